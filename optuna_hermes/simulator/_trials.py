"""The opened trials of a simulation, as policies see them, and the tiers in which they wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from optuna_hermes.model import Curve, TierName, TrialStatus, TrialView
from optuna_hermes.simulator._values import SwitchCosts
from optuna_hermes.simulator._workload import Recording, Source


class OpenedTrials:
    """The views of all opened trials: running, waiting in a tier, or over.

    ``changed`` is called with the number of each trial whose view has changed.
    """

    def __init__(
        self,
        source: Source,
        costs: SwitchCosts,
        changed: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._source = source
        self._costs = costs
        self._changed = changed
        self._live: dict[int, TrialView] = {}
        self.recordings: dict[int, Recording] = {}
        self.over: tuple[TrialView, ...] = ()
        self.ends: dict[Literal["done", "pruned"], dict[int, float]] = {"done": {}, "pruned": {}}
        self.n_waiting = 0
        self._next = 0

    @property
    def live(self) -> tuple[TrialView, ...]:
        # A dict keeps a key's place when its value is replaced, so they stay in order.
        return tuple(self._live.values())

    def view_of(self, number: int) -> TrialView | None:
        """A trial that is not over."""
        return self._live.get(number)

    def state_of(self, number: int) -> TrialStatus | None:
        """The state of a trial that is not over."""
        view = self._live.get(number)
        return None if view is None else view.state

    def store(self, number: int) -> None:
        """Put a trial that waits on disk."""
        self._put(self._live[number], "disk")

    def take(self, number: int | None, now: float) -> TrialView:
        """Take a waiting trial, a listed one, or, for None, a new one."""
        if number is None:
            if not self._source.unstarted.any:
                raise ValueError("A policy may open a trial only while one is left, but none is.")
            number = self.next_number
        elif not self._is_listed(number):
            return self._take_waiting(number)
        self.recordings[number] = self._source.open(number)
        return TrialView(number=number, state="pending", submitted=now)

    def _is_listed(self, number: int) -> bool:
        if number in self.recordings:
            return False
        return any(each.number == number for each in self._source.unstarted.listed)

    @property
    def next_number(self) -> int:
        """The lowest number that no trial has."""
        while self._next in self.recordings:
            self._next += 1
        return self._next

    def start(self, view: TrialView, device: str) -> None:
        self._show(view, "running", view.curve, view.attained_seconds, device, None)

    def stop(self, number: int, device: str, start: float, now: float) -> None:
        """Park a trial on its device without a report of what it trained since ``start``."""
        view = self._live[number]
        used = view.attained_seconds + (now - start)
        self._show(view, "parked", view.curve, used, device, now)
        self.n_waiting += 1

    def report(self, number: int, device: str, start: float, now: float) -> tuple[int, float]:
        """Record the end of a unit begun at ``start``, and return its number and value."""
        view = self._live[number]
        before, unit = view.curve, view.curve.units + 1
        values = self.recordings[number].values
        value, used = values[unit - 1], view.attained_seconds + (now - start)
        curve = Curve(
            steps=(*before.steps, unit),
            values=(*before.values, value),
            device_seconds=(*before.device_seconds, used),
        )
        self._show(view, "parked", curve, used, device, now)
        # Before its end: a sampler's study may be told of an end only after the last value.
        self._source.reported(number, unit, value)
        if unit == len(values):
            self._end(number, "done", now)
        else:
            self.n_waiting += 1
        return unit, value

    def prune(self, number: int, now: float) -> None:
        self._take_waiting(number)
        self._end(number, "pruned", now)

    def leave(
        self,
        number: int,
        device: str,
        *,
        last_trials: Collection[tuple[int | None, str]],
        host_of: Mapping[str, str],
    ) -> None:
        """Account for another trial on a device: resuming the former one has a cost from now on.

        ``last_trials`` are the last ones of each device, which no other has displaced.
        """
        view = self._live.get(number)
        if view is None or view.state == "running" or view.device != device:
            return
        self._put(view, "resident")
        if self._costs.by_tier:
            suspended = [
                each
                for each in self._live.values()
                if each.state != "running" and (each.number, each.device) not in last_trials
            ]
            for moved, tier in _evictions(suspended, self._costs, host_of):
                self._put(moved, tier)

    def lose(self, device: str) -> None:
        """Handle the failure of a device: trials suspended on it go on from disk."""
        for view in self.live:
            if view.tier == "resident" and view.device == device:
                self._put(view, "disk")

    def _put(self, view: TrialView, tier: TierName) -> None:
        # The last unit's time stands for the next one's, which a policy must not know.
        seconds = self.recordings[view.number].seconds[max(0, view.curve.units - 1)]
        state: TrialStatus = "stored" if tier == "disk" else "parked"
        cost = self._costs.seconds(seconds, tier)
        self._live[view.number] = replace(view, tier=tier, state=state, switch_cost_seconds=cost)
        self._changed(view.number)

    def _take_waiting(self, number: int) -> TrialView:
        view = self._live.get(number)
        if view is None or view.state == "running":
            raise ValueError(f"A policy may choose trials that wait but got trial {number}.")
        self.n_waiting -= 1
        return view

    def _show(
        self,
        view: TrialView,
        state: TrialStatus,
        curve: Curve,
        used: float,
        device: str,
        waiting_since: float | None,
    ) -> None:
        """Show a trial running or parked on a device: resuming there costs nothing."""
        recording = self.recordings[view.number]
        # Not replace(), which is slower: a simulation spends most of its time here.
        self._live[view.number] = TrialView(
            number=view.number,
            state=state,
            curve=curve,
            attained_seconds=used,
            submitted=view.submitted,
            waiting_since=waiting_since,
            tier=None if state == "running" else "resident",
            device=device,
            units_left=len(recording.values) - curve.units,
            params=recording.params,
        )
        self._changed(view.number)

    def _end(self, number: int, state: Literal["done", "pruned"], now: float) -> None:
        view = replace(self._live.pop(number), state=state, tier=None, device=None)
        self.over = (*self.over, view)
        self.ends[state][number] = now
        self._changed(number)
        self._source.ended(number, pruned=state == "pruned")


def _evictions(
    suspended: Iterable[TrialView], costs: SwitchCosts, host_of: Mapping[str, str]
) -> Iterator[tuple[TrialView, TierName]]:
    """The trials that move from their device to the host's memory, and from there to disk."""
    resident = dict.fromkeys(host_of, costs.resident_trials)
    host = dict.fromkeys(host_of.values(), costs.host_trials)
    # The trial that stopped last has the first choice. None moves up: that takes training again.
    for view in sorted(suspended, key=lambda view: -(view.waiting_since or 0.0)):
        assert view.device is not None, "a suspended trial has had a device"
        tier: TierName = "disk"
        if view.tier == "resident" and resident[view.device] > 0:
            resident[view.device] -= 1
            tier = "resident"
        elif view.tier != "disk" and host[host_of[view.device]] > 0:
            host[host_of[view.device]] -= 1
            tier = "host"
        if tier != view.tier:
            yield view, tier
