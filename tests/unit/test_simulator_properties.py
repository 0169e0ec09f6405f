"""The simulator on random workloads, against its rules and against another simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.policies import POLICIES, make_policy
from optuna_hermes.simulator import (
    FixedList,
    Overheads,
    Recording,
    SwitchCosts,
    Trace,
    TrialSimulator,
)

# -- random workloads --------------------------------------------------------------------------

LENGTHS = st.sampled_from([1.0, 2.0, 0.5])
"""Of units, so that many end at the same time; the fractions that go with them are exact too."""

VALUES = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf, math.nan]) | st.floats(-10, 10)


@st.composite
def recordings(draw: st.DrawFn, seconds: st.SearchStrategy[float] = LENGTHS) -> Recording:
    n_units = draw(st.integers(1, 12))
    return Recording(
        values=tuple(draw(st.lists(VALUES, min_size=n_units, max_size=n_units))),
        seconds=tuple(draw(st.lists(seconds, min_size=n_units, max_size=n_units))),
    )


WORKLOADS = st.lists(recordings(), min_size=1, max_size=9)
UNEVEN = st.lists(recordings(st.floats(0.1, 10)), min_size=1, max_size=9)
"""Hardly two units end at the same time."""

FRACTIONS = st.sampled_from([0.0, 0.25, 1.0])


def simulate(name: str, work: Sequence[Recording], n_devices: int, fraction: float) -> Trace:
    costs = SwitchCosts(fraction=fraction)
    return TrialSimulator(
        make_policy(name), FixedList(work), n_devices=n_devices, costs=costs
    ).run()


# -- what holds under every policy -------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None)
@given(work=WORKLOADS | UNEVEN, n_devices=st.integers(1, 5), fraction=FRACTIONS)
def test_every_policy(name: str, work: list[Recording], n_devices: int, fraction: float) -> None:
    """Every trial is trained to its end, once, unit by unit, on one device at a time; no device
    does two things at once; every second is a unit's or a switch's; and nothing is random."""
    trace = simulate(name, work, n_devices, fraction)
    assert sorted(trace.finished) == list(range(len(work)))
    assert not trace.pruned
    for number, recording in enumerate(work):
        own = [each for each in trace.slices if each.number == number]
        assert [each.unit for each in own] == list(range(1, len(recording.values) + 1))
        assert repr([each.value for each in own]) == repr(list(recording.values))
        assert_one_after_another(trace, number=number)
        assert trace.finished[number] == own[-1].end
    for device in range(n_devices):
        assert_one_after_another(trace, device=device)
    units = [work[each.number].seconds[each.unit - 1] for each in trace.slices]
    switches = [u for u, each in zip(units, trace.slices, strict=True) if each.switched]
    busy = math.fsum(each.end - each.start for each in trace.slices)
    assert busy == pytest.approx(math.fsum(units) + fraction * math.fsum(switches))
    assert [each.end for each in trace.slices] == sorted(each.end for each in trace.slices)
    assert trace.decisions >= len(trace.slices)
    # repr: NaN is not equal to itself.
    assert repr(simulate(name, work, n_devices, fraction)) == repr(trace)


def assert_one_after_another(
    trace: Trace, *, number: int | None = None, device: int | None = None
) -> None:
    own = [e for e in trace.slices if e.number == number or e.device == device]
    for before, after in pairwise(own):
        assert before.end <= after.start


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10, deadline=None)
@given(work=WORKLOADS, n_devices=st.integers(1, 3), fraction=FRACTIONS)
def test_switches_are_counted_where_a_device_changes_trial(
    name: str, work: list[Recording], n_devices: int, fraction: float
) -> None:
    """A slice is a switch when the one before it on its device, or of its trial, was another's."""
    on_device: dict[int, int] = {}
    of_trial: dict[int, int] = {}
    for each in simulate(name, work, n_devices, fraction).slices:
        stayed = on_device.get(each.device) == each.number
        assert each.switched == (not stayed or of_trial[each.number] != each.device)
        on_device[each.device], of_trial[each.number] = each.number, each.device


@settings(max_examples=30, deadline=None)
@given(
    work=WORKLOADS | UNEVEN,
    n_devices=st.integers(1, 3),
    opening=FRACTIONS,
    decision=FRACTIONS,
    startup=FRACTIONS,
)
def test_every_second_is_a_units_or_an_overheads(
    work: list[Recording], n_devices: int, opening: float, decision: float, startup: float
) -> None:
    """Nothing begins before the start; each trial is opened once; each unit is decided about."""
    overheads = Overheads(
        opening_seconds=opening, decision_seconds=decision, startup_seconds=startup
    )
    trace = TrialSimulator(
        make_policy("hermes"), FixedList(work), n_devices=n_devices, overheads=overheads
    ).run()
    assert min(each.start for each in trace.slices) == startup
    busy = math.fsum(each.end - each.start for each in trace.slices)
    units = math.fsum(sum(each.seconds) for each in work)
    n_decided = len(trace.slices) - len({each.device for each in trace.slices})
    assert busy == pytest.approx(units + opening * len(work) + decision * n_decided)


