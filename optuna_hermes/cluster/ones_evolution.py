"""Evolution of schedules, which give devices and batch sizes to trials. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.cluster.ones_field import Field
from optuna_hermes.cluster.placement import Ints

MUTATION = 0.1
"""Probability that a trial loses its devices, or gets another batch size, in a child."""

STEPS = (1, 2, 4, 8)
"""Numbers of further devices that a trial is offered at once, besides the landmarks."""


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """A batch of schedules as arrays.

    Args:
        owner: index of the trial that has a device, -1 for none [schedule, device].
        level: batch size of each trial, as an index into its choices [schedule, trial].
    """

    owner: Ints
    level: Ints

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, places: Ints) -> Schedules:
        return Schedules(owner=self.owner[places], level=self.level[places])


def joined(one: Schedules, other: Schedules) -> Schedules:
    """The schedules of both."""
    return Schedules(
        owner=np.concatenate([one.owner, other.owner]),
        level=np.concatenate([one.level, other.level]),
    )


class Evolution:
    """Lets schedules of a ``Field`` cross and mutate, and keeps the best: see ``Ones``.

    Args:
        field: the trials and devices.
        rng: source of all randomness.
    """

    def __init__(self, field: Field, rng: np.random.Generator) -> None:
        self._field = field
        self._rng = rng

    def best(self, seeds: Schedules, *, population: int, generations: int) -> Schedules:
        """The best schedules after some generations, best first, all of their devices given out.

        Args:
            seeds: first schedules; no generation loses the best of them.
            population: number of schedules that survive a generation.
            generations: number of generations; each makes ``population`` new schedules.
        """
        alive = self._select(self._mend(seeds, chance=0.0), population)
        for _ in range(generations):
            children = self._mend(self._children(alive, population), chance=1.0)
            alive = self._select(joined(alive, children), population)
        return alive

    # -- a generation --------------------------------------------------------------------------

    def _children(self, parents: Schedules, number: int) -> Schedules:
        """Uniform crossover, and mutation: some trials lose their devices."""
        rng, field = self._rng, self._field
        one = parents[rng.integers(len(parents), size=number)]
        other = parents[rng.integers(len(parents), size=number)]
        owner = np.where(rng.random((number, field.n_devices)) < 0.5, one.owner, other.owner)
        level = np.where(rng.random((number, field.n_trials)) < 0.5, one.level, other.level)
        preempted = rng.random((number, field.n_trials + 1)) < MUTATION
        owner = np.where(preempted[np.arange(number)[:, None], owner], -1, owner)
        return Schedules(owner=owner, level=level)

    def _mend(self, schedules: Schedules, chance: float) -> Schedules:
        """Refresh: keep every trial within its limits, give out useful idle devices, reorder."""
        field = self._field
        before = field.counts(schedules.owner)
        counts = np.minimum(before, field.most)
        # Crossover may leave too few devices: from half of the least on they are filled up.
        enough = 2 * counts >= field.least
        counts = np.where(enough, np.maximum(counts, field.least * (counts > 0)), 0)
        counts = self._fill(self._within(counts), chance)
        level = self._levels(schedules.level, counts, counts == before, chance)
        return Schedules(owner=field.reorder(counts), level=level)

    def _within(self, counts: Ints) -> Ints:
        """Drop trials at random where there are too few devices."""
        if (counts.sum(axis=1) <= self._field.n_devices).all():
            return counts
        order = np.argsort(self._rng.random(counts.shape), axis=1)
        taken = np.take_along_axis(counts, order, axis=1)
        taken = np.where(taken.cumsum(axis=1) <= self._field.n_devices, taken, 0)
        kept = np.zeros_like(counts)
        np.put_along_axis(kept, order, taken, axis=1)
        return kept

    def _fill(self, counts: Ints, chance: float) -> Ints:
        """Give out idle devices, some at a time, where they win most, with some randomness.

        A trial is not given devices that make it slower, or that win less than a change costs.
        """
        field = self._field
        rows, trials = np.arange(len(counts)), np.arange(field.n_trials)
        luck = 1.0 + chance * self._rng.random((*counts.shape, 1))
        while (idle := field.n_devices - counts.sum(axis=1)).any():
            jumps = [np.broadcast_to(to, counts.shape) - counts for to in field.landmarks]
            steps = np.stack([*(np.full_like(counts, step) for step in STEPS), *jumps], axis=2)
            then = counts[..., None] + steps
            fits = (steps > 0) & (steps <= idle[:, None, None])
            fits &= (then >= field.least[:, None]) & (then <= field.most[:, None])
            rates = field.rates[trials[None, :, None], np.where(fits, then, 0)]
            gain = (rates - field.rates[trials, counts][..., None]) / np.maximum(steps, 1)
            gain = np.where(fits, gain * luck, 0.0).reshape(len(rows), -1)
            best = gain.argmax(axis=1)
            found = gain[rows, best] > 0
            if not found.any():
                break
            trial, step = np.divmod(best, steps.shape[2])
            counts[rows, trial] += np.where(found, steps[rows, trial, step], 0)
        return counts

    def _levels(self, level: Ints, counts: Ints, same: NDArray[np.bool_], chance: float) -> Ints:
        """Batch sizes: unchanged where the number of devices is, otherwise the best for it.

        A mutation draws any size that the trial can be trained with.
        """
        field = self._field
        trials = np.arange(field.n_trials)
        best = field.best_level[trials, counts]
        level = np.where(same & (chance > 0), level, best)
        drawn = (self._rng.random(counts.shape) * field.seconds.shape[1]).astype(np.int64)
        level = np.where(self._rng.random(counts.shape) < MUTATION * chance, drawn, level)
        works = np.isfinite(field.seconds[trials, level, counts, 0])
        return np.where(works, level, best)

    def _select(self, schedules: Schedules, number: int) -> Schedules:
        """The best schedules, no two with the same score while there are others."""
        scores = self._field.scores(schedules.owner, schedules.level)
        order = np.argsort(scores, kind="stable")
        # Equal scores are mostly copies of one schedule, which would crowd out all others.
        again = np.diff(scores[order], prepend=-np.inf) <= 0
        chosen = order[np.argsort(again, kind="stable")][:number]
        return schedules[chosen[np.argsort(scores[chosen], kind="stable")]]
