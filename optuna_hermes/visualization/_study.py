"""Input of the plots: a study's history, and its curves for the simulator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import optuna

from optuna_hermes import _optuna
from optuna_hermes.broker import broker_status
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view import StudyHistory, read_history

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger
    from optuna_hermes.simulator import CurveSet

_logger = optuna.logging.get_logger("optuna.hermes")
"""A child of Optuna's logger, so that its verbosity and its handlers apply."""


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """The data of a study to plot.

    Args:
        name: the study's name.
        history: from its ledger; empty if it has none.
        now: time of reading, in seconds of Unix time.
        curve_set: its trials for the simulator, None if there are none, or without ``to_replay``.
    """

    name: str
    history: StudyHistory
    now: float
    curve_set: CurveSet | None = None


def tell(study: optuna.Study, *, to_replay: bool = False) -> StudyData:
    """Read the ledger of a study; log a warning if it has nothing to plot.

    Args:
        study: the study.
        to_replay: true to read its trials for the simulator too.

    Raises:
        TypeError: ``study`` is no ``optuna.Study``.
    """
    if not isinstance(study, optuna.Study):
        raise TypeError(
            f"A plot is of an optuna.Study but got {study!r}: load it with optuna.load_study."
        )
    name = study.study_name
    with _ledger_of(study) as ledger:
        if ledger is None:
            _logger.warning(
                f"Study {name!r} has no ledger to plot: run it with optuna_hermes.optimize, or "
                "with HermesSampler and HermesPruner."
            )
            return StudyData(name=name, history=StudyHistory(key=""), now=time.time())
        history = read_history(ledger, _optuna.facts(study), broker=broker_status())
        if not any(trial.points for trial in history.trials):
            _logger.warning(f"No trial of study {name!r} has reported a value yet.")
            to_replay = False
        found = _replayable(study, ledger) if to_replay else None
    return StudyData(name=name, history=history, now=time.time(), curve_set=found)


@contextlib.contextmanager
def _ledger_of(study: optuna.Study) -> Iterator[Ledger | None]:
    from optuna_hermes.ledger import open_ledger

    if _optuna.known_key(study) is None:
        yield None
        return
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        yield ledger


def _replayable(study: optuna.Study, ledger: Ledger) -> CurveSet | None:
    from optuna_hermes.replay import curve_set_of

    try:
        return curve_set_of(study, ledger)
    except InvalidInputError as error:
        _logger.warning(str(error))
        return None
