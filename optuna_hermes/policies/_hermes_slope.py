"""The paper's idea with as little added as possible: the fastest falling trial goes first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optuna_hermes.curves import CurveCache
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, holders, opened, place, with_openings

# Reports over which the descent is taken.
WINDOW = 3
# Share of the newest value in the exponential mean; 1 would be no mean.
SMOOTHING = 0.5
# Share by which another trial must be faster.
HYSTERESIS = 0.1


class HermesSlope(Policy):
    """Trains next the trial that converges fastest at present.

    Son et al., "Hermes", Electronics 2021, 10(3), 350: trials that converge fast in their early
    phase go first, the others are suspended. The paper's formula could not be read; this one is
    the project's own reading of it. With ``s`` the exponential mean of the values and ``w`` the
    ``WINDOW``, the convergence of a trial is ``max(0, s[n - w] - s[n]) / |s[first]|`` over the
    steps between, and the largest goes first. One whose slice has just ended stays unless another
    is faster by more than the factor ``1 + HYSTERESIS``. One whose last value is NaN or infinite
    goes last, and of equal ones the earlier trial goes first. New trials are opened as by
    ``with_openings``, and get a second slice before any is ranked, for a slope takes two reports.

    It is meant for comparison. A good trial that has converged has slope 0 and waits just before
    it would end, so trials may starve.
    """

    def __init__(self) -> None:
        self._speeds = CurveCache(lambda curve: convergence(curve.values, curve.steps))

    def decide(self, snapshot: Snapshot) -> Decision:
        order = with_openings(snapshot, self._ranked(snapshot))
        return Decision(assignments=place(snapshot, order))

    def _ranked(self, snapshot: Snapshot) -> Iterator[TrialView]:
        held = holders(snapshot)
        keys: list[tuple[float, bool, int]] = []
        waiting = opened(snapshot)
        speeds = self._speeds.each(trial.curve for trial in waiting)
        for index, (trial, speed) in enumerate(zip(waiting, speeds, strict=True)):
            stays = trial.number in held
            keys.append((-speed * (1 + HYSTERESIS * stays), not stays, index))
        yield from (waiting[index] for _, _, index in sorted(keys))


def convergence(values: tuple[float, ...], steps: tuple[int, ...]) -> float:
    """The rate at which a curve falls at its end, as a share of its first value per step.

    At least 0; infinity for a curve of one report, minus infinity where the last value is NaN or
    infinite.
    """
    if not values or not math.isfinite(values[-1]):
        return -math.inf
    means: list[float] = []
    ends: list[int] = []
    for value, step in zip(values, steps, strict=True):
        # One that is not would make the mean of all later ones NaN.
        if math.isfinite(value):
            before = means[-1] if means else value
            means.append(before + SMOOTHING * (value - before))
            ends.append(step)
    if len(means) == 1:
        return math.inf if len(values) == 1 else 0.0
    start = max(0, len(means) - 1 - WINDOW)
    fall = max(0.0, means[start] - means[-1]) / max(abs(means[0]), _TINY)
    return fall / max(ends[-1] - ends[start], 1)


# Used as the divisor where the first value is 0.
_TINY = 1e-12
