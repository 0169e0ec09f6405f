"""The rule of each policy but Hermes, on small studies worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Curve, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import (
    Asha,
    FreezeThaw,
    HermesSlope,
    LeastAttainedService,
    Policy,
    Slaq,
)
from optuna_hermes.policies._freeze_thaw import extrapolate, moments_of
from optuna_hermes.policies._hermes_slope import convergence
from optuna_hermes.policies._slaq import predicted_reduction
from optuna_hermes.simulator import FixedList, Recording, TrialSimulator

BY_CURVES: list[Policy] = [
    Slaq(),
    HermesSlope(),
    FreezeThaw(),
]

ids = [type(policy).__name__ for policy in BY_CURVES]


def trace_of(policy: Policy, *trainings: Sequence[float], n_devices: int = 1) -> list[int]:
    """Return the trial of each unit, in the order of their ends; all units take one second."""
    recordings = [Recording(values=tuple(v), seconds=(1.0,) * len(v)) for v in trainings]
    trace = TrialSimulator(policy, FixedList(recordings), n_devices=n_devices).run()
    return [each.number for each in trace.slices]


def parked(number: int, *values: float, since: float = 0.0, device: str | None = None) -> TrialView:
    steps = tuple(range(1, len(values) + 1))
    curve = Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))
    return TrialView(number=number, state="parked", curve=curve, waiting_since=since, device=device)


def decide(
    policy: Policy,
    *trials: TrialView,
    devices: int = 1,
    unstarted: Unstarted | None = None,
    finished: tuple[TrialView, ...] = (),
    now: float = 100.0,
    seed: int = 0,
) -> list[int | None]:
    """Return the trials that get the devices, best first."""
    snapshot = Snapshot(
        now=now,
        seed=seed,
        devices=tuple(Device(id=f"cpu:{index}", free=True) for index in range(devices)),
        trials=trials,
        finished=finished,
        unstarted=unstarted or Unstarted(),
    )
    return [assignment.trial for assignment in policy.decide(snapshot).assignments]


# ASHA


def test_asha_by_hand() -> None:
    """Promotions, openings and what goes on when nothing can be promoted, with rungs 1, 2, 4."""
    trace = trace_of(Asha(eta=2), [5] * 4, [3] * 4, [4] * 4, [1] * 4)
    # Trial 1 leads rung 1 once two are there; 3 leads it, and rung 2, once it is opened. Then no
    # trial is new: 1 goes on from rung 2, then 2 and 0 from rung 1, each from rung to rung.
    assert trace == [0, 1, 1, 2, 3, 3, 3, 3, 1, 1, 2, 2, 2, 0, 0, 0]


def test_asha_compares_what_was_reported_at_the_rung() -> None:
    """A trial that got worse, or better, after a rung still counts there as it was at the rung."""
    better_later = parked(0, 0.9, 0.9, 0.9, 0.1)
    worse_later = TrialView(number=1, state="done", curve=parked(1, 0.1, 0.9).curve)
    trials = (parked(2, 0.2), parked(3, 0.8), parked(4, 0.5), parked(5, 0.7))
    # Six have reached rung 1, the best two are 1 and 2.
    busy = TrialView(number=0, state="running", curve=better_later.curve)
    new = Unstarted(count=9, fixed=True)
    assert decide(Asha(), busy, *trials, finished=(worse_later,), unstarted=new) == [2]
    assert decide(Asha(), busy, *trials[1:], finished=(worse_later,), unstarted=new) == [None]


def test_asha_looks_from_the_highest_rung_down() -> None:
    """A promotion further up goes first, and a trial between two rungs before any."""
    low = [parked(number, 0.1 * number) for number in range(1, 4)]
    high = [parked(number, 9.0, 9.0, 9.0 - number) for number in range(4, 7)]
    assert decide(Asha(), *low, *high, devices=3) == [6, 1, 2]
    assert decide(Asha(), *low, *high, devices=9) == [6, 1, 2, 5, 4, 3]
    assert decide(Asha(), *low, *high, parked(7, 99.0, 99.0)) == [7]


def test_asha_promotes_the_earlier_of_equal_trials_and_nan_last() -> None:
    """Ties in a rung go to the smaller number; no number is worse than any number."""
    new = Unstarted(count=1)
    trials = [parked(number, 0.5) for number in (3, 1, 2)]
    assert decide(Asha(), *trials, unstarted=new) == [1]
    diverged = [parked(number, value) for number, value in ((0, math.nan), (1, -math.inf))]
    assert decide(Asha(), *diverged, parked(2, 1e9), unstarted=new) == [2]


@settings(deadline=None, max_examples=60)
@given(
    table=st.lists(
        st.lists(st.one_of(st.integers(0, 9), st.just(math.nan)), min_size=1, max_size=12),
        min_size=1,
        max_size=12,
    ),
    eta=st.integers(2, 4),
)
def test_asha_is_the_textbook(table: list[list[float]], eta: int) -> None:
    """On one device it does what the rules say, followed literally from state to state."""
    assert trace_of(Asha(eta=eta), *table) == asha_by_the_rules(table, eta)


def asha_by_the_rules(table: list[list[float]], eta: int) -> list[int]:
    """Return the trial of each unit; promotions are remembered here, not read from ages."""

    def key(value: float, trial: int) -> tuple[bool, float, int]:
        return (True, 0.0, trial) if math.isnan(value) else (False, value, trial)

    rungs = [eta**k for k in range(5)]
    promoted: set[tuple[int, int]] = set()
    age: dict[int, int] = {}
    trace: list[int] = []

    def train(trial: int) -> None:
        """Up to the next rung, or to the end."""
        goal = next(rung for rung in rungs if rung > age[trial])
        while age[trial] < min(goal, len(table[trial])):
            age[trial] += 1
            trace.append(trial)

    def promotable() -> int | None:
        for rung in reversed(rungs):
            reached = sorted(
                (trial for trial in age if age[trial] >= rung),
                key=lambda trial: key(table[trial][rung - 1], trial),
            )
            for trial in reached[: len(reached) // eta]:
                if (trial, rung) not in promoted and rung < len(table[trial]):
                    promoted.add((trial, rung))
                    return trial
        return None

    while any(age.get(trial, 0) < len(row) for trial, row in enumerate(table)):
        trial = promotable()
        if trial is None and len(age) < len(table):
            trial = len(age)
            age[trial] = 0
        elif trial is None:
            paused = [each for each in age if age[each] < len(table[each])]
            highest = max(age[each] for each in paused)
            paused = [each for each in paused if age[each] == highest]
            trial = min(paused, key=lambda each: key(table[each][age[each] - 1], each))
            promoted.add((trial, age[trial]))
        train(trial)
    return trace


# Least attained service


def test_las_serves_its_queues_in_order() -> None:
    """All get a unit, then all a second one, then each is trained to its end in order."""
    las = LeastAttainedService(thresholds=(2,))
    assert trace_of(las, *[[0] * 4] * 3) == [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 2]


def test_las_lets_a_trial_climb_that_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """After waiting as long as it was served a trial is in the first queue, for one slice."""
    monkeypatch.setattr("optuna_hermes.policies._las.PATIENCE", 1.0)
    las = LeastAttainedService(thresholds=(2,))
    assert trace_of(las, *[[0] * 4] * 3) == [0, 1, 2] * 4


def test_las_measures_in_units() -> None:
    """Ten times longer units change nothing: thresholds are no seconds."""
    las = LeastAttainedService(thresholds=(2,))
    recordings = [Recording(values=(0.0,) * 4, seconds=(10.0,) * 4)] * 3
    trace = TrialSimulator(las, FixedList(recordings)).run()
    assert [each.number for each in trace.slices] == [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 2, 2]


def test_las_opens_a_samplers_trial_when_its_first_queue_is_empty() -> None:
    """A trial that would have had nothing is served behind those that had little."""
    las = LeastAttainedService(thresholds=(2,))
    young, old = attained(0, 1.0), attained(1, 2.0)
    assert decide(las, young, old, devices=3, unstarted=Unstarted(count=1)) == [0, None, 1]
    fixed = Unstarted(count=2, fixed=True)
    assert decide(las, young, old, devices=3, unstarted=fixed) == [None, None, 0]


def attained(number: int, seconds: float) -> TrialView:
    """A trial with a unit a second that has just stopped."""
    values = (0.0,) * int(seconds)
    steps = tuple(range(1, 1 + len(values)))
    curve = Curve(steps=steps, values=values, device_seconds=tuple(map(float, steps)))
    return TrialView(
        number=number,
        state="parked",
        curve=curve,
        attained_seconds=seconds,
        waiting_since=100.0,
    )


# Hermes of slopes


def test_convergence_by_hand() -> None:
    """The fall of the exponential mean over the window, in parts of the first value, a step."""
    # Means 8, 6, 4, 3, 2.5: over three reports (8 - 3) / 8 / 3, then (6 - 2.5) / 8 / 3.
    values, steps = (8.0, 4.0, 2.0, 2.0, 2.0), (1, 2, 3, 4, 5)
    assert convergence(values[:4], steps[:4]) == pytest.approx(5 / 24)
    assert convergence(values, steps) == pytest.approx(3.5 / 24)
    # Ten steps a report make a tenth of the speed; a NaN in between is left out.
    assert convergence((8.0, 4.0), (10, 20)) == pytest.approx(1 / 40)
    assert convergence((8.0, math.nan, 4.0), (1, 2, 3)) == pytest.approx(1 / 8)


def test_hermes_slope_prefers_the_fastest() -> None:
    """The fastest to fall goes first, one that rises or diverges last, newcomers before all."""
    trials = (
        parked(0, 1.0, 1.1, 1.2),
        parked(1, 1.0, 0.5, 0.4),
        parked(2, 1.0, 0.9, 0.8),
        parked(3, 1.0, 0.1, math.nan),
        parked(4, 5.0),
    )
    assert decide(HermesSlope(), *trials, devices=5) == [4, 1, 2, 0, 3]


def test_hermes_slope_keeps_a_trial_unless_another_is_clearly_faster() -> None:
    """The trial whose slice has just ended stays within the hysteresis, and no further."""
    here = parked(1, 1.0, 0.8, since=100.0, device="cpu:0")
    assert decide(HermesSlope(), here, parked(0, 1.0, 0.79)) == [1]
    assert decide(HermesSlope(), here, parked(0, 1.0, 0.77)) == [0]
    # Where it does not hold the device any more it has no such right.
    gone = parked(1, 1.0, 0.8, since=99.0, device="cpu:0")
    assert decide(HermesSlope(), gone, parked(0, 1.0, 0.79)) == [0]


# SLAQ


def test_slaq_predicts_its_own_family() -> None:
    """The next fall of a curve of the fitted form is predicted, in parts of the largest fall."""

    def loss(unit: int) -> float:
        return 1 / (0.02 * unit**2 + 0.1 * unit + 1) + 0.5

    for units in (3, 6, 12, 24, 48):
        values = tuple(loss(unit) for unit in range(1, units + 1))
        largest = max(a - b for a, b in pairwise(values))
        expected = (loss(units) - loss(units + 1)) / largest
        assert predicted_reduction(values) == pytest.approx(expected, rel=0.2)


def test_slaq_falls_back_to_the_last_change() -> None:
    """Two reports are no curve, and neither is one that rises: what fell last falls again."""
    assert predicted_reduction((5.0, 3.0)) == 1.0
    assert predicted_reduction((3.0, 5.0)) == 0.0
    assert predicted_reduction((1.0, 2.0, 3.0, 4.0, 5.0)) == 0.0


def test_slaq_measures_a_trial_by_its_own_changes() -> None:
    """A loss in other units promises the same; newcomers promise 1, diverged runs nothing."""
    values = (8.0, 5.0, 4.0, 3.5, 3.4)
    promised = predicted_reduction(values)
    assert 0 < promised < 1
    assert predicted_reduction(tuple(1e6 * v - 3 for v in values)) == pytest.approx(promised)
    assert predicted_reduction(()) == predicted_reduction((math.pi,)) == 1.0
    assert predicted_reduction((8.0, 5.0, math.nan)) == -1.0


def test_slaq_prefers_the_larger_promise() -> None:
    """A curve that still falls goes before one that has settled, whatever their levels."""
    settled = parked(0, 0.9, 0.1, 0.09, 0.089, 0.0889)
    falling = parked(1, 900.0, 800.0, 720.0, 650.0, 590.0)
    assert decide(Slaq(), settled, falling, parked(2, 1.0, math.inf), devices=3) == [1, 0, 2]


# Freeze-thaw


@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.2])
def test_power_laws_are_extrapolated(exponent: float) -> None:
    """The value at the end of a power law is forecast to a few per cent of its fall."""
    values = tuple(1 + 2 * unit**-exponent for unit in range(1, 16))
    forecast = extrapolate([moments_of(parked(0, *values).curve)], np.array([50.0]), span=1.0)
    assert forecast.mean[0] == pytest.approx(1 + 2 * 50**-exponent, abs=0.1)
    assert abs(forecast.mean[0] - 1 - 2 * 50**-exponent) < 3 * forecast.deviation[0]


def test_forecasts_further_off_are_less_certain() -> None:
    """Uncertainty grows with the horizon and falls with the number of reports."""
    values = tuple(1 + 2 * unit**-0.8 for unit in range(1, 16))
    moments = [moments_of(parked(0, *each).curve) for each in (values[:4], values[:4], values)]
    forecast = extrapolate(moments, np.array([5.0, 50.0, 50.0]), 1.0)
    near, far, known = forecast.deviation
    assert near < far
    assert known < far


@settings(deadline=None, max_examples=40)
@given(
    table=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=2, max_size=6),
    policy=st.sampled_from([Slaq(), FreezeThaw()]),
)
def test_the_scale_of_a_loss_means_nothing(table: list[list[int]], policy: Policy) -> None:
    """A loss that is multiplied by a power of two leads to the same order."""
    trials = [parked(n, *map(float, values)) for n, values in enumerate(table)]
    scaled = [parked(n, *(v * 2.0**20 for v in values)) for n, values in enumerate(table)]
    assert decide(policy, *trials, devices=3) == decide(policy, *scaled, devices=3)


def test_freeze_thaw_goes_on_with_what_will_be_lower() -> None:
    """Of runs at one level it prefers the one that falls, and a diverged one comes last."""
    policy = FreezeThaw()
    flat = parked(0, 0.5, 0.5, 0.5, 0.5)
    falling = parked(1, 0.8, 0.7, 0.6, 0.5)
    diverged = parked(2, 0.8, 0.1, math.nan)
    for seed in range(5):
        assert decide(policy, diverged, flat, falling, devices=3, seed=seed) == [1, 0, 2]


def test_freeze_thaw_draws_from_seed_and_units() -> None:
    """The target changes with the seed and with every unit, and with nothing else."""
    # The first is sure to be a little better, the second may be far better.
    trials = [parked(0, 0.5, 0.31, 0.3, 0.299), parked(1, 1.5, 0.9, 0.6, 0.4)]
    chosen = [decide(FreezeThaw(), *trials, seed=seed)[0] for seed in range(40)]
    assert set(chosen) == {0, 1}
    assert chosen == [decide(FreezeThaw(), *trials, seed=seed, now=3.0)[0] for seed in range(40)]
    elsewhere = [
        TrialView(number=9, state="done", curve=parked(9, *[9.0] * units).curve)
        for units in range(1, 40)
    ]
    by_units = {decide(FreezeThaw(), *trials, finished=(over,))[0] for over in elsewhere}
    assert by_units == {0, 1}


# When trials are opened


@pytest.mark.parametrize("policy", BY_CURVES, ids=ids)
def test_a_fixed_list_is_opened_first(policy: Policy) -> None:
    """Every trial of a list gets its first unit before any gets a second."""
    assert trace_of(policy, [5, 4, 3], [5, 1, 1], [9, 9, 9])[:3] == [0, 1, 2]


@pytest.mark.parametrize("policy", BY_CURVES, ids=ids)
@pytest.mark.parametrize(
    ("n_trials", "units", "opens"),
    # Trial m + 1 is due at (m + 1) ** (4 / 3) units: 2.52 for the second, 4.33 for the third.
    [(1, 2, False), (1, 3, True), (2, 4, False), (2, 5, True)],
)
def test_a_samplers_trial_is_opened_when_it_is_due(
    policy: Policy, n_trials: int, units: int, opens: bool
) -> None:
    """The more units there are in all, the more trials are opened, and not before."""
    first = parked(0, *(1.0 / unit for unit in range(1, units - n_trials + 2)))
    trials = [first, *(parked(number, 0.9) for number in range(1, n_trials))]
    chosen = decide(policy, *trials, unstarted=Unstarted(count=None))
    assert (chosen == [None]) == opens
    assert len(chosen) == 1


@pytest.mark.parametrize("policy", BY_CURVES, ids=ids)
def test_an_idle_device_opens_a_trial(policy: Policy) -> None:
    """A trial is opened where no trial waits, due or not; a first unit is finished before."""
    busy = TrialView(number=0, state="running", curve=parked(0, 1.0).curve)
    assert decide(policy, busy, unstarted=Unstarted(count=None)) == [None]
    unreported = parked(1)
    trials = (parked(0, *[1.0] * 99), unreported)
    assert decide(policy, *trials, unstarted=Unstarted(count=9, fixed=True)) == [1]


# Settings


@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (Asha, {"eta": 1}),
        (LeastAttainedService, {"thresholds": (3, 2)}),
        (LeastAttainedService, {"thresholds": (0, 2)}),
    ],
)
def test_bad_settings_are_refused(policy: type[Policy], arguments: dict[str, object]) -> None:
    """A setting out of its range is an error that names it, the rule and its value."""
    ((name, value),) = arguments.items()
    with pytest.raises(InvalidInputError) as caught:
        policy(**arguments)
    assert str(caught.value).startswith(f"{name} must be ")
    assert str(caught.value).endswith(f"but got {value!r}.")
