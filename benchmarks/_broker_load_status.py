"""How long ``optuna-hermes status`` takes about a study of many runs."""

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

from optuna_hermes import _optuna as private
from optuna_hermes.ledger import ReportRecord, RunRecord, open_ledger

REPORTS = 10
REPETITIONS = 5
STUDY = "many"


def status_rows(runs: int) -> list[dict[str, Any]]:
    """Seconds of ``status`` on each database there is: the whole process, and what it waits for."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hermes-status-") as folder:
        for database, url in _databases(Path(folder)):
            _fill(url, runs)
            rows.append({"database": database, "runs": runs, **_seconds(url)})
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


def _fill(url: str, runs: int) -> None:
    """A study of suspended trials, each with reports."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=url, study_name=STUDY)
    trial = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING,
        params={"lr": 0.1},
        distributions={"lr": optuna.distributions.FloatDistribution(0.0, 1.0)},
        intermediate_values={REPORTS: 0.5},
    )
    study.add_trials([trial] * runs)
    ledger, key = open_ledger(private.ledger_url(study)), private.study_key(study)
    with ledger.batch():
        for number in range(runs):
            _fill_run(ledger, key, number)
    ledger.close()


def _fill_run(ledger: Any, key: str, number: int) -> None:
    ledger.save_run(RunRecord(study=key, number=number, trial_id=number + 1, state="stored"))
    for unit in range(1, REPORTS + 1):
        value = 1.0 / unit + number / 1e6
        ledger.add_report(
            ReportRecord(
                study=key,
                number=number,
                unit=unit,
                step=unit,
                value=value,
                device_seconds=unit,
                at=time.time(),
            )
        )


def _seconds(url: str) -> dict[str, float]:
    command = [sys.executable, "-m", "optuna_hermes", "status"]
    about = [*command, "--storage", url, "--study-name", STUDY]
    return {
        "seconds": min(_timed(about) for _ in range(REPETITIONS)),
        "json_seconds": min(_timed([*about, "--json"]) for _ in range(REPETITIONS)),
        "without_study_seconds": min(_timed(command) for _ in range(REPETITIONS)),
    }


def _timed(command: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - begin
