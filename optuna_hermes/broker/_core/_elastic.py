"""Elastic trials: changes of their numbers of devices that are worth their cost. Pure."""

from __future__ import annotations

from collections.abc import Callable

from optuna_hermes.broker._core._study import Study
from optuna_hermes.model import Assignment, Decision, Elastic

WORTH = 1.1
"""Factor by which the gain of a change must exceed its cost."""


def worthwhile(
    decide: Callable[[frozenset[int]], Decision],
    study: Study,
    slice_seconds: Callable[[float | None], float],
) -> Decision:
    """Decision of the policy; a trial whose change is not worth its cost keeps its devices.

    Args:
        decide: asks the policy; trials of these numbers keep their devices if they go on.
        slice_seconds: how long a slice lasts for which a policy wants so many seconds.
    """
    kept: frozenset[int] = frozenset()
    while True:
        decision = decide(kept)
        vain = frozenset(
            each.trial
            for each in decision.assignments
            if each.trial in study.trials
            and _is_vain(study, each.trial, each, decision, slice_seconds(each.slice_seconds))
        )
        # What these keep changes what is left for others: the policy is asked again.
        if vain <= kept:
            return decision
        kept |= vain


def _is_vain(
    study: Study, number: int, assignment: Assignment, decision: Decision, slice_seconds: float
) -> bool:
    """True if another number of devices is not worth its cost for a trial that has devices."""
    trial = study.trials[number]
    elastic = trial.elastic
    if elastic is None or trial.state != "running" or len(trial.devices) == len(assignment.devices):
        return False
    others = (each for each in decision.assignments if each is not assignment)
    elsewhere = {id_ for each in others for id_ in each.devices}
    return not pays(
        elastic,
        len(trial.devices),
        len(assignment.devices),
        given_away=len(elsewhere.intersection(trial.devices)),
        slice_seconds=slice_seconds,
        leave_seconds=study.leave_seconds,
        back_seconds=study.cost("disk"),
    )


def pays(
    elastic: Elastic,
    before: int,
    after: int,
    *,
    given_away: int,
    slice_seconds: float,
    leave_seconds: float,
    back_seconds: float,
) -> bool:
    """True if a trial had better go on with another number of devices for its next slice.

    All is counted in device time. A trial that is quicker wins the time that the devices it had
    would have needed for what the new ones train in addition, by the fit to its measured steps;
    what nothing was measured of counts as perfect. What others get of its devices is won too. A
    change costs the old devices while the trial leaves to disk, and the new ones while it comes
    back.

    Args:
        before, after: the number of devices that it has, and that it would have.
        given_away: of the devices that it has, those that others would get.
        slice_seconds: how long its next slice lasts.
        leave_seconds, back_seconds: what suspending to disk, and coming back from there, were
            measured to take, 0.0 if they never were.
    """
    quicker = max(0.0, _speedup(elastic, before, after) - 1)
    gain = slice_seconds * (before * quicker + given_away)
    return gain > WORTH * (leave_seconds * before + back_seconds * after)


def _speedup(elastic: Elastic, before: int, after: int) -> float:
    """Factor by which a step is quicker; 1.0 if no step was measured."""
    import numpy as np  # here, since few trials are elastic and a broker starts quickly without

    from optuna_hermes.policies.step_model import fit_steps

    model = fit_steps(elastic.speeds, elastic.device_batch_size)
    if model is None:
        return 1.0
    counts = np.array([before, after], dtype=float)
    batches = np.full(2, float(elastic.batch_size))
    old, new = model.step_seconds(counts, batches, np.zeros(2)).tolist()
    return float(old / new) if new > 0 else 1.0
