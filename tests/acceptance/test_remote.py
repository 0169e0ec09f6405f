"""Hosts that share a database and a bucket of S3, and no folder."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage

from optuna_hermes import _optuna
from optuna_hermes.ledger import open_ledger

moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")

Cli = Callable[..., Any]

N_TRIALS, BUCKET = 4, "digits"

OBJECTIVE = """
import os
import time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable


def objective(trial):
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    rate = trial.suggest_float("rate", 0.01, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs(int(os.environ["UNITS"])):
        for x in run.batches(torch.ones(4, 3, 4)):
            time.sleep(0.05)  # training
            loss = (model(x + torch.randn(3, 4)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with Path(os.environ["TRAINED"]).open("a") as file:
            file.write(f"{os.getpid()} {trial.number} {epoch} {loss.item().hex()}\\n")
        run.report(loss.item())
    return run.value
"""


class Bucket:
    """A bucket of an S3 that can be away."""

    def __init__(self) -> None:
        self._port = 0
        self._server: Any = None
        self.come_back()
        import boto3

        self.env = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }
        self._client = boto3.client(
            "s3",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        self._client.create_bucket(Bucket=BUCKET)

    def come_back(self) -> None:
        """Answer again, at the same address, with all that it had."""
        self._server = moto_server.ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def go_away(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.stop()
        self._server = None

    def names(self) -> list[str]:
        """The objects in it."""
        found = self._client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return sorted(each["Key"] for each in found)

    def close(self) -> None:
        import moto.backends

        self._client.close()
        self.go_away()
        moto.backends.get_backend("s3").reset()


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with closing(Bucket()) as made:
        yield made


@pytest.fixture
def host(tmp_path: Path, bucket: Bucket) -> Callable[..., dict[str, str]]:
    """``host(name, units=8)``: the environment of a host with folders of its own."""

    def make(name: str, units: int = 8) -> dict[str, str]:
        runtime = Path(os.environ["OPTUNA_HERMES_RUNTIME_DIR"]) / name
        runtime.mkdir(mode=0o700, exist_ok=True)
        return {
            **bucket.env,
            "OPTUNA_HERMES_RUNTIME_DIR": str(runtime),
            "OPTUNA_HERMES_HOST": name,
            "OPTUNA_HERMES_BROKER_IDLE_SECONDS": "0.5",
            "XDG_STATE_HOME": str(tmp_path / name),
            "TRAINED": str(tmp_path / "trained"),
            "UNITS": str(units),
        }

    return make


def study_of(url: str, name: str) -> None:
    """A study whose trials are the same at each run."""
    storage = RDBStorage(url)
    study = optuna.create_study(storage=storage, study_name=name)
    for number in range(N_TRIALS):
        study.enqueue_trial({"rate": 0.02 * (1 + number)})
    storage.engine.dispose()


def words(tmp_path: Path, url: str, name: str, place: object) -> list[object]:
    file = tmp_path / "training.py"
    file.write_text(OBJECTIVE)
    return [
        *("optimize", f"{file}:objective", "--storage", url, "--study-name", name, "--json"),
        *("--n-trials", N_TRIALS, "--devices", "cpu:2", "--seed", 0, "--slice-seconds", 0.2),
        *("--policy", "round-robin", "--checkpoint-dir", place),
    ]


def units(tmp_path: Path) -> list[tuple[str, ...]]:
    """Trial, epoch and loss of each unit that was trained, and the process that did."""
    file = tmp_path / "trained"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(trial, epoch, loss, pid) for pid, trial, epoch, loss in map(str.split, lines)]


def alone(tmp_path: Path, storage_url: str, cli: Cli, env: dict[str, str]) -> set[tuple[str, ...]]:
    """Return what the trials train where nothing disturbs them."""
    study_of(storage_url, "alone")
    env = {**env, "TRAINED": str(tmp_path / "alone-trained")}
    done = cli(*words(tmp_path, storage_url, "alone", tmp_path / "folder"), env=env)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "alone-trained").read_text().splitlines()
    return {tuple(line.split()[1:]) for line in lines}


def check(tmp_path: Path, document: str, expected: set[tuple[str, ...]]) -> None:
    """Every trial is complete, each unit was trained once, and its loss is equal to the bit."""
    assert [each["state"] for each in json.loads(document)["trials"]] == ["COMPLETE"] * N_TRIALS
    seen = Counter(each[:3] for each in units(tmp_path))
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_what_one_host_has_suspended_another_one_carries_on(
    tmp_path: Path,
    postgres_url: str,
    storage_url: str,
    bucket: Bucket,
    cli: Cli,
    start_cli: Cli,
    host: Any,
    wait_for: Callable[..., Any],
) -> None:
    """From the bucket alone, bit for bit; ``gc`` empties it afterwards."""
    expected = alone(tmp_path, storage_url, cli, host("alone"))
    study_of(postgres_url, "s")
    command = words(tmp_path, postgres_url, "s", f"s3://{BUCKET}/trials")
    running = start_cli(*command, env=host("first"))
    wait_for(lambda: len({trial for trial, *_ in units(tmp_path)}) == N_TRIALS, 120)
    running.process.send_signal(signal.SIGTERM)
    stopped = running.wait(60)
    assert stopped.returncode == 75, stopped.stderr
    assert "STORED" in {each["state"] for each in json.loads(stopped.stdout)["trials"]}
    assert bucket.names()
    with closing(open_ledger(postgres_url)) as ledger:
        storage = RDBStorage(postgres_url)
        key = _optuna.study_key(optuna.load_study(storage=storage, study_name="s"))
        storage.engine.dispose()
        paths = [each.checkpoint.path for each in ledger.load_checkpoints(key)]
    assert {path.removeprefix(f"s3://{BUCKET}/") for path in paths} <= set(bucket.names())

    done = cli(*command, env=host("second"))
    assert done.returncode == 0, done.stderr
    check(tmp_path, done.stdout, expected)

    gc = ("gc", "--storage", postgres_url, "--study-name", "s", "--checkpoint-dir")
    emptied = cli(*gc, f"s3://{BUCKET}/trials", env=host("second"))
    assert emptied.returncode == 0, emptied.stderr
    assert bucket.names() == []


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_bucket_that_is_away_loses_nothing(
    seconds: float,
    tmp_path: Path,
    postgres_url: str,
    storage_url: str,
    bucket: Bucket,
    cli: Cli,
    start_cli: Cli,
    host: Any,
    wait_for: Callable[..., Any],
) -> None:
    """Trials wait in memory meanwhile, and go on there; the console says why."""
    units = int(4 * seconds)  # for twice as long as it is away
    expected = alone(tmp_path, storage_url, cli, host("alone", units))
    study_of(postgres_url, "s")
    command = words(tmp_path, postgres_url, "s", f"s3://{BUCKET}/trials")
    running = start_cli(*command, env=host("first", units))
    wait_for(lambda: len(bucket.names()) >= 2, 120)
    before = set(bucket.names())
    bucket.go_away()
    away = time.monotonic()
    wait_for(lambda: time.monotonic() - away > seconds, seconds + 10)
    bucket.come_back()
    wait_for(lambda: set(bucket.names()) - before, 60)
    done = running.wait(60 + 4 * seconds)
    assert done.returncode == 0, done.stderr
    check(tmp_path, done.stdout, expected)
    assert f"Cannot write into s3://{BUCKET}" in done.stderr
