"""The opened trials of a simulation, as policies see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from optuna_hermes.model import Curve, TierName, TrialStatus, TrialView, Unstarted
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._tiers import moves_down
from optuna_hermes.simulator._workload import Recording, Source


class Roster:
    """The views of all opened trials: running, waiting in a tier, or over.

    Args:
        source: the trials.
        costs: costs of resuming a trial on a device.
    """

    def __init__(self, source: Source, costs: SwitchCosts) -> None:
        self._source = source
        self._costs = costs
        self._live: dict[int, TrialView] = {}
        self.recordings: list[Recording] = []
        self.over: tuple[TrialView, ...] = ()
        self.ends: dict[Literal["done", "pruned"], dict[int, float]] = {"done": {}, "pruned": {}}
        self.n_waiting = 0

    @property
    def live(self) -> tuple[TrialView, ...]:
        """The trials that are not over, in the order of their numbers."""
        return tuple(self._live.values())

    @property
    def unstarted(self) -> Unstarted:
        """The trials that can still be opened."""
        return self._source.unstarted

    def running(self, number: int) -> TrialView:
        """The view of a trial that has a device."""
        return self._live[number]

    # -- from and to a device ------------------------------------------------------------------

    def take(self, number: int | None, now: float) -> TrialView:
        """Take a waiting trial, or, for None, a new one.

        Raises:
            ValueError: it does not wait, or no trial is left.
        """
        if number is not None:
            return self._take_waiting(number)
        if not self._source.unstarted.any:
            raise ValueError("A policy may open a trial only while one is left, but none is.")
        number = len(self.recordings)
        self.recordings.append(self._source.open(number))
        return TrialView(number=number, state="pending", submitted=now)

    def start(self, view: TrialView, device: str) -> None:
        """Record that a trial gets a device."""
        self._show(view, "running", view.curve, view.attained_seconds, device, None)

    def stop(self, view: TrialView, device: str, now: float, used: float) -> None:
        """Park a trial on its device without a report."""
        self._show(view, "parked", view.curve, used, device, now)
        self.n_waiting += 1

    def report(self, view: TrialView, device: str, now: float, used: float) -> tuple[int, float]:
        """Record the end of a unit: the trial is over, or parked on its device.

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
        """Prune a waiting trial.

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
        """Account for another trial on a device: resuming the former one has a cost from now on.

        Args:
            number: the trial that was there before; nothing is done if it does not wait there.
            device: the device.
            seated: the last trial of each device, which no other has displaced.
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

    # -- views ---------------------------------------------------------------------------------

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

    def _end(self, number: int, state: Literal["done", "pruned"], now: float) -> None:
        view = replace(self._live.pop(number), state=state, tier=None, device=None)
        self.over = (*self.over, view)
        self.ends[state][number] = now
        self._source.ended(number, pruned=state == "pruned")
