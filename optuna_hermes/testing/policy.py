"""Contract tests for policies."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optuna_hermes.model import (
    WAITING_STATES,
    Assignment,
    Budget,
    Curve,
    Device,
    Elastic,
    Snapshot,
    Speed,
    TrialStatus,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import Policy
from optuna_hermes.policies.decisions import check, plain
from optuna_hermes.simulator import FixedList, Recording, TrialSimulator

# A contract is inherited: Hypothesis would refuse one test that several classes run.
_inherited = settings(
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    deadline=None,
    max_examples=60,
)

_values = st.one_of(
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(-2, 2).map(float),
)
_lists = st.integers(0, 6).flatmap(
    lambda units: st.one_of(
        st.lists(_values, min_size=units, max_size=units),
        _values.map(lambda value: [value] * units),
    )
)


def _curve(values: Sequence[float]) -> Curve:
    steps = tuple(range(1, len(values) + 1))
    seconds = tuple(float(step) for step in steps)
    return Curve(steps=steps, values=tuple(values), device_seconds=seconds)


curves = _lists.map(_curve)
"""Curves of any values, constant ones and NaN, infinite and equal values among them."""

# Built once, since building a strategy takes longer than drawing from it.
_flags = st.booleans()
_small = st.integers(0, 5)
_ids = st.lists(st.sampled_from(["cpu:0", "cpu:1", "cpu:2"]), min_size=1, max_size=2, unique=True)
_waiting_states: st.SearchStrategy[TrialStatus] = st.sampled_from(["pending", "parked", "stored"])
_wanted = st.sampled_from([1, 1, 1, 2])
_finished = st.lists(curves, max_size=2)
_speeds = st.sampled_from([0.0, 1e-9, 0.02, 3.0, math.inf, math.nan]).map(
    lambda seconds: Speed(devices=1, batch_size=8, step_seconds=seconds)
)
_stretches: st.SearchStrategy[Elastic] = st.builds(
    Elastic,
    batch_size=st.just(8),
    batch_sizes=st.sampled_from([(1, 8), (8, 8), (2, 4096)]),
    devices=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 3)]),
    device_batch_size=st.sampled_from([None, 1, 8, 64]),
    noise_scale=st.sampled_from([None, 0.0, 100.0, math.nan, math.inf]),
    speeds=st.lists(_speeds, max_size=1).map(tuple),
)
_counts = st.none() | _small
_bounds = st.sampled_from([None, None, 0.0, 0.5, 3.0, 9.0, 1e9, math.inf])
_budgets = st.builds(Budget, seconds=_bounds, device_seconds=_bounds)
_openings = st.sampled_from([0.0, 0.0, 1e-9, 0.5, 30.0])
_units_left = st.none() | st.integers(1, 9)
_params: st.SearchStrategy[Mapping[str, Any]] = st.sampled_from(
    [{}, {"lr": 0.1}, {"lr": 1e-5, "layers": 3, "act": "relu", "nesterov": True, "clip": None}]
)
_trainings = st.lists(
    st.lists(_values, min_size=1, max_size=5).map(
        lambda values: Recording(values=tuple(values), seconds=(1.0,) * len(values))
    ),
    min_size=1,
    max_size=5,
)
LONG = 600
"""Number of units within which every trial must have its turn, twice."""

ENDLESS = 4 * LONG
"""Number of units of a training that does not come near its end: there others may wait longer."""

_endless = st.lists(
    st.lists(_values, min_size=1, max_size=3).map(
        lambda values: Recording(values=(*values * ENDLESS,)[:ENDLESS], seconds=(1.0,) * ENDLESS)
    ),
    min_size=2,
    max_size=4,
)

MANY = 10_000
"""Number of trials of the largest study that a policy must support."""

MOST_DECISION_SECONDS = 5.0
"""Time limit of a decision over ``MANY`` trials, far above the usual, since machines differ."""


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Snapshots that a broker could hand to a policy."""
    devices = [_device(draw, index) for index in range(draw(_small))]
    busy = [device.id for device in devices if device.powered and not device.free]
    trials = [_run(draw, number, busy) for number in range(draw(_small))]
    finished = [
        TrialView(number=100 + index, state="done" if index else "failed", curve=curve)
        for index, curve in enumerate(draw(_finished))
    ]
    count = draw(_counts)
    fixed = draw(_flags) and count is not None
    listed = range(count or 0) if fixed and draw(_flags) else ()
    return Snapshot(
        now=1000.0,
        seed=draw(_small),
        devices=tuple(devices),
        trials=tuple(trials),
        finished=tuple(finished),
        unstarted=Unstarted(
            count=count,
            fixed=fixed,
            listed=tuple(
                TrialView(number=50 + index, state="pending", params={"lr": 0.1 * draw(_small)})
                for index in listed
            ),
        ),
        left=draw(_budgets),
        opening_seconds=draw(_openings),
    )


def _device(draw: st.DrawFn, index: int) -> Device:
    powered = draw(_small) > 0
    return Device(
        id=f"cpu:{index}",
        free=powered and draw(_flags),
        healthy=draw(_small) > 0,
        powered=powered,
    )


