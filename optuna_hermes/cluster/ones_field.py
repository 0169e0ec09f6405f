"""Trials and devices that schedules are made of, and the score of a schedule. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.cluster.placement import Ints, side_by_side

Floats = NDArray[np.float64]

ELASTICITY = 0.75
"""Assumed speed-up as a power: k times the devices train ``k ** 0.75`` times as fast."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """The trials, the one with the least left to do first, and the devices.

    Args:
        seconds: time until a trial ends [trial, batch size, devices, several hosts]; infinite where
            it cannot be trained so, 0 on no device.
        wanted: number of devices that a trial was submitted with [trial].
        value: factor of a trial's weight [trial].
        switch_seconds: cost of moving a trial to other devices [trial].
        gate: share of the time to the end that a change of devices must win.
        owner: index of the trial that has a device now, -1 for none [device].
        host: index of a device's host, from 0 [device].
    """

    seconds: Floats
    wanted: Ints
    value: Floats
    switch_seconds: Floats
    gate: float
    owner: Ints
    host: Ints

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
    def landmarks(self) -> tuple[Ints, Ints, Ints]:
        """Numbers of devices that are always tried: least, wanted, and present ones [trial]."""
        return self.least, self.wanted, self.now

    @cached_property
    def weight(self) -> Floats:
        """Weight of finishing a trial [trial].

        It is the remaining utilisation, the device seconds to its end where they are least, times
        its place from the last, as a power: those behind it wait for it. With a power of 1 and
        devices that are of equal use to all, the shortest trial has all of them; with the
        elasticity as the power, the shares are nearly those that are best for trials of one
        elasticity (Berg et al., "heSRPT", Performance Evaluation 2020).
        """
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
        """Score of each schedule, less is better [schedule].

        It is minus the rate at which the schedule brings down the remaining utilisation of all,
        weighted by trial.
        """
        counts = self.counts(owner)
        trials = np.arange(self.n_trials)
        seconds = self.seconds[trials, level, counts, self._apart(owner)]
        rates = self._rate(seconds, counts != self.now, self.weight, self.switch_seconds)
        scores: Floats = -rates.sum(axis=1)
        return scores

    def reorder(self, counts: Ints) -> Ints:
        """Owners of the devices, from the number of devices of each trial [schedule, trial]."""
        return side_by_side(counts, self.owner, self.host)

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
        """The weight of a trial over its seconds to the end, the cost of a move included."""
        trains = (seconds > 0) & np.isfinite(seconds)
        seconds = np.where(trains, seconds, 1.0)
        cost = np.where(moved, np.maximum(switch, self.gate * seconds), 0.0)
        return np.where(trains, weight / (seconds + cost), 0.0)
