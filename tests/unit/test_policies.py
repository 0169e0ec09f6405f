"""Small snapshots with exact decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.model import (
    Budget,
    Curve,
    Device,
    Snapshot,
    TrialStatus,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import (
    POLICIES,
    Fifo,
    Hermes,
    Policy,
    RoundRobin,
    _deadline,
    base,
    make_policy,
)
from optuna_hermes.policies._trial_table import TrialTable, seconds_to_end
from optuna_hermes.simulator import FixedList, Recording, TrialSimulator
from optuna_hermes.testing.policy import snapshots


def curve(values: Sequence[float]) -> Curve:
    steps = tuple(range(1, len(values) + 1))
    return Curve(steps=steps, values=tuple(values), device_seconds=tuple(map(float, steps)))


def parked(number: int, *values: float, since: float = 0.0) -> TrialView:
    return TrialView(number=number, state="parked", curve=curve(values), waiting_since=since)


def pending(number: int, submitted: float = 0.0) -> TrialView:
    return TrialView(number=number, state="pending", submitted=submitted)


def decide(
    policy: Policy,
    *trials: TrialView,
    devices: int = 1,
    unstarted: int | None = 0,
    fixed: bool = False,
    finished: tuple[TrialView, ...] = (),
) -> list[int | None]:
    """Return the trials that get the devices, best first."""
    snapshot = Snapshot(
        devices=tuple(Device(id=f"cpu:{index}", free=True) for index in range(devices)),
        trials=trials,
        finished=finished,
        unstarted=Unstarted(count=unstarted, fixed=fixed),
    )
    return [assignment.trial for assignment in policy.decide(snapshot).assignments]


def replay(
    policy: Policy,
    curves: Mapping[int, Sequence[float]],
    *,
    slices: int,
    ages: Mapping[int, int] | None = None,
) -> list[int]:
    """Return the trial of each slice of one device, one unit a slice, all trials being known."""
    age = dict.fromkeys(curves, 0) | dict(ages or {})
    since = dict.fromkeys(curves, 0.0)
    trace: list[int] = []
    for now in range(1, slices + 1):
        views = [
            parked(n, *values[: age[n]], since=since[n]) if age[n] else pending(n)
            for n, values in curves.items()
        ]
        live = [view for view in views if age[view.number] < len(curves[view.number])]
        over = tuple(view for view in views if view not in live)
        chosen = decide(policy, *live, fixed=True, finished=over)
        if not chosen:
            break
        (number,) = chosen
        assert number is not None
        age[number] += 1
        since[number] = float(now)
        trace.append(number)
    return trace


# FIFO


def test_fifo_runs_each_trial_to_its_end() -> None:
    """The next trial begins when the one before it is over."""
    trace = replay(Fifo(), {0: [3, 2, 1], 1: [9, 9], 2: [0]}, slices=9)
    assert trace == [0, 0, 0, 1, 1, 2]


def test_fifo_prefers_started_then_admitted_then_new() -> None:
    """A started trial keeps going before an admitted one, and that before a new trial."""
    trials = (pending(1, submitted=5.0), pending(2, submitted=4.0), parked(3, 1.0))
    assert decide(Fifo(), *trials, devices=4, unstarted=9) == [3, 2, 1, None]


# Round-robin


def test_round_robin_goes_round() -> None:
    """Every trial is opened, then each gets a slice in turn until it is over."""
    trace = replay(RoundRobin(), {0: [1] * 3, 1: [1] * 2, 2: [1] * 3}, slices=9)
    assert trace == [0, 1, 2, 0, 1, 2, 0, 2]


def test_round_robin_goes_round_on_devices_whose_slices_end_at_once() -> None:
    """Of trials that have waited equally long, the one that has had least is next."""
    recordings = [Recording(values=(1.0,) * 4, seconds=(1.0,) * 4) for _ in range(3)]
    trace = TrialSimulator(RoundRobin(), FixedList(recordings), n_devices=2).run()
    slices: dict[float, set[int]] = {}
    for each in trace.slices:
        slices.setdefault(each.start, set()).add(each.number)
    assert list(slices.values()) == [{0, 1}, {0, 2}, {1, 2}] * 2


def test_round_robin_opens_before_anybody_goes_on() -> None:
    """Trials that are not opened yet have waited longest, created or not."""
    trials = (parked(0, 1.0, since=1.0), pending(1))
    assert decide(RoundRobin(), *trials, devices=3, unstarted=1) == [1, None, 0]


def test_round_robin_without_a_bound_on_trials_goes_on_with_trials() -> None:
    """Trials without end are opened only on devices that no trial waits for."""
    trials = (parked(0, 1.0, since=2.0), parked(1, 1.0, since=1.0))
    assert decide(RoundRobin(), *trials, devices=3, unstarted=None) == [1, 0, None]


# Hermes


def test_harmonic_rank_by_hand() -> None:
    """The order is that of ``(place * lead) ** 0.75 * units``, worked out by hand."""
    trials = (
        # Age 3, behind 4 now and then; falls to 0.25, and 4 is at 0.1: (2 * 2), 2.83 * 3 = 8.49
        parked(0, 0.9, 0.5, 0.4),
        # Age 2, behind 0 and 4 now and then; falls to 0.4, 4 is lower: (3 * 2), 3.83 * 2 = 7.67
        parked(1, 0.8, 0.6),
        # Age 1, behind 0, 1 and 4 now, and only behind 4 then: (4 * 2), 4.76 * 1 = 4.76
        parked(2, 0.7),
        # Age 1, behind all others now and then: (5 * 5), 11.2 * 1 = 11.2
        parked(3, 1.0),
    )
    over = TrialView(number=4, state="done", curve=curve([0.6, 0.3, 0.2, 0.1]))
    assert decide(Hermes(), *trials, devices=4, finished=(over,)) == [2, 1, 0, 3]


def test_a_trial_that_will_overtake_goes_before_one_that_has_settled() -> None:
    """Of two that were behind as many, the one goes first that will pass them if it goes on so."""
    steady = [0.40 - 0.0005 * unit for unit in range(40)]
    ahead = [parked(number, *steady) for number in (7, 8, 9)]
    settled, falling = parked(0, 0.60, 0.55), parked(1, 0.95, 0.58)
    assert decide(Hermes(), *ahead, settled, falling) == [1]
    assert decide(Hermes(), *ahead, settled, parked(1, 0.60, 0.58)) == [0]


def test_one_lucky_value_does_not_count_for_much() -> None:
    """The trial that is lower on the whole goes first where values are noisy."""
    noise = [0.1 * (-1) ** (unit + number) for number in range(8) for unit in range(24)]
    others = [
        parked(10 + number, *[1.0 + each for each in noise[24 * number : 24 * number + 24]])
        for number in range(8)
    ]
    lower = parked(0, *[0.8 + each for each in noise[:23]], 0.9)
    lucky = parked(1, *[1.0 + each for each in noise[:23]], 0.85)
    assert decide(Hermes(), *others, lower, lucky) == [0]


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 0), (1.0, 1)])
def test_where_ranks_say_nothing_trials_are_finished(noise: float, expected: int) -> None:
    """A trial that is nearly over goes before a better one that is younger."""
    rng = np.random.default_rng(0)
    fall = np.linspace(1.0, 0.0, 16)
    over = tuple(
        TrialView(number=20 + number, state="done", curve=curve(row))
        for number, row in enumerate((fall + noise * rng.standard_normal((24, 16))).tolist())
    )
    young = replace(parked(0, *fall[:8].tolist()), units_left=8)
    old = replace(parked(1, *(fall[:15] + 0.001).tolist()), units_left=1)
    assert decide(Hermes(), young, old, finished=over) == [expected]


def test_a_trial_that_got_worse_is_no_longer_in_the_way() -> None:
    """A trial that was lower once and is higher now does not count."""
    behind = parked(0, 0.6, 0.5)
    worse, better = parked(1, 0.5, 0.4, 0.9, 0.9), parked(1, 0.5, 0.4, 0.3, 0.3)
    # 2 < (2 * 1) ** 0.75 * 4 of trial 1, and (2 * 2) ** 0.75 * 2 = 5.66 > 4.
    assert decide(Hermes(), behind, worse) == [0]
    assert decide(Hermes(), behind, better) == [1]


def test_an_expensive_trial_waits_longer_but_not_as_much_longer() -> None:
    """With four times the seconds a unit a trial is treated as if it had twice the units."""

    def at(number: int, value: float, units: int, seconds: float) -> TrialView:
        steps = tuple(range(1, units + 1))
        used = tuple(seconds * step for step in steps)
        return TrialView(
            number=number,
            state="parked",
            curve=Curve(steps=steps, values=(value,) * units, device_seconds=used),
        )

    policy = Hermes(alpha=0.0)
    assert decide(policy, at(0, 0.5, 2, 4.0), at(1, 0.5, 3, 1.0)) == [1]
    assert decide(policy, at(0, 0.5, 2, 4.0), at(1, 0.5, 5, 1.0)) == [0]


def test_who_is_behind_late_in_its_life_waits_longer() -> None:
    """Rank counts for more, the more of a trial's life is over; unknown lives are young."""
    over = TrialView(number=9, state="done", curve=curve([0.1] * 8))
    half, young = parked(0, 0.5, 0.5, 0.5, 0.5), parked(1, 0.7, 0.7, 0.7)
    # (2 * 2) ** 0.75 * 4 = 11.3 of trial 0 is below (3 * 3) ** 0.75 * 3 = 15.6 of trial 1; with
    # half of its life over it is (2 * 2) ** (0.75 * 1.5) * 4 * 0.5 ** 0.25 = 16.0.
    assert decide(Hermes(), half, young, finished=(over,)) == [0]
    assert decide(Hermes(), replace(half, units_left=4), young, finished=(over,)) == [1]