def _run(draw: st.DrawFn, number: int, busy: list[str]) -> TrialView:
    """A trial on one of the ``busy`` devices, which is removed from the list, or one that waits."""
    if not (draw(_flags) and busy):
        return _waiting(draw, number)
    curve = draw(curves)
    return TrialView(
        number=number,
        state="running",
        curve=curve,
        attained_seconds=float(curve.units),
        device=busy.pop(),
        units_left=draw(_units_left),
        params=draw(_params),
    )


def _waiting(draw: st.DrawFn, number: int) -> TrialView:
    state, since, wanted = draw(_waiting_states), float(draw(_small)), draw(_wanted)
    elastic = draw(_stretches) if draw(_flags) else None
    if elastic is not None:
        wanted = min(max(wanted, elastic.devices[0]), elastic.devices[1])
    if state == "pending":
        return TrialView(
            number=number, state=state, submitted=since, devices_wanted=wanted, elastic=elastic
        )
    ids, curve = draw(_ids), draw(curves)
    return TrialView(
        number=number,
        state=state,
        curve=curve,
        attained_seconds=float(curve.units),
        waiting_since=since,
        tier="disk" if state == "stored" else "host",
        device=ids[0] if state == "parked" else None,
        devices=tuple(ids) if state == "parked" and len(ids) == wanted > 1 else (),
        bound_to=tuple(ids) if wanted == 1 and draw(_flags) else (),
        devices_wanted=wanted,
        units_left=draw(_units_left),
        params=draw(_params),
        elastic=elastic,
    )


_snapshots = snapshots()


def _on_any_snapshot(test: Callable[..., None]) -> Callable[..., None]:
    return _inherited(given(snapshot=_snapshots)(test))


