"""The kernel for jobs: who runs when, on what, and what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.cluster.job_estimates import Clairvoyant
from optuna_hermes.cluster.job_hosts import Hosts
from optuna_hermes.cluster.job_metrics import BUSY_WATTS, IDLE_WATTS, measure_jobs
from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import (
    ClusterJob,
    FixedWork,
    JobTrace,
    Placement,
    Work,
)
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Assignment, Decision, Snapshot, TrialView
from optuna_hermes.policies import Fifo, Policy, Ranked, RoundRobin, place


def job(
    number: int, at: float, seconds: float, devices: int = 1, group: str | None = None
) -> ClusterJob:
    return ClusterJob(
        number=number, submitted=at, work=FixedWork(seconds), devices=devices, group=group
    )


def ends(trace: JobTrace) -> dict[int, tuple[float, float]]:
    return {record.job.number: (record.started, record.finished) for record in trace.records}


class Shortest(Ranked):
    """Policy that puts the trial first that is expected to take least."""

    def rank(self, trial: TrialView) -> tuple[float, int]:
        assert trial.expected_seconds is not None
        return trial.expected_seconds - trial.attained_seconds, trial.number


class Arrival(Ranked):
    """Policy whose ranks are equal where jobs come at one time, and have no numbers."""

    def rank(self, trial: TrialView) -> tuple[float]:
        return (trial.submitted // 10,)


class Whole(Policy):
    """A ranked policy that the kernel shows everything."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.shown: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        self.shown.append(snapshot)
        return self.inner.decide(snapshot)


JOBS = [job(0, 0, 10), job(1, 1, 10, devices=2), job(2, 2, 3), job(3, 20, 1)]


def test_the_queue_stops_at_a_job_that_does_not_fit() -> None:
    """First in, first out keeps a device for a wide job, and with backfill gives it away."""
    strict = JobSimulator(Fifo(backfill=False), JOBS, groups={None: [2]}).run()
    assert ends(strict) == {0: (0, 10), 1: (10, 20), 2: (20, 23), 3: (20, 21)}
    filled = JobSimulator(Fifo(), JOBS, groups={None: [2]}).run()
    assert ends(filled) == {0: (0, 10), 2: (2, 5), 1: (10, 20), 3: (20, 21)}


def test_a_job_that_a_host_can_hold_is_held_by_one() -> None:
    """Two free devices of two hosts are no place for a job of two."""
    jobs = [job(0, 0, 10, devices=3), job(1, 0, 10, devices=3), job(2, 1, 5, devices=2)]
    trace = JobSimulator(Fifo(), jobs, groups={None: [4, 4]}).run()
    assert ends(trace)[2] == (10, 15)


def test_a_job_goes_where_least_is_left_over() -> None:
    """A small job fills a host that is broken into, so that a large one finds a whole host."""
    jobs = [job(0, 0, 10, devices=2), job(1, 1, 10, devices=2), job(2, 2, 5, devices=4)]
    trace = JobSimulator(Fifo(), jobs, groups={None: [4, 4]}).run()
    assert ends(trace)[2] == (2, 7)


def test_a_large_job_takes_whole_hosts() -> None:
    """A job of one and a half hosts waits for a host that is empty, and begins on two."""
    jobs = [job(0, 0, 10), job(1, 1, 20), job(2, 2, 5, devices=6)]
    trace = JobSimulator(Fifo(), [*jobs], groups={None: [4, 4]}).run()
    assert ends(trace)[2] == (2, 7), "both small ones are on one host"
    wide = [job(0, 0, 10, devices=3), job(1, 0, 20, devices=3), job(2, 2, 5, devices=6)]
    assert ends(JobSimulator(Fifo(), wide, groups={None: [4, 4]}).run())[2] == (20, 25)


def test_a_large_job_is_on_as_few_hosts_as_possible() -> None:
    """The largest hosts first, whatever they are called."""
    devices = Hosts(None, [4, 8, 8]).devices
    wide = TrialView(number=0, state="pending", devices_wanted=16)
    (given,) = place(Snapshot(devices=devices), [wide])
    assert {id_.partition(":")[0] for id_ in given.devices} == {"1", "2"}


def test_a_large_job_stays_on_its_hosts() -> None:
    """A slice's end does not move it where its devices are free."""
    jobs = [job(0, 0, 25), job(1, 0, 40, devices=3), job(2, 1, 40, devices=3)]
    trace = JobSimulator(
        Fifo(), jobs, groups={None: [2, 2]}, slice_seconds=10, restart_seconds=1
    ).run()
    assert ends(trace)[1] == (0, 40)