def test_what_is_about_to_end_is_brought_to_its_end() -> None:
    """Of equal rank, 8 units of 10 are treated as if they were 8 * 0.2 ** 0.25 = 5.35."""
    policy = Hermes(alpha=0.0)
    late, early = parked(0, *[0.5] * 8), parked(1, *[0.5] * 6)
    assert decide(policy, late, early) == [1]
    assert decide(policy, replace(late, units_left=2), early) == [0]
    assert decide(policy, replace(late, units_left=2), parked(1, *[0.5] * 5)) == [1]


def test_thousands_of_trials_are_ordered_as_if_all_were_compared() -> None:
    """Indices that are put off until they matter change no order."""
    rng = np.random.default_rng(0)
    units = rng.integers(1, 4, 600).tolist()
    trials = [
        replace(
            parked(number, *np.round(rng.random(count), 2).tolist()),
            units_left=None if number % 3 else number % 5,
        )
        for number, count in enumerate(units)
    ]

    def index(trial: TrialView) -> tuple[float, int]:
        age, own = trial.curve.units, trial.curve.values[-1]
        before = trial.curve.values[-1 - age // 2]
        goal = own - max(0.0, before - own) * (age / 2 / max(1, age // 2))
        lower = [r for r in trials if r.curve.units >= age and r.curve.values[age - 1] < own]
        lead = 1 + sum(r.curve.values[-1] < goal for r in lower)
        place = 1 + sum(r.curve.values[-1] < own for r in trials)
        over = 0.0 if trial.units_left is None else age / (age + trial.units_left)
        return float((place * lead) ** (0.75 * (1 + over)) * age * (1 - over) ** 0.25), trial.number

    expected = [trial.number for trial in sorted(trials, key=index)]
    assert decide(Hermes(), *trials, devices=40) == expected[:40]


def test_running_trials_count_in_ranks() -> None:
    """A trial that trials elsewhere still lets others rank behind it."""
    trials = (parked(0, 0.5, 0.5, 0.5), parked(1, 0.6))
    faster = TrialView(number=2, state="running", curve=curve([0.1]))
    assert decide(Hermes(), *trials) == [1]
    # Age 1 of trial 1: rank 3, 5.20 > 3, where without trial 2 it had rank 2, 2.83 < 3.
    assert decide(Hermes(), *trials, faster) == [0]


def test_equal_indices_go_to_the_earlier_trial() -> None:
    """Equal values have equal ranks, and the lower number goes first, at other ages as well."""
    assert decide(Hermes(), parked(4, 0.5), parked(3, 0.5), devices=2) == [3, 4]
    # Trial 0: rank 1 at age 2; trial 9: rank 2 at age 1, and 2 ** 1 * 1 == 1 ** 1 * 2.
    assert decide(Hermes(alpha=1.0), parked(9, 0.5), parked(0, 0.4, 0.4), devices=2) == [0, 9]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_ranks_last(value: float) -> None:
    """A NaN or infinite value ranks behind everything, even where nobody else is as old."""
    trials = (parked(0, 0.1, value), parked(1, 0.9), parked(2, 0.5), parked(3, 0.7))
    assert decide(Hermes(), *trials, devices=4) == [2, 3, 1, 0]


def test_every_trial_of_a_fixed_list_gets_its_first_unit() -> None:
    """All trials of a list are opened before the best of them goes on."""
    trace = replay(Hermes(), {0: [1] * 9, 1: [2] * 9, 2: [3] * 9}, slices=4)
    assert trace == [0, 1, 2, 0]


def test_a_trial_without_a_report_goes_first() -> None:
    """A first unit that was interrupted is finished before anything is ranked or opened."""
    trials = (parked(0, 0.1), parked(1), pending(2))
    assert decide(Hermes(), *trials, devices=4, unstarted=1, fixed=True) == [1, 2, None, 0]
    assert decide(Hermes(opening=0.0), *trials, devices=4, unstarted=1) == [1, 2, None, 0]


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        # One trial opened: index 1, the second is opened at 0.25 * 2 ** 1.5 = 0.71.
        ([parked(0, 0.5)], None),
        # Two opened: smallest index 1, the third is opened at 0.25 * 3 ** 1.5 = 1.30.
        ([parked(0, 0.5), parked(1, 0.6)], 0),
        # The leader has had two units: smallest index 2 >= 1.30.
        ([parked(0, 0.5, 0.4), parked(1, 0.6)], None),
        # Three opened: the fourth is opened at 0.25 * 4 ** 1.5 = 2, which is reached exactly.
        ([parked(0, 0.5, 0.4), parked(1, 0.6), parked(2, 0.6)], None),
    ],
)
def test_a_trial_is_opened_once_the_smallest_index_is_large_enough(
    trials: list[TrialView], expected: int | None
) -> None:
    """A sampler that learns is asked for trial m + 1 at the threshold, not before."""
    assert decide(Hermes(opening=0.25), *trials, unstarted=99) == [expected]


def test_admitted_trials_are_opened_before_new_ones_and_as_late() -> None:
    """An admitted trial that never ran counts as not opened."""
    trials = (parked(0, 0.5), parked(1, 0.6), pending(2))
    assert decide(Hermes(opening=0.25), *trials, unstarted=9) == [0]
    assert decide(Hermes(opening=0.25), parked(0, 0.5), pending(2), unstarted=9) == [2]


def test_a_dear_opening_is_put_off() -> None:
    """The bound grows with what a first unit takes with its opening, of units without."""
    trials = (parked(0, 0.5, 0.4), parked(1, 0.6))
    # The smallest index is 2, the bound 1.30 without openings. With two of 0.5 s in the 3 s of
    # three units a first unit takes 1.75 times as long as another.
    for seconds, expected in ((0.0, None), (0.3, None), (0.5, 0), (1.4, 0), (1.6, 0), (1e9, 0)):
        snapshot = Snapshot(
            devices=(Device(id="cpu:0", free=True),),
            trials=trials,
            unstarted=Unstarted(count=99),
            opening_seconds=seconds,
        )
        (chosen,) = Hermes(opening=0.25).decide(snapshot).assignments
        assert chosen.trial == expected


def test_finished_trials_count_as_opened() -> None:
    """The threshold grows with all trials that were ever opened."""
    over = tuple(TrialView(number=n, state="done", curve=curve([0.9])) for n in (1, 2, 3))
    assert decide(Hermes(opening=0.25), parked(0, 0.5), unstarted=9, finished=over) == [0]


def test_several_devices_are_decided_one_after_another() -> None:
    """Opening one trial puts off the next, in the same decision."""
    # After the first opening two are open, and the smallest index, 1, is below 1.30.
    assert decide(Hermes(opening=0.25), parked(0, 0.5), devices=2, unstarted=9) == [None, 0]
    assert decide(Hermes(opening=0.25), parked(0, 0.5), devices=3, unstarted=9) == [None, 0, None]


def test_an_idle_device_opens_a_trial_whatever_the_threshold() -> None:
    """A trial is opened where no trial waits."""
    busy = TrialView(number=0, state="running", curve=curve([0.5]))
    assert decide(Hermes(opening=1e9), busy, unstarted=None) == [None]


def test_a_winner_near_its_end_is_not_starved() -> None:
    """A leader whose curve is flat finishes after a bounded number of slices of others."""
    curves = {0: [0.1] * 30} | {n: [0.5 + n / 10] * 30 for n in range(1, 6)}
    trace = replay(Hermes(), curves, slices=60, ages={0: 28} | dict.fromkeys(range(1, 6), 1))
    # Trial of rank r overtakes while r ** 1.5 * units < 29: at most 29 / r ** 1.5 slices.
    bound = sum(29 / rank**1.5 for rank in range(2, 7)) + 2
    assert [index for index, number in enumerate(trace) if number == 0][1] < bound


@pytest.mark.parametrize(
    "arguments",
    [
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"alpha": 17.0},
        {"opening": -0.1},
        {"opening": math.inf},
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object]) -> None:
    """A setting out of its range is an error that names it and its value."""
    ((name, value),) = arguments.items()
    with pytest.raises(InvalidInputError, match=rf"{name} must be .* but got '?{value}"):
        Hermes(**arguments)  # type: ignore[arg-type]


