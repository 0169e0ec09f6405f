"""The waiting jobs of one group, and the part of them that a policy has to see."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from optuna_hermes.model import TrialView
from optuna_hermes.policies import Policy, Ranked


class Line:
    """Views of waiting jobs, kept in the order of a ``Ranked`` policy if it is one.

    A ranked policy takes devices for one job after the other. Of jobs that want the same number of
    devices, none fits after one that did not; so of each size it has to see as many as can be
    served, and one more.

    Args:
        policy: the policy whose order is kept.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy if isinstance(policy, Ranked) else None
        self._views: dict[int, TrialView] = {}
        self._ranks: dict[int, tuple[Any, ...]] = {}
        self._by_size: dict[int, list[tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, number: int) -> bool:
        return number in self._views

    @property
    def is_ranked(self) -> bool:
        """True if the first jobs of each size are enough for a decision."""
        return self._policy is not None

    def add(self, view: TrialView) -> None:
        """Add a waiting job, or replace its view."""
        if view.number in self._views:
            self.remove(view.number)
        self._views[view.number] = view
        if self._policy is None:
            return
        rank = self._policy.rank(view)
        # Such a job does not fit by its rank and size alone: show all jobs from now on.
        if rank is None or view.elastic is not None or view.bound_to:
            self._policy = None
            return
        self._ranks[view.number] = rank
        insort(self._by_size.setdefault(view.devices_wanted, []), rank)

    def remove(self, number: int) -> TrialView:
        """Remove a job that no longer waits."""
        view = self._views.pop(number)
        if self._policy is not None:
            rank, size = self._ranks.pop(number), self._by_size[view.devices_wanted]
            del size[bisect_left(size, rank)]
        return view

    def shown(self, n_free: int) -> tuple[TrialView, ...]:
        """The jobs that a decision about ``n_free`` devices may depend on."""
        if self._policy is None:
            return tuple(self._views.values())
        return tuple(
            self._views[rank[-1]]
            for wanted, ranks in self._by_size.items()
            for rank in ranks[: n_free // wanted + 1]
        )
