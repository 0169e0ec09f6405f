"""The simulator on examples that can be followed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

import pytest

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Assignment, Budget, Decision, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import Policy, make_policy
from optuna_hermes.policies.decisions import check
from optuna_hermes.simulator import (
    FixedList,
    Overheads,
    Recording,
    SwitchCosts,
    Trace,
    TrialSimulator,
)
from optuna_hermes.simulator._simulator import EventQueue

Line = tuple[float, float, int, int, int]
"""Start, end, device, trial, unit."""


Choice = int | Decision | Literal["idle"] | None
"""A trial, None for a new one, or a whole decision."""


class Rule(Policy):
    """Does what a function says, and keeps what it saw."""

    def __init__(self, choose: Callable[[Snapshot], Choice]) -> None:
        self.choose = choose
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen.append(snapshot)
        chosen = self.choose(snapshot)
        if isinstance(chosen, Decision):
            return chosen
        return Decision() if chosen == "idle" else give(chosen, free(snapshot))


def free(snapshot: Snapshot) -> str:
    (device,) = (device.id for device in snapshot.devices if device.free)
    return device


def waiting(snapshot: Snapshot) -> list[TrialView]:
    return [trial for trial in snapshot.trials if trial.state != "running"]


def give(trial: int | None, device: str, **more: float) -> Decision:
    return Decision(assignments=(Assignment(trial=trial, devices=(device,), **more),))


def timetable(choices: Mapping[tuple[float, int], Choice]) -> Rule:
    """Make a rule that chooses by time and device; a device without an entry stays idle."""
    return Rule(
        lambda snapshot: choices.get((snapshot.now, int(free(snapshot).split(":")[1])), "idle")
    )


def trial(*values: float, seconds: float | Sequence[float] = 1.0) -> Recording:
    times = [seconds] * len(values) if isinstance(seconds, float) else seconds
    return Recording(values=values, seconds=tuple(times))


def lines(trace: Trace) -> list[Line]:
    return [(each.start, each.end, each.device, each.number, each.unit) for each in trace.slices]


def view(snapshot: Snapshot, number: int) -> TrialView:
    (found,) = (trial for trial in snapshot.trials if trial.number == number)
    return found


class TestEventQueue:
    """The clock and the heap."""

    def test_orders_by_time_then_priority_then_plan(self) -> None:
        """Events at one time happen by priority, and those of one priority as they were planned."""
        queue = EventQueue[str]()
        for time, priority, event in [(2, 0, "f"), (1, 1, "d"), (1, 0, "b"), (1, 0, "c")]:
            queue.add(time, event, priority=priority)
        queue.add(0.5, "a", priority=9)
        queue.add(1, "e", priority=1)
        assert [queue.pop() for _ in range(6)] == list("abcdef")
        assert queue.now == 2

    def test_never_compares_events(self) -> None:
        """Events need no order of their own."""
        queue = EventQueue[object]()
        first, second = object(), object()
        queue.add(1.0, first)
        queue.add(1.0, second)
        assert (queue.pop(), queue.pop()) == (first, second)

    @pytest.mark.parametrize("time", [0.9, math.nan])
    def test_refuses_the_past(self, time: float) -> None:
        """Nothing can be planned before now, and not at no time either."""
        queue = EventQueue[str]()
        queue.add(1.0, "now")
        queue.pop()
        with pytest.raises(ValueError, match=r"must be at 1.0 or later"):
            queue.add(time, "then")

    def test_next_time_of_none_is_infinite(self) -> None:
        """An empty queue has nothing before any time."""
        assert EventQueue[str]().next_time == math.inf


class TestOneDevice:
    """Traces of one device."""

    def test_fifo(self) -> None:
        """A device pays half a unit for each trial it changes to, the first one too."""
        costs = SwitchCosts(fraction=0.5)
        trace = TrialSimulator(
            make_policy("fifo"), FixedList([trial(0.9, 0.8), trial(0.7)]), costs=costs
        ).run()
        assert [tuple(each) for each in trace.slices] == [
            (0.0, 1.5, 0, 0, 1, 0.9, True),
            (1.5, 2.5, 0, 0, 2, 0.8, False),
            (2.5, 4.0, 0, 1, 1, 0.7, True),
        ]
        assert trace.finished == {0: 2.5, 1: 4.0}
        assert trace.decisions == 3

    def test_round_robin(self) -> None:
        """Each slice of another trial is a switch; the last trial alone pays no more."""
        source = FixedList([trial(9, 8, 7), trial(6, 5)])
        trace = TrialSimulator(
            make_policy("round-robin"), source, costs=SwitchCosts(fraction=0.5)
        ).run()
        assert lines(trace) == [
            (0.0, 1.5, 0, 0, 1),
            (1.5, 3.0, 0, 1, 1),
            (3.0, 4.5, 0, 0, 2),
            (4.5, 6.0, 0, 1, 2),
            (6.0, 7.5, 0, 0, 3),
        ]
        assert all(each.switched for each in trace.slices)

    def test_hermes_opens_a_fixed_list_first(self) -> None:
        """Every trial of a list has its first unit before the best one goes on."""
        trace = TrialSimulator(make_policy("hermes"), FixedList([trial(5, 5), trial(1, 1)])).run()
        assert [each.number for each in trace.slices] == [0, 1, 1, 0]

    def test_the_switch_is_a_fraction_of_the_unit_that_comes(self) -> None:
        """Units of different lengths pay in proportion to their own."""
        source = FixedList([trial(3, 2, seconds=(4.0, 8.0))])
        trace = TrialSimulator(make_policy("fifo"), source, costs=SwitchCosts(fraction=0.25)).run()
        assert lines(trace) == [(0.0, 5.0, 0, 0, 1), (5.0, 13.0, 0, 0, 2)]

    def test_nothing_to_do(self) -> None:
        """Without a trial the policy is not even asked."""
        trace = TrialSimulator(make_policy("fifo"), FixedList([])).run()
        assert (trace.slices, trace.finished, trace.decisions) == ((), {}, 0)

    def test_a_policy_that_wants_nobody(self) -> None:
        """Nothing will ever happen where all devices stay idle: an error, unless it is to end."""
        simulator = TrialSimulator(timetable({(0, 0): None}), FixedList([trial(2, 1)]))
        trace = simulator.run(until=9.0)
        assert lines(trace) == [(0.0, 1.0, 0, 0, 1)]
        assert trace.finished == {}
        with pytest.raises(InvalidInputError, match=r"every trial .* but Rule leaves trial 0"):
            simulator.run()
        policy = timetable({(0, 0): None, (1, 0): 0})
        with pytest.raises(InvalidInputError, match=r"every trial .* but Rule opens no other"):
            TrialSimulator(policy, FixedList([trial(2, 1)] * 2)).run()
        policy = timetable({(0, 0): None})
        assert TrialSimulator(policy, FixedList([trial(2)] * 2), timeout=9.0).run().finished


class TestTwoDevices:
    """Traces of two devices."""

    def test_fifo(self) -> None:
        """The third trial goes to the device that is free first."""
        source = FixedList([trial(3, 3, 3), trial(2, 2), trial(1, seconds=2.0)])
        assert lines(TrialSimulator(make_policy("fifo"), source, n_devices=2).run()) == [
            (0.0, 1.0, 0, 0, 1),
            (0.0, 1.0, 1, 1, 1),
            (1.0, 2.0, 0, 0, 2),
            (1.0, 2.0, 1, 1, 2),
            (2.0, 3.0, 0, 0, 3),
            (2.0, 4.0, 1, 2, 1),
        ]

    def test_ties_go_by_device_not_by_what_was_planned_first(self) -> None:
        """Two units end at once: device 0 is served first, though 1 began its unit before."""
        source = FixedList([trial(3, 3), trial(2, seconds=2.0), trial(1), trial(0)])
        trace = TrialSimulator(make_policy("fifo"), source, n_devices=2).run()
        assert lines(trace)[-2:] == [(2.0, 3.0, 0, 2, 1), (2.0, 3.0, 1, 3, 1)]
        assert [each.device for each in trace.slices] == [0, 0, 1, 0, 1]

    def test_a_device_is_decided_before_the_next_is_looked_at(self) -> None:
        """Two units end at once: the decision on device 0 does not know of the report on 1."""
        policy = Rule(lambda s: waiting(s)[0].number if waiting(s) else None)
        source = FixedList([trial(5, 5), trial(1, 1)])
        TrialSimulator(policy, source, n_devices=2).run()
        at_one = [snapshot for snapshot in policy.seen if snapshot.now == 1.0]
        assert [free(snapshot) for snapshot in at_one] == ["cpu:0", "cpu:1"]
        assert [view(snapshot, 1).state for snapshot in at_one] == ["running", "parked"]
        assert [view(snapshot, 1).curve.values for snapshot in at_one] == [(), (1,)]
        assert [view(snapshot, 0).state for snapshot in at_one] == ["parked", "running"]

    def test_idle_devices_are_asked_again_after_every_event(self) -> None:
        """A device that was left idle gets the trial it can take up when another one reports."""
        policy = timetable({(0, 0): None, (1, 1): 0, (2, 0): 0})
        trace = TrialSimulator(policy, FixedList([trial(3, 2, 1)]), n_devices=2).run()
        assert lines(trace) == [(0.0, 1.0, 0, 0, 1), (1.0, 2.0, 1, 0, 2), (2.0, 3.0, 0, 0, 3)]
        asked = [(snapshot.now, free(snapshot)) for snapshot in policy.seen]
        assert asked == [(0, "cpu:0"), (1, "cpu:0"), (1, "cpu:1"), (2, "cpu:1"), (2, "cpu:0")]


class TestIdle:
    """Cost of a trial that its device waited for."""

    costs = SwitchCosts(fraction=0.5)

    def test_going_on_after_a_pause_is_no_switch(self) -> None:
        """A device that stood idle has not changed run when it goes on with the one it had."""
        policy = timetable({(0, 0): None, (0, 1): None, (1.5, 1): 1, (2.5, 0): 0, (2.5, 1): 1})
        source = FixedList([trial(2, 1), trial(4, 3, 2)])
        trace = TrialSimulator(policy, source, n_devices=2, costs=self.costs).run()
        assert lines(trace) == [
            (0.0, 1.5, 0, 0, 1),
            (0.0, 1.5, 1, 1, 1),
            (1.5, 2.5, 1, 1, 2),
            (2.5, 3.5, 0, 0, 2),
            (2.5, 3.5, 1, 1, 3),
        ]

    def test_coming_back_is_a_switch(self) -> None:
        """A device has changed run if its last one trained elsewhere while it stood idle."""
        policy = timetable({(0, 0): None, (0, 1): None, (1.5, 1): 0, (3, 0): 0})
        source = FixedList([trial(2, 1, 0), trial(4, 3)])
        trace = TrialSimulator(policy, source, n_devices=2, costs=self.costs).run(until=9.0)
        assert lines(trace) == [
            (0.0, 1.5, 0, 0, 1),
            (0.0, 1.5, 1, 1, 1),
            (1.5, 3.0, 1, 0, 2),
            (3.0, 4.5, 0, 0, 3),
        ]

    def test_its_former_device_has_no_say(self) -> None:
        """A trial that is on one device goes on there for nothing, whatever its former one does."""
        policy = timetable({(0, 0): None, (1.5, 1): 0, (3, 0): None, (4.5, 1): 0})
        source = FixedList([trial(3, 2, 1), trial(5, 4)])
        trace = TrialSimulator(policy, source, n_devices=2, costs=self.costs).run(until=9.0)
        assert lines(trace)[-2:] == [(3.0, 4.5, 0, 1, 1), (4.5, 5.5, 1, 0, 3)]
        (at_the_end,) = (s for s in policy.seen if (s.now, free(s)) == (4.5, "cpu:1"))
        assert view(at_the_end, 0).switch_cost_seconds == 0.0


class TestSnapshot:
    """Snapshots that policies see."""

    def test_a_trial_over_its_life(self) -> None:
        """Opened trials are running or parked, with their reports, device time and units left."""
        policy = timetable({(0, 0): None, (1.5, 0): None, (3, 0): 0, (4.5, 0): 1})
        recordings = [trial(8, 7), Recording(values=(6.0,), seconds=(1.0,), params={"lr": 0.1})]
        TrialSimulator(policy, FixedList(recordings), costs=SwitchCosts(fraction=0.5), seed=7).run()
        first, second, third = policy.seen
        assert first.trials == ()
        assert first.unstarted == Unstarted(count=2, fixed=True)
        assert (first.seed, second.now) == (7, 1.5)
        parked = view(second, 0)
        assert (parked.state, parked.device, parked.tier) == ("parked", "cpu:0", "resident")
        assert (parked.waiting_since, parked.switch_cost_seconds) == (1.5, 0.0)
        assert (parked.curve.steps, parked.curve.values) == ((1,), (8,))
        assert (parked.curve.device_seconds, parked.attained_seconds) == ((1.5,), 1.5)
        assert (parked.units_left, parked.submitted) == (1, 0.0)
        assert third.unstarted.count == 0
        assert view(third, 0).switch_cost_seconds == 0.5
        assert [run.number for run in third.finished] == [1]
        (over,) = third.finished
        assert (over.state, over.params, over.submitted) == ("done", {"lr": 0.1}, 1.5)
        assert (over.units_left, over.device, over.tier) == (0, None, None)

    def test_memory_comes_back(self) -> None:
        """Memory that a policy left in its decision is in its next snapshot; the first has None."""
        policy = Rule(
            lambda s: replace(give(None, free(s)), memory=[*(s.memory or []), len(s.trials)])
        )
        TrialSimulator(policy, FixedList([trial(2), trial(1), trial(0)])).run()
        assert [snapshot.memory for snapshot in policy.seen] == [None, [0], [0, 0]]


class TestPruning:
    """Trials that never go on."""

    def test_a_pruned_trial_is_over(self) -> None:
        """It leaves the live trials for the finished ones without an end; its source is told."""

        class Listening(FixedList):
            def __init__(self, recordings: Sequence[Recording]) -> None:
                super().__init__(recordings)
                self.heard: list[tuple[float, ...]] = []

            def reported(self, number: int, unit: int, value: float) -> None:
                self.heard.append((number, unit, value))

            def ended(self, number: int, *, pruned: bool) -> None:
                self.heard.append((number, pruned))

        drop = replace(give(None, "cpu:0"), pruned=(0,))
        policy = timetable({(0, 0): None, (1, 0): drop, (2, 0): 1})
        source = Listening([trial(9, 8), trial(5, 4)])
        trace = TrialSimulator(policy, source).run()
        assert lines(trace) == [(0.0, 1.0, 0, 0, 1), (1.0, 2.0, 0, 1, 1), (2.0, 3.0, 0, 1, 2)]
        assert (trace.pruned, trace.finished) == ({0: 1.0}, {1: 3.0})
        assert [(run.number, run.state) for run in policy.seen[2].finished] == [(0, "pruned")]
        assert [run.number for run in policy.seen[2].trials] == [1]
        assert source.heard == [(0, 1, 9), (0, True), (1, 1, 5), (1, 2, 4), (1, False)]

    def test_pruning_alone_leaves_the_device_idle(self) -> None:
        """A policy that prunes the last trial and opens none is done."""
        policy = timetable({(0, 0): None, (1, 0): Decision(pruned=(0,))})
        trace = TrialSimulator(policy, FixedList([trial(9, 8)])).run()
        assert (len(trace.slices), trace.pruned) == (1, {0: 1.0})


class TestSwitchSeconds:
    """Seconds to resume a trial, whatever its units take."""

    costs = SwitchCosts(fraction=0.5, seconds=0.25)

    def test_coming_back_takes_seconds(self) -> None:
        """To its own device or to another one; a trial that goes on pays nothing."""
        policy = timetable({(0, 0): None, (1.5, 0): None, (3, 0): 0, (4.75, 0): 0, (4.75, 1): 1})
        source = FixedList([trial(3, 2, 1), trial(5, 4)])
        trace = TrialSimulator(policy, source, n_devices=2, costs=self.costs).run(until=9.0)
        assert lines(trace)[2:] == [
            (3.0, 4.75, 0, 0, 2),
            (4.75, 5.75, 0, 0, 3),
            (4.75, 6.5, 1, 1, 2),
        ]

    def test_policies_see_what_it_costs(self) -> None:
        """All that wait are on their devices; the one that trained last goes on for nothing."""
        policy = Rule(lambda s: None if s.unstarted.any else "idle")
        TrialSimulator(policy, FixedList([trial(2, 1)] * 3), costs=self.costs).run(until=9.0)
        shown = [(r.tier, r.state, r.switch_cost_seconds) for r in policy.seen[-1].trials]
        assert shown == [("resident", "parked", 0.75)] * 2 + [("resident", "parked", 0.0)]

    def test_a_new_trial_has_nothing_to_bring(self) -> None:
        """Only the fraction of its first unit is paid when a trial is opened."""
        trace = TrialSimulator(make_policy("fifo"), FixedList([trial(1)]), costs=self.costs).run()
        assert trace.finished == {0: 1.5}

    @pytest.mark.parametrize("name", ["fraction", "seconds"])
    @pytest.mark.parametrize("value", [-1, math.nan, math.inf])
    def test_costs_are_numbers(self, name: str, value: float) -> None:
        """A cost that is negative or infinite is refused by its name."""
        with pytest.raises(InvalidInputError, match=f"{name} must be finite and at least 0"):
            SwitchCosts(**{name: value})


class TestUntil:
    """A simulation that is stopped."""

    def test_a_unit_that_ends_later_is_not_reported(self) -> None:
        """A unit that ends at that time is in the trace, one that ends after it is not."""
        trace = TrialSimulator(make_policy("fifo"), FixedList([trial(3, 2, 1)])).run(until=2)
        assert lines(trace) == [(0.0, 1.0, 0, 0, 1), (1.0, 2.0, 0, 0, 2)]
        assert trace.finished == {}
        assert len(trace.recordings) == 1

    def test_it_can_go_on(self) -> None:
        """Stopped on the way and continued, it is what it would have been in one go."""
        recordings = [trial(5, 4), trial(1, 0.5), trial(3, 2)]

        def cluster() -> TrialSimulator:
            return TrialSimulator(make_policy("hermes"), FixedList(recordings), n_devices=2)

        stopped = cluster()
        first = stopped.run(until=1.5)
        assert stopped.run(until=3) != first
        assert stopped.run() == cluster().run()


class TestRefused:
    """Input that cannot be simulated."""

    @pytest.mark.parametrize("n_devices", [0, -1])
    def test_no_devices(self, n_devices: int) -> None:
        """There is a device at least."""
        with pytest.raises(InvalidInputError, match=f"a device at least but got {n_devices}"):
            TrialSimulator(make_policy("fifo"), FixedList([]), n_devices=n_devices)

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            (7, "waiting trials .* but got trial 7"),
            (0, "waiting trials .* but got trial 0"),
            (give(None, "cpu:0"), "free devices, each once at most, but got device cpu:0"),
            (give(None, "gpu:9"), "free devices, each once at most, but got device gpu:9"),
            (
                Decision(assignments=give(None, "cpu:1").assignments * 2),
                "free devices, each once at most, but got device cpu:1",
            ),
            (
                replace(give(None, "cpu:1"), powered_down=("cpu:0",)),
                "powers down idle devices but got cpu:0",
            ),
            (
                give(None, "cpu:1", batch_size=32),
                "batch sizes to elastic trials, .* but got 32 for a new trial",
            ),
            (give(None, "cpu:1", slice_seconds=math.nan), "a finite number of seconds but got nan"),
            (Decision(pruned=(0,)), "trials that wait but got trial 0"),
        ],
        ids=[
            "unknown",
            "running",
            "busy device",
            "unknown device",
            "twice",
            "powers down a busy one",
            "batch size",
            "slice",
            "prunes a running one",
        ],
    )
    def test_decisions_against_the_contract(self, choice: Choice, message: str) -> None:
        """A policy's wrong decision is an error that says what it was."""
        policy = timetable({(0, 0): None, (0, 1): choice})
        with pytest.raises(InvalidInputError, match=message):
            TrialSimulator(policy, FixedList([trial(2, 1)] * 3), n_devices=2).run()

    @pytest.mark.parametrize(("chosen", "n_looked_at"), [(None, 1), (2, 4), (99, 100)])
    def test_a_check_looks_no_farther_than_for_the_trial(
        self, chosen: int | None, n_looked_at: int
    ) -> None:
        """A replay of thousands of trials checks a decision for each unit of each of them."""
        looked_at = []

        class Trials(tuple[TrialView, ...]):
            def __iter__(self) -> Iterator[TrialView]:
                for each in super().__iter__():
                    looked_at.append(each.number)
                    yield each

        trials = Trials(TrialView(number=number, state="parked") for number in range(100))
        snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=trials)
        check(give(chosen, "cpu:0"), snapshot)
        assert len(looked_at) == n_looked_at

    @pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3)])
    def test_a_policy_that_raises(self, error: BaseException) -> None:
        """One line names it, the error and its place, and the error itself is the cause."""

        def fail(snapshot: Snapshot) -> Choice:
            raise error

        with pytest.raises(InvalidInputError) as caught:
            TrialSimulator(Rule(fail), FixedList([trial(2, 1)])).run()
        assert str(caught.value).startswith(f"Policy Rule raised {error!r} at {__file__}:")
        assert caught.value.__cause__ is error

    def test_lists_and_generators_are_taken_as_by_a_broker(self) -> None:
        """What is no tuple becomes one."""

        def listed(snapshot: Snapshot) -> Decision:
            given = (Assignment(trial=None, devices=[free(snapshot)]) for _ in "1")  # type: ignore[arg-type]
            return Decision(assignments=given)  # type: ignore[arg-type]

        assert TrialSimulator(Rule(listed), FixedList([trial(2)])).run().finished == {0: 1.0}

    def test_opening_more_than_there_are(self) -> None:
        """A policy cannot open a trial when none is left."""
        policy = timetable({(0, 0): None, (1, 0): None})
        with pytest.raises(InvalidInputError, match="only while one is left"):
            TrialSimulator(policy, FixedList([trial(2, 1)])).run()


