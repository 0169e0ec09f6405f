"""The opened trials of a simulation, as policies see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from optuna_hermes.model import Curve, RunState, RunView, TierName, Unstarted
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._tiers import moves_down
from optuna_hermes.simulator._workload import Recording, Source


class Roster:
    """Who is live, who waits where, and who is over.

    Args:
        source: the trials.
        costs: of bringing a run onto a device.
    """

    def __init__(self, source: Source, costs: SwitchCosts) -> None:
        self._source = source
        self._costs = costs
        self._live: dict[int, RunView] = {}
        self.recordings: list[Recording] = []
        self.over: tuple[RunView, ...] = ()
        self.ends: dict[Literal["done", "pruned"], dict[int, float]] = {"done": {}, "pruned": {}}
        self.n_waiting = 0

    @property
    def live(self) -> tuple[RunView, ...]:
        """The runs that are not over, in the order of their numbers."""
        return tuple(self._live.values())

    @property
    def unstarted(self) -> Unstarted:
        """The trials that can still be opened."""
        return self._source.unstarted

    def running(self, number: int) -> RunView:
        """A run that has a device."""
        return self._live[number]

    # -- from and to a device ------------------------------------------------------------------

    def take(self, number: int | None, now: float) -> RunView:
        """A run that waits, or, for None, a new one.

        Raises:
            ValueError: it does not wait, or no trial is left.
        """
        if number is not None:
            return self._take_waiting(number)
        if not self._source.unstarted.any:
            raise ValueError("A policy may open a trial only while one is left, but none is.")
        number = len(self.recordings)
        self.recordings.append(self._source.open(number))
        return RunView(number=number, state="pending", submitted=now)

    def start(self, view: RunView, device: str) -> None:
        """A run gets a device."""
        self._show(view, "running", view.curve, view.attained_seconds, device, None)

    def stop(self, view: RunView, device: str, now: float, used: float) -> None:
        """A run is up for decision where it sits, without a report."""
        self._show(view, "parked", view.curve, used, device, now)
        self.n_waiting += 1

    def report(self, view: RunView, device: str, now: float, used: float) -> tuple[int, float]:
        """A run ends a unit: it is over, or up for decision where it sits.

        Returns:
            The unit, from 1, and its value.
        """
        before, unit = view.curve, view.curve.units + 1
        values = self.recordings[view.number].values
        value = values[unit - 1]
        curve = Curve(
            steps=(*before.steps, unit),
            values=(*before.values, value),
            device_seconds=(*before.device_seconds, used),
        )
        self._show(view, "parked", curve, used, device, now)
        self._source.reported(view.number, unit, value)
        if unit == len(values):
            self._end(view.number, "done", now)
        else:
            self.n_waiting += 1
        return unit, value

    def prune(self, number: int, now: float) -> None:
        """A run that waits never goes on.

        Raises:
            ValueError: it does not wait.
        """
        self._take_waiting(number)
        self._end(number, "pruned", now)

    # -- tiers ---------------------------------------------------------------------------------

    def leave(
        self,
        number: int,
        device: str,
        *,
        seated: Collection[tuple[int | None, str]],
        host_of: Mapping[str, str],
    ) -> None:
        """Another run trains on a device: to bring back the one before costs something now.

        Args:
            number: of the run that was there before, if it waits at all.
            device: where.
            seated: the last run of each device: nobody has pushed it out.
            host_of: the host of each device.
        """
        view = self._live.get(number)
        if view is None or view.state == "running" or view.device != device:
            return
        self._put(view, "resident")
        if self._costs.by_tier:
            suspended = [
                each
                for each in self._live.values()
                if each.state != "running" and (each.number, each.device) not in seated
            ]
            for moved, tier in moves_down(suspended, self._costs, host_of):
                self._put(moved, tier)

    def lose(self, device: str) -> None:
        """A device fails: of the runs on it there is only what is on disk."""
        for view in self.live:
            if view.tier == "resident" and view.device == device:
                self._put(view, "disk")

    def _put(self, view: RunView, tier: TierName) -> None:
        # What the last unit took is what a policy can expect of the next.
        seconds = self.recordings[view.number].seconds[max(0, view.curve.units - 1)]
        state: RunState = "stored" if tier == "disk" else "parked"
        cost = self._costs.seconds(seconds, tier)
        self._live[view.number] = replace(view, tier=tier, state=state, switch_cost_seconds=cost)

    # -- views ---------------------------------------------------------------------------------

    def _take_waiting(self, number: int) -> RunView:
        view = self._live.get(number)
        if view is None or view.state == "running":
            raise ValueError(f"A policy may choose trials that wait but got trial {number}.")
        self.n_waiting -= 1
        return view

    def _show(
        self,
        view: RunView,
        state: RunState,
        curve: Curve,
        used: float,
        device: str,
        waiting_since: float | None,
    ) -> None:
        """A run on a device, or just off it: to go on there costs nothing."""
        recording = self.recordings[view.number]
        # Not replace(): here a simulation spends its time.
        self._live[view.number] = RunView(
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

    def _end(self, number: int, state: Literal["done", "pruned"], now: float) -> None:
        view = replace(self._live.pop(number), state=state, tier=None, device=None)
        self.over = (*self.over, view)
        self.ends[state][number] = now
        self._source.ended(number, pruned=state == "pruned")