# Places


def test_a_trial_stays_where_it_is() -> None:
    """Trials that are parked on a free device get that one, also against the order of ranks."""
    here = TrialView(number=0, state="parked", curve=curve([0.9]), device="cpu:0")
    there = TrialView(number=1, state="parked", curve=curve([0.1]), device="cpu:1")
    anywhere = TrialView(number=2, state="stored", curve=curve([0.05]))
    snapshot = Snapshot(
        devices=tuple(Device(id=f"cpu:{index}", free=True) for index in range(3)),
        trials=(here, there, anywhere),
    )
    places = {given.trial: given.devices for given in Hermes().decide(snapshot).assignments}
    assert places == {0: ("cpu:0",), 1: ("cpu:1",), 2: ("cpu:2",)}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(1, {"cpu:2"}), (2, {"cpu:2", "cpu:3"}), (3, {"cpu:0", "cpu:2", "cpu:3"})],
)
def test_a_trial_on_several_devices_keeps_them(wanted: int, expected: set[str]) -> None:
    """All that it has and wants, if they are free: it would move over disk for nothing."""
    several = TrialView(
        number=0,
        state="parked",
        device="cpu:2",
        devices=("cpu:2", "cpu:3"),
        devices_wanted=wanted,
    )
    snapshot = Snapshot(devices=tuple(Device(id=f"cpu:{index}", free=True) for index in range(4)))
    (given,) = base.place(snapshot, [several])
    assert set(given.devices) == expected


