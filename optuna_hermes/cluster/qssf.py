"""QSSF: the trial that is expected to need the least device time goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from optuna_hermes.cluster.similar import Service, import_trees
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies._fifo import Fifo
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
    can be suspended; the first 500 of a list whose parameters are known, before they begin. While
    fewer than 5 are finished, the order is that of ``fifo``. Shortest first is best for the mean
    time to completion if the predictions are right, not for the time to the best trial.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them; the
            authors let the queue stop there.
    """

    def __init__(self, *, backfill: bool = True) -> None:
        super().__init__(backfill=backfill)
        import_trees()
        self._learned: tuple[list[TrialView], Service] | None = None

    def rank(self, trial: TrialView) -> tuple[Any, ...] | None:
        """Rank by the expected time left; None where there is no prediction yet."""
        if trial.expected_seconds is None:
            return None
        return _place(trial, trial.expected_seconds)

    def decide(self, snapshot: Snapshot) -> Decision:
        """Serve the trials with the least expected time left first."""
        new = unopened(snapshot)
        trials = [*opened(snapshot), *(trial for trial in new if trial is not None)]
        n_new = new.count(None)
        if not n_new and all(trial.expected_seconds is not None for trial in trials):
            return super().decide(snapshot)
        service = self._service(snapshot)
        if service is None:
            order = [*sorted(trials, key=_IN_ORDER.rank), *[None] * n_new]
        else:
            order = self._by_remaining(trials, n_new, snapshot.unstarted.listed, service)
        return Decision(assignments=place(snapshot, order, backfill=self.backfill))

    def _by_remaining(
        self,
        trials: Sequence[TrialView],
        n_new: int,
        listed: Sequence[TrialView],
        service: Service,
    ) -> list[TrialView | None]:
        ranks = [*self._ranks(trials, service)]
        if n_new and listed:
            by_rank = sorted(self._ranks(listed[:MOST_LEARNED], service), key=_first)
            ranks += by_rank[:n_new]
        elif n_new:
            # A trial of a sampler that learns has no parameters yet: it is expected to be typical.
            newcomer = TrialView(number=_LAST, state="pending", submitted=_LAST)
            ranks += [(_place(newcomer, service.typical), None)] * n_new
        return [trial for _, trial in sorted(ranks, key=_first)]

    def _ranks(self, trials: Sequence[TrialView], service: Service) -> Iterator[_Rank]:
        unknown = [trial for trial in trials if trial.expected_seconds is None]
        predicted = dict(zip((r.number for r in unknown), service.of(unknown), strict=True))
        for trial in trials:
            yield self.rank(trial) or _place(trial, predicted[trial.number]), trial

    def _service(self, snapshot: Snapshot) -> Service | None:
        done = [r for r in snapshot.finished if r.state == "done" and r.attained_seconds > 0]
        if len(done) < FEWEST:
            return None
        done.sort(key=lambda trial: trial.number)
        done = done[-MOST_LEARNED:]
        # Views are immutable: the same objects give the same estimates, so they are kept.
        if self._learned is None or [*map(id, self._learned[0])] != [*map(id, done)]:
            self._learned = (done, Service(done))
        return self._learned[1]


# A number, and a time, after those of all trials: new trials go last among equal ones.
_LAST = 2**62

_IN_ORDER = Fifo()
_Rank: TypeAlias = tuple[tuple[Any, ...], TrialView | None]
_first = itemgetter(0)


def seconds_left(trial: TrialView, expected: float) -> float:
    """Device seconds that a trial still needs, of those that were expected of it."""
    # One that has overrun its prediction is expected to need as much again as it is over: were it
    # more at once, a trial whose prediction is a little too short would be put off just before its
    # end.
    return abs(expected - trial.attained_seconds)


def _place(trial: TrialView, expected: float) -> tuple[Any, ...]:
    left = seconds_left(trial, expected)
    return left, trial.state == "pending", trial.submitted, trial.number
