"""Best value over device time, of a study and of its replay under other policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optuna_hermes.view import StudyHistory
from optuna_hermes.visualization import _info as drawn
from optuna_hermes.visualization._study import StudyData, tell

if TYPE_CHECKING:
    import optuna


def best_info_of(
    study: optuna.Study, against: Sequence[str], n_devices: int | None
) -> drawn.BestInfo:
    """The data of ``plot_best_over_device_time``, for every backend."""
    _check(against)
    told = tell(study, to_replay=bool(against))
    history = _without_failed(told.history)
    n_devices = n_devices or len({bar.device for bar in history.bars}) or 1
    others = [(name, _replayed(told, name, n_devices, history.maximize)) for name in against]
    return drawn.best_info(history, others)


def _replayed(
    told: StudyData, policy: str, n_devices: int, maximize: bool
) -> tuple[tuple[float, float], ...]:
    """Device time and value of each report that was the best so far, under another policy.

    Args:
        told: with a curve set.
        policy: its name.
        n_devices: number of devices.
        maximize: true if the study maximises; a replay's values are negated then.
    """
    from optuna_hermes.replay import SimulationRules, replay

    if told.curve_set is None:
        return ()
    recordings = told.curve_set.recordings
    trace = replay(
        recordings, policy, SimulationRules(n_devices=n_devices, n_trials=len(recordings))
    )
    spent, best, found = 0.0, float("inf"), []
    for each in trace.slices:
        spent += each.end - each.start
        if each.value < best:
            best = each.value
            found.append((spent, -best if maximize else best))
    return tuple(found)


def _without_failed(history: StudyHistory) -> StudyHistory:
    """The history without failed trials, which a replay leaves out too."""
    kept = tuple(trial for trial in history.trials if trial.state != "failed")
    return replace(history, trials=kept)


def _check(names: Sequence[str]) -> None:
    """Refuse unknown names of policies.

    Raises:
        TypeError: ``names`` is a string and not a list.
        UnknownPolicyError: no policy has this name.
    """
    from optuna_hermes.replay import check_policy

    if isinstance(names, str):
        raise TypeError(f'against must be a list of policies but got {names!r}: ["{names}"].')
    for name in names:
        check_policy(name)
