"""Input of the plots: a study's history, and its replay under other policies."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import optuna

from optuna_hermes import _optuna
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view.history import Bar, StudyHistory, held_epochs, read_history
from optuna_hermes.view.source import apart, ask_broker
from optuna_hermes.visualization import _data as plot_data

if TYPE_CHECKING:
    from optuna_hermes.simulator import CurveSet

# A child of Optuna's logger, so that its verbosity and its handlers apply.
_logger = optuna.logging.get_logger("optuna.hermes")


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """The data of a study to plot, as of ``now``; the history is empty if it has no ledger.

    ``held`` are the epochs of the leases that this host's broker knows to last.
    """

    history: StudyHistory
    now: float
    held: frozenset[int] = frozenset()
    curve_set: CurveSet | None = None


def read_study(study: optuna.Study, *, to_replay: bool = False) -> StudyData:
    """Read the ledger of a study; log a warning if it has nothing to plot.

    Raises:
        TypeError: ``study`` is no ``optuna.Study``.
    """
    if not isinstance(study, optuna.Study):
        raise TypeError(
            f"A plot is of an optuna.Study but got {study!r}: load it with optuna.load_study."
        )
    from optuna_hermes.ledger import open_ledger

    name = study.study_name
    if _optuna.known_key(study) is None:
        _logger.warning(
            f"Study {name!r} has no ledger to plot: run it with optuna_hermes.optimize, or "
            "with HermesSampler and HermesPruner."
        )
        return StudyData(history=StudyHistory(key=""), now=time.time())
    found = None
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        broker, silence = ask_broker()
        if silence:
            _logger.warning(silence)
        facts = _optuna.facts(study)
        broker = apart(broker, facts)
        history = read_history(ledger, facts, broker=broker, silent=bool(silence))
        if not any(trial.points for trial in history.trials):
            _logger.warning(f"No trial of study {name!r} has reported a value yet.")
        elif to_replay:
            from optuna_hermes.replay import curve_set_of

            try:
                found = curve_set_of(study, ledger)
            except InvalidInputError as error:
                _logger.warning(str(error))
    held = held_epochs(broker, history.key)
    return StudyData(history=history, now=time.time(), held=held, curve_set=found)


def best_info_of(
    study: optuna.Study, against: Sequence[str], n_devices: int | None
) -> plot_data.BestInfo:
    """The data of ``plot_best_over_device_time``, for every backend."""
    from optuna_hermes.policies import check_simulated_policy
    from optuna_hermes.simulator import RIVALS

    if isinstance(against, str):
        raise TypeError(f'against must be a list of policies but got {against!r}: ["{against}"].')
    for name in against:
        check_simulated_policy(name, RIVALS)
    data = read_study(study, to_replay=bool(against))
    # A replay leaves failed trials out, too.
    kept = tuple(trial for trial in data.history.trials if trial.state != "failed")
    history = replace(data.history, trials=kept)
    n_devices = n_devices or _most_at_once(history.bars) or 1
    others = [
        (name, _replayed(data.curve_set, name, n_devices, history.maximize)) for name in against
    ]
    return plot_data.best_info(history, others)


def _most_at_once(bars: Iterable[Bar]) -> int:
    """The largest number of devices that were leased at one time.

    Not of their names: a host of a cluster may have another one in each job.
    """
    times = [(bar.begin, 1) for bar in bars]
    times += [(bar.end, -1) for bar in bars if bar.end is not None]
    return max(accumulate(change for _, change in sorted(times)), default=0)


def _replayed(
    curve_set: CurveSet | None, policy: str, n_devices: int, maximize: bool
) -> tuple[tuple[float, float], ...]:
    """Device time and value of each report that was the best so far, under another policy."""
    from optuna_hermes.replay import SimulationRules, replay

    if curve_set is None:
        return ()
    recordings = curve_set.recordings
    trace = replay(
        recordings, policy, SimulationRules(n_devices=n_devices, n_trials=len(recordings))
    )
    spent, best, found = 0.0, float("inf"), []
    for each in trace.slices:
        spent += each.end - each.start
        if math.isfinite(each.value) and each.value < best:
            best = each.value
            # The recordings of a study that maximises are negated.
            found.append((spent, -best if maximize else best))
    return tuple(found)
