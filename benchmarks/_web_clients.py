"""A study of many trials with long curves, of which some train and report."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection as Pipe

import optuna
import sqlalchemy
from _broker_load_clients import Crowd, _report
from _broker_load_status import _add_trials

from optuna_hermes import _optuna
from optuna_hermes.broker import StudySpec
from optuna_hermes.ledger import TrialRecord, open_ledger
from optuna_hermes.ledger._schema import METADATA

NAME = "web"
FIRST_ID = 1
SLICES = 4


def fill(url: str, trials: int, points: int) -> StudySpec:
    """A study whose trials have curves and leases, and wait to go on.

    Args:
        url: of an empty database.
        trials: how many.
        points: of each curve.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=url, study_name=NAME)
    _add_trials(url, study._study_id, range(trials), FIRST_ID)
    key = _optuna.study_key(study)
    ledger = open_ledger(_optuna.ledger_url(study))
    with ledger.batch():
        for number in range(trials):
            ledger.save_trial(
                TrialRecord(
                    study=key,
                    number=number,
                    trial_id=FIRST_ID + number,
                    state="stored",
                    units=points,
                    slices=SLICES,
                    suspensions=SLICES,
                    device_seconds=float(points),
                )
            )
    ledger.close()
    begin = time.time() - trials * points / 4
    with sqlalchemy.create_engine(url).begin() as connection:
        tables = METADATA.tables
        connection.execute(
            sqlalchemy.insert(tables["hermes_reports"]), _reports(key, trials, points, begin)
        )
        connection.execute(
            sqlalchemy.insert(tables["hermes_leases"]), _leases(key, trials, points, begin)
        )
    return StudySpec(key=key, name=NAME, ledger_url=url, policy="round-robin", slice_seconds=5.0)


def _reports(key: str, trials: int, points: int, begin: float) -> list[dict[str, object]]:
    return [
        {
            "study": key,
            "number": number,
            "unit": unit,
            "step": unit,
            "value": value(number, unit),
            "device_seconds": float(unit),
            "at": begin + (unit * trials + number) / 4,
        }
        for unit in range(1, points + 1)
        for number in range(trials)
    ]


def _leases(key: str, trials: int, points: int, begin: float) -> list[dict[str, object]]:
    length = points / SLICES
    return [
        {
            "epoch": turn * trials + number + 1,
            "study": key,
            "number": number,
            "devices": f'["vm/cpu:{number % 4}"]',
            "host": "vm",
            "started": begin + (turn * trials + number) // 4 * length,
            "ended": begin + ((turn * trials + number) // 4 + 1) * length - 0.1,
        }
        for turn in range(SLICES)
        for number in range(trials)
    ]


def value(number: int, unit: int) -> float:
    """Return the value that a trial reports after a unit: each has a curve of its own."""
    return 0.1 + number % 37 / 50 + (1 + number % 11 / 5) / unit**0.7


class Reporters(Crowd):
    """Trials that go on where their curves end, and remember when they said what."""

    def __init__(self, study: StudySpec, numbers: range, points: int) -> None:
        super().__init__(study, numbers, slice_seconds=5.0)
        self.said: list[tuple[int, int, float]] = []
        for client in self._clients.values():
            client.unit = points

    def _talk(self, due: list[tuple[float, int]], rate: float, only_holders: bool) -> None:
        now = time.monotonic()
        while due[0][0] <= now:
            at, number = due.pop(0)
            due.append((at + 1 / rate, number))
            client = self._clients[number]
            if client.device is not None:
                client.unit += 1
                self.said.append((number, client.unit, time.time()))
                self._say(client, _report(client))


def reporters(pipe: Pipe, study: StudySpec, trials: int, points: int, rate: float) -> None:
    """A process of them; ``pipe`` says ``stop``, and is sent what was said."""
    crowd = Reporters(study, range(trials), points)
    pipe.send("joined")
    crowd.serve(pipe, rate, only_holders=True)
    pipe.send(crowd.said)