def test_a_group_has_its_own_hosts() -> None:
    """A job waits for its own group, whatever is free elsewhere; a policy sees its group only."""
    policy = Whole(Fifo())
    jobs = [job(0, 0, 10, group="a"), job(1, 0, 10, group="a"), job(2, 0, 1, group="b")]
    trace = JobSimulator(policy, jobs, groups={"a": [1], "b": [8]}).run()
    assert ends(trace) == {0: (0, 10), 1: (10, 20), 2: (0, 1)}
    assert {len(snapshot.devices) for snapshot in policy.shown} == {1, 8}
    assert trace.n_devices == 9


def test_a_job_that_no_group_can_hold_is_refused() -> None:
    """A job that wants more than its group has never holds up the others."""
    trace = JobSimulator(
        Fifo(backfill=False), [job(0, 0, 1, devices=5), job(1, 1, 1)], groups={None: [2, 2]}
    ).run()
    assert ends(trace) == {1: (1, 2)}


def test_slices_give_everybody_a_turn() -> None:
    """Two jobs on one device alternate, and each pays for its return."""
    jobs = [job(0, 0, 4), job(1, 0, 4)]
    trace = JobSimulator(RoundRobin(), jobs, groups={None: [1]}, slice_seconds=2).run()
    assert ends(trace) == {0: (0, 6), 1: (2, 8)}
    assert [record.run_seconds for record in trace.records] == [4, 4]
    paid = JobSimulator(
        RoundRobin(), jobs, groups={None: [1]}, slice_seconds=2, restart_seconds=1
    ).run()
    # 0: 2 s; 1: 2 s; 0: 1 s to restart and 1 s; 1 likewise; each once more.
    assert ends(paid) == {0: (0, 10), 1: (2, 12)}
    assert [record.restarts for record in paid.records] == [2, 2]


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7, 1.1, 3.3, 33.3, 59.9])
def test_slices_of_any_length_end(seconds: float) -> None:
    """Also where a multiple of the length is rounded below what it is divided into."""
    jobs = [job(0, 0.0, 20 * seconds), job(1, 0.0, 20 * seconds)]
    trace = JobSimulator(Fifo(), jobs, groups={None: [1]}, slice_seconds=seconds).run()
    assert {number: end for number, (_, end) in ends(trace).items()} == {
        0: pytest.approx(20 * seconds),
        1: pytest.approx(40 * seconds),
    }


def test_a_slice_below_the_resolution_of_the_clock_is_refused() -> None:
    """It would never end."""
    jobs = [job(0, 1e15, 10.0), job(1, 1e15, 10.0)]
    with pytest.raises(InvalidInputError, match="resolution"):
        JobSimulator(Fifo(), jobs, groups={None: [1]}, slice_seconds=1e-3).run()


def test_a_job_whose_end_no_clock_can_hold() -> None:
    """It ends at an infinite time, and so does the replay."""
    trace = JobSimulator(Fifo(), [job(0, 1e308, 1e308)], groups={None: [1]}).run()
    assert ends(trace) == {0: (1e308, math.inf)}


def test_who_keeps_its_place_pays_nothing() -> None:
    """The end of a slice costs nothing where the same job goes on."""
    jobs = [job(0, 0, 10, devices=2), job(1, 0, 10, devices=2)]
    trace = JobSimulator(Fifo(), jobs, groups={None: [2]}, slice_seconds=3, restart_seconds=5).run()
    assert ends(trace) == {0: (0, 10), 1: (10, 20)}


@dataclass(frozen=True)
class Halving(Work):
    """10 amounts: the first 4 at one a device and second, the others at half of that."""

    total: float = 10.0

    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        return (sum(devices), 4.0) if done < 4 else (sum(devices) / 2, 10.0)


def test_work_goes_on_at_its_own_speed() -> None:
    """Each part of a job takes its own time, and a slice in between changes nothing."""
    jobs = [ClusterJob(number=0, submitted=0.0, work=Halving(), devices=2)]
    assert ends(JobSimulator(Fifo(), jobs, groups={None: [2]}).run()) == {0: (0, 8)}
    both = [*jobs, job(1, 0, 1, devices=2)]
    trace = JobSimulator(Fifo(), both, groups={None: [2]}, slice_seconds=0.75).run()
    assert ends(trace)[0] == pytest.approx((0, 8))


