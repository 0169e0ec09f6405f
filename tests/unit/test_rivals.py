"""Small replays under the rivals, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.model import Curve, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import Asha, Policy
from optuna_hermes.simulator import (
    RIVALS,
    FixedList,
    Recording,
    Trace,
    TrialSimulator,
    arrange,
    make_rival,
    measure,
)
from optuna_hermes.simulator.rivals import AshaStop, HyperbandStop, MedianStop, Oracle
from optuna_hermes.simulator.rivals._stop import bracket_of, bracket_shares


def recording(*values: float) -> Recording:
    return Recording(values=values, seconds=(1.0,) * len(values))


def flat(*levels: float, units: int = 4) -> list[Recording]:
    """Trials that stay where they are."""
    return [recording(*[level] * units) for level in levels]


def trial(policy: Policy, recordings: Sequence[Recording], n_devices: int = 1) -> Trace:
    return TrialSimulator(policy, FixedList(recordings), n_devices=n_devices).run()


def order(trace: Trace) -> list[int]:
    """Return the trial of each slice."""
    return [each.number for each in trace.slices]


def units(trace: Trace) -> list[int]:
    """Count the units of each trial."""
    return [order(trace).count(number) for number in range(len(trace.recordings))]


# Names


def test_every_rival_can_be_made() -> None:
    """Each name makes a policy that trains a list as far as its rule wants."""
    for name in RIVALS:
        trials = arrange(name, flat(0.3, 0.1, 0.2))
        trace = trial(make_rival(name, trials), trials)
        assert len(trace.finished) + len(trace.pruned) == 3


def test_an_unknown_rival_is_answered_with_the_known_ones() -> None:
    """The error names all rivals."""
    with pytest.raises(UnknownPolicyError, match=r"asha-stop, .*oracle-breadth but got 'fifo'"):
        make_rival("fifo", [])


# Order of arrival


@pytest.mark.parametrize("name", ["asha-stop", "median-stop", "hyperband-stop"])
def test_whom_no_rule_stops_is_trained_in_order(name: str) -> None:
    """Trials that get better and better are run to their ends one after another."""
    trials = flat(0.5, 0.4, 0.3)
    trace = trial(make_rival(name, trials), trials)
    assert order(trace) == [0] * 4 + [1] * 4 + [2] * 4
    assert not trace.pruned


# ASHA


def test_asha_stops_at_rungs_only() -> None:
    """A trial that turns bad between two rungs is trained to the next one, and pruned there."""
    good = recording(*[0.5] * 10)
    late = recording(0.4, 0.9, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.0)
    trace = trial(AshaStop(), [good, late])
    assert units(trace) == [10, 9]
    assert trace.pruned == {1: 19.0}


def test_asha_lets_a_third_go_on() -> None:
    """A place for the second best opens when the sixth trial comes to a rung."""
    trace = trial(AshaStop(), flat(0.1, 0.5, 0.6, 0.4, 0.3, 0.2))
    # The last one is second of six at the first rung, and second of two at the next.
    assert units(trace) == [4, 1, 1, 1, 1, 3]


def test_asha_lets_equal_values_go_on_together() -> None:
    """A trial that is as good as the best is not behind it."""
    assert not trial(AshaStop(), flat(0.2, 0.2, 0.2)).pruned


def test_asha_stops_nan_and_does_not_count_it() -> None:
    """NaN never goes on, and takes nobody's place among those that came."""
    trials = flat(math.nan, math.nan, math.nan, 0.2, 0.3, 0.1)
    trace = trial(AshaStop(), trials)
    assert units(trace) == [1, 1, 1, 4, 1, 4]
    # With the three NaN there would be six at the rung, and a place for the second best of them.
    assert set(trace.pruned) == {0, 1, 2, 4}


def test_asha_judges_by_what_has_come_so_far() -> None:
    """Of two that come at the same time, the one on the first device is judged before the other."""
    assert not trial(AshaStop(), flat(0.9, 0.1), n_devices=2).pruned
    assert units(trial(AshaStop(), flat(0.1, 0.9), n_devices=2)) == [4, 1]


def test_eta_is_two_at_least() -> None:
    """There is nothing to halve by one."""
    with pytest.raises(InvalidInputError, match="at least 2 but got 1"):
        Asha(eta=1)


# Hyperband


def test_hyperband_has_the_brackets_of_its_paper() -> None:
    """For 81 units and eta 3 the lots are those of the paper's formula."""
    assert bracket_shares(81) == (81, 34, 15, 8, 5)
    assert bracket_shares(80) == (27, 12, 6, 4)
    assert bracket_shares(0) == ()


def test_hyperband_deals_all_its_trials_out() -> None:
    """Many trials are spread over the brackets about as their shares say."""
    shares = bracket_shares(50)
    dealt = [bracket_of(number, shares) for number in range(4900)]
    for bracket, share in enumerate(shares):
        assert dealt.count(bracket) == pytest.approx(100 * share, rel=0.25)


