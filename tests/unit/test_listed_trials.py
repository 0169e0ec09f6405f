"""Listed trials: those that look best by their parameters are opened first, and when they do."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.model import Budget, Curve, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import Fifo, Hermes, _listed
from optuna_hermes.policies._listed import (
    GROWTH,
    IN_ORDER,
    MOST_FORESEEN,
    MOST_KEPT,
    PredictedRanks,
)
from optuna_hermes.simulator import FixedList, Recording, TrialSimulator
from optuna_hermes.surrogate import _points, points_of

FREE = (Device(id="cpu:0", free=True),)


def begun(number: int, params: Mapping[str, Any], *values: float) -> TrialView:
    steps = tuple(range(1, len(values) + 1))
    curve = Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))
    return TrialView(number=number, state="parked", curve=curve, params=params, units_left=9)


def listed(*params: Mapping[str, Any], first: int = 100, count: int | None = None) -> Unstarted:
    trials = tuple(
        TrialView(number=number, state="pending", params=each)
        for number, each in enumerate(params, first)
    )
    return Unstarted(count=len(trials) if count is None else count, fixed=True, listed=trials)


def on_a_line(n: int = IN_ORDER, units: int = 8) -> tuple[TrialView, ...]:
    """Trials whose values are the distances of their parameter from 0.3."""
    return tuple(
        begun(number, {"x": x}, *[abs(x - 0.3)] * units)
        for number, x in enumerate(np.linspace(0, 1, n))
    )


def chosen(snapshot: Snapshot) -> list[int | None]:
    return [each.trial for each in Hermes().decide(snapshot).assignments]


def devices(n: int) -> tuple[Device, ...]:
    return tuple(Device(id=f"cpu:{index}", free=True) for index in range(n))


# -- points ------------------------------------------------------------------------------------


def test_examples_hold() -> None:
    """The example in the docstring holds."""
    assert doctest.testmod(_points).failed == 0


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["relu", "tanh", ""])
)
spaces = st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=3), min_size=1)


@given(spaces)
def test_any_parameters_are_points_of_a_cube(params: Sequence[Mapping[str, Any]]) -> None:
    """Whatever their types, and whether or not all trials have them; equal ones are one point."""
    points = points_of(params)
    assert len(points) == len(params)
    assert ((points >= 0) & (points <= 1)).all()
    for one, other in zip(params, points, strict=True):
        same = [repr(each) == repr(one) for each in params]
        assert (points[same] == other).all()
    assert (points.max(axis=0) > points.min(axis=0)).all()


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=20))
def test_a_number_counts_by_its_rank(numbers: list[float]) -> None:
    """So a parameter may as well be given by its logarithm."""
    one = points_of([{"x": number} for number in numbers])
    other = points_of([{"x": math.exp(number)} for number in numbers])
    assert one.shape == other.shape or len(set(map(math.exp, numbers))) < len(set(numbers))
    if one.size and one.shape == other.shape:
        assert one.min() == 0.0
        assert one.max() == 1.0
        assert (np.diff(one[np.argsort(numbers), 0]) >= 0).all()


def test_choices_and_missing_parameters_have_columns() -> None:
    """A column for each of three choices; one that says which trials lack a number."""
    params: list[dict[str, Any]] = [
        {"act": "relu"},
        {"act": "tanh", "x": 1},
        {"act": "gelu", "x": 3},
        {"act": "relu"},
    ]
    assert points_of(params).tolist() == [
        [1, 0, 0, 0.5, 1],
        [0, 0, 1, 0.0, 0],
        [0, 1, 0, 1.0, 0],
        [1, 0, 0, 0.5, 1],
    ]


def test_columns_are_bounded() -> None:
    """A choice with many values, and many parameters, have a bounded number of columns."""
    assert points_of([{"x": str(each)} for each in range(50)]).shape[1] == _points.MOST_CHOICES
    many = [{str(name): each for name in range(90)} for each in range(3)]
    assert points_of(many).shape[1] == _points.MOST_COLUMNS


# -- the order of openings ---------------------------------------------------------------------


def test_the_first_ones_are_opened_in_the_order_of_the_list() -> None:
    """Before that nothing is foreseen, and trials that have reported wait until then."""
    few = on_a_line(3)
    rest = listed(*({"x": each / 30} for each in range(30)))
    order = chosen(Snapshot(devices=devices(IN_ORDER - 3 + 1), trials=few, unstarted=rest))
    assert order == [*range(100, 100 + IN_ORDER - 3), 1]


def test_more_are_opened_in_order_while_hardly_any_has_reported() -> None:
    """Many devices open more than the first ones before there is anything to compare."""
    trials = tuple(
        TrialView(number=number, state="running", params={"x": 0.1}) for number in range(IN_ORDER)
    )
    rest = listed({"x": 0.9}, {"x": 0.1})
    assert chosen(Snapshot(devices=FREE, trials=trials, unstarted=rest)) == [100]


def test_the_one_that_looks_best_is_opened_next() -> None:
    """Whatever its place in the list."""
    rest = listed({"x": 0.95}, {"x": 0.6}, {"x": 0.31}, {"x": 0.05})
    assert chosen(Snapshot(devices=FREE, trials=on_a_line(), unstarted=rest)) == [102]


def test_one_that_looks_bad_waits_for_those_that_are_better() -> None:
    """It is opened once all that wait have had more than it would deserve."""
    bad = listed({"x": 0.99})
    assert chosen(Snapshot(devices=FREE, trials=on_a_line(), unstarted=bad)) == [4]
    older = on_a_line(units=800)
    assert chosen(Snapshot(devices=FREE, trials=older, unstarted=bad)) == [100]


def test_choices_are_learned_from_too() -> None:
    """Trials of one optimiser are better, so the listed ones that have it come first."""
    trials = tuple(
        begun(
            number, {"opt": "sgd" if number % 2 else "adam", "x": number}, *[number % 2 + 0.0] * 40
        )
        for number in range(20)
    )
    rest = listed({"opt": "sgd", "x": 3}, {"opt": "adam", "x": 3}, {"opt": "sgd", "x": 7})
    assert chosen(Snapshot(devices=FREE, trials=trials, unstarted=rest)) == [101]


def test_not_more_are_opened_than_may_be() -> None:
    """A host has processes for a few only."""
    rest = listed(*({"x": 0.3} for _ in range(9)), count=2)
    order = chosen(Snapshot(devices=devices(5), trials=on_a_line(), unstarted=rest))
    assert sum(number is not None and number >= 100 for number in order) == 2
    assert len(order) == 5


def test_a_trial_that_is_set_up_is_one_of_the_list() -> None:
    """It was set up since it looked good; it begins when it still does."""
    pending = [
        TrialView(number=number, state="pending", params={"x": x})
        for number, x in ((50, 0.99), (51, 0.3))
    ]
    for trial, expected in zip(pending, (4, 51), strict=True):
        snapshot = Snapshot(
            devices=FREE, trials=(*on_a_line(), trial), unstarted=Unstarted(count=0, fixed=True)
        )
        assert chosen(snapshot) == [expected]


def test_trials_whose_parameters_are_unknown_are_opened_at_once() -> None:
    """As before there were lists with parameters."""
    snapshot = Snapshot(
        devices=devices(2), trials=on_a_line(), unstarted=Unstarted(count=1, fixed=True)
    )
    decision = Hermes().decide(snapshot)
    assert [each.trial for each in decision.assignments] == [None, 4]
    assert decision.memory is None


def test_other_policies_open_the_list_in_its_order() -> None:
    """They name no listed trial: a new one is then the first of the list."""
    snapshot = Snapshot(devices=devices(2), unstarted=listed({"x": 0.1}, {"x": 0.2}))
    assert [each.trial for each in Fifo().decide(snapshot).assignments] == [None, None]


def test_the_end_of_a_budget_comes_first() -> None:
    """A trial that can only just end goes before any listed one."""
    trials = (*on_a_line(), begun(60, {"x": 0.9}, 5.0, 0.01))
    snapshot = Snapshot(
        devices=FREE,
        trials=trials,
        unstarted=listed({"x": 0.3}),
        left=Budget(seconds=9.5),
    )
    assert chosen(snapshot) == [60]


# -- what is foreseen is remembered ------------------------------------------------------------


def test_what_is_foreseen_holds_until_there_is_a_fifth_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In between a decision costs no fit; then, or when none of it is left, it is made anew."""
    fits: list[int] = []

    def predict_ranks(*args: Any) -> PredictedRanks:
        fits.append(args[2])
        return own(*args)

    own = _listed.predict_ranks
    monkeypatch.setattr(_listed, "predict_ranks", predict_ranks)
    trials, memory = list(on_a_line(20, units=1)), None
    rest = listed(*({"x": 0.9} for _ in range(4)))
    for _ in range(20):
        snapshot = Snapshot(devices=FREE, trials=tuple(trials), unstarted=rest, memory=memory)
        memory = json.loads(json.dumps(Hermes().decide(snapshot).memory))
        trials[0] = begun(0, trials[0].params, *trials[0].curve.values, 0.3)
    assert fits == [20, 24, 29, 35]
    assert all(later >= GROWTH * before for before, later in pairwise(fits))
    others = replace(snapshot, unstarted=listed({"x": 0.3}, first=200), memory=memory)
    Hermes().decide(others)
    assert len(fits) == 5


