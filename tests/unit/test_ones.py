"""The evolution of ``ones``: guided by its score, within limits, and repeatable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.cluster.candidates import candidates, worth_of_samples
from optuna_hermes.cluster.job_metrics import measure_jobs
from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import ClusterJob
from optuna_hermes.cluster.ones_search import Evolution, Schedules, SearchSpace
from optuna_hermes.model import (
    Assignment,
    Curve,
    Device,
    Elastic,
    Snapshot,
    Speed,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import LeastAttainedService, Ones, Policy, Smd
from optuna_hermes.policies.step_model import fit_steps
from support.elastic import (
    Application,
    ElasticWork,
    Measured,
    StepTime,
    StepTimes,
    Validation,
)


def trial(
    number: int, units: int, left: int | None, seconds: float = 1.0, **fields: object
) -> TrialView:
    """A parked trial that has had so many units."""
    steps = tuple(range(1, units + 1))
    curve = Curve(
        steps=steps,
        values=tuple(1.0 / step for step in steps),
        device_seconds=tuple(seconds * step for step in steps),
    )
    view = TrialView(
        number=number, state="parked" if units else "pending", curve=curve, units_left=left
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def speeds(a: float, b: float, d: float, *where: tuple[int, int]) -> tuple[Speed, ...]:
    """Measurements that obey ``a M / w + b + d (w - 1)``."""
    return tuple(
        Speed(devices=w, batch_size=m, step_seconds=a * m / w + b + d * (w - 1)) for w, m in where
    )


def elastic(*measured: Speed, noise: float | None = 1e6, most: int = 4) -> Elastic:
    return Elastic(
        batch_size=16,
        batch_sizes=(16, 1024),
        devices=(1, most),
        noise_scale=noise,
        unit_samples=1e4,
        speeds=measured,
    )


def cluster(n_devices: int, per_host: int = 4) -> tuple[Device, ...]:
    return tuple(
        Device(id=f"{i // per_host}:{i % per_host}", host=str(i // per_host), free=True)
        for i in range(n_devices)
    )


def given_out(snapshot: Snapshot, policy: Policy | None = None) -> dict[int | None, Assignment]:
    decision = (policy or Ones()).decide(snapshot)
    return {each.trial: each for each in decision.assignments}


# Who goes first


def test_who_has_least_left_goes_first() -> None:
    """On one device the trial with the least utilisation left is chosen, seconds counted."""
    trials = (trial(0, 5, 9), trial(1, 5, 3), trial(2, 5, 2, seconds=4.0))
    assert list(given_out(Snapshot(devices=cluster(1), trials=trials))) == [1]


def test_a_trial_that_diverged_goes_last() -> None:
    """A loss that is no number keeps nobody waiting, and trains where a device is left."""
    good = trial(0, 5, 100)
    curve = replace(good.curve, values=(*good.curve.values[:-1], math.nan))
    diverged = trial(1, 5, 1, curve=curve)
    assert list(given_out(Snapshot(devices=cluster(1), trials=(good, diverged)))) == [0]
    assert set(given_out(Snapshot(devices=cluster(2), trials=(good, diverged)))) == {0, 1}


def test_progress_that_is_not_told_is_drawn_once() -> None:
    """Another seed draws another order; the same seed, the same; a report draws anew."""
    trials = tuple(trial(number, 5, None) for number in range(8))
    chosen = {
        seed: next(iter(given_out(Snapshot(devices=cluster(1), trials=trials, seed=seed))))
        for seed in range(8)
    }
    assert len(set(chosen.values())) > 1
    for seed, number in chosen.items():
        again = Snapshot(devices=cluster(1), trials=trials[::-1], seed=seed, now=99.0)
        assert next(iter(given_out(again))) == number


def test_what_took_as_long_before_is_expected_again() -> None:
    """Runs with the parameters of one that is over are expected to take its units."""
    over = tuple(
        replace(trial(10 + i, units, 0), state="done", params={"depth": depth})
        for i, (depth, units) in enumerate([(1, 6), (9, 600)])
    )
    short, long = trial(0, 5, None, params={"depth": 1}), trial(1, 5, None, params={"depth": 9})
    for seed in range(20):
        snapshot = Snapshot(devices=cluster(1), trials=(long, short), finished=over, seed=seed)
        assert list(given_out(snapshot)) == [0]


@pytest.mark.parametrize("policy", [Ones(), Smd()])
def test_jobs_without_units_go_by_what_was_expected_of_them(policy: Policy) -> None:
    """Of jobs that only have a prediction the one with the least left of it is served."""
    expected = {0: (3600.0, 0.0), 1: (70.0, 60.0), 2: (60.0, 0.0), 3: (900.0, 1900.0)}
    jobs = tuple(
        TrialView(number=n, state="pending", expected_seconds=seconds, attained_seconds=had)
        for n, (seconds, had) in expected.items()
    )
    for seed in range(8):
        snapshot = Snapshot(devices=cluster(1), trials=jobs, seed=seed)
        assert list(given_out(snapshot, policy)) == [1]
        left = replace(snapshot, trials=(jobs[0], jobs[2], jobs[3]))
        assert list(given_out(left, policy)) == [2]


@pytest.mark.parametrize("policy", [Ones(), Smd()])
def test_wide_trials_that_do_not_fit_leave_no_device_idle(policy: Policy) -> None:
    """However many with less left want more devices than are free, one that fits is assigned."""
    devices = (replace(cluster(2)[0], free=False), cluster(2)[1])
    wide = [trial(number, 5, 1, devices_wanted=2) for number in range(200)]
    snapshot = Snapshot(devices=devices, trials=(*wide, trial(200, 5, 999)))
    assert list(given_out(snapshot, policy)) == [200]


# How many devices, and what batch


def test_devices_go_where_they_are_of_use() -> None:
    """The one that has less left goes first, but the other one gets what it has no use for."""
    scales = elastic(*speeds(0.01, 0.0, 0.0, (1, 1024), (4, 1024)))
    stuck = elastic(*speeds(0.0, 10.24, 0.5, (1, 1024), (4, 1024)))
    trials = (trial(0, 1, 9, elastic=scales), trial(1, 1, 3, elastic=stuck))
    found = given_out(Snapshot(devices=cluster(4), trials=trials))
    assert {number: len(each.devices) for number, each in found.items()} == {0: 3, 1: 1}


def test_a_trial_is_tried_on_twice_what_it_was_measured_with() -> None:
    """Never more: devices beyond stay with those that are known to use them, or idle."""
    measured = elastic(*speeds(0.01, 0.1, 0.0, (1, 64), (2, 64)), most=16)
    (found,) = given_out(
        Snapshot(devices=cluster(16), trials=(trial(0, 1, 9, elastic=measured),))
    ).values()
    assert len(found.devices) == 4
    assert found.batch_size == 128


def test_the_batch_follows_the_noise() -> None:
    """A large step is chosen where noise is large, and a small one where it would be wasted."""
    measured = speeds(0.001, 0.01, 0.0, (1, 16), (1, 1024))
    sizes = []
    for noise in (1.0, 100.0, 1e6):
        view = trial(0, 1, 1, elastic=elastic(*measured, noise=noise))
        found = given_out(Snapshot(devices=cluster(1), trials=(view,)))
        sizes.append(found[0].batch_size)
    assert sizes == sorted(sizes, key=lambda size: size or 0)
    assert (sizes[0], sizes[-1]) == (16, 1024)


def test_a_batch_doubles_until_that_is_of_no_use() -> None:
    """Without noise a trial is tried with twice the batch, and keeps what proved to be best."""
    tried = [Speed(devices=1, batch_size=16, step_seconds=0.4)]
    taken = []
    for _ in range(5):
        view = trial(0, 1, 9, elastic=replace(elastic(*tried, noise=None), batch_size=16))
        (found,) = Ones().decide(Snapshot(devices=cluster(1), trials=(view,))).assignments
        assert found.batch_size is not None
        taken.append(found.batch_size)
        # Past 64 samples a device takes as long for each of them, and a little longer.
        seconds = 0.3 + 0.4 * max(found.batch_size / 64, 1.0) ** 1.5
        tried.append(Speed(devices=1, batch_size=found.batch_size, step_seconds=seconds))
    assert taken[:2] == [32, 64]
    assert max(taken) <= 512


def test_trials_that_are_not_elastic_keep_what_they_want() -> None:
    """A fixed trial gets just its devices and no batch size, and waits if they are not there."""
    pair = trial(0, 5, 2, devices_wanted=2)
    found = given_out(Snapshot(devices=cluster(4), trials=(pair,)))
    assert (len(found[0].devices), found[0].batch_size) == (2, None)
    assert given_out(Snapshot(devices=cluster(1), trials=(pair,))) == {}


def test_a_trial_that_one_host_holds_is_on_one() -> None:
    """Devices of a trial are side by side, whoever else is there."""
    wanted = (3, 2, 4, 3, 2, 2)
    trials = tuple(trial(i, 1, 5, devices_wanted=n) for i, n in enumerate(wanted))
    found = given_out(Snapshot(devices=cluster(16), trials=trials))
    assert all(len(each.devices) == wanted[each.trial or 0] for each in found.values())
    assert len({id_.split(":")[0] for id_ in found[2].devices}) == 1


# What a change costs


def holding(view: TrialView, *devices: str) -> TrialView:
    return replace(view, waiting_since=50.0, tier="resident", device=devices[0], devices=devices)


def test_a_trial_stays_unless_a_change_wins_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial on devices keeps them while it is not a tenth faster elsewhere."""
    measured = elastic(*speeds(0.01, 3.0, 0.4, (1, 16), (1, 1024), (3, 1024), (4, 1024)))
    parked = holding(trial(0, 1, 9, elastic=measured), "0:1", "0:2", "0:3")
    snapshot = Snapshot(now=50.0, devices=cluster(4), trials=(parked,))
    assert given_out(snapshot)[0].devices == ("0:1", "0:2", "0:3")
    monkeypatch.setattr("optuna_hermes.cluster.ones.GATE", 0.0)
    assert len(given_out(snapshot)[0].devices) == 4


