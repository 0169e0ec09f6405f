"""Quasi-shortest service first: what is learned about trials and jobs, and what comes of it."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.cluster.job_estimates import (
    HOUR,
    Clairvoyant,
    Estimator,
    Learned,
    Noisy,
)
from optuna_hermes.cluster.job_metrics import measure_jobs
from optuna_hermes.cluster.job_replay import ShortestRemaining
from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import ClusterJob, FixedWork, JobRecord
from optuna_hermes.cluster.similar import Service
from optuna_hermes.model import Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import Fifo, Qssf
from optuna_hermes.simulator import FixedList, Recording, TrialSimulator

ONE = (Device(id="cpu:0", free=True),)


def done(number: int, seconds: float, **params: object) -> TrialView:
    return TrialView(number=number, state="done", attained_seconds=seconds, params=params)


def parked(number: int, attained: float, **params: object) -> TrialView:
    return TrialView(
        number=number,
        state="parked",
        attained_seconds=attained,
        waiting_since=0.0,
        params=params,
    )


def chosen(policy: Qssf, snapshot: Snapshot) -> list[int | None]:
    return [each.trial for each in policy.decide(snapshot).assignments]


LAYERS = [done(n, 100.0 * (1 + n % 4), layers=1 + n % 4) for n in range(40)]
"""A trial takes 100 s for each of its layers."""


@pytest.fixture(params=[True, False], ids=["lightgbm", "without"])
def lightgbm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With LightGBM, and where it is not installed."""
    if not request.param:
        monkeypatch.setitem(sys.modules, "lightgbm", None)
    return bool(request.param)


def test_what_a_trial_takes_is_learned(lightgbm: bool) -> None:
    """Parameters say what a trial takes, with trees and without."""
    service = Service(LAYERS)
    for layers in (1, 2, 3, 4):
        (seconds,) = service.of([parked(99, 0.0, layers=layers)])
        assert seconds == pytest.approx(100 * layers, rel=0.15)
    assert 200 <= service.typical <= 300


def test_the_nearest_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rolling estimate is the geometric mean of the five nearest, and of those as near."""
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    finished = [done(n, 2.0**n, x=float(n)) for n in range(8)]
    assert Service(finished).of([parked(9, 0.0, x=0.0)]) == [pytest.approx(4.0)]
    assert Service(finished).of([parked(9, 0.0, x=7.0)]) == [pytest.approx(32.0)]
    wide = [done(n, 2.0**n, lr=10.0**-n) for n in range(8)]
    assert Service(wide).of([parked(9, 0.0, lr=1e-7)]) == [pytest.approx(32.0)], "in logarithms"
    kinds = [done(n, 10.0 if n % 2 else 90.0, kind="b" if n % 2 else "a") for n in range(20)]
    assert Service(kinds).of([parked(9, 0.0, kind="b")]) == [pytest.approx(10.0)]


def test_trials_that_lack_a_choice_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that neither has does not part them; one that none has had parts it from all."""
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    plain = [done(n, 10.0, x=1.0) for n in range(5)]
    kernels = [done(n, 1000.0, x=1.0, kernel="a") for n in range(5, 10)]
    service = Service(plain + kernels)
    assert service.of([parked(99, 0.0, x=1.0)]) == [pytest.approx(10.0)]
    assert service.of([parked(99, 0.0, x=1.0, kernel="a")]) == [pytest.approx(1000.0)]
    assert service.of([parked(99, 0.0, x=1.0, kernel="b")]) == [pytest.approx(100.0)]


