"""How studies and runs come into the broker's book, pure."""

from __future__ import annotations

from optuna_hermes.broker._book import Book, Run, Study
from optuna_hermes.broker._events import StudyRead
from optuna_hermes.broker._protocol import OpenStudy, SavedCheckpoint
from optuna_hermes.ledger._base import RunRecord
from optuna_hermes.model import Curve
from optuna_hermes.policies import make_policy

KEPT_CHECKPOINTS = 2
"""A run's newest ones; the older is for the day on which the newest cannot be read."""


def admit_study(book: Book, event: StudyRead, now: float) -> Study:
    """The study of a message; read from its ledger unless a living process holds part of it."""
    book.epoch = max(book.epoch, event.last_epoch)
    spec = event.message.study
    study = book.studies.get(spec.key)
    if study is None or not study.attended:
        study = Study(spec=spec, policy=make_policy(spec.policy), memory=event.memory)
        for known in event.runs:
            study.runs[known.number] = _run(known, event, now)
        book.studies[spec.key] = study
    return study


def admit_run(study: Study, number: int, trial_id: int, now: float) -> Run:
    """A run of the study, new or known."""
    if number not in study.runs:
        study.runs[number] = Run(
            study=study.spec.key,
            number=number,
            trial_id=trial_id,
            state="pending",
            submitted=now,
            waiting_since=now,
        )
    return study.runs[number]


def take_charge(study: Study, connection: int, message: OpenStudy, now: float) -> list[Run]:
    """Give the study to a driver, and learn from it what Optuna knows better than the ledger.

    Returns:
        Runs that changed: their trials have ended, or had never been registered.
    """
    study.spec, study.policy = message.study, make_policy(message.study.policy)
    study.driver, study.max_alive = connection, message.max_alive
    study.unstarted, study.fixed = message.unstarted, message.fixed
    study.draining, study.problem = False, None
    study.switches, study.overhead_seconds, study.spent_seconds = 0, 0.0, 0.0
    changed: list[Run] = []
    for number, state in message.ended.items():
        run = study.runs.get(number)
        if run is not None and run.live and run.connection is None:
            run.state, run.tier = state, None
            changed.append(run)
    for number, trial_id in message.adopted.items():
        if number not in study.runs:
            changed.append(admit_run(study, number, trial_id, now))
    return changed


def _run(known: RunRecord, event: StudyRead, now: float) -> Run:
    """A run as its ledger left it: whoever held it is gone, so it is stored or begins again."""
    curve = event.curves.get(known.number, Curve())
    saved = [
        SavedCheckpoint(path=c.path, units=c.units, size_bytes=c.size_bytes, sha256=c.sha256)
        for c in event.checkpoints
        if c.number == known.number
    ]
    run = Run(
        study=known.study,
        number=known.number,
        trial_id=known.trial_id,
        state=known.state,
        submitted=now,
        curve=curve,
        waiting_since=now,
        units=max(known.units, curve.units),
        slices=known.slices,
        suspensions=known.suspensions,
        device_seconds=known.device_seconds,
        host=known.host if known.slices else None,
        checkpoints=saved[-KEPT_CHECKPOINTS:],
    )
    if run.live:
        run.forget_process()
    return run