def test_what_is_foreseen_is_kept_while_no_trial_can_be_opened() -> None:
    """A broker shows nothing of the list while it has no process for it."""
    snapshot = Snapshot(devices=FREE, trials=on_a_line(20), unstarted=listed({"x": 0.9}))
    memory = Hermes().decide(snapshot).memory
    busy = replace(snapshot, unstarted=Unstarted(count=0, fixed=True), memory=memory)
    assert Hermes().decide(busy).memory == memory is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["units", "ranks", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_memory_of_another_kind_is_ignored(memory: Any) -> None:
    """That of an earlier version, of another policy, or mended by hand."""
    found = PredictedRanks.from_memory(memory)
    assert found is None or PredictedRanks.from_memory(found.to_memory()) == found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_the_order_of_trials_means_nothing(seed: int, random: Any) -> None:
    """Nor does the object that decides, nor whether memory went through JSON."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(IN_ORDER, 140))
    trials = [
        begun(number, {"x": float(rng.random()), "k": str(rng.integers(3))}, *rng.random(1 + n % 4))
        for number in range(n)
    ]
    rest = listed(*({"x": float(rng.random()), "k": "1"} for _ in range(9)), first=500)
    snapshot = Snapshot(devices=devices(3), trials=tuple(trials), unstarted=rest)
    decision = Hermes().decide(snapshot)
    random.shuffle(trials)
    assert Hermes().decide(replace(snapshot, trials=tuple(trials))) == decision
    again = replace(snapshot, memory=json.loads(json.dumps(decision.memory)))
    assert Hermes().decide(again) == decision


def test_of_a_long_list_some_are_looked_at_and_the_best_kept() -> None:
    """Spread over the list; others with more units, so that all have their turn."""
    rest = listed(*({"x": each / 3000} for each in range(3000)), first=0).listed
    first, later = (_listed._looked_at(rest, units) for units in (20, 24))
    assert len(first) == len(later) == MOST_FORESEEN
    numbers = [trial.number for trial in first]
    assert numbers == sorted(set(numbers))
    assert max(np.diff(numbers)) < 20
    assert len({*numbers} & {trial.number for trial in later}) < MOST_FORESEEN / 2
    snapshot = Snapshot(
        devices=FREE,
        trials=on_a_line(),
        unstarted=Unstarted(count=3000, fixed=True, listed=tuple(
            replace(trial, number=100 + trial.number) for trial in rest
        )),
    )  # fmt: skip
    decision = Hermes().decide(snapshot)
    assert len(decision.memory["ranks"]) == MOST_KEPT
    (assignment,) = decision.assignments
    assert assignment.trial is not None
    assert abs((assignment.trial - 100) / 3000 - 0.3) < 0.1


# -- in a simulation ---------------------------------------------------------------------------


def recordings(n: int = 60) -> list[Recording]:
    """Trainings whose values fall to where their two parameters say."""
    rng = np.random.default_rng(0)
    found = []
    for x, y in rng.random((n, 2)).tolist():
        units = np.arange(1, 21)
        values = (x - 0.7) ** 2 + (y - 0.2) ** 2 + units**-0.5 + rng.normal(0, 0.005, 20)
        found.append(Recording(values=tuple(values), seconds=(1.0,) * 20, params={"x": x, "y": y}))
    return found


@pytest.mark.parametrize("n_devices", [1, 3])
def test_the_best_one_is_found_sooner_where_parameters_tell(n_devices: int) -> None:
    """Every listed trial is trained once, from its place in the list, and the best one sooner."""
    known = recordings()
    best = min(range(len(known)), key=lambda number: known[number].final)
    ends = []
    for trials in (known, [replace(each, params={}) for each in known]):
        trace = TrialSimulator(Hermes(), FixedList(trials), n_devices=n_devices).run()
        assert set(trace.finished) == set(range(len(known)))
        for each in trace.slices:
            assert each.value == known[each.number].values[each.unit - 1]
        assert dict(trace.recordings) == dict(enumerate(trials))
        ends.append(trace.finished[best])
    assert ends[0] < 0.8 * ends[1]