def test_a_policy_is_held_to_its_contract() -> None:
    """Devices that are taken or too few, and jobs that do not wait, are refused."""

    class Wrong(Policy):
        def __init__(self, *assignments: Assignment, **more: Any) -> None:
            self.answer = Decision(assignments=assignments, **more)

        def decide(self, snapshot: Snapshot) -> Decision:
            return self.answer

    first = Assignment(trial=0, devices=("0:0",))
    for wrong, message in (
        (Wrong(first, Assignment(trial=1, devices=("0:0",))), "each once .* device 0:0"),
        (Wrong(first, first), "each once .* trial 0"),
        (Wrong(Assignment(trial=0, devices=("0:0", "0:1"))), "as many devices .* but got 2"),
        (Wrong(Assignment(trial=None, devices=("0:0",))), "that wait"),
        (Wrong(replace(first, batch_size=-7)), "batch sizes .* but got -7"),
        (Wrong(replace(first, slice_seconds=-1.0)), "slices .* but got -1.0"),
        (Wrong(first, powered_down=("nope",)), "powers down .* but got nope"),
        (Wrong(first, pruned=(1,)), "stops no job for good but got"),
    ):
        cluster = JobSimulator(wrong, [job(0, 0, 1), job(1, 0, 1)], groups={None: [2]})
        with pytest.raises(InvalidInputError, match=message):
            cluster.run()

    class Ranking(Ranked):
        def rank(self, trial: TrialView) -> tuple[float, int]:
            raise SystemExit(3)

    with pytest.raises(InvalidInputError, match=r"Policy Ranking raised SystemExit\(3\) at "):
        JobSimulator(Ranking(), [job(0, 0, 1)], groups={None: [1]}).run()

    class Mixed(Ranked):
        def rank(self, trial: TrialView) -> tuple[object]:
            return ("one" if trial.number else 1,)

    with pytest.raises(InvalidInputError, match="Policy Mixed raised TypeError"):
        JobSimulator(Mixed(), [job(0, 0, 1), job(1, 0, 1)], groups={None: [1]}).run()
    with pytest.raises(ValueError, match="serve every job"):
        JobSimulator(Wrong(), [job(0, 0, 1)], groups={None: [1]}).run()


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        ([job(0, 0, 1), job(0, 1, 1)], {}, "different numbers"),
        ([job(0, 0, 1, group="x")], {}, "group must be one of None"),
        ([], {"slice_seconds": 0.0}, "slice_seconds"),
        ([], {"restart_seconds": -1.0}, "restart_seconds"),
        ([], {"groups": {None: []}}, "must have a host"),
        ([], {"groups": {None: [2, 0]}}, "must have a host"),
    ],
)
def test_what_cannot_be_is_refused(jobs: list[ClusterJob], options: dict, message: str) -> None:
    """One line says what is wrong with jobs, groups and lengths."""
    with pytest.raises(InvalidInputError, match=message):
        JobSimulator(Fifo(), jobs, **{"groups": {None: [1]}, **options})


@pytest.mark.parametrize(
    ("at", "seconds", "devices"), [(-1, 1, 1), (0, 0, 1), (0, math.inf, 1), (0, 1, 0)]
)
def test_a_job_is_checked(at: float, seconds: float, devices: int) -> None:
    """A job comes at some time, takes some time, and wants a device."""
    with pytest.raises(InvalidInputError):
        job(0, at, seconds, devices)


lists = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.sampled_from([1, 1, 1, 2, 3, 5])),
    min_size=1,
    max_size=25,
).map(lambda drawn: [job(n, *each) for n, each in enumerate(drawn)])


@settings(max_examples=150, deadline=None)
@given(
    jobs=lists,
    backfill=st.booleans(),
    slices=st.sampled_from([None, 4.0]),
    ranked=st.sampled_from([Fifo, Shortest, Arrival]),
)
def test_of_a_ranked_queue_a_part_is_enough(
    jobs: Sequence[ClusterJob], backfill: bool, slices: float | None, ranked: type[Ranked]
) -> None:
    """A ranked policy decides on the first of each size as it does on all that wait."""
    policy = ranked(backfill=backfill)
    options = {"groups": {None: [3, 2]}, "slice_seconds": slices, "estimator": Clairvoyant()}
    part = JobSimulator(policy, jobs, **options).run()
    whole = JobSimulator(Whole(policy), jobs, **options).run()
    assert part == whole


