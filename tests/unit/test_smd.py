"""The knapsack of ``smd``: feasible, of the highest value, and within devices and memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.cluster.knapsack import Item, Knapsack
from optuna_hermes.cluster.smd import utility
from optuna_hermes.model import (
    Curve,
    Device,
    Elastic,
    Resources,
    Snapshot,
    Speed,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import Smd

GB = 1 << 30


def trial(number: int, left: int, units: int = 2, **fields: object) -> TrialView:
    """A parked trial of one-second units."""
    steps = tuple(range(1, units + 1))
    curve = Curve(
        steps=steps, values=(0.5,) * units, device_seconds=tuple(float(step) for step in steps)
    )
    view = TrialView(
        number=number,
        state="parked" if units else "pending",
        curve=curve,
        attained_seconds=float(units),
        units_left=left,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def stored(number: int, left: int, gigabytes: float) -> TrialView:
    """A trial on disk whose state would take so much host memory."""
    needs = Resources(host_bytes=int(gigabytes * GB))
    return trial(number, left, state="stored", tier="disk", needs=needs)


def cluster(n_devices: int) -> tuple[Device, ...]:
    return tuple(Device(id=f"cpu:{index}", free=True) for index in range(n_devices))


def chosen(snapshot: Snapshot) -> dict[int | None, int]:
    """Count the devices of each trial."""
    return {each.trial: len(each.devices) for each in Smd().decide(snapshot).assignments}


# The knapsack

items = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=3
)


def made(trials: list[list[tuple[float, int, int]]]) -> list[Item]:
    return [
        Item(trial=trial, devices=w, batch_size=None, value=value, weights=(float(w), m * 1e9))
        for trial, ways in enumerate(trials)
        for value, w, m in ways
    ]


def fits(found: list[Item], room: tuple[float, float]) -> bool:
    used = [sum(item.weights[place] for item in found) for place in (0, 1)]
    once = len({item.trial for item in found}) == len(found)
    return once and all(use <= there for use, there in zip(used, room, strict=True))


@settings(max_examples=60, deadline=None)
@given(trials=st.lists(items, min_size=1, max_size=4), memory=st.integers(0, 9))
def test_nothing_that_fits_is_worth_more(
    trials: list[list[tuple[float, int, int]]], memory: int
) -> None:
    """The exact knapsack finds what going through everything finds; the greedy one fits too."""
    all_items, room = made(trials), (6.0, memory * 1e9)
    ways = [
        [None, *(item for item in all_items if item.trial == index)] for index in range(len(trials))
    ]
    best = 0.0
    for picked in product(*ways):
        found = [item for item in picked if item is not None]
        if fits(found, room):
            best = max(best, sum(item.value for item in found))
    knapsack = Knapsack(all_items, room)
    exact, greedy = knapsack.exact(), knapsack.greedy()
    assert fits(exact, room)
    assert fits(greedy, room)
    assert sum(item.value for item in exact) == pytest.approx(best, abs=1e-5)
    assert sum(item.value for item in greedy) <= best + 1e-9


def test_a_choice_among_like_trials_ends() -> None:
    """To prove that one is the best takes HiGHS minutes here, so it is the best of some nodes."""
    rng, all_items, room = np.random.default_rng(0), [], (64.0, 256e9, 100e9)
    for index in range(30):
        on_device, on_host = rng.uniform(2e9, 12e9, 2).tolist()
        all_items += [
            Item(
                trial=index,
                devices=w,
                batch_size=None,
                value=10.0 + (w * on_device + on_host) / 1e9,
                weights=(float(w), w * on_device, on_host),
            )
            for w in range(1, 17)
        ]
    knapsack = Knapsack(all_items, room)
    exact, greedy = knapsack.exact(), knapsack.greedy()
    assert all(sum(item.weights[place] for item in exact) <= room[place] for place in range(3))
    assert sum(item.value for item in exact) >= sum(item.value for item in greedy)


def test_the_greedy_one_puts_a_trial_in_another_way_if_that_adds_most() -> None:
    """A trial that took one device is given three when nobody else has a use for them."""
    found = Knapsack(made([[(0.5, 1, 0), (0.9, 3, 0)], [(0.05, 1, 0)]]), (4.0, 1.0)).greedy()
    assert [(item.trial, item.devices) for item in found] == [(0, 3), (1, 1)]


def test_what_is_worth_nothing_fills_what_is_left() -> None:
    """Runs without a value come in, in their order, as long as everything fits."""
    knapsack = Knapsack(
        made([[(0.0, 2, 1)], [(0.5, 1, 1)], [(0.0, 2, 9)], [(0.0, 1, 0)]]), (4.0, 5e9)
    )
    assert [item.trial for item in knapsack.filled(knapsack.exact())] == [1, 0, 3]


# The policy


def test_utility_is_a_half_at_the_target() -> None:
    """It falls from nearly 1 towards 0, and infinite times are no error."""
    assert utility(10.0, 10.0) == 0.5
    assert utility(0.0, 10.0) > 0.98
    assert utility(math.inf, 10.0) < 1e-300
    assert utility(1.0, 0.0) < 1e-300


def test_who_can_still_be_in_time_goes_first() -> None:
    """A trial that is far too late anyway leaves the device to one that is not."""
    late = trial(0, 20, submitted=0.0)
    timely = trial(1, 20, submitted=980.0)
    assert chosen(Snapshot(now=1000.0, devices=cluster(1), trials=(late, timely))) == {1: 1}
    assert chosen(Snapshot(now=1000.0, devices=cluster(2), trials=(late, timely))) == {0: 1, 1: 1}


def test_who_loses_nothing_by_waiting_waits() -> None:
    """One that comes just now, and can wait for the other, is worth nothing yet."""

    def one(number: int, seconds: float, submitted: float) -> TrialView:
        measured = Curve(steps=(1,), values=(0.5,), device_seconds=(seconds,))
        return TrialView(
            number=number, state="parked", submitted=submitted, units_left=1, curve=measured
        )

    trials = (one(0, 1.0, 0.0), one(1, 10.0, 5.2))
    assert chosen(Snapshot(now=5.2, devices=cluster(1), trials=trials)) == {0: 1}


def test_devices_are_enumerated() -> None:
    """A trial gets the number of devices on which it is worth most, not as many as there are."""

    def speed(devices: int) -> Speed:
        seconds = 4.0 / devices + 0.25 * (devices - 1)
        return Speed(devices=devices, batch_size=64, step_seconds=seconds)

    elastic = Elastic(
        batch_size=64,
        batch_sizes=(64, 64),
        devices=(1, 16),
        unit_samples=640.0,
        speeds=(speed(1), speed(4), speed(8)),
    )
    decision = Smd().decide(Snapshot(devices=cluster(16), trials=(trial(0, 9, elastic=elastic),)))
    assert [len(each.devices) for each in decision.assignments] == [4]


def test_more_trials_than_are_solved_exactly_are_packed_greedily() -> None:
    """A queue of a hundred gets all devices, and those with least left are first."""
    trials = tuple(trial(number, 100 - number) for number in range(100))
    assert set(chosen(Snapshot(devices=cluster(4), trials=trials))) == {96, 97, 98, 99}


def test_a_trial_for_whose_state_there_is_no_memory_waits() -> None:
    """A device stays empty rather than that more host memory is promised than there is."""
    room = Resources(host_bytes=5 * GB)
    trials = (stored(0, 3, 4), stored(1, 4, 4), stored(2, 5, 1))
    assert chosen(Snapshot(devices=cluster(3), trials=trials, room=room)) == {0: 1, 2: 1}
    assert set(chosen(Snapshot(devices=cluster(3), trials=trials))) == {0, 1, 2}


def test_who_waits_in_memory_takes_no_more_of_it() -> None:
    """A trial that was promised its memory keeps it, on a device and off it."""
    needs = Resources(host_bytes=4 * GB)
    held = trial(0, 3, tier="host", needs=needs)
    snapshot = Snapshot(
        devices=cluster(2), trials=(held, stored(1, 2, 4)), room=Resources(host_bytes=5 * GB)
    )
    assert chosen(snapshot) == {0: 1}


def test_who_has_its_memory_trains_where_it_is_short() -> None:
    """More is promised than there is: nobody else comes in, and who was promised some goes on."""
    needs = Resources(host_bytes=GB)
    held = trial(1, 2, tier="host", needs=needs)
    snapshot = Snapshot(
        devices=cluster(2), trials=(stored(0, 1, 1), held), room=Resources(host_bytes=0)
    )
    assert chosen(snapshot) == {1: 1}


def test_one_trial_trains_however_much_it_takes() -> None:
    """If nobody could train otherwise, one does; while somebody trains it waits."""
    room = Resources(host_bytes=GB)
    trials = (stored(0, 3, 4), stored(1, 4, 4))
    assert chosen(Snapshot(devices=cluster(2), trials=trials, room=room)) == {0: 1}
    busy = TrialView(number=9, state="running", device="cpu:9")
    assert chosen(Snapshot(devices=cluster(2), trials=(*trials, busy), room=room)) == {}


def test_a_new_trial_is_expected_to_take_what_others_take() -> None:
    """No trial is created where the known ones leave no room for another of their size."""
    known = stored(0, 9, 3)
    for gigabytes, new in ((5, 0), (6, 1), (9, 2)):
        snapshot = Snapshot(
            devices=cluster(3),
            trials=(known,),
            unstarted=Unstarted(count=5, fixed=True),
            room=Resources(host_bytes=gigabytes * GB),
        )
        given = Smd().decide(snapshot).assignments
        assert sum(each.trial is None for each in given) == new + (
            known.number not in {a.trial for a in given}
        )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["disk", "host"])), max_size=8),
    memory=st.integers(0, 12),
    n_devices=st.integers(1, 4),
)
def test_no_more_is_promised_than_there_is(
    sizes: list[tuple[int, str]], memory: int, n_devices: int
) -> None:
    """Trials on devices, and those promised memory, fit, but for one that trains alone."""
    trials = tuple(
        trial(
            number,
            number + 1,
            state="stored" if tier == "disk" else "parked",
            tier=tier,
            needs=Resources(host_bytes=size * GB),
        )
        for number, (size, tier) in enumerate(sizes)
    )
    room = Resources(host_bytes=memory * GB)
    given = chosen(Snapshot(devices=cluster(n_devices), trials=trials, room=room))
    promised = [s for n, (s, tier) in enumerate(sizes) if tier == "host" or n in given]
    kept = sum(size for size, tier in sizes if tier == "host")
    alone = len(given) == 1
    assert sum(promised) <= max(memory, kept) or alone
