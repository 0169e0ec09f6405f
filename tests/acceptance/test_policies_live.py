"""Every policy, and one's own, decides for real: processes, a database, trainings that end."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes.policies import POLICIES

FOLDER = Path(__file__).parent
N_TRIALS = 3
AT_EVERY_CHANGE = "qssf"
"""It learns from what only a broker knows. Of the others ``test_parity`` shows that a broker and
the simulator do the same, and some run studies in other tests."""

Cli = Callable[..., subprocess.CompletedProcess[str]]
StartCli = Callable[..., Any]

MINE = """
from dataclasses import replace

from optuna_hermes.model import Resources, TrialView
from optuna_hermes.policies import Policy, RoundRobin, Smd
from beside import EPOCHS


class Expecting(RoundRobin):
    def decide(self, snapshot):
        assert 0 < snapshot.left.seconds < 600, snapshot.left
        assert 0 < snapshot.left.device_seconds <= 500, snapshot.left
        for trial in snapshot.trials:
            if trial.curve.units or trial.state == "stored":
                assert set(trial.params) == {"lr", "p"}, trial
                assert trial.units_left in (None, EPOCHS - trial.curve.units), trial
        if snapshot.finished:
            assert all(trial.units_left == 0 for trial in snapshot.finished), snapshot.finished
        return super().decide(snapshot)


class Careful(Smd):
    # Trials of a gigabyte each, on a host that has room for two.
    def decide(self, snapshot):
        one = Resources(host_bytes=1 << 30)
        trials = tuple(replace(trial, needs=one) for trial in snapshot.trials)
        known = TrialView(number=99, state="done", needs=one)
        waiting = (trial for trial in trials if trial.state == "parked")
        held = {trial.number for trial in waiting if trial.tier in ("host", "resident")}
        busy = sum(not device.free for device in snapshot.devices)
        room = Resources(host_bytes=(2 - busy) << 30)
        decision = super().decide(replace(snapshot, trials=trials, finished=(known,), room=room))
        new = [each.trial for each in decision.assignments if each.trial not in held]
        if snapshot.devices[0].id != "any":  # a question that the broker only asks itself
            assert busy + len(held) + len(new) <= 2, (decision, snapshot)
        return decision


class Clumsy(Policy):
    def decide(self, snapshot):
        if any(trial.curve.units for trial in snapshot.trials):
            raise RuntimeError("out of ideas")
        return RoundRobin().decide(snapshot)
"""


def command(storage: str, policy: str, file: str = "tiny.py", **options: object) -> list[object]:
    given = {"n_trials": N_TRIALS, "devices": "cpu:2", "seed": 0, "slice_seconds": 0.05, **options}
    flags = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", value)]
    return [
        *("optimize", f"{FOLDER / file}:objective", "--storage", storage, "--study-name", "s"),
        *("--policy", policy, *flags, "--json"),
    ]


def states(storage: str) -> list[TrialState]:
    return [trial.state for trial in optuna.load_study(study_name="s", storage=storage).trials]


def n_reports(storage: str) -> int:
    """Read beside Optuna, which would make tables that are missing."""
    path = storage.removeprefix("sqlite:///")
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database,
    ):
        rows = database.execute("select count(*) from trial_intermediate_values")
        return int(rows.fetchone()[0])
    return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with policies of a user's, who imports what lies beside them."""
    path = tmp_path / "policies"
    path.mkdir()
    (path / "mine.py").write_text(MINE)
    (path / "beside.py").write_text("EPOCHS = 8\n")
    return path


@pytest.mark.parametrize(
    ("policy", "file"),
    [
        *(pytest.param(each, "tiny.py", marks=pytest.mark.slow) for each in POLICIES),
        (AT_EVERY_CHANGE, "light.py"),
    ],
)
def test_every_policy_runs_a_study(cli: Cli, storage_url: str, policy: str, file: str) -> None:
    """All trials complete, whoever decides: those that train for real, and those that wait."""
    n_trials = 7 if policy == "qssf" else N_TRIALS  # it predicts once five have ended
    done = cli(*command(storage_url, policy, file, n_trials=n_trials))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"] == policy
    assert states(storage_url) == [TrialState.COMPLETE] * n_trials


@pytest.mark.slow
def test_ones_own_policy_is_told_all_there_is(
    start_cli: StartCli, cli: Cli, storage_url: str, folder: Path, wait_for: Callable[..., Any]
) -> None:
    """A broker that was started elsewhere imports it, and shows it what Optuna knew before."""
    running = start_cli(*command(storage_url, "round-robin", n_trials=4))
    wait_for(lambda: n_reports(storage_url) > 6, 90)
    running.send(signal.SIGINT)
    stopped = running.wait()
    assert "STORED" in {trial["state"] for trial in json.loads(stopped.stdout)["trials"]}
    budget = {"timeout": 600, "device_seconds": 500}
    done = cli(*command(storage_url, "mine:Expecting", n_trials=4, **budget), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == [TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_no_more_host_memory_is_promised_than_there_is(
    cli: Cli, storage_url: str, folder: Path
) -> None:
    """With ``smd`` four devices train two trials at a time if the host has room for two only."""
    done = cli(*command(storage_url, "mine:Careful", n_trials=5, devices="cpu:4"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert states(storage_url) == [TrialState.COMPLETE] * 5


def test_a_policy_that_breaks_ends_its_study_with_a_word(
    cli: Cli, storage_url: str, folder: Path
) -> None:
    """Status 2 and one line that says which policy; the trials wait, and another goes on."""
    done = cli(*command(storage_url, "mine.py:Clumsy", "light.py"), cwd=folder)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "mine.py:Clumsy" in error
    assert "out of ideas" in error
    assert "Traceback" not in done.stderr
    assert TrialState.FAIL not in states(storage_url)
    mended = cli(*command(storage_url, "fifo", "light.py"))
    assert mended.returncode == 0, mended.stderr
    assert states(storage_url) == [TrialState.COMPLETE] * N_TRIALS