def test_what_a_restart_costs_is_counted() -> None:
    """A trial that is nearly over is not worth a restart that takes longer."""
    parked = holding(trial(0, 5, 12), "0:0")
    comes = trial(1, 5, 10, switch_cost_seconds=0.0)
    snapshot = Snapshot(now=50.0, devices=cluster(1), trials=(parked, comes))
    assert list(given_out(snapshot)) == [1]
    dear = replace(snapshot, trials=(parked, replace(comes, switch_cost_seconds=30.0)))
    assert list(given_out(dear)) == [0]


# What lasts


@pytest.mark.parametrize("memory", [None, [], "x", {"plans": 3}, {"plans": [7, {"0:0": "?"}]}])
def test_the_memory_of_another_policy_does_no_harm(memory: object) -> None:
    """Memory that cannot be read is as if nothing were remembered."""
    snapshot = Snapshot(devices=cluster(2), trials=(trial(0, 1, 5), trial(1, 1, 5)), memory=memory)
    assert set(given_out(snapshot)) == {0, 1}


def test_the_best_schedules_are_remembered() -> None:
    """Each is the trial of every device, as JSON, and begins the next decision."""
    trials = tuple(trial(number, 1, 5) for number in range(3))
    decision = Ones().decide(Snapshot(devices=cluster(2), trials=trials))
    plan = decision.memory["plans"][0]
    assert plan == {id_: each.trial for each in decision.assignments for id_ in each.devices}


