"""Elastic jobs: read between what was measured, counted in one kind of work, seen as they were."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from optuna_hermes.cluster.job_simulator import JobSimulator
from optuna_hermes.cluster.jobs import ClusterJob, JobProgress
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Assignment, Decision, Snapshot, Speed, TrialView
from optuna_hermes.policies import Policy
from support.elastic import (
    Application,
    ElasticWork,
    Measured,
    StepTime,
    StepTimes,
    Validation,
    read_application,
    read_elastic_jobs,
)

TRACES = "OPTUNA_HERMES_TRACES"
SHAPES = [(1,), (2,), (4,), (1, 1), (2, 2), (4, 4)]
NOISE = 300.0
SLICE = 10_000.0


def seconds(hosts: float, density: float, local_batch: float) -> float:
    """Step times that are linear in everything, so that reading between them is exact."""
    return 0.1 + 0.01 * local_batch + 0.5 * (hosts - 1) + 0.2 * density


def step_time(hosts: float, density: float, local_batch: float) -> StepTime:
    return StepTime(
        step_seconds=seconds(hosts, density, local_batch), sync_seconds=0.5 * (hosts - 1)
    )


def table() -> list[Measured]:
    shaped = [
        Measured(
            shape=shape,
            hosts=len(shape),
            devices=sum(shape),
            local_batch=batch,
            time=step_time(len(shape), sum(shape) / len(shape), batch),
        )
        for shape, batch in product(SHAPES, (10, 20, 40))
    ]
    counted = [
        Measured(
            shape=None,
            hosts=6,
            devices=devices,
            local_batch=batch,
            time=step_time(6, devices / 6, batch),
        )
        for devices, batch in product((6, 24), (10, 20))
    ]
    return [*shaped, *counted]


def training(batch_size: int, noise: float = NOISE) -> Validation:
    """Two epochs of 1000 steps of 10 samples, at a gradient noise scale."""
    worth = (noise + 10) / (noise + batch_size) * batch_size / 10
    steps = [round(1e6 / worth), round(2e6 / worth)]
    return Validation(
        progress=(1e6, 2e6),
        steps=tuple(steps),
        metric=(0.5, 0.7),
        grad_sqr=(1.0, 1.0),
        grad_var=(noise / 10, 2 * noise / 10),
    )


def application() -> Application:
    trainings = {batch: training(batch) for batch in (10, 40, 160)}
    return Application("tiny", StepTimes(table()), trainings)


def test_step_times_are_read_between_what_was_measured() -> None:
    """Between hosts, devices a host and batch sizes a linear table is read without an error."""
    times = StepTimes(table())
    for shape, batch in (((4,), 15), ((1, 1), 33), ((2, 2, 3, 3), 13), ((2,) * 6, 20)):
        density = sum(shape) / len(shape)
        found = times.at(shape, batch).step_seconds
        assert found == pytest.approx(seconds(len(shape), density, batch))


def test_beyond_what_was_measured_nothing_is_known() -> None:
    """More hosts, more devices a host and larger parts have no limits, or other ones."""
    times = StepTimes(table())
    assert times.limits((4,)) == (10, 40)
    assert times.limits((4,) * 5) == (10, 20)
    assert times.limits((4,) * 7) is None
    assert times.limits((5,) * 6) is None


def test_a_step_that_fits_on_no_device_takes_several_passes() -> None:
    """Gradients are accumulated: a pass more costs a step without its synchronisation."""
    planned = application().plan((1, 1), 160)
    assert planned is not None
    samples, taken = planned
    assert samples == 160
    assert taken == pytest.approx(2 * seconds(2, 1, 40) - 0.5)


def test_a_device_takes_as_much_as_was_measured_at_least() -> None:
    """A batch that is too small for the devices grows, and past the largest one it is refused."""
    assert application().plan((4,), 12) == (40, pytest.approx(seconds(1, 4, 10)))
    small = Application("small", StepTimes(table()), {b: training(b) for b in (2, 30)})
    assert small.plan((4,), 30) is None
    with pytest.raises(ValueError, match="not measured"):
        small.speed(0, (4,), 30)


def test_a_step_is_worth_what_the_noise_scale_says() -> None:
    """Between batch sizes steps are read as a noise scale has it, and so exactly."""
    tiny = application()
    for batch in (10, 25, 40, 100, 160):
        expected = (NOISE + 10) / (NOISE + batch) * batch / 10
        assert tiny.worth(0, batch) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="trained with 10 to 160"):
        tiny.worth(0, 161)


def test_two_trainings_that_ascend_are_needed() -> None:
    """One batch size says nothing of others, and time does not go back."""
    with pytest.raises(InvalidInputError, match="two batch sizes"):
        Application("one", StepTimes(table()), {10: training(10)})
    back = replace(training(40), steps=(5, 5))
    with pytest.raises(InvalidInputError, match="batch size 40 must have progress"):
        Application("back", StepTimes(table()), {10: training(10), 40: back})


def test_a_job_shows_what_it_has_trained_and_no_more() -> None:
    """Epochs to come change nothing of what a policy sees."""
    trainings = {batch: training(batch) for batch in (10, 40)}
    other = {
        batch: replace(each, metric=(0.5, 0.1), grad_var=(each.grad_var[0], 9.0))
        for batch, each in trainings.items()
    }
    progress = JobProgress(done=1.5e6, batch_size=40, trained={((2,), 40)}, stretches=[80.0])
    seen = []
    for each in (trainings, other):
        tiny = Application("tiny", StepTimes(table()), each)
        seen.append(ElasticWork(application=tiny, batch_size=10, most_devices=4).shown(progress))
    first = seen[0]
    assert seen[1]["elastic"] == first["elastic"]
    assert first["units_left"] == 1
    assert first["curve"].device_seconds == (80.0,)
    assert first["elastic"].noise_scale == pytest.approx(NOISE)
    speed = Speed(devices=2, batch_size=40, step_seconds=seconds(1, 2, 20))
    (shown,) = first["elastic"].speeds
    assert replace(shown, step_seconds=speed.step_seconds) == speed
    assert shown.step_seconds == pytest.approx(speed.step_seconds)
    blind = ElasticWork(
        application=application(), batch_size=10, most_devices=4, shows_epochs_left=False
    )
    assert blind.shown(progress)["units_left"] is None


class Scripted(Policy):
    """Gives the only job these devices and this batch size, one after another, and looks on."""

    def __init__(self, *script: tuple[int, int | None]) -> None:
        self.script = list(script)
        self.shown: list[TrialView] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        (trial,) = snapshot.trials
        self.shown.append(trial)
        count, batch_size = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        ids = tuple(device.id for device in snapshot.devices[:count])
        return Decision(assignments=(Assignment(trial=0, devices=ids, batch_size=batch_size),))


def finish(policy: Scripted) -> tuple[float, int]:
    """Return the end of a job that wants two devices, and its restarts, of 7 seconds each."""
    work = ElasticWork(application=application(), batch_size=40, most_devices=4)
    job = ClusterJob(number=0, submitted=0.0, work=work, devices=2)
    trace = JobSimulator(
        policy, [job], groups={None: [4]}, slice_seconds=SLICE, restart_seconds=7.0
    ).run()
    return trace.records[0].finished, trace.records[0].restarts


def remaining(done: float, shape: tuple[int, ...], batch_size: int) -> float:
    """Seconds from there to the end of both epochs."""
    tiny = application()
    total = 0.0
    for epoch, end in enumerate(tiny.ends):
        if end > done:
            total += (end - done) / tiny.speed(epoch, shape, batch_size)
            done = end
    return total


def test_other_devices_cost_a_restart_and_another_batch_size_does_not() -> None:
    """The cost of a change of devices is added once, and to change the batch is free."""
    assert finish(Scripted((2, None))) == (pytest.approx(remaining(0, (2,), 40)), 0)
    done = SLICE * application().speed(0, (2,), 40)
    batch, restarts = finish(Scripted((2, None), (2, 160)))
    assert batch == pytest.approx(SLICE + remaining(done, (2,), 160))
    assert restarts == 0
    more, restarts = finish(Scripted((2, None), (4, None)))
    assert more == pytest.approx(SLICE + 7.0 + remaining(done, (4,), 40))
    assert restarts == 1


def test_speeds_are_seen_once_they_were_trained_at() -> None:
    """A policy sees what it has tried, the devices that the job is on, and no other speeds."""
    policy = Scripted((2, None), (4, 160), (4, 160))
    finish(policy)
    tried = [
        [(speed.devices, speed.batch_size) for speed in trial.elastic.speeds]
        if trial.elastic
        else []
        for trial in policy.shown[:4]
    ]
    assert tried == [[], [(2, 40)], [(2, 40), (4, 160)], [(2, 40), (4, 160)]]
    assert [len(trial.current_devices) for trial in policy.shown[:3]] == [0, 2, 4]


def write_application(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    lines += [f"{place},{batch},0.5,0.1" for place, batch in product(("1", "2", "12"), (5, 50))]
    (folder / "placements.csv").write_text("\n".join(lines))
    lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time", "6,6,5,0.9,0.4"]
    (folder / "scalability.csv").write_text("\n".join(lines))
    for batch, steps in ((10, 100), (20, 60)):
        lines = ["progress,iteration,metric,grad_sqr,grad_var", f"100.0,{steps},0.3,1.0,2.0"]
        (folder / f"validation-{batch}.csv").write_text("\n".join(lines))


def test_published_files_are_read(tmp_path: Path) -> None:
    """Models and workloads become jobs, which take what they want unless they may be stretched."""
    write_application(tmp_path / "tiny")
    tiny = read_application(tmp_path / "tiny")
    assert tiny.name == "tiny"
    assert tiny.speed(0, (1, 2), 20) == pytest.approx(100 / 60 / 0.5)
    workload = tmp_path / "workload.csv"
    workload.write_text("name,time,application,num_replicas,batch_size\na-0,53,tiny,2,20\n")
    (job,) = read_elastic_jobs(workload, {"tiny": tiny}, most_devices=4)
    assert (job.number, job.submitted, job.devices, dict(job.params)) == (
        *(0, 53.0, 2),
        {"application": "tiny"},
    )
    assert job.work.shown(JobProgress())["elastic"].devices == (1, 4)
    (rigid,) = read_elastic_jobs(workload, {"tiny": tiny})
    assert rigid.work.shown(JobProgress()) == {}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a-0,53,other,2,20", "An application must be one of tiny but got 'other'"),
        ("a-0,53,tiny,two,20", "line 2 must have a number as num_replicas but has 'two'"),
        ("a-0,53,tiny,2,21", "A batch size of tiny must be 10 to 20 but got 21"),
        ("a-0,53,tiny", "line 2 must have a column batch_size but has none"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(tmp_path: Path, row: str, words: str) -> None:
    """One line says what is wrong."""
    write_application(tmp_path / "tiny")
    workload = tmp_path / "workload.csv"
    workload.write_text(f"name,time,application,num_replicas,batch_size\n{row}\n")
    with pytest.raises(InvalidInputError, match=words):
        read_elastic_jobs(workload, {"tiny": read_application(tmp_path / "tiny")})
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_elastic_jobs(tmp_path / "missing.csv", {})


def published() -> list[Path]:
    folder = os.environ.get(TRACES)
    return sorted(Path(folder, "elastic", "models").glob("*")) if folder else []


@pytest.mark.skipif(not published(), reason=f"{TRACES} names no folder with job traces")
@pytest.mark.parametrize("folder", published(), ids=lambda path: path.name)
def test_what_was_left_out_is_read_between_the_others(folder: Path) -> None:
    """The work of a batch size that is left out is met within 6 %, all epochs together."""
    whole = read_application(folder)
    validations = dict(zip(whole._batches, whole._validations, strict=True))
    for batch in whole._batches[1:-1]:
        rest = {other: each for other, each in validations.items() if other != batch}
        without = Application(folder.name, whole.times, rest)
        steps = sum(
            (end - before) / without.worth(epoch, batch)
            for epoch, (before, end) in enumerate(
                zip((0.0, *without.ends), without.ends, strict=False)
            )
        )
        assert steps == pytest.approx(validations[batch].steps[-1], rel=0.06)


@pytest.mark.skipif(not published(), reason=f"{TRACES} names no folder with job traces")
@pytest.mark.parametrize("folder", published(), ids=lambda path: path.name)
def test_every_workload_can_run_as_it_was_submitted(folder: Path) -> None:
    """Each job's own devices and batch size were measured, or lie between what was."""
    applications = {folder.name: read_application(folder)}
    workloads = folder.parent.parent / "workloads"
    for path in sorted(workloads.glob("*.csv")):
        lines = path.read_text().splitlines()
        own = [line for line in lines[1:] if line.split(",")[2] == folder.name]
        for line in set(each.partition(",")[2].partition(",")[2] for each in own):
            _, devices, batch_size = line.split(",")
            work = ElasticWork(application=applications[folder.name], batch_size=int(batch_size))
            rate, until = work.speed(0.0, (int(devices),), None)
            assert rate > 0
            assert until == work.application.ends[0]