# -- overheads and budgets -----------------------------------------------------------------------


def test_openings_decisions_and_the_start_take_device_time() -> None:
    """A trial's first unit has its opening, every later slice of a device a decision."""
    work = [Recording(values=(2.0, 1.0), seconds=(1.0, 1.0)) for _ in range(2)]
    overheads = Overheads(
        opening_seconds=0.25, opening_fraction=0.25, decision_seconds=0.125, startup_seconds=4.0
    )
    trace = TrialSimulator(make_policy("fifo"), FixedList(work), overheads=overheads).run()
    assert [(each.start, each.end) for each in trace.slices] == [
        (4.0, 5.5),
        (5.5, 6.625),
        (6.625, 8.25),
        (8.25, 9.375),
    ]


def test_a_policy_is_shown_the_expected_opening_and_the_time_that_is_left() -> None:
    """Nothing is known of an opening before the first; at the time-out the simulation ends."""
    policy = Rule(lambda snapshot: None if snapshot.unstarted.any else "idle")
    work = [Recording(values=(1.0,), seconds=(seconds,)) for seconds in (1.0, 3.0, 1.0)]
    simulator = TrialSimulator(
        policy, FixedList(work), overheads=Overheads(opening_fraction=1.0), timeout=8.5
    )
    trace = simulator.run()
    assert [each.opening_seconds for each in policy.seen] == pytest.approx([0.0, 1.0, 1.6])
    assert [each.left for each in policy.seen] == [Budget(seconds=s) for s in (8.5, 6.5, 0.5)]
    assert trace.finished == {0: 2.0, 1: 8.0}
    assert simulator.run(until=20.0) == trace


@pytest.mark.parametrize("name", [field.name for field in fields(Overheads)])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_impossible_overheads_are_refused(name: str, value: float) -> None:
    """An overhead is a finite time of at least 0."""
    with pytest.raises(InvalidInputError, match=f"{name} must be finite"):
        Overheads(**{name: value})