# The parts


@settings(max_examples=40, deadline=None)
@given(
    terms=st.tuples(*[st.floats(1e-3, 10.0)] * 3),
    where=st.sets(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([64, 512])), min_size=6),
)
def test_a_fit_finds_what_it_was_made_of(
    terms: tuple[float, float, float], where: set[tuple[int, int]]
) -> None:
    """Step times that obey the formula are met where nothing was measured."""
    model = fit_steps(speeds(*terms, *sorted(where)), None)
    assert model is not None
    a, b, d = terms
    found = model.step_seconds(np.array([3.0]), np.array([384.0]), np.array([0.0]))
    assert found[0] == pytest.approx(a * 128 + b + 2 * d, rel=0.02)


@pytest.mark.parametrize("left", [1, 3])
@pytest.mark.parametrize("noise", [None, 100.0])
@pytest.mark.parametrize("samples", [None, 1e4])
def test_the_time_to_the_end_is_that_of_its_steps(
    samples: float | None, noise: float | None, left: int
) -> None:
    """The next unit at the noise of now, the others at the best batch for the noise of later.

    Where the size of a unit is unknown, one on the devices that it wants is as long as its units.
    """
    a, b, d, e = 0.01, 0.5, 0.2, 0.7

    def step(devices: int, batch_size: int, hosts: int) -> float:
        return a * batch_size / devices + b + d * (devices - 1) + e * (hosts > 1)

    def unit(devices: int, batch_size: int, hosts: int, noise: float | None) -> float:
        worth = 1.0 if noise is None else (noise + 16) / (noise + batch_size)
        return 1e4 / (batch_size * worth) * step(devices, batch_size, hosts)

    measured = tuple(
        Speed(devices=w, hosts=h, batch_size=m, step_seconds=step(w, m, h))
        for w, m, h in product([1, 2, 4], [16, 64], [1, 2])
        if h <= w
    )
    stretched = replace(elastic(*measured, noise=noise), batch_sizes=(16, 64), unit_samples=samples)
    # Units tell more than what was expected.
    view = trial(0, 2, left, elastic=stretched, devices_wanted=2, expected_seconds=1e9)
    (found,) = candidates(Snapshot(devices=cluster(4), trials=(view,)), most=9)
    assert (found.batch_sizes, found.counts) == ((16, 32, 64), (1, 2, 3, 4))
    assert found.wanted == 2
    assert not found.seconds[:, 0].any()
    scale = 1.0 if samples else 0.5 / unit(2, 16, 1, noise)
    for (index, size), w, hosts in product(enumerate([16, 32, 64]), [1, 2, 4], [1, 2]):
        hosts = min(hosts, w)
        later = None if noise is None else max(noise, 64.0)
        rest = min(unit(w, other, hosts, later) for other in [16, 32, 64])
        expected = unit(w, size, hosts, noise) + (left - 1) * rest
        assert found.seconds[index, w, hosts - 1] == pytest.approx(scale * expected, rel=1e-3)


