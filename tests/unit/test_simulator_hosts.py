"""Simulated hosts that share a study, each with a policy of its own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import make_policy
from optuna_hermes.simulator import (
    FixedList,
    Recording,
    Sharing,
    SwitchCosts,
    Trace,
    Traffic,
    TrialSimulator,
)


def falling(final: float, units: int = 6, seconds: float = 10.0) -> Recording:
    """A training whose values fall from 1 to its final one."""
    values = tuple(1.0 - (1.0 - final) * (1 + unit) / units for unit in range(units))
    return Recording(values=values, seconds=(seconds,) * units)


def simulate(
    finals: list[float], hosts: int, sharing: Sharing | None, policy: str = "hermes"
) -> tuple[Trace, Traffic]:
    simulator = TrialSimulator(
        make_policy(policy),
        FixedList([falling(final) for final in finals]),
        n_devices=hosts,
        n_hosts=hosts,
        costs=SwitchCosts(disk_seconds=0.5),
        sharing=sharing,
    )
    return simulator.run(), simulator.traffic


@settings(max_examples=40)
@given(
    finals=st.lists(st.floats(0.0, 0.9), min_size=1, max_size=12),
    hosts=st.integers(1, 4),
    asks=st.booleans(),
    policy=st.sampled_from(["hermes", "round-robin", "fifo", "las"]),
)
def test_every_unit_is_trained_once_whatever_hosts_ask_for(
    finals: list[float], hosts: int, asks: bool, policy: str
) -> None:
    """All trials come to their ends, on one device at a time, in order."""
    sharing = Sharing(asks=asks, claim_seconds=0.1, store_seconds=0.5)
    trace, traffic = simulate(finals, hosts, sharing, policy)
    assert set(trace.finished) == set(range(len(finals)))
    units = Counter((each.number, each.unit) for each in trace.slices)
    assert set(units.values()) == {1}
    assert len(units) == 6 * len(finals)
    ends: dict[int, float] = {}
    for each in sorted(trace.slices, key=lambda each: (each.number, each.unit)):
        assert each.start >= ends.get(each.number, 0.0)
        ends[each.number] = each.end
    assert traffic.reads <= traffic.looks


def test_one_host_alone_decides_as_without_a_ledger() -> None:
    """Nobody asks it for anything, and it has nothing to claim."""
    finals = [0.5, 0.1, 0.7, 0.3]
    alone, _ = simulate(finals, 1, None)
    shared, traffic = simulate(finals, 1, Sharing())
    assert shared.slices == alone.slices
    assert (traffic.claims, traffic.lost) == (0, 0)


def test_the_best_trials_are_trained_on_whichever_host_is_free() -> None:
    """Both good ones begin on one host: the other one asks for the second of them."""
    finals = [0.1, 0.9, 0.15, 0.9]  # the first host has those of even numbers

    def second_best(asks: bool) -> float:
        trace, traffic = simulate(finals, 2, Sharing(asks=asks))
        assert (traffic.claims > 0) == asks
        return max(trace.finished[0], trace.finished[2])

    assert second_best(asks=True) < second_best(asks=False)


def test_a_stored_trial_is_left_to_the_host_that_has_asked() -> None:
    """Of eight that would like the same ones, few claim one in vain."""
    finals = [0.02 * number for number in range(24)]
    _, traffic = simulate(finals, 8, Sharing())
    assert traffic.claims > 0
    assert traffic.lost < traffic.claims


@pytest.mark.parametrize("name", ["refresh_seconds", "claim_seconds", "store_seconds"])
def test_times_are_finite(name: str) -> None:
    """As of all costs."""
    with pytest.raises(InvalidInputError, match=name):
        Sharing(**{name: float("nan")})
    with pytest.raises(InvalidInputError, match="above 0"):
        Sharing(refresh_seconds=0.0)