# -- another simulator -------------------------------------------------------------------------


@dataclass
class Naive:
    """The rules of the simulation once more, as plainly as they can be written."""

    work: Sequence[Recording]
    rule: Callable[[Naive], int | None]
    n_devices: int
    fraction: float
    ages: dict[int, int] = field(default_factory=dict)
    stopped: dict[int, float] = field(default_factory=dict)
    attained: dict[int, float] = field(default_factory=dict)
    busy: dict[int, tuple[float, int]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    log: list[tuple[float, int, int, int]] = field(default_factory=list)

    def run(self) -> list[tuple[float, int, int, int]]:
        """End, device, trial and unit of every slice."""
        for device in range(self.n_devices):
            self.serve(device, 0.0)
        while self.busy:
            now, device = min((end, device) for device, (end, _) in self.busy.items())
            number = self.busy.pop(device)[1]
            self.ages[number] += 1
            self.stopped[number] = now
            self.log.append((now, device, number, self.ages[number]))
            for each in [device, *range(self.n_devices)]:
                if each not in self.busy:
                    self.serve(each, now)
        return self.log

    def serve(self, device: int, now: float) -> None:
        number = self.rule(self)
        if number is not None:
            unit = self.work[number].seconds[self.ages.setdefault(number, 0)]
            cost = 0.0 if self.last.get(device) == number else self.fraction * unit
            self.busy[device] = (now + unit + cost, number)
            self.attained[number] = self.attained.get(number, 0.0) + unit + cost
            self.last[device] = number

    def waiting(self) -> list[int]:
        taken = {number for _, number in self.busy.values()}
        left = [n for n, age in self.ages.items() if age < len(self.work[n].values)]
        return [n for n in left if n not in taken]

    def new(self) -> list[int]:
        return list(range(len(self.ages), len(self.work)))[:1]

    def value(self, number: int, age: int) -> float:
        value = self.work[number].values[age - 1]
        return value if math.isfinite(value) else math.inf


def naive_fifo(sim: Naive) -> int | None:
    return next(iter([*sorted(sim.waiting()), *sim.new()]), None)


def naive_round_robin(sim: Naive) -> int | None:
    def waits_since(number: int) -> tuple[float, float, int]:
        return sim.stopped[number], sim.attained[number], number

    longest = sorted(sim.waiting(), key=waits_since)
    return next(iter([*sim.new(), *longest]), None)


def naive_asha(sim: Naive) -> int | None:
    """Promotion with reduction factor 3: the best third of a rung goes on, then new trials."""
    waiting, rungs = sim.waiting(), [3**k for k in range(10)]
    for number in sorted(waiting):
        if sim.ages[number] not in rungs:
            return number
    for rung in reversed(rungs):
        reached = [number for number, age in sim.ages.items() if age >= rung]
        ranked = sorted(reached, key=lambda number: (sim.value(number, rung), number))
        for number in ranked[: len(reached) // 3]:
            if number in waiting and sim.ages[number] == rung:
                return number
    best = sorted(
        waiting,
        key=lambda number: (-sim.ages[number], sim.value(number, sim.ages[number]), number),
    )
    return next(iter([*sim.new(), *best]), None)


def assert_same(
    name: str, rule: Callable[[Naive], int | None], work: Sequence[Recording], *setting: float
) -> None:
    n_devices, fraction = int(setting[0]), setting[1]
    expected = Naive(work, rule, n_devices, fraction).run()
    found = simulate(name, work, n_devices, fraction).slices
    assert [(e.device, e.number, e.unit) for e in found] == [line[1:] for line in expected]
    assert [e.end for e in found] == pytest.approx([line[0] for line in expected], rel=0, abs=1e-9)


RULES = {"fifo": naive_fifo, "round-robin": naive_round_robin, "asha": naive_asha}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=100, deadline=None)
@given(work=WORKLOADS, n_devices=st.integers(1, 5), fraction=FRACTIONS)
def test_agrees_with_another_simulator(
    name: str, work: list[Recording], n_devices: int, fraction: float
) -> None:
    """Slices are those of a simulator that shares no code, where many units end at once."""
    assert_same(name, RULES[name], work, n_devices, fraction)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20, deadline=None)
@given(work=UNEVEN, n_devices=st.integers(1, 5), fraction=st.sampled_from([0.005, 0.3]))
def test_agrees_on_uneven_units(
    name: str, work: list[Recording], n_devices: int, fraction: float
) -> None:
    """Units of any length: the same slices, with the same ends to 1e-9 seconds."""
    assert_same(name, RULES[name], work, n_devices, fraction)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n_devices", [1, 4])
def test_agrees_on_a_study(name: str, n_devices: int) -> None:
    """Forty trials of up to thirty units: the same slices from the first to the last."""
    rng = np.random.default_rng(n_devices)
    work = [
        Recording(
            values=tuple(rng.normal(size=n_units).round(1).tolist()),
            seconds=tuple(rng.choice([1.0, 2.0], n_units).tolist()),
        )
        for n_units in rng.integers(1, 31, 40).tolist()
    ]
    assert_same(name, RULES[name], work, n_devices, 0.25)