@pytest.mark.parametrize(
    ("units", "seconds", "left"),
    [(None, 6.0, 30), (0, 2.0, 20), (5, 2.0, 15), (20, 2.0, 20), (60, 2.0, 60)],
)
def test_what_is_not_told_is_as_of_others_with_its_parameters(
    units: int | None, seconds: float, left: int
) -> None:
    """Of all where there are none; one that has overrun has half of its life before it.

    On average a unit more is left.
    """
    alike = replace(trial(1, 20, 0, seconds=2.0), state="done", params={"lr": 0.1})
    other = replace(trial(2, 40, 0, seconds=10.0), state="done", params={"lr": 0.2})
    views = () if units is None else (trial(0, units, None, seconds=2.0, params={"lr": 0.1}),)
    snapshot = Snapshot(
        devices=cluster(1),
        trials=views,
        finished=(alike, other),
        unstarted=Unstarted(count=1 - len(views)),
    )
    found = [candidates(replace(snapshot, seed=seed), most=1)[0].use for seed in range(300)]
    assert np.mean(found) == pytest.approx(seconds * (left + 1), rel=0.15)


def test_measurements_that_are_none_are_left_out() -> None:
    """Zero, negative, NaN and infinite seconds fit nothing."""
    bad = [Speed(devices=1, batch_size=8, step_seconds=s) for s in (0.0, -1.0, math.nan, math.inf)]
    assert fit_steps(tuple(bad), None) is None
    model = fit_steps((*bad, Speed(devices=2, batch_size=8, step_seconds=0.4)), None)
    assert model is not None
    assert model.sample_seconds == pytest.approx(0.1)


def test_samples_are_worth_less_beyond_the_noise() -> None:
    """At the noise scale a sample is worth about half; unknown noise makes no difference."""
    batches = np.array([16.0, 100.0])
    worth = worth_of_samples(elastic(noise=100.0), batches)
    assert worth.tolist() == pytest.approx([1.0, 116 / 200])
    for unknown in (None, math.nan, -1.0):
        assert worth_of_samples(elastic(noise=unknown), batches).tolist() == [1.0, 1.0]


