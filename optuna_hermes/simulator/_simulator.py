"""Simulation of devices that replay recorded trials under a policy. No clock, no randomness."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Budget, Device, Snapshot, TrialView, moving_average
from optuna_hermes.policies import Policy
from optuna_hermes.policies.decisions import check, named, plain
from optuna_hermes.simulator._trials import OpenedTrials
from optuna_hermes.simulator._values import Overheads, Slice, SwitchCosts, Trace
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

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = Device(id=f"cpu:{index}", host="host-0")
        self.free = replace(self.device, free=True)
        self.number: int | None = None
        self.last: int | None = None
        self.start = 0.0
        self.switched = False


class TrialSimulator:
    """Replays trainings on some devices of one host under a policy, one unit a slice.

    The policy gets the same snapshots as in a broker.

    Args:
        policy: the policy that assigns devices.
        source: the trials.
        n_devices: number of devices.
        costs: costs of a device that changes to another trial; by default none.
        overheads: device time that goes to openings, decisions and the start; by default none.
        seed: for policies that draw random numbers.
        timeout: when the simulation ends, which the policy is told; None for no such time.

    Raises:
        InvalidInputError: there is no device.

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
        costs: SwitchCosts | None = None,
        overheads: Overheads | None = None,
        seed: int = 0,
        timeout: float | None = None,
    ) -> None:
        if n_devices < 1:
            raise InvalidInputError(f"There must be a device at least but got {n_devices}.")
        self._policy = policy
        self._source = source
        self._costs = costs or SwitchCosts()
        self._overheads = overheads or Overheads()
        self._opening_seconds = 0.0
        self._trials = OpenedTrials(source, self._costs)
        self._seed = seed
        self._timeout = timeout
        self._slots = [_Slot(index) for index in range(n_devices)]
        self._devices = [slot.device for slot in self._slots]
        self._events = EventQueue[Callable[[], _Slot | None]]()
        self._events.add(self._overheads.startup_seconds, lambda: self._slots[0], priority=-1)
        self._memory: Any = None
        self._slices: list[Slice] = []
        self._decisions = 0

    def run(self, until: float = math.inf) -> Trace:
        """Replay until nothing is left to do, or until a time; another call goes on from there.

        Raises:
            InvalidInputError: the policy raised, a decision breaks the contract of policies, or
                trials are left for ever.
        """
        until = min(until, math.inf if self._timeout is None else self._timeout)
        while self._events and self._events.next_time <= until:
            # One event at a time, as in a broker, which hears of one device after the other: the
            # policy decides about the device of an event first, then about those that are idle.
            touched = self._events.pop()()
            if touched is not None:
                self._decide(touched)
                for slot in self._slots:
                    if slot is not touched:
                        self._decide(slot)
        if until == math.inf and self._trials_left:
            waiting = [view.number for view in self._trials.live]
            raise InvalidInputError(
                f"A policy must serve every trial in the end but {type(self._policy).__name__} "
                + (f"leaves trial {waiting[0]} waiting." if waiting else "opens no other.")
            )
        return Trace(
            slices=tuple(self._slices),
            finished=dict(self._trials.ends["done"]),
            pruned=dict(self._trials.ends["pruned"]),
            recordings=dict(self._trials.recordings),
            decisions=self._decisions,
        )

    def _decide(self, slot: _Slot) -> None:
        """Ask the policy about one device, if it is idle and a trial could use it."""
        while slot.number is None:
            if not self._trials_left:
                return
            snapshot = self._snapshot(slot)
            with named(self._policy):
                decision = plain(self._policy.decide(snapshot))
                check(decision, snapshot)
            self._memory = decision.memory
            self._decisions += 1
            for number in decision.pruned:
                self._trials.prune(number, self._events.now)
            if not decision.assignments:
                return
            stopped = slot.last
            self._start(slot, self._trials.take(decision.assignments[0].trial, self._events.now))
            if stopped is not None and stopped != slot.number:
                self._trials.leave(stopped, slot.device.id)

    @property
    def _trials_left(self) -> bool:
        """True if a trial waits, or can be opened."""
        return self._trials.n_waiting > 0 or self._source.unstarted.any

    def _snapshot(self, slot: _Slot) -> Snapshot:
        # Only the device in question is free.
        devices = [*self._devices]
        devices[slot.index] = slot.free
        left = Budget()
        if self._timeout is not None:
            left = Budget(seconds=max(0.0, self._timeout - self._events.now))
        return Snapshot(
            now=self._events.now,
            seed=self._seed,
            devices=tuple(devices),
            trials=self._trials.live,
            finished=self._trials.over,
            unstarted=self._source.unstarted,
            left=left,
            opening_seconds=self._opening_seconds,
            memory=self._memory,
        )

    def _start(self, slot: _Slot, view: TrialView) -> None:
        unit_seconds = self._trials.recordings[view.number].seconds[view.curve.units]
        is_new = not view.curve.units
        cost = 0.0
        slot.switched = view.device != slot.device.id or slot.last != view.number
        if slot.switched:
            cost = self._costs.of(unit_seconds, is_new=is_new)
        if is_new:
            cost += self._overheads.opening(unit_seconds)
        seconds = unit_seconds + cost
        if slot.last is not None:
            seconds += self._overheads.decision_seconds
        slot.number = slot.last = view.number
        slot.start = self._events.now
        self._trials.start(view, slot.device.id)
        if is_new:
            self._events.add(slot.start + cost, partial(self._train, slot))
        event = partial(self._report, slot, view.number)
        self._events.add(slot.start + seconds, event, priority=slot.index)

    def _train(self, slot: _Slot) -> None:
        # As a broker measures it.
        seconds = self._events.now - slot.start
        self._opening_seconds = moving_average(self._opening_seconds, seconds)

    def _report(self, slot: _Slot, number: int) -> _Slot:
        now = self._events.now
        unit, value = self._trials.report(number, slot.device.id, slot.start, now)
        self._slices.append(Slice(slot.start, now, slot.index, number, unit, value, slot.switched))
        slot.number = None
        return slot
