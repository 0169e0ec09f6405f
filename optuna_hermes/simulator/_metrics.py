"""Metrics of a simulated schedule of trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optuna_hermes.simulator._values import SwitchCosts, Trace
from optuna_hermes.simulator._workload import Recording

# Distance that counts as near, as a share of the span from the median first value to the best.
NEAR = 0.01


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of a policy on a list of trials.

    An event that never came counts as the latest end of a trial where no device idles and every
    unit is a switch: the work over the devices, and with several of them all but one n-th of the
    longest trial. It is the same for all policies, and no policy that trains all is later.

    Args:
        best_seconds: time until the trial with the lowest final value has finished.
        top3_seconds: time until one of the three with the lowest final values has.
        near_seconds: time until a value is within ``NEAR`` of the best final one.
        auc: mean regret of the best value seen: 1 at the median first value, 0 at the best final.
        work_seconds: time of all trials to their ends without switches, over the number of devices.
        switches: number of times a device changed to another trial.
        killed_best: whether the trial with the lowest final value was pruned.
    """

    best_seconds: float
    top3_seconds: float
    near_seconds: float
    auc: float
    work_seconds: float
    switches: int
    killed_best: bool


def measure(
    trace: Trace,
    recordings: Sequence[Recording],
    n_devices: int,
    costs: SwitchCosts | None = None,
) -> Metrics:
    """Measure a simulation of a fixed list, given in its order, with its costs of switches."""
    work = sum(sum(recording.seconds) for recording in recordings) / n_devices
    costs = costs or SwitchCosts()
    # Of trainings whose devices change to them before every unit.
    slowest = [
        sum(each + costs.of(each, is_new=not unit) for unit, each in enumerate(recording.seconds))
        for recording in recordings
    ]
    # Graham's bound of a list schedule (1969).
    never = sum(slowest) / n_devices + max(slowest) * (1 - 1 / n_devices)
    order = by_final(recordings)
    lowest_3 = [each for each in order[:3] if math.isfinite(recordings[each].final)]
    lowest, span = span_of(recordings)
    near = lowest + NEAR * span
    ends = trace.finished
    return Metrics(
        best_seconds=ends.get(order[0], never),
        top3_seconds=min((ends[each] for each in lowest_3 if each in ends), default=never),
        near_seconds=next(
            (each.end for each in trace.slices if math.isfinite(each.value) and each.value <= near),
            never,
        ),
        auc=_mean_regret(trace, lowest, span, work),
        work_seconds=work,
        switches=sum(each.switched for each in trace.slices),
        killed_best=order[0] in trace.pruned,
    )


def by_final(recordings: Sequence[Recording]) -> list[int]:
    """Indices from the lowest final value up; those that diverged last, equal ones in order."""
    keys = [each.final if math.isfinite(each.final) else math.inf for each in recordings]
    return sorted(range(len(keys)), key=keys.__getitem__)


def span_of(recordings: Sequence[Recording]) -> tuple[float, float]:
    """The lowest final value, and the distance of the median first value above it (0 at least).

    Values that are not finite count as neither.
    """
    lowest = recordings[by_final(recordings)[0]].final
    firsts = [each.first for each in recordings]
    # Studies have no value before the first unit; the value after it stands for that.
    if not np.isfinite(firsts).any():
        firsts = [each.values[0] for each in recordings]
    known = [each for each in firsts if math.isfinite(each)]
    return lowest, max(0.0, float(np.median(known)) - lowest) if known else 0.0


def _mean_regret(trace: Trace, lowest: float, span: float, work: float) -> float:
    area, since, regret = 0.0, 0.0, 1.0
    best = lowest + span
    for each in trace.slices:
        if each.end >= work:
            break
        # A diverged unit changes nothing.
        if math.isfinite(each.value) and each.value < best:
            area += regret * (each.end - since)
            best, since = each.value, each.end
            regret = max(0.0, best - lowest) / span if span else 0.0
    return (area + regret * (work - since)) / work