def field(seconds: Sequence[Sequence[float]], n_hosts: int = 1) -> SearchSpace:
    """Runs by their seconds on 0, 1, 2, ... devices, with one batch size."""
    table = np.array(seconds, dtype=float)[:, None, :, None].repeat(2, axis=3)
    n_devices = table.shape[2] - 1
    return SearchSpace(
        seconds=table,
        wanted=np.ones(len(table), dtype=np.int64),
        value=np.ones(len(table)),
        switch_seconds=np.zeros(len(table)),
        gate=0.0,
        owner=np.full(n_devices, -1),
        host=np.arange(n_devices) * n_hosts // n_devices,
    )


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(0.3, 1.0)), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_evolution_comes_near_the_best_there_is(rows: list[tuple[float, float]], seed: int) -> None:
    """On four devices no schedule is more than a hundredth better than the one that is found."""
    table = field(
        [
            [0.0, *(total / devices**power for devices in range(1, 5))]
            for total, power in sorted(rows)
        ]
    )
    nobody = Schedules(owner=np.full((1, 4), -1), level=np.zeros((1, len(rows)), dtype=np.int64))
    best = Evolution(table, np.random.default_rng(seed)).best(nobody, population=16, generations=4)
    found = table.scores(best.owner[:1], best.level[:1])[0]
    everything = np.array(list(product(range(-1, len(rows)), repeat=4)))
    level = np.zeros((len(everything), len(rows)), dtype=np.int64)
    assert found <= 0.99 * table.scores(everything, level).min()


def test_no_generation_loses_the_best() -> None:
    """More generations never end with a worse schedule."""
    rng = np.random.default_rng(0)
    totals = np.sort(rng.uniform(1, 100, 12))
    table = field([[0.0, *(t / d ** rng.uniform(0.3, 1.0) for d in range(1, 17))] for t in totals])
    seeds = Schedules(owner=np.full((1, 16), -1), level=np.zeros((1, 12), dtype=np.int64))
    scores = []
    for generations in (0, 4, 16):
        evolution = Evolution(table, np.random.default_rng(1))
        best = evolution.best(seeds, population=8, generations=generations)
        scores.append(table.scores(best.owner[:1], best.level[:1])[0])
    assert scores == sorted(scores, reverse=True)


def test_contenders_are_those_with_least_left() -> None:
    """Of many trials those that have least to do compete, whatever their numbers are."""
    trials = tuple(trial(number, 5, 100 - number) for number in range(50))
    found = candidates(Snapshot(devices=cluster(1), trials=trials), 5)
    assert [each.number for each in found] == [49, 48, 47, 46, 45]


# All together


def tiny() -> Application:
    """Trains four times as fast on four devices where batches are large, and hardly otherwise."""
    table = [
        Measured(
            shape=(devices,),
            hosts=1,
            devices=devices,
            local_batch=batch,
            time=StepTime(step_seconds=0.05 * devices + 0.01 * batch, sync_seconds=0.05 * devices),
        )
        for devices, batch in product((1, 2, 3, 4), (4, 256))
    ]
    trainings = {
        batch: Validation(
            progress=(1000.0, 2000.0),
            steps=(16000 // batch, 32000 // batch),
            metric=(0.5, 0.6),
            grad_sqr=(1.0, 1.0),
            grad_var=(1e4, 1e4),
        )
        for batch in (16, 256)
    }
    return Application("tiny", StepTimes(table), trainings)


def test_jobs_that_may_be_stretched_are_done_sooner() -> None:
    """In the simulator elastic jobs under ``ones`` take less time than as they were submitted."""
    means = []
    for policy, most in ((Ones(), 4), (LeastAttainedService(), None)):
        work = ElasticWork(application=tiny(), batch_size=32, most_devices=most)
        jobs = [ClusterJob(number=i, submitted=30.0 * i, work=work, devices=2) for i in range(6)]
        trace = JobSimulator(
            policy, jobs, groups={None: [4]}, slice_seconds=20.0, restart_seconds=1.0
        ).run()
        means.append(measure_jobs(trace).mean_completion_seconds)
    assert means[0] < 0.9 * means[1]
