"""Time of ``optuna-hermes status`` for a study of many trials."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import FloatDistribution, distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import TrialState

from optuna_hermes import _optuna
from optuna_hermes.ledger import TrialRecord, open_ledger
from optuna_hermes.ledger._schema import METADATA

REPORTS = 10
REPETITIONS = 3
STUDY, SMALL = "many", "one"
LR = distribution_to_json(FloatDistribution(0.0, 1.0))


def status_rows(trials: int) -> list[dict[str, Any]]:
    """Seconds of ``status`` on each database there is: the whole process, and what it waits for."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hermes-status-") as folder:
        for database, url in _databases(Path(folder)):
            _fill(url, STUDY, trials, first_id=2)
            _fill(url, SMALL, 1, first_id=1)
            rows.append({"database": database, "trials": trials, **_seconds(url)})
    return rows


def _databases(folder: Path) -> Iterator[tuple[str, str]]:
    yield "sqlite", f"sqlite:///{folder}/study.db"
    with contextlib.suppress(ImportError):
        import pgserver

        server = pgserver.get_server(folder / "postgres")
        try:
            yield "postgresql", server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        finally:
            server.cleanup()


def _fill(url: str, name: str, trials: int, *, first_id: int) -> None:
    """A study of suspended trials, each with reports."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=url, study_name=name)
    _add_trials(url, study._study_id, range(trials), first_id)
    ledger, key = open_ledger(_optuna.ledger_url(study)), _optuna.study_key(study)
    with ledger.batch():
        for number in range(trials):
            trial_id = first_id + number
            trial = TrialRecord(study=key, number=number, trial_id=trial_id, state="stored")
            ledger.save_trial(trial)
    ledger.close()
    reports = [
        {
            "study": key,
            "number": number,
            "unit": unit,
            "step": unit,
            "value": 1.0 / unit + number / 1e6,
            "device_seconds": unit,
            "at": time.time(),
        }
        for unit in range(1, REPORTS + 1)
        for number in range(trials)
    ]
    with sqlalchemy.create_engine(url).begin() as connection:
        connection.execute(sqlalchemy.insert(METADATA.tables["hermes_reports"]), reports)


def _add_trials(url: str, study_id: int, numbers: range, first_id: int) -> None:
    """As ``study.add_trials``, which takes minutes for 10,000."""
    with sqlalchemy.create_engine(url).begin() as connection:
        trials = [
            {
                "trial_id": first_id + n,
                "number": n,
                "study_id": study_id,
                "state": TrialState.RUNNING,
            }
            for n in numbers
        ]
        connection.execute(sqlalchemy.insert(models.TrialModel), trials)
        params = [
            {
                "trial_id": first_id + n,
                "param_name": "lr",
                "param_value": 0.1,
                "distribution_json": LR,
            }
            for n in numbers
        ]
        connection.execute(sqlalchemy.insert(models.TrialParamModel), params)


def _seconds(url: str) -> dict[str, float]:
    command = [sys.executable, "-m", "optuna_hermes", "status", "--storage", url, "--study-name"]
    return {
        "seconds": min(_timed([*command, STUDY]) for _ in range(REPETITIONS)),
        "json_seconds": min(_timed([*command, STUDY, "--json"]) for _ in range(REPETITIONS)),
        "start_seconds": min(_timed([*command, SMALL]) for _ in range(REPETITIONS)),
    }


def _timed(command: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - begin
