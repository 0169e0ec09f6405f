"""The evolutionary search of ONES: schedules, their score, and their evolution. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.cluster.placement import Ints, side_by_side

Floats = NDArray[np.float64]

# Assumed speed-up as a power: k times the devices train ``k ** 0.75`` times as fast.
ELASTICITY = 0.75


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The trials, the one with the least left to do first, and the devices."""

    # Time until a trial ends [trial, batch size, devices, several hosts]; infinite where it cannot
    # be trained so, 0 on no device.
    seconds: Floats
    wanted: Ints  # number of devices that a trial was submitted with [trial]
    value: Floats  # factor of a trial's weight [trial]
    switch_seconds: Floats  # cost of moving a trial to other devices [trial]
    gate: float  # share of the time to the end that a change of devices must win
    owner: Ints  # index of the trial that has a device now, -1 for none [device]
    host: Ints  # index of a device's host, from 0 [device]

    @property
    def n_trials(self) -> int:
        """Number of trials that could have devices."""
        return len(self.seconds)

    @property
    def n_devices(self) -> int:
        """Number of devices that are given out."""
        return len(self.owner)

    @cached_property
    def least(self) -> Ints:
        """The fewest devices that a trial can be trained on [trial]."""
        least: Ints = 1 + np.isfinite(self._quickest[:, 1:]).argmax(axis=1)
        return least

    @cached_property
    def most(self) -> Ints:
        """The most devices that a trial can be trained on [trial]."""
        most: Ints = self.n_devices - np.isfinite(self._quickest[:, :0:-1]).argmax(axis=1)
        return most

    @cached_property
    def now(self) -> Ints:
        """The number of devices that a trial has now [trial]."""
        now: Ints = self.counts(self.owner[None])[0]
        return now

    @cached_property
    def best_level(self) -> Ints:
        """The index of the batch size that is best on so many devices [trial, devices]."""
        best: Ints = self.seconds[..., 0].argmin(axis=1)
        return best

    @cached_property
    def weight(self) -> Floats:
        """Weight of finishing a trial: remaining utilisation, times a power of its place [trial].

        Utilisation is device seconds to its end where they are least; places count from the last.
        """
        # Those behind it wait for it. With a power of 1, and devices of equal use to all, the
        # shortest trial would have all of them; with the elasticity the shares are nearly those
        # that are best for trials of one elasticity (Berg et al., "heSRPT", 2020).
        use = (self._quickest * np.arange(self.n_devices + 1))[:, 1:].min(axis=1)
        weight: Floats = self.value * use * np.arange(self.n_trials, 0.0, -1.0) ** ELASTICITY
        return weight

    @cached_property
    def rates(self) -> Floats:
        """The rate that a trial on so many devices, close together, adds [trial, devices]."""
        counts = np.arange(self.n_devices + 1)
        largest = int(np.bincount(self.host).max())
        apart = self.seconds[..., 1].min(axis=1)
        seconds = np.where(counts > largest, apart, self._quickest)
        moved = counts != self.now[:, None]
        return self._rate(seconds, moved, self.weight[:, None], self.switch_seconds[:, None])

    @cached_property
    def _quickest(self) -> Floats:
        """Seconds to the end with the best batch size [trial, devices]."""
        quickest: Floats = self.seconds[..., 0].min(axis=1)
        return quickest

    def counts(self, owner: Ints) -> Ints:
        """The number of devices that each trial has [schedule, trial]."""
        flat = owner + 1 + (self.n_trials + 1) * np.arange(len(owner))[:, None]
        found = np.bincount(flat.ravel(), minlength=len(owner) * (self.n_trials + 1))
        counts: Ints = found.reshape(len(owner), self.n_trials + 1)[:, 1:]
        return counts

    def scores(self, owner: Ints, level: Ints) -> Floats:
        """Minus the rate at which each schedule brings down the weighted utilisation [schedule]."""
        counts = self.counts(owner)
        trials = np.arange(self.n_trials)
        seconds = self.seconds[trials, level, counts, self._apart(owner)]
        rates = self._rate(seconds, counts != self.now, self.weight, self.switch_seconds)
        scores: Floats = -rates.sum(axis=1)
        return scores

    def _apart(self, owner: Ints) -> Ints:
        """1 for a trial on several hosts, otherwise 0 [schedule, trial]."""
        n_hosts = int(self.host.max()) + 1
        flat = owner + 1 + (self.n_trials + 1) * np.arange(len(owner))[:, None]
        there = np.zeros(len(owner) * (self.n_trials + 1) * n_hosts, dtype=bool)
        there[flat * n_hosts + self.host] = True
        hosts = there.reshape(len(owner), self.n_trials + 1, n_hosts).sum(axis=2)[:, 1:]
        apart: Ints = (hosts > 1).astype(np.int64)
        return apart

    def _rate(
        self, seconds: Floats, moved: NDArray[np.bool_], weight: Floats, switch: Floats
    ) -> Floats:
        trains = (seconds > 0) & np.isfinite(seconds)
        seconds = np.where(trains, seconds, 1.0)
        cost = np.where(moved, np.maximum(switch, self.gate * seconds), 0.0)
        return np.where(trains, weight / (seconds + cost), 0.0)