def test_a_trial_makes_room_for_one_that_is_bound() -> None:
    """A trial that fits anywhere leaves its device to one that fits nowhere else."""
    best = TrialView(number=0, state="parked", curve=curve([0.1]), device="cpu:1")
    bound = TrialView(number=1, state="parked", curve=curve([0.9]), bound_to=("cpu:1",))
    snapshot = Snapshot(
        devices=(Device(id="cpu:0", free=True), Device(id="cpu:1", free=True)), trials=(best, bound)
    )
    places = {given.trial: given.devices for given in Hermes().decide(snapshot).assignments}
    assert places == {0: ("cpu:0",), 1: ("cpu:1",)}


@pytest.mark.parametrize(
    ("free", "filled", "strict"),
    [("0", [1], []), ("1", [0], [0]), ("01", [0, 1], [0, 1]), ("02", [1], []), ("", [], [])],
)
def test_a_bound_trial_gets_no_other_device(
    free: str, filled: list[int], strict: list[int]
) -> None:
    """Without backfill its device is kept for it, and the trial behind it waits."""
    devices = tuple(Device(id=f"cpu:{index}", free=index in free) for index in "012")
    order = (TrialView(number=0, state="parked", bound_to=("cpu:1",)), parked(1, 0.5))
    for backfill, expected in ((True, filled), (False, strict)):
        given = base.place(Snapshot(devices=devices), order, backfill=backfill)
        assert [each.trial for each in given] == expected