class PolicyContract:
    """The contract of every policy: subclass it in your tests and set ``policy``.

    Example:
        >>> from optuna_hermes.policies import Fifo
        >>> class TestFifo(PolicyContract):
        ...     policy = Fifo()

    Args:
        policy: the policy under test; one object serves all tests, for policies have no state.
        work_conserving: whether a device stays empty only if nothing fits on it; False for
            policies that hold devices back on purpose.
        prunes: whether it may prune; only rivals in the simulator may, the broker refuses it.
        starves_none: whether every trial gets devices again and again, however bad it is, also
            among trials that do not end.
    """

    policy: Policy
    work_conserving: bool = True
    prunes: bool = False
    starves_none: bool = False

    @_on_any_snapshot
    def test_a_decision_keeps_the_contract(self, snapshot: Snapshot) -> None:
        """The broker would accept the decision.

        Besides, no broken or excluded device is given out, no device of a trial is powered down,
        and not more trials are created than may be.
        """
        decision = plain(self.policy.decide(snapshot))
        check(decision, snapshot)
        bounds: dict[int | None, tuple[str, ...]] = {
            trial.number: trial.bound_to for trial in snapshot.trials if trial.bound_to
        }
        for each in decision.assignments:
            assert _free(snapshot).issuperset(each.devices)
            assert set(bounds.get(each.trial, each.devices)).issuperset(each.devices)
        count = snapshot.unstarted.count
        assert count is None or _count_new(snapshot, decision.assignments) <= count
        down = set(decision.powered_down)
        assert len(down) == len(decision.powered_down)
        assert down.isdisjoint(id_ for trial in snapshot.trials for id_ in trial.current_devices)

    @_on_any_snapshot
    def test_the_same_snapshot_gives_the_same_decision(self, snapshot: Snapshot) -> None:
        """A decision depends on nothing but its snapshot."""
        first = self.policy.decide(snapshot)
        assert self.policy.decide(snapshot) == first
        self.policy.decide(Snapshot(devices=(Device(id="other", free=True),)))
        assert self.policy.decide(snapshot) == first

    @_inherited
    @given(snapshot=_snapshots, data=st.data())
    def test_the_order_of_a_snapshot_means_nothing(
        self, snapshot: Snapshot, data: st.DataObject
    ) -> None:
        """Runs and devices in another order get the same decision."""
        shuffled = replace(
            snapshot,
            devices=tuple(data.draw(st.permutations(snapshot.devices))),
            trials=tuple(data.draw(st.permutations(snapshot.trials))),
            finished=tuple(data.draw(st.permutations(snapshot.finished))),
        )
        assert self.policy.decide(shuffled) == self.policy.decide(snapshot)

    @_on_any_snapshot
    def test_memory_survives_json(self, snapshot: Snapshot) -> None:
        """Memory that went through JSON leads to the same next decision."""
        memory = self.policy.decide(snapshot).memory
        restored = json.loads(json.dumps(memory))
        assert restored == memory
        before, after = (replace(snapshot, memory=each) for each in (memory, restored))
        assert self.policy.decide(after) == self.policy.decide(before)

    @_on_any_snapshot
    def test_only_suspended_trials_are_pruned(self, snapshot: Snapshot) -> None:
        """A live policy prunes nothing; a rival prunes no trial twice, and none that it assigns."""
        decision = self.policy.decide(snapshot)
        pruned = set(decision.pruned)
        assert len(pruned) == len(decision.pruned) * self.prunes
        assert pruned.isdisjoint(each.trial for each in decision.assignments)
        assert {trial.number for trial in _candidates(snapshot)}.issuperset(pruned)

    @_on_any_snapshot
    def test_no_device_stays_empty_that_could_be_used(self, snapshot: Snapshot) -> None:
        """A free device stays empty only if no waiting trial and no new trial fits on it."""
        assigned = self._assigned(snapshot)
        empty = _free(snapshot) - {id_ for each in assigned for id_ in each.devices}
        if not self.work_conserving or not empty:
            return
        served = {each.trial for each in assigned}
        for trial in _candidates(snapshot):
            usable = empty.intersection(trial.bound_to or empty)
            assert trial.number in served or len(usable) < trial.devices_wanted
        assert _count_new(snapshot, assigned) == snapshot.unstarted.count

    @_inherited
    @given(curve=curves)
    def test_one_trial_gets_the_one_device(self, curve: Curve) -> None:
        """A single trial gets the device, with any curve."""
        trial = TrialView(number=7, state="parked", curve=curve, waiting_since=0.0)
        snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=(trial,))
        assert not self.work_conserving or [a.trial for a in self._assigned(snapshot)] == [7]

    def test_without_devices_nothing_is_assigned(self) -> None:
        """A host without devices gets an empty decision."""
        trials = (TrialView(number=0, state="pending"),)
        assert self._assigned(Snapshot(trials=trials, unstarted=Unstarted(count=None))) == ()

    def test_without_runs_nothing_is_assigned(self) -> None:
        """A device stays empty where nothing waits and nothing may be created."""
        assert self._assigned(Snapshot(devices=(Device(id="cpu:0", free=True),))) == ()

    def test_the_first_trial_is_opened(self) -> None:
        """An empty study on an empty device begins, with a bound on its trials or without."""
        for count in (1, None):
            snapshot = Snapshot(
                devices=(Device(id="cpu:0", free=True),), unstarted=Unstarted(count=count)
            )
            assigned = [each.trial for each in self._assigned(snapshot)]
            assert assigned == [None] or not (self.work_conserving or assigned)

    @_inherited
    @given(trainings=_trainings, n_devices=st.integers(1, 3))
    def test_every_trial_ends(self, trainings: Sequence[Recording], n_devices: int) -> None:
        """In a simulation every trial is trained to its end, or pruned, with any values."""
        simulator = TrialSimulator(self.policy, FixedList(trainings), n_devices=n_devices)
        # Long enough for all of them; without a time the simulator itself would refuse some left.
        trace = simulator.run(until=LONG)
        over = {*trace.finished, *trace.pruned}
        assert not self.work_conserving or over == set(range(len(trainings)))

    @settings(_inherited, max_examples=8)
    @given(trainings=_endless)
    def test_no_trial_starves(self, trainings: Sequence[Recording]) -> None:
        """Late in a simulation every trial still gets slices, for policies that promise it."""
        if not self.starves_none:
            return
        trace = TrialSimulator(self.policy, FixedList(trainings)).run(until=LONG)
        late = {each.number for each in trace.slices if each.start >= LONG / 2}
        assert late == set(range(len(trainings)))

    def test_ten_thousand_trials_are_decided_in_time(self) -> None:
        """A decision over a very large study, on one device or several, keeps the time limit."""
        for free in (1, 3):
            began = time.process_time()
            decision = self.policy.decide(_large(free))
            assert time.process_time() - began < MOST_DECISION_SECONDS
            given_out = {id_ for each in decision.assignments for id_ in each.devices}
            assert not self.work_conserving or len(given_out) == free

    def _assigned(self, snapshot: Snapshot) -> tuple[Assignment, ...]:
        return tuple(self.policy.decide(snapshot).assignments)  # a list will do, too


@cache
def _large(free: int) -> Snapshot:
    """Runs of different ages that fall to different levels, some of them alike, some diverged."""
    trials = tuple(
        TrialView(
            number=number,
            state="stored" if number % 3 else "parked",
            curve=_curve([1 / unit + number % 977 for unit in range(1, 2 + number % 20)]),
            attained_seconds=2.0 + number % 20,
            waiting_since=float(number % 31),
        )
        for number in range(MANY - 1)
    )
    diverged = TrialView(number=MANY - 1, state="parked", curve=_curve([1.0, math.nan]))
    devices = tuple(Device(id=f"cpu:{index}", free=index < free) for index in range(4))
    return Snapshot(now=1000.0, devices=devices, trials=(*trials, diverged))


def _candidates(snapshot: Snapshot) -> list[TrialView]:
    return [trial for trial in snapshot.trials if trial.state in WAITING_STATES]


def _count_new(snapshot: Snapshot, assigned: Sequence[Assignment]) -> int:
    new = {None, *(trial.number for trial in snapshot.unstarted.listed)}
    return sum(each.trial in new for each in assigned)


def _free(snapshot: Snapshot) -> set[str]:
    return {device.id for device in snapshot.devices if device.free and device.healthy}
