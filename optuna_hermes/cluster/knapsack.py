"""A multiple-choice knapsack in several dimensions: each trial is in it in one way at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Amounts above this are bytes, not counts of devices or processes, and are scaled to shares.
COUNTABLE = 1e6

# Of branch and bound, all but never needed: like trials would take minutes, and a broker answers
# nobody meanwhile. Nodes and not seconds, so that a decision does not depend on the machine.
MOST_NODES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One way to train a trial, of which no other item is chosen then."""

    trial: int  # its index
    devices: int
    batch_size: int | None  # samples a step, None to leave it
    value: float  # utility; items of no value are left to ``Knapsack.filled``
    weights: tuple[float, ...]  # use of each resource, devices first


class Knapsack:
    """Chooses items, those of a trial in a row, whose weights fit into the given room."""

    def __init__(self, items: Sequence[Item], room: Sequence[float]) -> None:
        self._items = list(items)
        self._room = np.array(room, dtype=float)
        good = [index for index, item in enumerate(self._items) if item.value > 0]
        self._weights = np.array([item.weights for item in self._items], dtype=float)
        self._weights = self._weights.reshape(len(self._items), len(self._room))
        self._good = [index for index in good if (self._weights[index] <= self._room).all()]

    def exact(self) -> list[Item]:
        """The items of the largest total value, or the best of ``MOST_NODES`` nodes (HiGHS)."""
        good = self._good
        if not good:
            return []
        from scipy.optimize import LinearConstraint, milp  # as in ``step_model``: it takes long
        from scipy.sparse import coo_array

        trials = sorted({self._items[index].trial for index in good})
        row = {trial: place for place, trial in enumerate(trials)}
        rows = [row[self._items[index].trial] for index in good]
        once = coo_array((np.ones(len(good)), (rows, range(len(good)))), (len(trials), len(good)))
        bounded = np.flatnonzero(np.isfinite(self._room))
        # Bytes become shares: coefficients of 1e10 beside ones are bad for the solver's tolerances.
        scale = np.where(self._room > COUNTABLE, self._room, 1.0)[bounded]
        constraints = [
            LinearConstraint(once.tocsr(), ub=1.0),
            LinearConstraint(
                (self._weights[good][:, bounded] / scale).T, ub=self._room[bounded] / scale
            ),
        ]
        value = np.array([self._items[index].value for index in good])
        found = milp(
            -value / value.max(),
            integrality=np.ones(len(good)),
            bounds=(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "node_limit": MOST_NODES},
        )
        if found.x is None:
            return self.greedy()
        chosen = [self._items[index] for index, x in zip(good, found.x, strict=True) if x > 0.5]
        used = sum(np.array(item.weights) for item in chosen)
        # The solver's tolerance may let a choice exceed the room a little.
        if len({item.trial for item in chosen}) < len(chosen) or np.any(used > self._room):
            return self.greedy()
        if found.success:
            return chosen
        return max(chosen, self.greedy(), key=lambda items: sum(item.value for item in items))

    def greedy(self) -> list[Item]:
        """Choose items by value over the sum of their shares of the room."""
        by_trial: dict[int, Item] = {}
        left = self._room.copy()
        scale = np.where(np.isfinite(self._room), np.maximum(self._room, 1.0), np.inf)
        good = np.array(self._good, dtype=np.int64)
        values = np.array([self._items[index].value for index in good])
        weights = self._weights[good]
        trials = np.array([self._items[index].trial for index in good], dtype=np.int64)
        has_value, has_weight = np.zeros(len(good)), np.zeros_like(weights)
        while len(good):
            # What an item adds to the chosen one of its trial, which it would replace.
            more, gain = weights - has_weight, values - has_value
            share = np.maximum((np.maximum(more, 0.0) / scale).sum(axis=1), 1e-12)
            open_ = (more <= left).all(axis=1) & (gain > 1e-12)
            if not open_.any():
                break
            best = int(np.where(open_, gain / share, -np.inf).argmax())
            left -= more[best]
            by_trial[int(trials[best])] = self._items[good[best]]
            same = trials == trials[best]
            has_value[same], has_weight[same] = values[best], weights[best]
        return [by_trial[trial] for trial in sorted(by_trial)]

    def filled(self, chosen: Sequence[Item]) -> list[Item]:
        """Add trials of no value now to ``chosen``, in their order, as long as there is room."""
        taken = {item.trial for item in chosen}
        filled = list(chosen)
        left = self._room - sum(
            (np.array(item.weights) for item in chosen), np.zeros(len(self._room))
        )
        for index, item in enumerate(self._items):
            if item.trial not in taken and (self._weights[index] <= left).all():
                taken.add(item.trial)
                filled.append(item)
                left = left - self._weights[index]
        return filled
