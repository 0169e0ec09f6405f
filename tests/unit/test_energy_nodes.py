"""Nodes that are powered down behind a recorded demand: the rule, the forecast, the bound."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.cluster.energy import (
    DAY_TICKS,
    KEPT_TICKS,
    LEARNING_TICKS,
    EnergyRules,
    appended,
)
from optuna_hermes.errors import InvalidInputError
from support.benchmarks import benchmark

trees = benchmark("_energy_trees")
expected_peak, features = trees.expected_peak, trees.features
nodes = benchmark("_energy_nodes")
NodeSeries = nodes.NodeSeries
clairvoyant_nodes = nodes.clairvoyant_nodes
never_powered_down = nodes.never_powered_down
replay_nodes = nodes.replay_nodes

_demands = st.lists(st.integers(0, 6), min_size=1, max_size=90)
_small_rules = st.builds(
    EnergyRules,
    buffer_share=st.floats(0, 1),
    look_back_ticks=st.integers(1, 3),
    keep_ticks=st.integers(1, 3),
)


@pytest.fixture
def _no_lightgbm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trees._fitted.cache_clear()
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    yield
    trees._fitted.cache_clear()


def _series(demand: Sequence[int], n_nodes: int = 6) -> NodeSeries:
    rises = [max(0, b - a) for a, b in zip([0, *demand], demand, strict=False)]
    return NodeSeries(active=demand, demand=demand, total=[n_nodes] * len(demand), arrivals=rises)


def _days(n_days: int) -> list[int]:
    """Demand by the tick that is high by day and low by night, and never quite the same."""
    noise = np.random.default_rng(7).integers(0, 4, n_days * DAY_TICKS)
    hours = np.arange(n_days * DAY_TICKS) % DAY_TICKS
    high = np.where((hours > 54) & (hours < 108), 30, 8)
    return [int(each) for each in high + noise]


# -- the rule ----------------------------------------------------------------------------------


@given(
    rules=_small_rules,
    n_nodes=st.integers(1, 50),
    powered=st.integers(0, 60),
    demand=st.integers(0, 50),
    rise=st.integers(0, 9),
    expected=st.floats(0, 60),
    may_fall=st.booleans(),
)
def test_what_is_wanted_has_power(
    rules: EnergyRules,
    n_nodes: int,
    powered: int,
    demand: int,
    rise: int,
    expected: float,
    may_fall: bool,
) -> None:
    """Power goes to demand and half a buffer at least, to no more nodes than there are."""
    demand = min(demand, n_nodes)
    wanted = rules.wanted(
        n_nodes=n_nodes,
        powered=powered,
        demand=demand,
        recent=demand + rise,
        expected=expected,
        may_fall=may_fall,
    )
    assert min(n_nodes, demand + rules.buffer(n_nodes) // 2) <= wanted <= n_nodes
    if wanted < min(powered, n_nodes):
        assert may_fall
        assert wanted >= demand + rise + rules.buffer(n_nodes)


def test_half_of_the_buffer_is_used_before_anything_is_woken() -> None:
    """With a buffer of 4 nothing is woken while 2 are spare, then the whole buffer is."""
    rules = EnergyRules(buffer_share=0.04)

    def wanted(powered: int) -> int:
        return rules.wanted(
            n_nodes=100, powered=powered, demand=10, recent=10, expected=0.0, may_fall=False
        )

    assert wanted(12) == 12
    assert wanted(11) == 14


def test_bad_rules_are_refused() -> None:
    """EnergyRules that mean nothing are an error that says what must hold."""
    with pytest.raises(InvalidInputError, match=r"buffer_share must be between 0 and 1 but got 2"):
        EnergyRules(buffer_share=2)
    with pytest.raises(InvalidInputError, match=r"keep_ticks must be 1 or more but got 0"):
        EnergyRules(keep_ticks=0)


# -- the forecast ------------------------------------------------------------------------------


@given(
    past=st.lists(st.integers(0, 20), min_size=1, max_size=400),
    future=st.lists(st.integers(0, 20), min_size=1, max_size=20),
)
def test_features_know_nothing_of_the_future(past: list[int], future: list[int]) -> None:
    """The features of a tick are the same whatever comes after it."""
    here = np.array([len(past) - 1])
    known = features(np.array(past, dtype=float), here)
    np.testing.assert_array_equal(features(np.array(past + future, dtype=float), here), known)


def test_a_forecast_knows_the_days() -> None:
    """Before the load of a day begins a rise is expected, in the middle of the night none."""
    peaks = _days(6)
    before = 4 * DAY_TICKS + 52
    night = 4 * DAY_TICKS + 20
    assert expected_peak(peaks[:before]) > expected_peak(peaks[:night]) + 4


@pytest.mark.usefixtures("_no_lightgbm")
def test_without_lightgbm_the_mean_of_the_days_before_is_expected() -> None:
    """A seasonal mean stands in: the last peak, and the mean rise at this time of day."""
    peaks = [5] * DAY_TICKS * 3
    for day in (1, 2):
        peaks[day * DAY_TICKS + 3] = 5 + 4 * day
    assert expected_peak((*peaks, 5)) == pytest.approx(5 + (0 + 4 + 8) / 3)


def test_nothing_is_forecast_from_too_little() -> None:
    """Without two days of the past the last peak is expected, and nothing without any."""
    assert expected_peak(()) == 0.0
    assert expected_peak([9] * (LEARNING_TICKS - 2) + [4]) == 4.0


def test_what_is_old_is_forgotten_by_the_day() -> None:
    """The past has a bound, and begins at the same time of day whatever was forgotten."""
    peaks: tuple[int, ...] = ()
    for tick in range(KEPT_TICKS + 2 * DAY_TICKS + 5):
        peaks = appended(peaks, tick)
    assert len(peaks) < KEPT_TICKS + DAY_TICKS
    assert peaks[0] % DAY_TICKS == 0
    assert peaks == tuple(range(peaks[0], tick + 1))


# -- the replay --------------------------------------------------------------------------------


@settings(deadline=None)
@given(demand=_demands, rules=_small_rules, data=st.data())
def test_a_replay_knows_nothing_of_the_future(
    demand: list[int], rules: EnergyRules, data: st.DataObject
) -> None:
    """Whatever comes after a minute, power was given up to it in the same way."""
    cut = data.draw(st.integers(0, len(demand)))
    other = demand[:cut] + data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=30))
    powered = replay_nodes(_series(demand), rules).powered[: cut + 1]
    assert replay_nodes(_series(other), rules).powered[: len(powered)] == powered[: len(other)]


def test_forecasts_in_a_replay_know_nothing_of_the_future() -> None:
    """The trees that a forecast asks have learned from nothing that comes later either."""
    demand = [each for each in _days(4) for _ in range(10)]
    cut = 35 * DAY_TICKS
    other = demand[:cut] + [0] * (len(demand) - cut)
    first = replay_nodes(_series(demand, 40))
    second = replay_nodes(_series(other, 40))
    assert first.powered[: cut + 1] == second.powered[: cut + 1]
    assert first.powered != second.powered


def test_a_replay_minute_by_minute() -> None:
    """A job finds its node down: it waits while nodes boot, which takes power and no job."""
    demand = [4, *[1] * 30, *[4] * 10]
    use = replay_nodes(
        _series(demand), EnergyRules(look_back_ticks=1, keep_ticks=1), boot_minutes=3
    )
    # After the second tick one node and the buffer are left; demand takes all of that, and more.
    assert use.powered == (*[6] * 10, *[5] * 10, *[2] * 12, *[5] * 9)
    assert (use.wakeups, use.delayed, use.delayed_fraction) == (3, 3, 3 / 7)
    served = 4 + 30 + 3 * 2 + 7 * 4
    assert use.utilisation == served / sum(use.powered)


@given(demand=_demands)
def test_fifo_never_powers_down(demand: list[int]) -> None:
    """Without `energy` all nodes have power all the time, and nobody waits for one."""
    use = never_powered_down(_series(demand))
    assert use.utilisation == pytest.approx(sum(demand) / (6 * len(demand)))
    assert (use.delayed_fraction, use.wakeups) == (0.0, 0)


def test_a_series_that_cannot_be_is_refused() -> None:
    """Lists of different lengths and more active nodes than there are get an error."""
    with pytest.raises(InvalidInputError, match="as many in each list"):
        NodeSeries(active=[1], demand=[1, 2], total=[3], arrivals=[0])
    with pytest.raises(InvalidInputError, match="minute 1 they are 2, 1 and 3"):
        NodeSeries(active=[1, 2], demand=[1, 1], total=[3, 3], arrivals=[0, 0])


# -- the bound ---------------------------------------------------------------------------------


def _fewest_minutes(needed: Sequence[bool], boot: int, keep: int) -> float:
    """The same for one node, by trying everything."""
    best = math.inf
    for on in itertools.product((False, True), repeat=len(needed)):
        before, up_at, leaves_at = True, 0, 0
        for minute, (power, need) in enumerate(zip(on, needed, strict=True)):
            if power and not before:
                up_at, leaves_at = minute + boot, minute + boot + keep
            if (need and not (power and minute >= up_at)) or (not power and minute < leaves_at):
                break
            before = power
        else:
            best = min(best, sum(on))
    return best


@settings(deadline=None, max_examples=60)
@given(
    needed=st.lists(st.booleans(), min_size=1, max_size=10).filter(any),
    boot=st.integers(1, 3),
    keep=st.integers(0, 4),
)
def test_the_bound_is_what_trying_everything_finds(
    needed: list[bool], boot: int, keep: int
) -> None:
    """A controller that knows the future powers no node for longer than it must."""
    (wanted,) = nodes._levels([int(each) for each in needed])
    found = nodes._least_minutes(wanted, len(needed), boot, keep)
    assert found == _fewest_minutes(needed, boot, keep)


@settings(deadline=None)
@given(demand=_demands, rules=_small_rules)
def test_nobody_beats_the_bound_without_a_delay(demand: list[int], rules: EnergyRules) -> None:
    """A replay in which nobody waited uses its nodes no better than the clairvoyant one."""
    series = _series(demand)
    use = replay_nodes(series, rules)
    bound = clairvoyant_nodes(series, rules)
    assert use.delayed or use.utilisation <= bound + 1e-12
    assert clairvoyant_nodes(series, rules, with_buffer=True) <= bound


def test_a_bound_by_hand() -> None:
    """A gap is worth a wake-up only if it is longer than a boot."""
    rules = replace(EnergyRules(), keep_ticks=1)
    for gap, powered in ((5, 2 + 5), (6, 2 + 5), (60, 2 + 5)):
        series = _series([1, *[0] * gap, 1], 1)
        assert clairvoyant_nodes(series, rules) == pytest.approx(2 / powered)
