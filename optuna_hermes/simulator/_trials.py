"""The opened trials of a simulation, as policies see them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Curve, TrialStatus, TrialView
from optuna_hermes.simulator._values import SwitchCosts
from optuna_hermes.simulator._workload import Recording, Source


class OpenedTrials:
    """The views of all opened trials: running, waiting on a device, or over."""

    def __init__(self, source: Source, costs: SwitchCosts) -> None:
        self._source = source
        self._costs = costs
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

    def take(self, number: int | None, now: float) -> TrialView:
        """Take a waiting trial, a listed one, or, for None, a new one."""
        if number is None:
            if not self._source.unstarted.any:
                raise InvalidInputError(
                    "A policy may open a trial only while one is left, but none is."
                )
            while self._next in self.recordings:  # the lowest number that no trial has
                self._next += 1
            number = self._next
        elif number in self.recordings or all(
            each.number != number for each in self._source.unstarted.listed
        ):
            return self._take_waiting(number)
        self.recordings[number] = self._source.open(number)
        return TrialView(number=number, state="pending", submitted=now)

    def start(self, view: TrialView, device: str) -> None:
        self._show(view, "running", view.curve, view.attained_seconds, device, None)

    def report(self, number: int, device: str, start: float, now: float) -> tuple[int, float]:
        """Record the end of a unit begun at ``start``, and return its number and value."""
        view = self._live[number]
        unit = view.curve.units + 1
        values = self.recordings[number].values
        value, used = values[unit - 1], view.attained_seconds + (now - start)
        curve = view.curve.with_report(unit, unit, value, used)
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

    def leave(self, number: int, device: str) -> None:
        """Account for another trial on a device: resuming the former one has a cost from now on."""
        view = self._live.get(number)
        if view is None or view.device != device:  # it is over, or runs elsewhere
            return
        # The last unit's time stands for the next one's, which a policy must not know.
        cost = self._costs.of(self.recordings[number].seconds[view.curve.units - 1])
        self._live[number] = replace(view, switch_cost_seconds=cost)

    def _take_waiting(self, number: int) -> TrialView:
        view = self._live.get(number)
        if view is None or view.state == "running":
            raise InvalidInputError(f"A policy may choose trials that wait but got trial {number}.")
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
