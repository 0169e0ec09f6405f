"""Batch sizes change for real: processes, slices, a ledger that tells of it."""

from __future__ import annotations

import contextlib
import json
import runpy
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes.suspend._state import seed_everything, trial_seed
from optuna_hermes.testing import FakeSession

TINY = Path(__file__).parent / "tiny.py"
N_TRIALS = 5

Cli = Callable[..., subprocess.CompletedProcess[str]]

DOUBLES = """
from dataclasses import replace

from optuna_hermes.policies import Policy, RoundRobin


class Doubles(Policy):
    def decide(self, snapshot):
        sizes = {each.number: each.elastic for each in snapshot.trials if each.elastic is not None}
        decision = RoundRobin().decide(snapshot)
        return replace(
            decision,
            assignments=tuple(
                replace(each, batch_size=next_size(sizes[each.trial]))
                if each.trial in sizes
                else each
                for each in decision.assignments
            ),
        )


def next_size(elastic):
    least, most = elastic.batch_sizes
    return min(most, 2 * elastic.batch_size) if elastic.batch_size < most else least
"""


@pytest.fixture
def doubles(tmp_path: Path) -> str:
    """A policy of one's own."""
    file = tmp_path / "doubles.py"
    file.write_text(DOUBLES)
    return f"{file}:Doubles"


def command(storage: str, policy: str) -> list[object]:
    return [
        *("optimize", f"{TINY}:elastic", "--storage", storage, "--study-name", "s"),
        *("--policy", policy, "--devices", "cpu:4", "--n-trials", N_TRIALS),
        *("--seed", 0, "--slice-seconds", 0.05, "--json"),
    ]


def events(storage: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the ledger's events of a kind, of all trials, oldest first."""
    with contextlib.closing(sqlite3.connect(storage.removeprefix("sqlite:///"))) as database:
        rows = database.execute(
            "select number, detail from hermes_events where kind = ? order by id", (kind,)
        )
        return [(number, json.loads(detail)) for number, detail in rows]


def changes(storage: str) -> dict[int, list[dict[str, Any]]]:
    """Return the ledger's changes of batch size of each trial."""
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in range(N_TRIALS)}
    for number, detail in events(storage, "batch size"):
        found[number].append(detail)
    return found


@pytest.mark.slow  # test_elastic_exact shows the values, and test_parity the decisions
def test_ones_changes_batch_sizes(cli: Cli, storage_url: str) -> None:
    """Every trial completes, each change is in the ledger, and each begins where the last ended."""
    done = cli(*command(storage_url, "ones"))
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="s", storage=storage_url)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * N_TRIALS
    assert all(len(trial.intermediate_values) == 8 for trial in study.trials)
    told = changes(storage_url)
    assert any(told.values())
    for each in told.values():
        sizes = [4, *(change["to"] for change in each)]
        assert [change["from"] for change in each] == sizes[:-1]
        assert 2 <= min(sizes) <= max(sizes) <= 32
    number = max(told, key=lambda number: len(told[number]))
    shown = cli("status", number, "--storage", storage_url, "--study-name", "s")
    assert f"batch size {told[number][0]['to']}, before 4" in shown.stdout


@pytest.mark.slow
def test_a_live_trial_is_the_same_to_the_bit_as_one_that_never_stopped(
    start_cli: Callable[..., Any],
    cli: Cli,
    storage_url: str,
    doubles: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspended in memory and on disk, in many slices: the same batches have the same losses."""
    running = start_cli(*command(storage_url, doubles))
    wait_for(lambda: len(list(tmp_path.glob("batches-*"))) == N_TRIALS, 120)
    running.send(signal.SIGINT)
    assert running.wait().returncode in (0, 130)
    done = cli(*command(storage_url, doubles))
    assert done.returncode == 0, done.stderr
    assert {detail["tier"] for _, detail in events(storage_url, "suspended")} == {
        "resident",
        "disk",
    }
    again = tmp_path / "again"
    again.mkdir()
    monkeypatch.chdir(again)
    elastic = runpy.run_path(str(TINY))["elastic"]
    replayed, n_steps = optuna.create_study(), 0
    for trial in optuna.load_study(study_name="s", storage=storage_url).trials:
        whole = (tmp_path / f"batches-{trial.number}").read_text().splitlines()
        sizes = [4, *(json.loads(line)[2] for line in whole)]
        steps = {at: sizes[at + 1] for at in range(len(whole)) if sizes[at + 1] != sizes[at]}
        replayed.enqueue_trial(trial.params)
        alone = replayed.ask()
        seed_everything(trial_seed(0, trial.number))
        assert elastic(alone, FakeSession(batch_sizes=steps)) == trial.value
        assert (again / f"batches-{trial.number}").read_text().splitlines() == whole
        n_steps += len(steps)
    assert n_steps >= N_TRIALS
