"""QSSF: the trial that is expected to need the least device time goes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna_hermes.cluster.similar import Service
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies.base import Ranked, opened, place, unopened

# Number of finished trials that a prediction needs.
FEWEST = 5

# Finished trials that are learned from, the newest: each end of a trial makes all of it anew.
MOST_LEARNED = 500


class Qssf(Ranked):
    """Gives the next slice to the trial that is expected to need least device time from now on.

    Hu et al., "Characterization and Prediction of Deep Learning Workloads in Large-Scale GPU
    Datacenters", SC 2021, where it is quasi-shortest-service-first: a job's priority is
    ``0.1 * rolling + 0.9 * gbdt``, two predictions of its time, times its devices; it is worked
    out once, at submission, and jobs are not interrupted. The prediction comes with a job, as
    ``expected_seconds``.

    This project's own: trials have no names and users, so their device time is learned from the
    finished ones, by distance between parameters and by trees over the parameters; without
    LightGBM (extra ``[qssf]``) by distance alone. Trials are ranked by the time left, since a trial
    can be suspended. While fewer than 5 are finished, the least attained service goes first among
    the trials that have begun, and new ones are opened when none of them waits. Shortest first is
    best for the mean time to completion, not for the time to the best trial.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them; the
            authors let the queue stop there.
    """

    def __init__(self, *, backfill: bool = True) -> None:
        super().__init__(backfill=backfill)
        self._learned: tuple[list[TrialView], Service] | None = None

    def rank(self, trial: TrialView) -> tuple[Any, ...] | None:
        """Rank by the expected time left; None where there is no prediction yet."""
        if trial.expected_seconds is None:
            return None
        return self._place(trial, trial.expected_seconds)

    def decide(self, snapshot: Snapshot) -> Decision:
        """Serve the trials with the least expected time left first."""
        waiting = opened(snapshot)
        new = unopened(snapshot)
        trials = [*waiting, *(trial for trial in new if trial is not None)]
        n_new = len(new) - (len(trials) - len(waiting))
        unknown = [trial for trial in trials if trial.expected_seconds is None]
        if not unknown and not n_new:
            return super().decide(snapshot)
        service = self._service(snapshot)
        if service is None:
            order = self._by_attained(snapshot, trials, n_new)
        else:
            order = self._by_remaining(trials, unknown, n_new, service)
        return Decision(assignments=place(snapshot, order, backfill=self.backfill))

    def _by_attained(
        self, snapshot: Snapshot, trials: Sequence[TrialView], n_new: int
    ) -> list[TrialView | None]:
        def rank(trial: TrialView) -> tuple[Any, ...]:
            predicted = self.rank(trial)
            return predicted or self._place(trial, trial.attained_seconds, unknown=True)

        ranked: list[TrialView | None] = [*sorted(trials, key=rank)]
        new: list[TrialView | None] = [None] * n_new
        return [*new, *ranked] if snapshot.unstarted.fixed else [*ranked, *new]

    def _by_remaining(
        self,
        trials: Sequence[TrialView],
        unknown: Sequence[TrialView],
        n_new: int,
        service: Service,
    ) -> list[TrialView | None]:
        predicted = dict(zip((r.number for r in unknown), service.of(unknown), strict=True))
        ranks: list[tuple[tuple[Any, ...], TrialView | None]] = [
            (self.rank(trial) or self._place(trial, predicted[trial.number]), trial)
            for trial in trials
        ]
        # A trial of a sampler that learns has no parameters yet: it is expected to be typical.
        if n_new:
            newcomer = TrialView(number=_LAST, state="pending", submitted=_LAST)
            ranks += [(self._place(newcomer, service.typical), None)] * n_new
        return [trial for _, trial in sorted(ranks, key=lambda each: each[0])]

    def _place(
        self, trial: TrialView, expected: float, *, unknown: bool = False
    ) -> tuple[bool, float, float, int]:
        left = expected if unknown else _left(expected, trial.attained_seconds)
        return unknown, left, trial.submitted, trial.number

    def _service(self, snapshot: Snapshot) -> Service | None:
        done = [r for r in snapshot.finished if r.state == "done" and r.attained_seconds > 0]
        if len(done) < FEWEST:
            return None
        done.sort(key=lambda trial: trial.number)
        done = done[-MOST_LEARNED:]
        # Views are immutable: the same objects give the same estimates, so they are kept.
        if self._learned is None or not _same(self._learned[0], done):
            self._learned = (done, Service(done))
        return self._learned[1]


# A number, and a time, after those of all trials: new trials go last among equal ones.
_LAST = 2**62


def _left(expected: float, attained: float) -> float:
    # One that has overrun its prediction is expected to take as long again.
    return expected - attained if attained < expected else attained


def _same(one: Sequence[TrialView], other: Sequence[TrialView]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
