"""A study takes few connections of its database, and says so where there are none left."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from sqlalchemy.pool import NullPool

from optuna_hermes import _optuna, optimize
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.ledger import open_ledger

LIMIT = 20
N_TRIALS = 40

OBJECTIVE = """
import time
from pathlib import Path

import optuna


def objective(trial):
    Path(__file__).with_name("begun").touch()
    x = trial.suggest_float("x", -1, 1)
    for unit in range(1, 4):
        time.sleep(0.1)  # training
        trial.report(x + unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x
"""


@contextmanager
def small_server() -> Iterator[sqlalchemy.URL]:
    """A PostgreSQL server that takes no more than ``LIMIT`` connections."""
    pgserver: Any = pytest.importorskip("pgserver", reason="needs pgserver: pip install pgserver")
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    with tempfile.TemporaryDirectory(prefix="hermes-pg-") as folder:
        server = pgserver.get_server(folder)
        try:
            Path(folder, "postgresql.auto.conf").write_text(f"max_connections = {LIMIT}\n")
            process = psutil.Process(server.get_pid())
            process.send_signal(signal.SIGINT)
            process.wait(30)
            server.ensure_postgres_running()
            yield sqlalchemy.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        finally:
            server.cleanup()


def start(
    url: sqlalchemy.URL,
    folder: Path,
    start_cli: Callable[..., Any],
    n_trials: int,
    *more: object,
    env: Mapping[str, str] | None = None,
) -> Any:
    """A study that is trained by the command line; on further hosts it is there already."""
    text = url.render_as_string(hide_password=False)
    storage = RDBStorage(text, engine_kwargs={"poolclass": NullPool})
    optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
    (folder / "train.py").write_text(OBJECTIVE)
    arguments = ("--storage", text, "--study-name", "s", "--n-trials", n_trials, *more)
    arguments += ("--devices", "cpu:2", "--json")
    return start_cli("optimize", "train.py:objective", *arguments, cwd=folder, env=env)


def states(ended: Any) -> list[str]:
    assert ended.returncode == 0, ended.stderr
    return [trial["state"] for trial in json.loads(ended.stdout)["trials"]]


@pytest.mark.slow
def test_parked_trials_keep_no_connections(tmp_path: Path, start_cli: Callable[..., Any]) -> None:
    """Many more live trials than a server has connections complete, and hold few of them."""
    most = 0
    with small_server() as url:
        running = start(
            url, tmp_path, start_cli, N_TRIALS, "--policy", "round-robin", "--slice-seconds", 0.1
        )
        engine = sqlalchemy.create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            while running.process.poll() is None:
                count = connection.exec_driver_sql(
                    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                )
                most = max(most, count.scalar_one())
        assert states(running.wait()) == ["COMPLETE"] * N_TRIALS
        assert "does not answer" not in running.stderr
    assert most < LIMIT - 3  # the superuser's own are left alone


@contextmanager
def directories(count: int) -> Iterator[list[Path]]:
    """A runtime directory for each host, whose path must be short; their brokers are ended."""
    with tempfile.TemporaryDirectory(prefix="hermes-", dir="/tmp") as root:
        made = [Path(root, str(number)) for number in range(count)]
        for directory in made:
            directory.mkdir(mode=0o700)
        try:
            yield made
        finally:
            for directory in made:
                with suppress(OSError, psutil.Error):
                    pid = json.loads((directory / "broker.json").read_text())["pid"]
                    broker = psutil.Process(pid)
                    broker.terminate()
                    broker.wait(30)


def test_hosts_share_the_few_connections_of_a_server(
    tmp_path: Path, start_cli: Callable[..., Any]
) -> None:
    """Hosts of two slots each complete as many live trials together as there are connections."""
    hosts, n_trials = 2, 20
    more = ("--policy", "round-robin", "--slice-seconds", 0.1, "--checkpoint-dir", tmp_path / "c")
    with small_server() as url, directories(hosts) as made:
        started = [
            start(url, tmp_path, start_cli, n_trials, *more, env={RUNTIME_DIR_VARIABLE: str(each)})
            for each in made
        ]
        for running in started:
            ended = running.wait(300)
            assert states(ended) == ["COMPLETE"] * n_trials
            assert "does not answer" not in ended.stderr


@pytest.mark.slow
def test_a_server_without_a_connection_left_is_named(
    tmp_path: Path, start_cli: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """While others have every connection, ``optimize`` says which limit it waits for."""
    with small_server() as url:
        engine = sqlalchemy.create_engine(url, poolclass=NullPool)
        running = start(url, tmp_path, start_cli, 8)
        wait_for(lambda: (tmp_path / "begun").exists(), 120)
        with ExitStack() as stack:
            taken = 0
            while "max_connections" not in running.stderr:
                assert running.process.poll() is None, running.stderr
                try:
                    stack.enter_context(engine.connect())
                    taken += 1
                except sqlalchemy.exc.OperationalError:
                    assert taken < LIMIT
        assert states(running.wait()) == ["COMPLETE"] * 8


def test_arguments_for_connections_count_for_the_ledger(postgres_url: str) -> None:
    """Those of ``engine_kwargs`` go into the URL by which broker and ledger reach the database."""
    engine = sqlalchemy.create_engine(postgres_url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA team")
    chosen = {"options": "-csearch_path=team", "connect_timeout": 5, "prepare_threshold": None}
    arguments = {"connect_args": chosen, "poolclass": NullPool}
    storage = RDBStorage(postgres_url, engine_kwargs=arguments)
    study = optuna.create_study(study_name="s", storage=storage)
    spec = _optuna.study_spec(study, policy="hermes", slice_seconds=1.0)
    assert sqlalchemy.make_url(spec.ledger_url).query["connect_timeout"] == "5"
    open_ledger(spec.ledger_url).close()
    assert _optuna.known_key(study) == spec.key
    with engine.begin() as connection:
        found = sqlalchemy.inspect(connection)
        assert {"studies", "hermes_trials"} <= {*found.get_table_names(schema="team")}
        assert found.get_table_names() == []
        connection.exec_driver_sql("DROP SCHEMA team CASCADE")


def test_a_creator_which_no_url_can_hold_is_refused(postgres_url: str) -> None:
    """In one line that names it, before anything is trained."""
    psycopg = pytest.importorskip("psycopg")
    arguments = {
        "creator": lambda: psycopg.connect(postgres_url.replace("+psycopg", "")),
        "poolclass": NullPool,
    }
    url = "postgresql+psycopg://nobody@nowhere.invalid/none"
    storage = RDBStorage(url, engine_kwargs=arguments)
    study = optuna.create_study(study_name="s", storage=storage)
    with pytest.raises(InvalidInputError, match="cannot hold creator of engine_kwargs"):
        optimize(study, lambda trial: 0.0, n_trials=1, devices="cpu:1", show_progress=False)