def test_a_ranked_policy_that_decides_itself_sees_all_jobs() -> None:
    """As in a broker: it may count those that run, wait or are over."""
    seen: list[tuple[list[str], int]] = []

    class Mine(Arrival):
        def decide(self, snapshot: Snapshot) -> Decision:
            states = sorted(each.state for each in snapshot.trials)
            seen.append((states, len(snapshot.finished)))
            return super().decide(snapshot)

    jobs = [job(0, 0, 1), job(1, 0, 9), *(job(n, 0, 5) for n in range(2, 6))]
    JobSimulator(Mine(), jobs, groups={None: [2]}).run()
    assert seen[:2] == [(["pending"] * 6, 0), (["pending"] * 4 + ["running"], 1)]


def test_jobs_that_are_over_are_not_copied_for_a_ranked_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not look at them: with 1.7 million jobs the copies would take hours."""
    shown: list[int] = []
    decide = Ranked.decide

    def spy(self: Ranked, snapshot: Snapshot) -> Decision:
        shown.append(len(snapshot.finished))
        return decide(self, snapshot)

    monkeypatch.setattr(Ranked, "decide", spy)
    jobs = [job(n, 0, 1) for n in range(5)]
    JobSimulator(Fifo(), jobs, groups={None: [1]}).run()
    assert shown == [0] * 5


@settings(max_examples=100, deadline=None)
@given(jobs=lists, slices=st.sampled_from([None, 3.0]))
def test_no_device_is_used_twice_and_every_job_is_done(
    jobs: Sequence[ClusterJob], slices: float | None
) -> None:
    """Every job gets exactly its work, and at no time are there more than the devices."""
    trace = JobSimulator(Fifo(), jobs, groups={None: [3, 2]}, slice_seconds=slices).run()
    assert sorted(record.job.number for record in trace.records) == [each.number for each in jobs]
    for record in trace.records:
        assert record.run_seconds == pytest.approx(record.job.work.total)
        assert record.device_seconds == pytest.approx(record.job.work.total * record.job.devices)
        assert record.queueing_seconds >= -1e-9
    moments = {record.started for record in trace.records}
    if slices is None:
        for now in moments:
            on = [r for r in trace.records if r.started <= now < r.finished]
            assert sum(record.job.devices for record in on) <= 5


def test_metrics_by_hand() -> None:
    """Two jobs on one device: 10 and 20 s to complete, 0 and 10 s in the queue."""
    metrics = measure_jobs(
        JobSimulator(Fifo(), [job(0, 5, 10), job(1, 5, 10)], groups={None: [1, 1]}).run()
    )
    assert metrics.utilisation == 1.0
    metrics = measure_jobs(
        JobSimulator(Fifo(), [job(0, 5, 10), job(1, 5, 10)], groups={None: [1]}).run()
    )
    assert metrics.mean_completion_seconds == metrics.median_completion_seconds == 15
    assert metrics.p99_completion_seconds == pytest.approx(19.9)
    assert metrics.mean_queueing_seconds == 5
    assert metrics.makespan_seconds == 20
    assert metrics.delayed_fraction == 0.5
    assert metrics.mean_finish_time_ratio == 1.5
    assert metrics.device_seconds == 20
    assert metrics.energy_joules == 20 * 300


def test_jobs_too_short_for_their_times_have_no_utilisation() -> None:
    """Times in nanoseconds: a second's end is its begin, by rounding."""
    trace = JobSimulator(Fifo(), [job(0, 1.8e18, 1)], groups={None: [1]}).run()
    assert math.isnan(measure_jobs(trace).utilisation)


def test_a_device_that_lies_idle_takes_energy_too() -> None:
    """Two devices, of which one has a job for 10 of 20 s and the other for none."""
    jobs = [job(0, 0, 5), job(1, 15, 5)]
    trace = JobSimulator(Fifo(), jobs, groups={None: [2]}).run()
    assert measure_jobs(trace).energy_joules == 10 * BUSY_WATTS + 30 * IDLE_WATTS


def test_a_policy_is_shown_what_was_estimated_and_who_is_done() -> None:
    """Estimates are device seconds, times of devices count each, and what is over is shown."""
    policy = Whole(Fifo())
    jobs = [job(0, 0, 10, devices=2), job(1, 20, 1)]
    JobSimulator(policy, jobs, groups={None: [2]}, estimator=Clairvoyant()).run()
    assert [trial.expected_seconds for trial in policy.shown[0].trials] == [20]
    assert [(trial.number, trial.attained_seconds) for trial in policy.shown[1].finished] == [
        (0, 20)
    ]