def test_many_devices_are_given_out_with_one_search_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial more does not have those before it placed anew: that would be one each for each."""
    searched: list[int] = []

    def augment(index: int, *rest: Any) -> bool:
        searched.append(index)
        return found(index, *rest)

    found = base._augment
    monkeypatch.setattr(base, "_augment", augment)
    assert len(decide(Fifo(), *map(pending, range(99)), devices=64)) == 64
    assert len(searched) <= 2 * 64


def test_a_trial_that_fits_nowhere_is_passed_over() -> None:
    """The device goes to the next best trial that can use it."""
    bound = TrialView(number=0, state="parked", curve=curve([0.1]), bound_to=("cpu:5",))
    assert decide(Hermes(), bound, parked(1, 0.9)) == [1]


# Names


def test_policies_are_made_by_name() -> None:
    """Each name gives a policy of its class, and ``hermes`` comes first as the default."""
    assert next(iter(POLICIES)) == "hermes"
    assert all(type(make_policy(name)) is POLICIES[name] for name in POLICIES)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error is one line with the names there are and the one that was asked for."""
    with pytest.raises(UnknownPolicyError) as caught:
        make_policy("best")
    assert str(caught.value) == (
        f"A policy must be one of {', '.join(POLICIES)}, or FILE.py:CLASS or module:CLASS, "
        "or one of these after energy:, but got 'best'."
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [("round_robin", "round-robin"), ("ASHA", "asha"), ("energy:herms", "hermes")],
)
def test_a_misspelt_name_is_answered_by_the_near_one(name: str, near: str) -> None:
    """Beside the list, in which it is hard to find."""
    with pytest.raises(UnknownPolicyError, match=rf"did you mean '{near}'\?$"):
        make_policy(name)


