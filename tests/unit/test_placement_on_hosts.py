"""Placement on the devices of several hosts: each promise of its docstring, for any trials."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.model import Device, Snapshot, TrialView
from optuna_hermes.policies import place

SIZES = {"a": 1, "b": 3, "c": 3}
IDS = [f"{host}:{index}" for host, size in SIZES.items() for index in range(size)]

NEW = TrialView(number=-1, state="pending")
"""As what a new trial is placed, which has no view: one device, wherever that is."""

_some = st.lists(st.sampled_from(IDS), unique=True, max_size=4)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Trials that wait, best first, and hosts of which some devices are busy or broken."""
    busy, broken = draw(_some), draw(_some.map(lambda ids: ids[:1]))
    devices = [
        Device(id=id_, host=id_[0], free=id_ not in busy, healthy=id_ not in broken) for id_ in IDS
    ]
    trials = [
        TrialView(
            number=number,
            state="parked",
            devices=tuple(draw(_some)),
            bound_to=tuple(draw(st.just([]) | _some)),
            devices_wanted=draw(st.sampled_from([1, 1, 2, 2, 3, 4, 6])),
        )
        for number in range(draw(st.integers(1, 4)))
    ]
    return Snapshot(devices=tuple(devices), trials=tuple(trials))


@given(snapshot=snapshots())
def test_a_trial_that_a_host_can_hold_gets_the_best_host(snapshot: Snapshot) -> None:
    """The one with most of its own devices free at first, then the one with the fewest free now."""
    healthy = {device.id for device in snapshot.devices if device.healthy}
    at_first = {device.id for device in snapshot.devices if device.free} & healthy
    free = set(at_first)
    largest = max(_by_host(healthy).values())
    order = (*snapshot.trials, None)
    given_out = {each.trial: each.devices for each in place(snapshot, order)}
    for trial in (each or NEW for each in order):
        got = given_out.get(None if trial is NEW else trial.number, ())
        usable = free & set(trial.bound_to or IDS)
        assert usable.issuperset(got)
        assert len(set(got)) == len(got) in (0, trial.devices_wanted)
        n_usable, n_got = _by_host(usable), _by_host(set(got))
        if trial.devices_wanted <= largest:
            own = _by_host(at_first & set(trial.devices))
            hosts = [host for host in n_usable if n_usable[host] >= trial.devices_wanted]
            best = min(((-own[host], n_usable[host]) for host in hosts), default=None)
            chosen = [(-own[host], n_usable[host]) for host in n_got]
            assert chosen == ([] if best is None else [best])
            for host in n_got:
                kept = _by_host(usable & set(trial.devices))[host]
                assert len(set(got) & set(trial.devices)) == min(kept, trial.devices_wanted)
        else:
            whole = _by_host(healthy)
            assert sum(n_got[host] < whole[host] for host in n_got) <= 1
        free -= set(got)


@given(snapshot=snapshots())
def test_without_backfill_no_trial_overtakes_one_that_could_ever_fit(snapshot: Snapshot) -> None:
    """Those before it get what they get with backfill, and those behind it nothing."""
    empty = replace(
        snapshot, devices=tuple(replace(device, free=True) for device in snapshot.devices)
    )
    filled = {each.trial: each for each in place(snapshot, snapshot.trials)}
    expected = []
    for trial in snapshot.trials:
        if trial.number in filled:
            expected.append(filled[trial.number])
        elif place(empty, [trial]):
            break
    assert list(place(snapshot, snapshot.trials, backfill=False)) == expected


def _by_host(ids: set[str]) -> Counter[str]:
    return Counter(id_[0] for id_ in ids)
