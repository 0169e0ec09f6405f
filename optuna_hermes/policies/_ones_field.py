"""What schedules are made of, what one is worth, and which devices a run gets. Arrays only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.policies._seats import Ints, side_by_side

Floats = NDArray[np.float64]

ELASTICITY = 0.75
"""What is gained by devices more, as a power: k times the devices train ``k ** 0.75`` as fast."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """J runs, the one with the least left to do first, and G devices.

    Args:
        seconds: until a run ends [run, batch size, devices, several hosts]; infinite where it
            cannot be trained so, 0 on no device.
        wanted: devices that a run was submitted with [run].
        value: a factor of what a run is worth [run].
        switch_seconds: what it costs a run to get other devices [run].
        gate: no change is worth it that wins less than this share of the time to the end.
        owner: which run has a device now, -1 for none [device].
        host: to which host a device belongs, from 0 [device].
    """

    seconds: Floats
    wanted: Ints
    value: Floats
    switch_seconds: Floats
    gate: float
    owner: Ints
    host: Ints

    @property
    def n_runs(self) -> int:
        """Runs that could have devices."""
        return len(self.seconds)

    @property
    def n_devices(self) -> int:
        """Devices that are given out."""
        return len(self.owner)

    @cached_property
    def least(self) -> Ints:
        """Devices that a run needs [run]."""
        least: Ints = 1 + np.isfinite(self._quickest[:, 1:]).argmax(axis=1)
        return least

    @cached_property
    def most(self) -> Ints:
        """Devices that a run may have [run]."""
        most: Ints = self.n_devices - np.isfinite(self._quickest[:, :0:-1]).argmax(axis=1)
        return most

    @cached_property
    def now(self) -> Ints:
        """Devices that a run has [run]."""
        now: Ints = self.counts(self.owner[None])[0]
        return now

    @cached_property
    def best_level(self) -> Ints:
        """The batch size that is best on so many devices [run, devices]."""
        best: Ints = self.seconds[..., 0].argmin(axis=1)
        return best

    @cached_property
    def landmarks(self) -> tuple[Ints, Ints, Ints]:
        """Numbers of devices that mean something to a run: needed, wanted, and had [run]."""
        return self.least, self.wanted, self.now

    @cached_property
    def weight(self) -> Floats:
        """What it is worth to finish a run [run].

        That is its remaining utilisation, the device seconds to its end where they are least,
        times its place from the last, as a power: those behind it wait for it. With a power of 1
        and devices that are of equal use to all, the shortest run has all of them; with a power
        that is the elasticity, the shares are nearly those that are best for runs of one
        elasticity (Berg et al., "heSRPT", Performance Evaluation 2020).
        """
        use = (self._quickest * np.arange(self.n_devices + 1))[:, 1:].min(axis=1)
        weight: Floats = self.value * use * np.arange(self.n_runs, 0.0, -1.0) ** ELASTICITY
        return weight

    @cached_property
    def rates(self) -> Floats:
        """What a run on so many devices, close together, adds to a schedule [run, devices]."""
        counts = np.arange(self.n_devices + 1)
        largest = int(np.bincount(self.host).max())
        apart = self.seconds[..., 1].min(axis=1)
        seconds = np.where(counts > largest, apart, self._quickest)
        moved = counts != self.now[:, None]
        return self._rate(seconds, moved, self.weight[:, None], self.switch_seconds[:, None])

    @cached_property
    def _quickest(self) -> Floats:
        """Seconds to the end with the best batch size [run, devices]."""
        quickest: Floats = self.seconds[..., 0].min(axis=1)
        return quickest

    def counts(self, owner: Ints) -> Ints:
        """How many devices each run has [schedule, run]."""
        flat = owner + 1 + (self.n_runs + 1) * np.arange(len(owner))[:, None]
        found = np.bincount(flat.ravel(), minlength=len(owner) * (self.n_runs + 1))
        counts: Ints = found.reshape(len(owner), self.n_runs + 1)[:, 1:]
        return counts

    def scores(self, owner: Ints, level: Ints) -> Floats:
        """Less is better [schedule].

        It is minus the rate at which the schedule brings down the remaining utilisation of all,
        each in the weight of its run.
        """
        counts = self.counts(owner)
        runs = np.arange(self.n_runs)
        seconds = self.seconds[runs, level, counts, self._apart(owner)]
        rates = self._rate(seconds, counts != self.now, self.weight, self.switch_seconds)
        scores: Floats = -rates.sum(axis=1)
        return scores

    def reorder(self, counts: Ints) -> Ints:
        """Who has which device, for devices of each run [schedule, run]."""
        return side_by_side(counts, self.owner, self.host)

    def _apart(self, owner: Ints) -> Ints:
        """1 for a run on several hosts, otherwise 0 [schedule, run]."""
        n_hosts = int(self.host.max()) + 1
        flat = owner + 1 + (self.n_runs + 1) * np.arange(len(owner))[:, None]
        there = np.zeros(len(owner) * (self.n_runs + 1) * n_hosts, dtype=bool)
        there[flat * n_hosts + self.host] = True
        hosts = there.reshape(len(owner), self.n_runs + 1, n_hosts).sum(axis=2)[:, 1:]
        apart: Ints = (hosts > 1).astype(np.int64)
        return apart

    def _rate(
        self, seconds: Floats, moved: NDArray[np.bool_], weight: Floats, switch: Floats
    ) -> Floats:
        """The weight of a run by its seconds to the end, what a move costs included."""
        trains = (seconds > 0) & np.isfinite(seconds)
        seconds = np.where(trains, seconds, 1.0)
        cost = np.where(moved, np.maximum(switch, self.gate * seconds), 0.0)
        return np.where(trains, weight / (seconds + cost), 0.0)
