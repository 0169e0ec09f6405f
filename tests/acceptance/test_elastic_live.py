"""Batch sizes change for real: processes, slices, a ledger that tells of it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

TINY = Path(__file__).parent / "tiny.py"
N_TRIALS = 5

Cli = Callable[..., subprocess.CompletedProcess[str]]

DOUBLES = """
from dataclasses import replace

from optuna_hermes.policies import Policy, RoundRobin


class Doubles(Policy):
    def decide(self, snapshot):
        sizes = {run.number: run.elastic for run in snapshot.runs if run.elastic is not None}
        decision = RoundRobin().decide(snapshot)
        return replace(
            decision,
            assignments=tuple(
                replace(each, batch_size=next_size(sizes[each.run])) if each.run in sizes else each
                for each in decision.assignments
            ),
        )


def next_size(elastic):
    least, most = elastic.batch_sizes
    return min(most, 2 * elastic.batch_size) if elastic.batch_size < most else least
"""


def changes(storage: str) -> dict[int, list[dict[str, Any]]]:
    """What the ledger tells of each trial."""
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in range(N_TRIALS)}
    with contextlib.closing(sqlite3.connect(storage.removeprefix("sqlite:///"))) as database:
        rows = database.execute(
            "select number, detail from hermes_events where kind = 'batch size' order by id"
        )
        for number, detail in rows:
            found[number].append(json.loads(detail))
    return found


def test_a_policy_changes_batch_sizes(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """Every trial completes, each change is in the ledger, and each begins where the last ended."""
    policy = tmp_path / "doubles.py"
    policy.write_text(DOUBLES)
    done = cli(
        *("optimize", f"{TINY}:elastic", "--storage", storage_url, "--study-name", "s"),
        *("--policy", f"{policy}:Doubles", "--devices", "cpu:4", "--n-trials", N_TRIALS),
        *("--seed", 0, "--slice-seconds", 0.05, "--json"),
    )
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="s", storage=storage_url)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * N_TRIALS
    assert all(len(trial.intermediate_values) == 12 for trial in study.trials)
    told = changes(storage_url)
    assert sum(map(len, told.values())) > N_TRIALS
    for each in told.values():
        sizes = [4, *(change["to"] for change in each)]
        assert [change["from"] for change in each] == sizes[:-1]
        assert set(sizes) <= {2, 4, 8, 16, 32}
    number = max(told, key=lambda number: len(told[number]))
    shown = cli("status", number, "--storage", storage_url, "--study-name", "s")
    assert "batch size 8, before 4" in shown.stdout
