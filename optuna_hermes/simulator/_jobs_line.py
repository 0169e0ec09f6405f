"""The jobs that wait in one group, and which of them a policy has to see."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from optuna_hermes.model import RunView
from optuna_hermes.policies import Policy, Ranked


class Line:
    """Views of waiting jobs, kept in the order of a ``Ranked`` policy if it is one.

    A ranked policy takes devices for one run after the other. Of runs that want as many devices,
    none fits after one that did not; so of each size it has to see no more than can be served,
    and one that cannot.

    Args:
        policy: whose order.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy if isinstance(policy, Ranked) else None
        self._views: dict[int, RunView] = {}
        self._ranks: dict[int, tuple[Any, ...]] = {}
        self._by_size: dict[int, list[tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, number: int) -> bool:
        return number in self._views

    @property
    def is_ranked(self) -> bool:
        """Whether a part of it is enough for a decision."""
        return self._policy is not None

    def add(self, view: RunView) -> None:
        """A job waits, or waits in another state than before."""
        if view.number in self._views:
            self.remove(view.number)
        self._views[view.number] = view
        if self._policy is None:
            return
        rank = self._policy.rank(view)
        if rank is None or view.elastic is not None or view.bound_to:
            self._policy = None
            return
        self._ranks[view.number] = rank
        insort(self._by_size.setdefault(view.devices_wanted, []), rank)

    def remove(self, number: int) -> RunView:
        """A job waits no longer."""
        view = self._views.pop(number)
        if self._policy is not None:
            rank, size = self._ranks.pop(number), self._by_size[view.devices_wanted]
            del size[bisect_left(size, rank)]
        return view

    def shown(self, n_free: int) -> tuple[RunView, ...]:
        """The jobs that a decision about so many devices may depend on."""
        if self._policy is None:
            return tuple(self._views.values())
        return tuple(
            self._views[rank[-1]]
            for wanted, ranks in self._by_size.items()
            for rank in ranks[: n_free // wanted + 1]
        )