# -- the end of a budget -------------------------------------------------------------------------


def ending(number: int, *values: float, left: int, state: TrialStatus = "parked") -> TrialView:
    return replace(parked(number, *values), units_left=left, state=state)


BEST = ending(0, 5.0, 4.0, 3.0, left=2)
YOUNG = ending(1, 1.0, left=50)
POOR = ending(2, 9.0, 8.9, 8.8, 8.7, left=1)


def last(budget: Budget, *trials: TrialView, **fields: Any) -> int:
    """Return the trial that gets the one device that is free."""
    devices = (Device(id="cpu:0", free=True), *fields.pop("others", ()))
    snapshot = Snapshot(devices=devices, trials=trials, left=budget, **fields)
    (chosen,) = Hermes().decide(snapshot).assignments
    assert chosen.trial is not None
    return chosen.trial


def test_what_can_end_goes_on_when_little_is_left() -> None:
    """The best one that can end is due a quarter of a training before it must go on."""
    assert last(Budget(), BEST, YOUNG) == 1
    assert last(Budget(seconds=3.3), BEST, YOUNG) == 1
    assert last(Budget(seconds=3.2), BEST, YOUNG, POOR) == 0
    assert last(Budget(seconds=2.0), BEST, YOUNG, POOR) == 0
    assert last(Budget(device_seconds=3.2), BEST, YOUNG, POOR) == 0


def due(snapshot: Snapshot) -> TrialView | None:
    table = TrialTable()
    return _deadline.due(snapshot, table, table.rows((*snapshot.trials, *snapshot.finished)))


def test_what_is_due_is_due_until_it_ends() -> None:
    """Time and what it needs fall alike while it trains."""
    for units in range(3, 10):
        trial = ending(0, *(9.0 - unit for unit in range(units)), left=10 - units)
        assert last(Budget(seconds=2.4 + 10 - units), trial, YOUNG) == 0


def test_what_cannot_end_any_more_is_not_due() -> None:
    """The next trial ends where the best cannot; where none can, nothing changes."""
    assert last(Budget(seconds=1.5), BEST, YOUNG, POOR) == 2
    assert last(Budget(seconds=0.5), BEST, YOUNG, POOR) == 1