def test_no_decision_imports_lightgbm() -> None:
    """It is imported when the policy is made: trials wait for a decision."""
    code = (
        "import sys; from optuna_hermes.policies import make_policy; make_policy('qssf'); "
        "print('lightgbm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_what_has_least_left_goes_first(lightgbm: bool) -> None:
    """A long trial that is nearly done goes before a short one that has just begun."""
    trials = (parked(50, 380.0, layers=4), parked(51, 10.0, layers=1), parked(52, 10.0, layers=3))
    for left in ([50, 51, 52], [51, 52], [52]):
        snapshot = Snapshot(
            devices=ONE, trials=tuple(r for r in trials if r.number in left), finished=tuple(LAYERS)
        )
        assert chosen(Qssf(), snapshot) == left[:1]


def test_a_trial_that_overran_is_expected_to_overrun_by_as_much_again() -> None:
    """Just over its prediction it is nearly done; far over it a shorter one goes first."""
    other = parked(51, 50.0, layers=3)
    for attained, expected in ((101.0, 50), (400.0, 51)):
        trials = (parked(50, attained, layers=1), other)
        snapshot = Snapshot(devices=ONE, trials=trials, finished=tuple(LAYERS))
        assert chosen(Qssf(), snapshot) == [expected]


def test_before_five_are_finished_the_order_is_that_of_arrival() -> None:
    """With four finished trials nothing is predicted, with five it is."""
    trials = (parked(50, 30.0, layers=4), parked(51, 20.0, layers=1))
    for n, expected in ((4, 50), (5, 51)):
        assert chosen(Qssf(), Snapshot(devices=ONE, trials=trials, finished=tuple(LAYERS[:n]))) == [
            expected
        ]


def test_trials_that_were_not_trained_to_their_ends_teach_nothing() -> None:
    """A trial that failed early says nothing of how long one like it takes."""
    trials = (parked(50, 30.0, layers=4), parked(51, 20.0, layers=1))
    failed = tuple(replace(each, state="failed") for each in LAYERS)
    assert chosen(Qssf(), Snapshot(devices=ONE, trials=trials, finished=failed)) == [50]


def test_a_new_trial_is_a_typical_one() -> None:
    """It is opened when what waits is expected to take longer; at first only if nothing waits."""
    short, long = parked(50, 10.0, layers=1), parked(51, 10.0, layers=4)
    some = Unstarted(count=None)
    for trial, finished, expected in (
        (short, LAYERS, 50),
        (long, LAYERS, None),
        (long, LAYERS[:4], 51),
    ):
        snapshot = Snapshot(devices=ONE, trials=(trial,), finished=tuple(finished), unstarted=some)
        assert chosen(Qssf(), snapshot) == [expected]
    fixed = Snapshot(devices=ONE, trials=(long,), unstarted=Unstarted(count=3, fixed=True))
    assert chosen(Qssf(), fixed) == [51], "those of a list too"


def lasting(*seconds: float) -> list[Recording]:
    return [Recording(values=(0.5,) * 4, seconds=(s,) * 4, params={"size": s}) for s in seconds]


def test_equal_trials_of_a_list_end_one_after_another() -> None:
    """No trial waits half trained for the others: each ends when it would under `fifo`."""
    trace, fifo = (
        TrialSimulator(policy, FixedList(lasting(*[1.0] * 12)), n_devices=2).run()
        for policy in (Qssf(), Fifo())
    )
    assert trace.finished == fifo.finished


def test_of_a_list_the_shortest_are_opened_first(lightgbm: bool) -> None:
    """So the mean completion is sooner than in their order, as parameters say what each takes."""
    recordings = lasting(*random.Random(0).choices([1.0, 2.0, 4.0, 8.0], k=30))
    means = {
        name: fmean(TrialSimulator(policy, FixedList(recordings)).run().finished.values())
        for name, policy in (("qssf", Qssf()), ("fifo", Fifo()))
    }
    assert means["qssf"] < 0.9 * means["fifo"]


def test_no_more_of_a_list_are_opened_than_are_left_to_open() -> None:
    """Three devices and two trials to open: the two shortest of the list, by their numbers."""
    listed = tuple(
        TrialView(number=60 + layers, state="pending", params={"layers": layers})
        for layers in (4, 3, 2, 1)
    )
    snapshot = Snapshot(
        devices=tuple(Device(id=f"cpu:{n}", free=True) for n in range(3)),
        finished=tuple(LAYERS),
        unstarted=Unstarted(count=2, fixed=True, listed=listed),
    )
    assert set(chosen(Qssf(), snapshot)) == {61, 62}


def test_a_short_trial_goes_before_one_that_has_begun() -> None:
    """The expected time of a trial counts, be it learned or what the trial itself brings."""
    short = TrialView(number=1, state="pending", submitted=5.0, expected_seconds=2.0)
    trials = (parked(0, 1.0), short)
    snapshot = Snapshot(devices=ONE, trials=trials, finished=tuple(LAYERS))
    assert chosen(Qssf(), snapshot) == [1]


def job(number: int, at: float, seconds: float, devices: int = 1) -> ClusterJob:
    return ClusterJob(
        number=number, submitted=at, work=FixedWork(seconds), devices=devices, group="g"
    )


def test_times_devices() -> None:
    """A wide job goes after a longer one that takes less device time."""
    jobs = [job(0, 0, 10, devices=2), job(1, 1, 5, devices=2), job(2, 1, 6)]
    options = {"groups": {"g": [2]}, "estimator": Clairvoyant()}
    order = [
        r.job.number for r in JobSimulator(Qssf(backfill=False), jobs, **options).run().records
    ]
    assert order == [0, 2, 1]
    trace = JobSimulator(ShortestRemaining(backfill=False), jobs, **options).run()
    assert [record.job.number for record in trace.records] == [0, 1, 2], "by time alone"


def test_the_oracle_interrupts_where_it_may() -> None:
    """With slices the shortest remaining time goes first, and the mean is the least there is."""
    jobs = [job(0, 0, 10), job(1, 1, 2)]
    options = {"groups": {"g": [1]}, "estimator": Clairvoyant()}
    alone = JobSimulator(ShortestRemaining(), jobs, **options).run()
    assert [record.finished for record in alone.records] == [10, 12]
    sliced = JobSimulator(ShortestRemaining(), jobs, slice_seconds=1, **options).run()
    assert [(r.job.number, r.finished) for r in sliced.records] == [(1, 4), (0, 12)]


KINDS = [
    job(n, 60.0 * n, (30.0 if n % 3 else 3000.0) * (1 + n % 7 / 20), devices=1 if n % 3 else 2)
    for n in range(250)
]
"""Long jobs want two devices, short ones one."""


def test_shortest_first_from_what_was_learned(lightgbm: bool) -> None:
    """On a trace whose jobs are of two kinds the learned order is nearly the oracle's."""
    options = {"groups": {"g": [4]}}
    fifo, learned, oracle = (
        measure_jobs(JobSimulator(policy, KINDS, estimator=estimator, **options).run())
        for policy, estimator in (
            (Fifo(backfill=False), None),
            (Qssf(backfill=False), Learned()),
            (Qssf(backfill=False), Clairvoyant()),
        )
    )
    assert learned.mean_queueing_seconds < 0.7 * fifo.mean_queueing_seconds
    assert learned.mean_completion_seconds < 1.1 * oracle.mean_completion_seconds


class Told(Estimator):
    """Remembers what an estimator says."""

    def __init__(self, inner: Estimator) -> None:
        self.inner = inner
        self.said: dict[int, float | None] = {}

    def submitted(self, job: ClusterJob) -> float | None:
        self.said[job.number] = self.inner.submitted(job)
        return self.said[job.number]

    def finished(self, record: JobRecord) -> None:
        self.inner.finished(record)


def estimates(jobs: Sequence[ClusterJob]) -> dict[int, float | None]:
    told = Told(Learned())
    JobSimulator(Fifo(), jobs, groups={"g": [1000]}, estimator=told).run()
    return told.said


@pytest.mark.parametrize("now", [600.0, 9_000.0, 15_000.0])
def test_the_future_changes_no_estimate(now: float) -> None:
    """Jobs that are not over, or have not come, may change: estimates up to now are the same."""

    def changed(each: ClusterJob) -> ClusterJob:
        over = each.submitted + each.work.total
        return each if over <= now else job(each.number, each.submitted, 7 * each.work.total)

    past = [each for each in KINDS if each.submitted <= now]
    other = [changed(each) for each in past]
    after = [job(1000 + n, now + 1 + n, 5.0) for n in range(50)]
    # A job's own devices are known when it comes.
    other = [
        ClusterJob(
            number=a.number, submitted=a.submitted, work=b.work, devices=a.devices, group="g"
        )
        for a, b in zip(past, other, strict=True)
    ]
    assert [each.work for each in past] != [each.work for each in other]
    real, made_up = estimates(KINDS), estimates([*other, *after])
    assert {n: real[n] for n in range(len(past))} == {n: made_up[n] for n in range(len(past))}


def test_what_was_read_is_what_was_over_by_then() -> None:
    """History that ends later than the present teaches nothing."""
    now = KINDS[200].submitted
    for known in (KINDS[:200], [j for j in KINDS[:200] if j.submitted + j.work.total <= now]):
        learned = Learned(trees=False)
        learned.read(known, now)
        assert len(learned._known) == len(
            [j for j in KINDS[:200] if j.submitted + j.work.total <= now]
        )


def by(user: str, group: str = "g", devices: int = 1, at: float = 0.0) -> ClusterJob:
    work = FixedWork(100.0)
    return ClusterJob(
        number=0, submitted=at, work=work, devices=devices, group=group, params={"user": user}
    )


def test_without_trees_jobs_of_the_most_specific_kind_that_is_known_count() -> None:
    """Of group, devices and user; else of group and user; else of as many devices; else an hour."""
    learned = Learned(trees=False)
    assert learned.submitted(by("ada")) == HOUR
    learned.finished(JobRecord(by("ada"), 0.0, 100.0, 100.0, 100.0, 0))
    for job, seconds in (
        (by("ada"), 100.0),
        (by("ada", devices=4), 4 * 100.0),
        (by("bob", "h"), 100.0),
        (by("bob", devices=4), 4 * HOUR),
    ):
        assert learned.submitted(job) == pytest.approx(seconds)


def test_features_are_of_recent_jobs_of_each_kind() -> None:
    """Means, the last one and quantiles of times, times since events, and counts of submissions."""
    learned = Learned(trees=False)
    for number, at in enumerate((0.0, 500.0, 1000.0)):
        learned._submitted(replace(by("ada", at=at), number=number))
    for number, (ended, seconds) in enumerate(((600.0, 1.0), (700.0, math.e))):
        learned._finished(replace(by("ada"), number=number), ended, seconds)
    row = learned._submitted(by("ada", at=1001.0))
    specific, of_user, of_devices = np.split(np.array(row[5:]), 3)
    expected = [0.2, 0.02, 1.0, 0.0, 1.0, 1.0, 1.0, 301.0, 2.0, 3.0]
    assert specific.tolist() == of_user.tolist() == of_devices.tolist() == pytest.approx(expected)
    fresh = np.split(np.array(learned._submitted(by("bob", "h", devices=2, at=1001.0))[5:]), 3)
    assert all(np.isnan(kind[:-2]).all() and not kind[-2:].any() for kind in fresh)


def test_estimates_are_the_same_twice() -> None:
    """The same jobs in the same order lead to the same trees."""
    assert estimates(KINDS) == estimates(KINDS)


def test_the_errors_are_those_of_the_authors_replay() -> None:
    """A tenth is within 10 %, half within 50 %, 70 % within 100 % and 90 % within ten times."""
    noisy = Noisy(seed=3)
    ratios = np.array([noisy.submitted(job(n, 0, 1000.0)) / 1000.0 for n in range(5_000)])
    errors = np.abs(ratios - 1)
    for share, bound in ((0.1, 0.1), (0.5, 0.5), (1.0, 100.0)):
        assert np.mean(errors <= bound) == pytest.approx(share, abs=0.02) or share == 1.0
    # Half of the larger errors are downwards, where they end at nothing.
    assert np.mean(ratios <= 2.0) == pytest.approx(0.7 + 0.15, abs=0.02)
    assert np.mean(ratios <= 11.0) == pytest.approx(0.9 + 0.05, abs=0.02)
    assert ratios.min() > 0
    assert noisy.submitted(job(5, 0, 10.0)) == Noisy(seed=3).submitted(job(5, 9, 10.0))
    assert noisy.submitted(job(5, 0, 10.0)) != Noisy(seed=4).submitted(job(5, 0, 10.0))


@settings(max_examples=25, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 1e6), min_size=5, max_size=12),
    params=st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "c"]),
            st.one_of(
                st.floats(), st.integers(-3, 3), st.booleans(), st.sampled_from("xyz"), st.none()
            ),
        ),
        min_size=12,
        max_size=12,
    ),
)
def test_any_parameters_will_do(seconds: list[float], params: list[dict[str, object]]) -> None:
    """Whatever trials were made of, an estimate lies within what trials took."""
    finished = [done(n, s, **params[n]) for n, s in enumerate(seconds)]
    for (estimate,) in (Service(finished).of([parked(99, 0.0, **each)]) for each in params):
        assert min(seconds) * 0.99 <= estimate <= max(seconds) * 1.01
