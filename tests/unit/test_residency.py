"""Eviction from a device's memory: its order, and the time-out of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.broker._core import _residency
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import fits
from optuna_hermes.broker._core._residency import clear
from optuna_hermes.broker._core._trial_order import MOST_ASKED, wanted_first
from optuna_hermes.model import (
    Assignment,
    Curve,
    Decision,
    Device,
    Snapshot,
    TierName,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import POLICIES, Policy, make_policy


def resident(number: int, takes_bytes: int | None = 10, **fields: Any) -> LiveTrial:
    """A trial that can go anywhere, unless told otherwise; in host memory it takes that there."""
    known = {"tier": "resident", "can_offload": True, "can_store": True} | fields
    there = "host_bytes" if known["tier"] == "host" else "held_bytes"
    known |= {there: takes_bytes, "trial_id": number, "state": "parked", "submitted": 0.0}
    return LiveTrial(study="s", number=number, **known)


def make_room(
    short: float, trials: Sequence[LiveTrial], room: int
) -> dict[tuple[str, int], TierName]:
    """Moves where no process takes anything beside its trial."""
    return _residency.make_room(short, trials, room, lambda _: None)


def gone(moves: dict[tuple[str, int], str]) -> dict[int, str]:
    return {number: tier for (_, number), tier in moves.items()}


# -- what fits


@pytest.mark.parametrize(
    ("free", "missing", "answer"),
    [(12, 10, True), (11, 10, False), (0, 0, True), (None, 10, None), (12, None, None)],
)
def test_a_trial_fits_with_a_margin(free: int | None, missing: int | None, answer: Any) -> None:
    """A fifth more must be free than is needed, and what is unknown is neither yes nor no."""
    assert fits(free, missing) is answer


# -- who makes room


def test_nobody_goes_while_the_next_one_fits() -> None:
    """Without a shortage everybody stays."""
    assert make_room(0, [resident(1), resident(2)], 100) == {}


def test_the_one_wanted_last_goes_first_and_no_more_than_needed() -> None:
    """Runs go from the front until enough is free."""
    moves = make_room(11, [resident(1), resident(2), resident(3)], 100)
    assert gone(moves) == {1: "host", 2: "host"}


def test_host_memory_is_promised_once() -> None:
    """A trial does not get what another got of the budget; it goes to disk."""
    assert gone(make_room(20, [resident(1), resident(2)], 15)) == {1: "host", 2: "disk"}


def test_a_trial_that_cannot_go_is_passed_over() -> None:
    """Neither moved nor stored: it stays, and the next one goes in its place."""
    stuck = resident(1, can_offload=False, can_store=False)
    assert gone(make_room(5, [stuck, resident(2)], 100)) == {2: "host"}


def test_a_trial_of_unknown_size_gets_no_host_memory() -> None:
    """Nothing can be promised to it: it goes to disk, and does not count as freed memory."""
    assert gone(make_room(5, [resident(1, None), resident(2)], 100)) == {1: "disk", 2: "host"}


def test_unknown_need_sends_everybody_away() -> None:
    """An infinite shortage is never met."""
    moves = make_room(math.inf, [resident(1), resident(2, can_offload=False), resident(3)], 100)
    assert gone(moves) == {1: "host", 2: "disk", 3: "host"}


def test_who_is_wanted_later_leaves_host_memory_for_who_is_wanted_sooner() -> None:
    """With the budget spent the later trial goes on to disk first; the sooner one follows later."""
    waits = resident(1, 10, tier="host")
    assert gone(make_room(5, [waits, resident(2)], 0)) == {1: "disk"}


def test_who_is_wanted_sooner_keeps_its_host_memory() -> None:
    """The trial that has to leave its device is the later one: it goes to disk itself."""
    waits = resident(1, 10, tier="host")
    assert gone(make_room(5, [resident(2), waits], 0)) == {2: "disk"}


@pytest.mark.parametrize(
    "waits", [resident(1, 3, tier="host"), resident(1, tier="host", can_store=False)]
)
def test_nobody_leaves_host_memory_in_vain(waits: LiveTrial) -> None:
    """If its room would not suffice, or it cannot be stored, it stays."""
    assert gone(make_room(5, [waits, resident(2)], 0)) == {2: "disk"}


def test_a_trial_gets_its_device_to_itself() -> None:
    """Everybody goes to disk, host memory included; who cannot be stored is moved at least."""
    residents = [
        resident(1),
        resident(2, tier="host"),
        resident(3, can_store=False),
        resident(4, can_store=False),
        resident(5, tier="host", can_store=False),
    ]
    assert gone(clear(residents, 10)) == {1: "disk", 2: "disk", 3: "host"}


residents = st.lists(
    st.builds(
        resident,
        st.integers(0, 1000),
        st.none() | st.integers(0, 20),
        can_offload=st.booleans(),
        can_store=st.booleans(),
    )
    | st.builds(
        resident,
        st.integers(0, 1000),
        st.integers(0, 20),
        tier=st.just("host"),
        can_offload=st.booleans(),
        can_store=st.booleans(),
    ),
    unique_by=lambda each: each.key,
    max_size=8,
)


@given(residents, st.integers(0, 60) | st.just(math.inf), st.integers(0, 40))
def test_no_move_that_cannot_be(residents: list[LiveTrial], short: float, room: int) -> None:
    """Only who can goes there, the budget is never exceeded, and nobody goes without need."""
    for moves in (make_room(short, residents, room), clear(residents, room)):
        by_trial = {each.key: each for each in residents}
        promised = [by_trial[trial].takes_bytes for trial, tier in moves.items() if tier == "host"]
        assert None not in promised
        assert sum(promised) <= room  # type: ignore[arg-type]
        for trial, tier in moves.items():
            goer = by_trial[trial]
            assert (
                goer.can_store if tier == "disk" else goer.can_offload and goer.tier == "resident"
            )
    if short <= 0:
        assert not make_room(short, residents, room)


# -- whom a policy will want first


def parked(number: int, *values: float, since: float = 0.0) -> TrialView:
    units = tuple(range(1, len(values) + 1))
    curve = Curve(steps=units, values=values, device_seconds=units)
    return TrialView(
        number=number,
        state="parked",
        curve=curve,
        waiting_since=since,
        device=f"GPU-{number}",
        bound_to=(f"GPU-{number}",),
    )


def snapshot(*trials: TrialView, **fields: Any) -> Snapshot:
    devices = (Device(id="GPU-0"), Device(id="GPU-1"))
    return Snapshot(now=100.0, devices=devices, trials=trials, memory={"kept": 1}, **fields)


def test_round_robin_wants_first_who_has_waited_longest() -> None:
    """The order is the policy's own, whatever devices the trials are bound to."""
    trials = [parked(n, 0.5, since=since) for n, since in enumerate([3.0, 1.0, 2.0])]
    decide = make_policy("round-robin").decide
    assert wanted_first(decide, snapshot(*trials), {0, 1, 2}) == [1, 2, 0]


