"""Devices that train recorded runs as a policy says. Deterministic: no clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Curve, Decision, Device, RunState, RunView, Snapshot, TierName
from optuna_hermes.policies import Policy
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._kernel import Agenda
from optuna_hermes.simulator._trace import Failure, Slice, Trace
from optuna_hermes.simulator._workload import Recording, Source


class _Seat:
    """A device, and what it trains."""

    def __init__(self, device: Device, index: int) -> None:
        self.device = device
        self.index = index
        self.number: int | None = None
        self.last: int | None = None
        self.lease = 0
        self.failures = 0
        self.start = 0.0
        self.switched = False


class Cluster:
    """Replays trainings on some devices under a policy, one unit a slice.

    The policy sees what a broker's policy sees. Events at the same time are handled in the order
    of the devices; each device is decided about before the next is looked at, and after it the
    devices that stand idle.

    Args:
        policy: who trains next.
        source: the trials.
        n_devices: how many devices.
        n_hosts: on how many hosts; the devices are dealt out evenly, in order.
        costs: of a device that changes run.
        seed: for policies that draw random numbers.
        failures: of devices.

    Raises:
        InvalidInputError: there is no device or no host, or fewer devices than hosts.

    Example:
        >>> from optuna_hermes.policies import make_policy
        >>> from optuna_hermes.simulator import Cluster, FixedList, Recording
        >>> training = Recording(values=(0.9, 0.5), seconds=(1.0, 1.0))
        >>> trace = Cluster(make_policy("fifo"), FixedList([training] * 2)).run()
        >>> trace.finished
        {0: 2.0, 1: 4.0}
    """

    def __init__(
        self,
        policy: Policy,
        source: Source,
        *,
        n_devices: int = 1,
        n_hosts: int = 1,
        costs: SwitchCosts | None = None,
        seed: int = 0,
        failures: Sequence[Failure] = (),
    ) -> None:
        if not 1 <= n_hosts <= n_devices:
            raise InvalidInputError(
                "There must be a device and a host at least, and no more hosts than devices, but "
                f"got {n_devices} devices on {n_hosts} hosts."
            )
        self._policy = policy
        self._source = source
        self._costs = costs or SwitchCosts()
        self._seed = seed
        self._failures = tuple(failures)
        self._seats = [
            _Seat(Device(id=f"cpu:{i}", host=f"host-{i * n_hosts // n_devices}"), i)
            for i in range(n_devices)
        ]
        self._agenda = Agenda[Callable[[], _Seat | None]]()
        self._devices_shown: dict[int, tuple[Device, ...]] = {}
        self._recordings: list[Recording] = []
        self._live: dict[int, RunView] = {}
        self._over: tuple[RunView, ...] = ()
        self._waiting = 0
        self._memory: Any = None
        self._slices: list[Slice] = []
        self._finished: dict[int, float] = {}
        self._pruned: dict[int, float] = {}
        self._decisions = 0

    def run(self, until: float = math.inf) -> Trace:
        """Replay until nothing is left to do.

        Args:
            until: seconds at which to stop; a unit that would end later is not reported.
        """
        for failure in self._failures:
            seat = self._seats[failure.device]
            event = partial(self._fail, seat, failure.seconds)
            self._agenda.plan(failure.at, event, priority=seat.index)
        for seat in self._seats:
            self._decide(seat)
        while self._agenda and self._agenda.next_time <= until:
            seat_or_none = self._agenda.next()()
            if seat_or_none is not None:
                self._decide(seat_or_none)
                self._decide_idle(seat_or_none)
        return Trace(
            slices=tuple(self._slices),
            finished=self._finished,
            pruned=self._pruned,
            recordings=tuple(self._recordings),
            decisions=self._decisions,
        )

    # -- deciding ------------------------------------------------------------------------------

    def _decide_idle(self, decided: _Seat) -> None:
        for seat in self._seats:
            if seat.number is None and seat is not decided:
                self._decide(seat)

    def _decide(self, seat: _Seat) -> None:
        unstarted = self._source.unstarted
        if seat.number is not None or not seat.device.healthy:
            return
        if self._waiting == 0 and not unstarted.any:
            return
        decision = self._policy.decide(
            Snapshot(
                now=self._agenda.now,
                seed=self._seed,
                devices=self._devices(seat),
                runs=tuple(self._live.values()),
                finished=self._over,
                unstarted=unstarted,
                memory=self._memory,
            )
        )
        self._decisions += 1
        self._memory = decision.memory
        self._obey(decision, seat)

    def _devices(self, seat: _Seat) -> tuple[Device, ...]:
        """All devices as a policy sees them when it decides about one of them."""
        if seat.index not in self._devices_shown:
            self._devices_shown[seat.index] = tuple(
                replace(each.device, free=each is seat) for each in self._seats
            )
        return self._devices_shown[seat.index]

    def _obey(self, decision: Decision, seat: _Seat) -> None:
        stopped = seat.last
        for number in decision.pruned:
            self._take_waiting(number)
            self._end(number, "pruned")
        for assignment in decision.assignments:
            if assignment.devices != (seat.device.id,) or seat.number is not None:
                raise ValueError(
                    f"A policy may assign {seat.device.id} once here but got {decision}."
                )
            self._start(seat, assignment.run)
        if stopped is not None and stopped != seat.number and stopped in self._live:
            self._leave(seat, stopped)

    def _take_waiting(self, number: int) -> RunView:
        view = self._live.get(number)
        if view is None or view.state == "running":
            raise ValueError(f"A policy may choose trials that wait but got trial {number}.")
        self._waiting -= 1
        return view

    # -- trials --------------------------------------------------------------------------------

    def _start(self, seat: _Seat, chosen: int | None) -> None:
        """Give a device to a run for one unit."""
        if chosen is None:
            number = len(self._recordings)
            self._recordings.append(self._source.open(number))
            view = RunView(number=number, state="pending", submitted=self._agenda.now)
        else:
            number, view = chosen, self._take_waiting(chosen)
        recording = self._recordings[number]
        seconds = recording.seconds[view.curve.units]
        seat.switched = seat.last != number
        if seat.switched:
            away = view.tier == "resident" and view.device != seat.device.id
            seconds += self._costs.seconds(seconds, "host" if away else view.tier)
        seat.number = seat.last = number
        seat.start = self._agenda.now
        seat.lease += 1
        self._live[number] = _shown(
            view, recording, "running", view.curve, seat, seat.start, view.attained_seconds
        )
        event = partial(self._report, seat, seat.lease)
        self._agenda.plan(seat.start + seconds, event, priority=seat.index)

    def _report(self, seat: _Seat, lease: int) -> _Seat | None:
        """A unit ends, unless its device has failed before."""
        if lease != seat.lease or seat.number is None:
            return None
        number, now = seat.number, self._agenda.now
        recording, view = self._recordings[number], self._live[number]
        before, unit = view.curve, view.curve.units + 1
        value, used = recording.values[unit - 1], view.attained_seconds + now - seat.start
        curve = Curve(
            steps=(*before.steps, unit),
            values=(*before.values, value),
            device_seconds=(*before.device_seconds, used),
        )
        self._slices.append(Slice(seat.start, now, seat.index, number, unit, value, seat.switched))
        self._stop(seat, curve, used)
        self._source.reported(number, unit, value)
        if unit == len(recording.values):
            self._waiting -= 1
            self._end(number, "done")
        return seat

    def _stop(self, seat: _Seat, curve: Curve, used: float) -> None:
        """A run is up for decision on the device where it sits."""
        assert seat.number is not None
        view, recording = self._live[seat.number], self._recordings[seat.number]
        self._live[seat.number] = _shown(
            view, recording, "parked", curve, seat, self._agenda.now, used
        )
        seat.number = None
        self._waiting += 1

    def _end(self, number: int, state: Literal["done", "pruned"]) -> None:
        view = replace(self._live.pop(number), state=state, tier=None, device=None)
        self._over = (*self._over, view)
        ends = self._finished if state == "done" else self._pruned
        ends[number] = self._agenda.now
        self._source.ended(number, pruned=state == "pruned")

    def _leave(self, seat: _Seat, number: int) -> None:
        """A run is suspended: from now on it costs something to bring it back."""
        view, recording = self._live[number], self._recordings[number]
        unit_seconds = recording.seconds[view.curve.units - 1] if view.curve.units else 0.0
        cost = self._costs.seconds(unit_seconds, view.tier)
        self._live[number] = replace(view, switch_cost_seconds=cost)
        if self._costs.by_tier:
            self._evict(unit_seconds)

    def _evict(self, unit_seconds: float) -> None:
        """Put every suspended run into the tier that has room for it, the latest first."""
        waiting = [view for view in self._live.values() if view.state == "parked"]
        room = dict.fromkeys((seat.device.id for seat in self._seats), self._costs.resident_runs)
        host = self._costs.host_runs
        for view in sorted(waiting, key=lambda view: -(view.waiting_since or 0.0)):
            tier: TierName = "disk"
            if view.device is not None and room[view.device] > 0:
                room[view.device] -= 1
                tier = "resident"
            elif host > 0:
                host -= 1
                tier = "host"
            if tier != view.tier:
                cost = self._costs.seconds(unit_seconds, tier)
                self._live[view.number] = replace(view, tier=tier, switch_cost_seconds=cost)

    # -- failures ------------------------------------------------------------------------------

    def _fail(self, seat: _Seat, seconds: float) -> _Seat:
        """A device fails, and its unit is lost."""
        now = self._agenda.now
        if seat.number is not None:
            number, view = seat.number, self._live[seat.number]
            self._slices.append(
                Slice(seat.start, now, seat.index, number, 0, math.nan, seat.switched)
            )
            self._stop(seat, view.curve, view.attained_seconds + now - seat.start)
            self._leave(seat, number)
        seat.last = None
        seat.failures += 1
        self._set_healthy(seat)
        self._agenda.plan(now + seconds, partial(self._mend, seat), priority=seat.index)
        return seat

    def _mend(self, seat: _Seat) -> _Seat:
        seat.failures -= 1
        self._set_healthy(seat)
        return seat

    def _set_healthy(self, seat: _Seat) -> None:
        seat.device = replace(seat.device, healthy=seat.failures == 0)
        self._devices_shown.clear()


def _shown(
    view: RunView,
    recording: Recording,
    state: RunState,
    curve: Curve,
    seat: _Seat,
    now: float,
    used: float,
) -> RunView:
    """A run as policies see it, on a device or just off it."""
    running = state == "running"
    return RunView(
        number=view.number,
        state=state,
        curve=curve,
        attained_seconds=used,
        submitted=view.submitted,
        waiting_since=None if running else now,
        tier=None if running else "resident",
        device=seat.device.id,
        units_left=len(recording.values) - curve.units,
        params=recording.params,
    )
