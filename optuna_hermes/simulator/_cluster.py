"""Simulation of devices that replay recorded trials under a policy. No clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Device, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.simulator._costs import SwitchCosts
from optuna_hermes.simulator._roster import Roster
from optuna_hermes.simulator._trace import Failure, Slice, Trace
from optuna_hermes.simulator._workload import Source
from optuna_hermes.simulator.kernel import Agenda


class _Seat:
    """A device, the trial that it trains (``number``), and the one that it trained last."""

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

    The policy gets the same snapshots as in a broker. Events at the same time are handled in the
    order of the devices; the policy decides about the device of an event before the next event,
    and after it, in their order, about the idle devices.

    Args:
        policy: the policy that assigns devices.
        source: the trials.
        n_devices: number of devices.
        n_hosts: number of hosts; the devices are distributed evenly, in order.
        costs: costs of a device that changes to another trial; by default none.
        seed: for policies that draw random numbers.
        failures: failures of devices.

    Raises:
        InvalidInputError: there is no device or no host, fewer devices than hosts, or a failure of
            a device that does not exist.

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
        _check(n_devices, n_hosts, failures)
        self._policy = policy
        self._costs = costs or SwitchCosts()
        self._roster = Roster(source, self._costs)
        self._seed = seed
        self._seats = [
            _Seat(Device(id=f"cpu:{i}", host=f"host-{i * n_hosts // n_devices}"), i)
            for i in range(n_devices)
        ]
        self._host_of = {seat.device.id: seat.device.host for seat in self._seats}
        self._devices_shown: dict[int, tuple[Device, ...]] = {}
        self._agenda = Agenda[Callable[[], _Seat | None]]()
        self._begun = False
        self._memory: Any = None
        self._slices: list[Slice] = []
        self._decisions = 0
        for failure in failures:
            event = partial(self._fail, self._seats[failure.device], failure.seconds)
            self._agenda.plan(failure.at, event, priority=failure.device)

    def run(self, until: float = math.inf) -> Trace:
        """Replay until nothing is left to do; another call goes on from there.

        Args:
            until: time in seconds at which to stop; a unit that would end later is not reported.

        Raises:
            ValueError: a decision of the policy breaks the contract of policies.
        """
        if not self._begun:
            self._begun = True
            for seat in self._seats:
                self._decide(seat)
        while self._agenda and self._agenda.next_time <= until:
            touched = self._agenda.next()()
            if touched is not None:
                self._decide(touched)
                self._decide_idle(touched)
        return Trace(
            slices=tuple(self._slices),
            finished=dict(self._roster.ends["done"]),
            pruned=dict(self._roster.ends["pruned"]),
            recordings=tuple(self._roster.recordings),
            decisions=self._decisions,
        )

    # -- deciding ------------------------------------------------------------------------------

    def _decide_idle(self, decided: _Seat) -> None:
        for seat in self._seats:
            if seat.number is None and seat is not decided:
                self._decide(seat)

    def _decide(self, seat: _Seat) -> None:
        """Ask the policy about one device, if it is idle and healthy and a trial could use it."""
        if seat.number is not None or not seat.device.healthy:
            return
        unstarted = self._roster.unstarted
        if self._roster.n_waiting == 0 and not unstarted.any:
            return
        decision = self._policy.decide(
            Snapshot(
                now=self._agenda.now,
                seed=self._seed,
                devices=self._devices(seat),
                trials=self._roster.live,
                finished=self._roster.over,
                unstarted=unstarted,
                memory=self._memory,
            )
        )
        self._decisions += 1
        self._memory = decision.memory
        self._obey(decision, seat)

    def _devices(self, seat: _Seat) -> tuple[Device, ...]:
        """All devices as a policy sees them for a decision about one of them."""
        if seat.index not in self._devices_shown:
            self._devices_shown[seat.index] = tuple(
                replace(each.device, free=each is seat) for each in self._seats
            )
        return self._devices_shown[seat.index]

    def _obey(self, decision: Decision, seat: _Seat) -> None:
        for number in decision.pruned:
            self._roster.prune(number, self._agenda.now)
        if not decision.assignments:
            return
        assignment = decision.assignments[0]
        if len(decision.assignments) > 1 or assignment.devices != (seat.device.id,):
            raise ValueError(
                f"A policy may assign {seat.device.id} here, once, but got {decision.assignments}."
            )
        stopped = seat.last
        self._start(seat, self._roster.take(assignment.trial, self._agenda.now))
        if stopped is not None and stopped != seat.number:
            seated = {(each.last, each.device.id) for each in self._seats}
            self._roster.leave(stopped, seat.device.id, seated=seated, host_of=self._host_of)

    # -- events --------------------------------------------------------------------------------

    def _start(self, seat: _Seat, view: TrialView) -> None:
        """Give a device to a trial for one unit."""
        seconds = self._roster.recordings[view.number].seconds[view.curve.units]
        here = view.device == seat.device.id
        seat.switched = not here or seat.last != view.number
        if seat.switched:
            away = view.tier == "resident" and not here
            seconds += self._costs.seconds(seconds, "host" if away else view.tier)
        seat.number = seat.last = view.number
        seat.start = self._agenda.now
        seat.lease += 1
        self._roster.start(view, seat.device.id)
        # The lease number makes this event void if the device fails before it.
        event = partial(self._report, seat, seat.lease)
        self._agenda.plan(seat.start + seconds, event, priority=seat.index)

    def _report(self, seat: _Seat, lease: int) -> _Seat | None:
        """Handle the end of a unit, unless its device has failed before."""
        if seat.number is None or lease != seat.lease:
            return None
        now, view = self._agenda.now, self._roster.running(seat.number)
        used = view.attained_seconds + (now - seat.start)
        unit, value = self._roster.report(view, seat.device.id, now, used)
        self._vacate(seat, unit, value)
        return seat

    def _vacate(self, seat: _Seat, unit: int, value: float) -> None:
        assert seat.number is not None, "nothing is on the device"
        now = self._agenda.now
        self._slices.append(
            Slice(seat.start, now, seat.index, seat.number, unit, value, seat.switched)
        )
        seat.number = None

    def _fail(self, seat: _Seat, seconds: float) -> _Seat:
        """Handle the failure of a device: the unit on it is lost."""
        now = self._agenda.now
        if seat.number is not None:
            view = self._roster.running(seat.number)
            used = view.attained_seconds + (now - seat.start)
            self._roster.stop(view, seat.device.id, now, used)
            self._vacate(seat, 0, math.nan)
        self._roster.lose(seat.device.id)
        seat.last = None
        # Counted, since failures of one device may overlap.
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


def _check(n_devices: int, n_hosts: int, failures: Sequence[Failure]) -> None:
    if not 1 <= n_hosts <= n_devices:
        raise InvalidInputError(
            "There must be a device and a host at least, and no more hosts than devices, but "
            f"got {n_devices} devices on {n_hosts} hosts."
        )
    for failure in failures:
        if not 0 <= failure.device < n_devices:
            raise InvalidInputError(
                f"A device that fails must be one of 0 to {n_devices - 1} but got {failure.device}."
            )
