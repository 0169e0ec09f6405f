"""Simulation of devices that replay recorded trials under a policy. No clock, no randomness."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Budget, Decision, Device, Snapshot, TrialView, moving_average
from optuna_hermes.policies import Policy
from optuna_hermes.simulator._sharing import HostView, SharedStudy, Sharing, Traffic
from optuna_hermes.simulator._trials import OpenedTrials
from optuna_hermes.simulator._values import Failure, Overheads, Slice, SwitchCosts, Trace
from optuna_hermes.simulator._workload import Source

Event = TypeVar("Event")


class EventQueue(Generic[Event]):
    """The clock and the events of a simulation, in the order of time, priority and addition.

    Example:
        >>> events = EventQueue[str]()
        >>> events.add(2.0, "later")
        >>> events.add(1.0, "second", priority=1)
        >>> events.add(1.0, "first", priority=0)
        >>> [events.pop() for _ in range(3)], events.now
        (['first', 'second', 'later'], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._added = 0

    def add(self, time: float, event: Event, priority: int = 0) -> None:
        """Add an event at a time in seconds; at one time the smallest priority comes first."""
        # Written so that NaN is refused too: it would break the order of the heap unseen.
        if not time >= self.now:
            raise ValueError(f"An event must be at {self.now} or later but got {time}.")
        # The counter makes the order of ties deterministic, and events need no comparison.
        heapq.heappush(self._heap, (time, priority, self._added, event))
        self._added += 1

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> Event:
        """Advance the clock to the next event, and return it."""
        self.now, _, _, event = heapq.heappop(self._heap)
        return event


class _Slot:
    """A device, the trial that it trains (``number``), and the one that it trained last."""

    def __init__(self, device: Device, index: int) -> None:
        self.device = device
        self.index = index
        self.number: int | None = None
        self.last: int | None = None
        self.lease = 0
        self.failures = 0
        self.start = self.end = 0.0
        self.switched = False
        self.begun = False


class TrialSimulator:
    """Replays trainings on some devices under a policy, one unit a slice.

    The policy gets the same snapshots as in a broker.

    Args:
        policy: the policy that assigns devices.
        source: the trials.
        n_devices: number of devices.
        n_hosts: number of hosts; the devices are distributed evenly, in order.
        sharing: how these hosts share the study, each with a policy of its own; by default one
            policy decides about all devices.
        costs: costs of a device that changes to another trial; by default none.
        overheads: device time that goes to openings, decisions and the start; by default none.
        seed: for policies that draw random numbers.
        failures: failures of devices.
        timeout: when the simulation ends, which the policy is told; None for no such time.

    Raises:
        InvalidInputError: the numbers of devices and hosts, or a failure's device, are impossible.

    Example:
        >>> from optuna_hermes.policies import make_policy
        >>> from optuna_hermes.simulator import FixedList, Recording, TrialSimulator
        >>> training = Recording(values=(0.9, 0.5), seconds=(1.0, 1.0))
        >>> trace = TrialSimulator(make_policy("fifo"), FixedList([training] * 2)).run()
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
        sharing: Sharing | None = None,
        costs: SwitchCosts | None = None,
        overheads: Overheads | None = None,
        seed: int = 0,
        failures: Sequence[Failure] = (),
        timeout: float | None = None,
    ) -> None:
        _check(n_devices, n_hosts, failures)
        self._policy = policy
        self._source = source
        self._costs = costs or SwitchCosts()
        self._overheads = overheads or Overheads()
        self._opening_seconds = 0.0
        self._trials = OpenedTrials(source, self._costs, self._changed)
        self._seed = seed
        self._timeout = timeout
        self._slots = [
            _Slot(Device(id=f"cpu:{i}", host=f"host-{i * n_hosts // n_devices}"), i)
            for i in range(n_devices)
        ]
        self._host_of = {slot.device.id: slot.device.host for slot in self._slots}
        self._shared: SharedStudy | None = None
        if sharing is not None:
            devices = [slot.device for slot in self._slots]
            self._shared = SharedStudy(policy, devices, sharing, self._trials)
        self._devices_shown: dict[int, tuple[Device, ...]] = {}
        self._events = EventQueue[Callable[[], _Slot | None]]()
        self._begun = self._started = False
        self._memory: Any = None
        self._slices: list[Slice] = []
        self._decisions = 0
        # Before all units: one that would end at the moment of a failure is lost too.
        for failure in failures:
            event = partial(self._fail, self._slots[failure.device], failure.seconds)
            self._events.add(failure.at, event, priority=failure.device)

    def run(self, until: float = math.inf) -> Trace:
        """Replay until nothing is left to do, or until a time; another call goes on from there.

        Raises:
            ValueError: a decision of the policy breaks the contract of policies.
        """
        if not self._begun:
            self._begun = True
            self._events.add(self._overheads.startup_seconds, self._begin, priority=-1)
        until = min(until, math.inf if self._timeout is None else self._timeout)
        while self._events and self._events.next_time <= until:
            # One event at a time, as in a broker, which hears of one device after the other: the
            # policy decides about the device of an event first, then about those that are idle.
            touched = self._events.pop()()
            if touched is not None and self._started:
                self._decide(touched)
                for slot in self._beside(touched):
                    if slot is not touched:
                        self._decide(slot)
        return Trace(
            slices=tuple(self._slices),
            finished=dict(self._trials.ends["done"]),
            pruned=dict(self._trials.ends["pruned"]),
            recordings=dict(self._trials.recordings),
            decisions=self._decisions,
        )

    @property
    def traffic(self) -> Traffic:
        """Counts of the questions that hosts which share the study have asked their database."""
        return Traffic() if self._shared is None else self._shared.traffic

    def _begin(self) -> _Slot:
        self._started = True
        if self._shared is not None:
            hosts = list(self._shared.hosts.values())
            for place, host in enumerate(hosts):
                # Hosts do not look at the same moment.
                first = self._shared.sharing.refresh_seconds * place / len(hosts)
                self._events.add(self._events.now + first, partial(self._look, host), priority=-1)
        return self._slots[0]

    def _beside(self, slot: _Slot) -> list[_Slot]:
        """The slots that may be decided about when one has had an event."""
        if self._shared is None:
            return self._slots
        return [each for each in self._slots if each.device.host == slot.device.host]

    def _decide(self, slot: _Slot) -> None:
        """Ask the policy about one device, if it is idle and healthy and a trial could use it."""
        while slot.number is None and slot.device.healthy:
            unstarted = self._source.unstarted
            if self._trials.n_waiting == 0 and not unstarted.any:
                return
            host = None if self._shared is None else self._shared.hosts[slot.device.host]
            if host is None:
                decision = self._policy.decide(
                    self._snapshot(slot, self._trials.live, self._memory)
                )
                self._memory = decision.memory
            else:
                shown = tuple(host.shown.values())
                decision = host.policy.decide(self._snapshot(slot, shown, host.memory))
                host.memory = decision.memory
            self._decisions += 1
            for number in decision.pruned:
                self._trials.prune(number, self._events.now)
            if not decision.assignments:
                return
            assignment = decision.assignments[0]
            if len(decision.assignments) > 1 or assignment.devices != (slot.device.id,):
                raise ValueError(
                    f"A policy may assign {slot.device.id} here, once, but got "
                    f"{decision.assignments}."
                )
            self._carry_out(slot, assignment.trial, host)

    def _snapshot(self, slot: _Slot, trials: tuple[TrialView, ...], memory: Any) -> Snapshot:
        return Snapshot(
            now=self._events.now,
            seed=self._seed,
            devices=self._devices(slot),
            trials=trials,
            finished=self._trials.over,
            unstarted=self._source.unstarted,
            left=self._left(),
            opening_seconds=self._opening_seconds,
            memory=memory,
        )

    def _carry_out(self, slot: _Slot, number: int | None, host: HostView | None) -> None:
        """Start a trial on a device, unless another host was faster to take it."""
        stopped, claim_seconds = slot.last, 0.0
        if self._shared is not None and host is not None:
            new = self._trials.next_number if number is None else number
            if self._shared.is_taken_over(host, new):
                claim_seconds = self._shared.sharing.claim_seconds
            if not self._shared.take(host, new):
                return
        self._start(slot, self._trials.take(number, self._events.now), claim_seconds)
        if stopped is not None and stopped != slot.number:
            last_trials = {(each.last, each.device.id) for each in self._slots}
            self._trials.leave(
                stopped, slot.device.id, last_trials=last_trials, host_of=self._host_of
            )

    def _left(self) -> Budget:
        if self._timeout is None:
            return Budget()
        return Budget(seconds=max(0.0, self._timeout - self._events.now))

    def _devices(self, slot: _Slot) -> tuple[Device, ...]:
        # Only the device in question is free; the tuples are kept, for they are most of a snapshot.
        if slot.index not in self._devices_shown:
            self._devices_shown[slot.index] = tuple(
                replace(each.device, free=each is slot) for each in self._beside(slot)
            )
        return self._devices_shown[slot.index]

    def _start(self, slot: _Slot, view: TrialView, claim_seconds: float = 0.0) -> None:
        unit_seconds = self._trials.recordings[view.number].seconds[view.curve.units]
        cost = 0.0
        here = view.device == slot.device.id
        slot.switched = not here or slot.last != view.number
        if slot.switched:
            # State on another device comes by way of the host's memory.
            away = view.tier == "resident" and not here
            cost = self._costs.seconds(unit_seconds, "host" if away else view.tier)
        is_new = not view.curve.units
        if is_new:
            cost += self._overheads.opening(unit_seconds)
        seconds = unit_seconds + cost + claim_seconds
        if slot.begun:
            seconds += self._overheads.decision_seconds
        slot.begun = True
        slot.number = slot.last = view.number
        slot.start = self._events.now
        slot.lease += 1
        self._trials.start(view, slot.device.id)
        if is_new:
            self._events.add(slot.start + cost, partial(self._train, slot, slot.lease))
        # The lease number makes this event void if the device fails before it.
        event = partial(self._report, slot, slot.lease)
        slot.end = slot.start + seconds
        self._events.add(slot.end, event, priority=slot.index)

    def _train(self, slot: _Slot, lease: int) -> None:
        # As a broker measures it.
        if slot.number is not None and lease == slot.lease:
            seconds = self._events.now - slot.start
            self._opening_seconds = moving_average(self._opening_seconds, seconds)

    def _report(self, slot: _Slot, lease: int) -> _Slot | None:
        if slot.number is None or lease != slot.lease:
            return None
        unit, value = self._trials.report(slot.number, slot.device.id, slot.start, self._events.now)
        self._end_slice(slot, slot.number, unit, value)
        return slot

    def _end_slice(self, slot: _Slot, number: int, unit: int, value: float) -> None:
        now = self._events.now
        self._slices.append(Slice(slot.start, now, slot.index, number, unit, value, slot.switched))
        slot.number = None

    # -- hosts that share the study ------------------------------------------------------------

    def _changed(self, number: int) -> None:
        if self._shared is not None:
            self._shared.update(number)

    def _look(self, host: HostView) -> _Slot | None:
        """Have a host read what others have done, store what they want, and ask them for more."""
        shared = self._shared
        assert shared is not None
        if not (self._trials.live or self._source.unstarted.any):
            return None
        shared.look(host)
        later = self._events.now + shared.sharing.store_seconds
        for number in shared.to_store(host, self._idle()):
            self._events.add(later, partial(self._store, host.name, number), priority=-1)
        soon = self._events.now + 3 * shared.sharing.refresh_seconds
        own = {device.id for device in host.devices}
        free = [
            slot.device
            for slot in self._slots
            if slot.device.id in own and (slot.number is None or slot.end <= soon)
        ]
        shared.ask(host, free, self._would_do)
        again = self._events.now + shared.sharing.refresh_seconds
        self._events.add(again, partial(self._look, host), priority=-1)
        return next(slot for slot in self._slots if slot.device.host == host.name)

    def _idle(self) -> Counter[str]:
        """How many devices of each host have nothing to train."""
        return Counter(slot.device.host for slot in self._slots if slot.number is None)

    def _would_do(
        self, host: HostView, free: Sequence[Device], trials: Sequence[TrialView]
    ) -> Decision:
        """The decision of a host's policy about these trials if these devices were free."""
        devices = tuple(replace(device, free=device in free) for device in host.devices)
        snapshot = self._snapshot(self._slots[0], tuple(trials), host.memory)
        return host.policy.decide(replace(snapshot, devices=devices))

    def _store(self, host: str, number: int) -> None:
        """Give up a trial that still waits on the host which was asked for it."""
        assert self._shared is not None
        if self._trials.state_of(number) == "parked" and self._shared.is_of(host, number):
            self._trials.store(number)
            self._shared.free(number)

    def _fail(self, slot: _Slot, seconds: float) -> _Slot:
        now = self._events.now
        if slot.number is not None:
            self._trials.stop(slot.number, slot.device.id, slot.start, now)
            self._end_slice(slot, slot.number, 0, math.nan)
        self._trials.lose(slot.device.id)
        slot.last = None
        # Counted, since failures of one device may overlap.
        self._count_failures(slot, 1)
        self._events.add(now + seconds, partial(self._recover, slot), priority=slot.index)
        return slot

    def _recover(self, slot: _Slot) -> _Slot:
        self._count_failures(slot, -1)
        return slot

    def _count_failures(self, slot: _Slot, change: int) -> None:
        slot.failures += change
        slot.device = replace(slot.device, healthy=slot.failures == 0)
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