def test_device_time_is_shared_by_all_devices() -> None:
    """Of two devices each has half of it."""
    two = {"others": (Device(id="cpu:1"),)}
    assert last(Budget(device_seconds=6.4), BEST, YOUNG, **two) == 0
    assert last(Budget(device_seconds=6.6), BEST, YOUNG, **two) == 1
    assert last(Budget(seconds=99.0, device_seconds=6.4), BEST, YOUNG, **two) == 0


def test_a_trial_on_several_devices_ends_as_soon_as_on_one() -> None:
    """Its curve has the time of all of them; it is due as if it had one."""
    curve_of_four = replace(BEST.curve, device_seconds=(4.0, 8.0, 12.0))
    many = replace(BEST, curve=curve_of_four, devices_wanted=4)
    devices = tuple(Device(id=f"cpu:{each}", free=True) for each in range(4))
    for seconds, expected in ((3.3, None), (3.2, 0), (2.0, 0), (1.5, None)):
        for trial in (BEST, many):
            snapshot = Snapshot(devices=devices, trials=(trial,), left=Budget(seconds=seconds))
            found = due(snapshot)
            assert (None if found is None else found.number) == expected


def test_one_trial_is_due_at_a_time() -> None:
    """While it trains on another device the rest go on as without a budget."""
    running = replace(BEST, state="running", device="cpu:1")
    others = (Device(id="cpu:1"),)
    trials = (running, YOUNG, POOR, ending(3, 9.0, 7.0, left=2))
    assert last(Budget(seconds=3.0), *trials, others=others) == last(
        Budget(), *trials, others=others
    )


def test_what_ends_higher_than_a_finished_trial_is_not_due() -> None:
    """Nothing is gained by its end, unless it is expected to fall below."""
    done = replace(ending(9, 2.5, left=0), state="done")
    assert (
        last(Budget(seconds=3.0), BEST, YOUNG, finished=(replace(done, curve=curve([0.5])),)) == 1
    )
    assert last(Budget(seconds=3.0), BEST, YOUNG, finished=(done,)) == 0
    failed = replace(done, state="failed", curve=curve([0.5]))
    assert last(Budget(seconds=3.0), BEST, YOUNG, finished=(failed,)) == 0
    nan = replace(done, curve=curve([math.nan]))
    assert last(Budget(seconds=3.0), BEST, YOUNG, finished=(nan,)) == 0


def test_a_fall_with_the_logarithm_of_age_is_foreseen() -> None:
    """A trial that falls by 1 at each doubling ends 1 lower at twice its age."""
    done = replace(ending(9, 7.2, left=0), state="done")
    for units, end in ((4, 7.0), (3, 10 - math.log2(6))):
        falls = ending(0, *(10 - math.log2(age) for age in range(1, units + 1)), left=units)
        device = Device(id="cpu:0", free=True)
        snapshot = Snapshot(
            devices=(device,), trials=(falls,), finished=(done,), left=Budget(seconds=units + 1.0)
        )
        found = due(snapshot)
        assert (found is not None) == (end < 7.2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_trial_is_not_due(value: float) -> None:
    """It has no final value to expect."""
    assert last(Budget(seconds=2.0), ending(0, 3.0, value, left=1), YOUNG) == 1


def test_a_trial_of_unknown_length_is_not_due() -> None:
    """No time is known that it needs."""
    endless = replace(BEST, units_left=None)
    assert last(Budget(seconds=2.0), endless, YOUNG) == last(Budget(), endless, YOUNG)


@settings(max_examples=200)
@given(snapshot=snapshots())
def test_a_budget_changes_who_goes_first_or_nothing(snapshot: Snapshot) -> None:
    """Only a trial that can end in time is preferred, and the others keep their order."""
    policy = Hermes()
    told = policy.decide(snapshot).assignments
    untold = policy.decide(replace(snapshot, left=Budget())).assignments
    if told == untold:
        return
    usable = sum(device.healthy for device in snapshot.devices)
    (chosen,) = [trial for trial in snapshot.trials if trial.number == told[0].trial]
    assert seconds_to_end(chosen) <= snapshot.left.on_each(usable)
    far = replace(snapshot, left=Budget(seconds=1e9, device_seconds=1e9))
    assert policy.decide(far).assignments == untold