# Probability that a trial loses its devices, or gets another batch size, in a child.
MUTATION = 0.1
# Numbers of further devices that a trial is offered at once.
STEPS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """A batch of schedules as arrays."""

    owner: Ints  # index of the trial that has a device, -1 for none [schedule, device]
    level: Ints  # batch size of each trial, as an index into its choices [schedule, trial]

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
    """Evolution of schedules: see ``Ones``."""

    def __init__(self, space: SearchSpace, rng: np.random.Generator) -> None:
        self._space = space
        self._rng = rng

    def best(self, seeds: Schedules, *, population: int, generations: int) -> Schedules:
        """The best schedules after some generations, best first, all of their devices given out.

        Each generation makes ``population`` new schedules, and as many survive it, the best always.
        """
        alive = self._select(self._repair(seeds, chance=0.0), population)
        for _ in range(generations):
            children = self._repair(self._children(alive, population), chance=1.0)
            alive = self._select(joined(alive, children), population)
        return alive

    def _children(self, parents: Schedules, number: int) -> Schedules:
        """Uniform crossover, and mutation: some trials lose their devices."""
        rng, space = self._rng, self._space
        one = parents[rng.integers(len(parents), size=number)]
        other = parents[rng.integers(len(parents), size=number)]
        owner = np.where(rng.random((number, space.n_devices)) < 0.5, one.owner, other.owner)
        level = np.where(rng.random((number, space.n_trials)) < 0.5, one.level, other.level)
        # One column more, for the owner -1 of idle devices.
        preempted = rng.random((number, space.n_trials + 1)) < MUTATION
        owner = np.where(preempted[np.arange(number)[:, None], owner], -1, owner)
        return Schedules(owner=owner, level=level)

    def _repair(self, schedules: Schedules, chance: float) -> Schedules:
        """Refresh: keep every trial within its limits, give out useful idle devices, reorder."""
        space = self._space
        before = space.counts(schedules.owner)
        counts = np.minimum(before, space.most)
        # Crossover may leave too few devices: from half of the least on they are filled up.
        enough = 2 * counts >= space.least
        counts = np.where(enough, np.maximum(counts, space.least * (counts > 0)), 0)
        counts = self._fill(self._within(counts), chance)
        level = self._levels(schedules.level, counts, counts == before, chance)
        owner = side_by_side(counts, space.owner, space.host)
        return Schedules(owner=owner, level=level)

    def _within(self, counts: Ints) -> Ints:
        """Drop trials at random where there are too few devices."""
        if (counts.sum(axis=1) <= self._space.n_devices).all():
            return counts
        order = np.argsort(self._rng.random(counts.shape), axis=1)
        taken = np.take_along_axis(counts, order, axis=1)
        taken = np.where(taken.cumsum(axis=1) <= self._space.n_devices, taken, 0)
        kept = np.zeros_like(counts)
        np.put_along_axis(kept, order, taken, axis=1)
        return kept

    def _fill(self, counts: Ints, chance: float) -> Ints:
        """Give out idle devices, some at a time, where they win most, with some randomness."""
        space = self._space
        rows, trials = np.arange(len(counts)), np.arange(space.n_trials)
        luck = 1.0 + chance * self._rng.random((*counts.shape, 1))
        while (idle := space.n_devices - counts.sum(axis=1)).any():
            # Single steps may not pay where the least, the wanted or the present number does.
            landmarks = (space.least, space.wanted, space.now)
            jumps = [np.broadcast_to(to, counts.shape) - counts for to in landmarks]
            steps = np.stack([*(np.full_like(counts, step) for step in STEPS), *jumps], axis=2)
            then = counts[..., None] + steps
            fits = (steps > 0) & (steps <= idle[:, None, None])
            fits &= (then >= space.least[:, None]) & (then <= space.most[:, None])
            rates = space.rates[trials[None, :, None], np.where(fits, then, 0)]
            gain = (rates - space.rates[trials, counts][..., None]) / np.maximum(steps, 1)
            gain = np.where(fits, gain * luck, 0.0).reshape(len(rows), -1)
            best = gain.argmax(axis=1)
            # No devices that make a trial slower, or win less than the change costs.
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
        space = self._space
        trials = np.arange(space.n_trials)
        best = space.best_level[trials, counts]
        level = np.where(same & (chance > 0), level, best)
        drawn = (self._rng.random(counts.shape) * space.seconds.shape[1]).astype(np.int64)
        level = np.where(self._rng.random(counts.shape) < MUTATION * chance, drawn, level)
        works = np.isfinite(space.seconds[trials, level, counts, 0])
        return np.where(works, level, best)

    def _select(self, schedules: Schedules, number: int) -> Schedules:
        """The best schedules, no two with the same score while there are others."""
        scores = self._space.scores(schedules.owner, schedules.level)
        order = np.argsort(scores, kind="stable")
        # Equal scores are mostly copies of one schedule, which would crowd out all others.
        again = np.diff(scores[order], prepend=-np.inf) <= 0
        chosen = order[np.argsort(again, kind="stable")][:number]
        return schedules[chosen[np.argsort(scores[chosen], kind="stable")]]