def test_hyperband_compares_within_brackets() -> None:
    """Each bracket stops at its own rungs, among its own trials."""
    shares = bracket_shares(4)
    brackets = [bracket_of(number, shares) for number in range(12)]
    assert {0, 1} == set(brackets)
    trials = flat(*(0.1 * (number + 1) for number in range(12)))
    # Every trial is worse than all before it: only the first of a bracket, and who is among the
    # best third, which are the earliest, goes on; the others have the units of the first rung.
    firsts = {brackets.index(bracket) for bracket in (0, 1)}
    expected = [
        4 if number in firsts else 3 if brackets[number] else 1 for number in range(len(trials))
    ]
    assert units(trial(HyperbandStop(), trials)) == expected


def test_hyperband_stops_nobody_while_no_length_is_known() -> None:
    """As in Optuna, brackets need the length of a training."""
    curve = Curve(steps=(1,), values=(9.0,), device_seconds=(1.0,))
    best = Curve(steps=(1,), values=(1.0,), device_seconds=(1.0,))
    trials = tuple(
        TrialView(number=number, state="parked", curve=best if number == 0 else curve)
        for number in range(20)
    )
    snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=trials)
    assert HyperbandStop().decide(snapshot).pruned == ()


# Median


def test_median_waits_for_five() -> None:
    """Nobody is stopped before five trials were trained to their ends."""
    trace = trial(MedianStop(), flat(0.1, 0.2, 0.3, 0.4, 0.5, 0.35, 0.25))
    assert units(trace) == [4, 4, 4, 4, 4, 1, 4]


def test_median_counts_the_best_so_far() -> None:
    """A trial that was good once is not stopped for what it is now."""
    trials = [*flat(0.1, 0.2, 0.3, 0.4, 0.5), recording(0.9, 0.9, 0.9), recording(0.2, 9.0, 9.0)]
    assert set(trial(MedianStop(), trials).pruned) == {5}


def test_median_takes_the_middle_of_an_even_number() -> None:
    """Of four ended trials at a unit the mean of the two in the middle counts; NaN does not."""
    ended = flat(0.0, 0.2, 0.4, 0.6, math.nan)
    assert set(trial(MedianStop(), [*ended, *flat(0.31)]).pruned) == {5}
    assert not trial(MedianStop(), [*ended, *flat(0.29)]).pruned


def test_median_asks_only_those_that_got_as_far() -> None:
    """Beyond the ends of all others there is nobody to be compared with."""
    longer = recording(0.1, 0.1, 9.0, 9.0)
    trace = trial(MedianStop(), [*flat(0.1, 0.2, 0.3, 0.4, 0.5, units=2), longer])
    assert units(trace)[5] == 4


def test_median_stops_who_reports_nothing_but_nan() -> None:
    """NaN is worse than any median."""
    trials = flat(0.1, 0.2, 0.3, 0.4, 0.5, math.nan)
    assert set(trial(MedianStop(), trials).pruned) == {5}


# Oracles


def test_the_oracle_trains_the_best_first() -> None:
    """The list is sorted by final values: equal ones in their order, diverged ones last."""
    trials = flat(0.3, 0.1, math.nan, 0.1, -math.inf, units=2)
    sorted_trials = arrange("oracle", trials)
    assert [*map(id, sorted_trials)] == [id(trials[number]) for number in (1, 3, 0, 2, 4)]
    trace = trial(make_rival("oracle", sorted_trials), sorted_trials)
    assert order(trace) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_other_lists_stay_as_they_are() -> None:
    """Only the oracle may choose what a new trial is."""
    trials = flat(0.3, 0.1, 0.2)
    for name in ("oracle-breadth", "asha-stop", "fifo", "a-name-of-nobody"):
        assert arrange(name, trials) == tuple(trials)


def test_the_breadth_oracle_sees_every_trial_first() -> None:
    """One unit each in the order of the list, then the best to its end, then the next."""
    trials = [recording(0.1, 0.5), recording(0.9, 0.2), recording(0.5, 0.2), recording(0.6, 0.1)]
    trace = trial(make_rival("oracle-breadth", trials), trials)
    assert order(trace) == [0, 1, 2, 3, 3, 1, 2, 0]


def test_no_schedule_finds_the_best_before_the_oracle() -> None:
    """The oracle's time to the best trial is that of this trial alone."""
    trials = flat(0.5, 0.4, 0.1, 0.3, units=3)
    seconds = {}
    for name in ("oracle", "oracle-breadth"):
        arranged = arrange(name, trials)
        seconds[name] = measure(
            trial(make_rival(name, arranged), arranged), arranged, 1
        ).best_seconds
    assert seconds == {"oracle": 3.0, "oracle-breadth": 4.0 + 2.0}


def test_an_oracle_over_proposals_learns_of_them_as_they_are_opened() -> None:
    """A list that grows is read as it is when the decision is taken."""
    known = flat(0.5)
    trials = tuple(TrialView(number=number, state="parked", tier="host") for number in range(2))
    snapshot = Snapshot(
        devices=(Device(id="cpu:0", free=True),), trials=trials, unstarted=Unstarted(count=None)
    )
    policy = Oracle(known)
    assert [each.trial for each in policy.decide(snapshot).assignments] == [0]
    known.append(recording(0.1))
    assert [each.trial for each in policy.decide(snapshot).assignments] == [1]
