"""Asynchronous successive halving, by promotion: nothing is killed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, opened, place, unopened


class Asha(Policy):
    """Promotes a trial to the next rung when it is among the best of its own.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, Algorithm 2.
    Rung ``k`` is the report after ``eta ** k`` units. A device that is free goes to the first of

    1. a trial between two rungs: its last report is at no rung, so its promotion is under way;
    2. a trial that can be promoted: its last report is at a rung, and among the ``n`` trials that
       have reached this rung it is one of the best ``floor(n / eta)``. Rungs are searched from
       the highest one down, and within a rung the best goes first;
    3. a new trial, if there is one;
    4. the best trial of the highest rung where one waits.

    Trials of a rung are compared by what they reported at that rung, whatever came later;
    finished and running ones count. NaN and infinite values rank last, and of equal values the
    earlier trial's ranks first. In the paper trials that are never promoted are given up, and
    there is always a new one: step 4 is this project's own.

    Args:
        eta: reduction factor; one in ``eta`` trials of a rung is promoted.
    """

    def __init__(self, eta: int = 3) -> None:
        # Below 2 the rungs would not move apart, and the loops over them not end.
        if not eta >= 2:
            raise InvalidInputError(f"eta must be at least 2 but got {eta}.")
        self.eta = eta

    def decide(self, snapshot: Snapshot) -> Decision:
        return Decision(assignments=place(snapshot, self._order(snapshot)))

    def _order(self, snapshot: Snapshot) -> Iterator[TrialView | None]:
        at_rung: dict[int, list[TrialView]] = {}
        # Lazy: the placement stops reading once all devices are taken.
        for trial in opened(snapshot):
            age = trial.curve.units
            if is_rung(age, self.eta):
                at_rung.setdefault(age, []).append(trial)
            else:
                yield trial
        promoted: set[int] = set()
        for age in sorted(at_rung, reverse=True):
            best = self._best(snapshot, age)
            for trial in sorted(at_rung[age], key=_last_value):
                if trial.number in best:
                    promoted.add(trial.number)
                    yield trial
        yield from unopened(snapshot)
        # It goes on to its next rung: from its next report on it is between two.
        for age in sorted(at_rung, reverse=True):
            rest = (trial for trial in at_rung[age] if trial.number not in promoted)
            yield from sorted(rest, key=_last_value)

    def _best(self, snapshot: Snapshot, age: int) -> set[int]:
        values = sorted(
            (_finite_first(trial.curve.values[age - 1]), trial.number)
            for trials in (snapshot.trials, snapshot.finished)
            for trial in trials
            if len(trial.curve.values) >= age
        )
        return {number for _, number in values[: len(values) // self.eta]}


def is_rung(units: int, eta: int, first: int = 1) -> bool:
    rung = first
    # Not by a logarithm, whose rounding misses some powers.
    while rung < units:
        rung *= eta
    return rung == units


def _last_value(trial: TrialView) -> tuple[float, int]:
    return _finite_first(trial.curve.values[-1]), trial.number


def _finite_first(value: float) -> float:
    return value if math.isfinite(value) else math.inf