def test_hermes_wants_first_who_ranks_best() -> None:
    """The best of three curves comes first, and a trial that is not asked about is left out."""
    trials = [parked(0, 0.9), parked(1, 0.1), parked(2, 0.5), parked(3, 0.05)]
    assert wanted_first(make_policy("hermes").decide, snapshot(*trials), {0, 1, 2}) == [1, 2, 0]


def test_a_trial_that_still_trains_competes_as_if_it_had_stopped_now() -> None:
    """The leaving trial has waited for no time at all."""
    running = TrialView(number=0, state="running", device="GPU-0")
    decide = make_policy("round-robin").decide
    assert wanted_first(decide, snapshot(running, parked(1, 0.5, since=99.0)), {0, 1}) == [1, 0]


def test_who_ran_last_is_wanted_first_where_the_policy_does_not_say() -> None:
    """A policy that assigns nothing leaves the order of their last slices."""
    trials = [parked(n, 0.5, since=since) for n, since in enumerate([3.0, 1.0, 2.0])]
    assert wanted_first(lambda _: Decision(), snapshot(*trials), {0, 1, 2}) == [0, 2, 1]


def test_a_policy_is_not_asked_about_more_trials_than_it_can_bear() -> None:
    """Beyond a bound those that have not run for longest are wanted last, unasked.

    It is shown none but the host's devices: one that looked up another by its id ended its study.
    """
    asked = []

    def decide(snapshot: Snapshot) -> Decision:
        asked.append(sorted(trial.number for trial in snapshot.trials if trial.state == "parked"))
        assert snapshot.memory == {"kept": 1}
        assert snapshot.unstarted == Unstarted(count=0, fixed=True)
        assert [each.id for each in snapshot.devices] == ["GPU-0", "GPU-1"]
        (device,) = (each for each in snapshot.devices if each.free)
        return Decision(assignments=(Assignment(trial=asked[-1][0], devices=(device.id,)),))

    trials = [parked(n, since=float(n)) for n in range(MOST_ASKED + 2)]
    known = snapshot(*trials, unstarted=Unstarted(count=3, fixed=True))
    order = wanted_first(decide, known, set(range(MOST_ASKED + 2)))
    assert asked[0] == list(range(2, MOST_ASKED + 2))
    assert len(asked) == MOST_ASKED - 1
    assert order == [*range(2, MOST_ASKED + 2), 1, 0]


def test_no_trial_is_on_the_device_that_a_policy_is_asked_about() -> None:
    """It is shown as free: a policy may take the devices of running trials for busy."""
    running = TrialView(number=0, state="running", device="GPU-0")
    wide = TrialView(number=1, state="running", device="GPU-0", devices=("GPU-0", "GPU-1"))

    def decide(snapshot: Snapshot) -> Decision:
        trials = snapshot.trials
        busy = {id_ for each in trials if each.state == "running" for id_ in each.current_devices}
        assert busy == {each.id for each in snapshot.devices if not each.free} == {"GPU-1"}
        least = min(trial.number for trial in trials if trial.state == "parked")
        return Decision(assignments=(Assignment(trial=least, devices=("GPU-0",)),))

    asked = [parked(n, since=float(n)) for n in (2, 3, 4)]
    assert wanted_first(decide, snapshot(running, wide, *asked), {2, 3, 4}) == [2, 3, 4]


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    numbers=st.sets(st.integers(0, 30), max_size=20), values=st.lists(st.floats(0, 1), min_size=31)
)
def test_every_trial_has_its_place(name: str, numbers: set[int], values: list[float]) -> None:
    """Each trial that is asked about appears once, whatever the policy."""
    policy: Policy = make_policy(name)
    trials = [parked(n, values[n], since=values[n]) for n in range(31)]
    order = wanted_first(policy.decide, snapshot(*trials), numbers)
    assert sorted(order) == sorted(numbers)
