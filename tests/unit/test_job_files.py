"""Traces of jobs: files, policies by name, and ``simulate --jobs``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from optuna_hermes.cli import run
from optuna_hermes.cluster.job_files import read_jobs
from optuna_hermes.cluster.job_metrics import measure_jobs
from optuna_hermes.cluster.job_replay import (
    JOB_POLICIES,
    NEED_SLICES,
    NEED_VALUES,
    JobRules,
    one_group,
    simulate_jobs,
)
from optuna_hermes.cluster.jobs import ClusterJob, FixedWork
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import check_simulated_policy
from support.benchmarks import benchmark

TINY = "submitted,seconds,devices,group,user\n" + "".join(
    f"{60 * n},{20 if n % 3 else 900},{1 + n % 2},{'ab'[n % 2]},u{n % 3}\n" for n in range(40)
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.csv"
    path.write_text(TINY)
    return path


def test_columns_of_a_file(tiny: Path) -> None:
    """Every column is read; the jobs come in the order of submission."""
    found = read_jobs(tiny)
    assert found.name == "tiny"
    assert len(found.jobs) == 40
    job = found.jobs[1]
    assert (job.number, job.submitted, job.work.total, job.devices) == (1, 60.0, 20.0, 2)
    assert (job.group, job.params) == ("b", {"user": "u1"})


def test_columns_of_published_traces(tmp_path: Path) -> None:
    """Philly's names are understood, also gzipped; dates count from the Monday before."""
    path = tmp_path / "jobs.csv.gz"
    text = (
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-11 01:00:00,66.0,2,132.0,x\n"
        "2017-10-10T00:00:30Z,5.5,1,5.5,y\n"
    )
    path.write_bytes(gzip.compress(text.encode()))
    jobs = read_jobs(path).jobs
    assert [job.submitted for job in jobs] == [86_430, 2 * 86_400 + 3_600]
    assert [(job.group, job.devices, job.work.total) for job in jobs] == [
        ("y", 1, 5.5),
        ("x", 2, 66),
    ]
    (tmp_path / "vc_nodes.csv").write_text("vc,node num\nx,3\n")
    philly = benchmark("_jobs_philly").read_philly(tmp_path)
    assert (philly.nodes, len(philly.jobs)) == ({"x": 3}, 1)


def test_a_file_that_may_name_devices_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blanks around names mean nothing; a file without devices, but with other columns, is told."""
    path = tmp_path / "jobs.csv"
    options = ["simulate", "--jobs", str(path), "--devices", "8"]
    path.write_text("submitted, seconds , devices,gpus\n0,60,4,4\n")
    assert [job.devices for job in read_jobs(path).jobs] == [4]
    assert run(options) == 0
    assert capsys.readouterr().err == ""
    path.write_text("submitted,seconds,user\n0,60,u,\n")
    assert run(options) == 0
    assert capsys.readouterr().err == ""
    path.write_text("submitted,seconds,gpus,who,\n0,60,4,u,\n")
    assert run(options) == 0
    assert capsys.readouterr().err == (
        f"Each job wants 1 device: {path} has no column devices or num_gpus or gpu_num but "
        "gpus, who.\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("submitted,seconds\n", "must have a job"),
        ("submitted,seconds\n1,0\n", "must have a job with a device and a time"),
        ("submitted,seconds,devices\n1,2,-1\n", "devices must be a whole number"),
        ("submitted,seconds\n1,2\n1,3,600\n", "line 3: a line must have 2 cells, .* but has 3: q"),
        ("submitted,devices\n1,2\n", "line 2: a job must have 'seconds'"),
        (
            "submitted,seconds\n1,2\n1,-2\n",
            "line 3: seconds must be a number of 0 or more .* got '-2'",
        ),
        ("submitted,seconds\n1,1e308\n", "line 2: seconds must be .* below 1e15 but got '1e308'"),
        ("submitted,seconds\n1e308,2\n", "line 2: submitted must be"),
        ("submitted,seconds\nsoon,2\n", "line 2: submitted must be"),
        ("submitted,seconds\n-1,2\n", "line 2: submitted must be"),
        ("submitted,seconds,devices\n1,2,1.5\n", "devices must be a whole number"),
        ("submitted,seconds,devices\n1,2,inf\n", "devices must be a whole number"),
        ("submitted,seconds\n1,2\n2017-10-10,2\n", "everywhere, or nowhere"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    """One line names the file, the line and the rule."""
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_jobs(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """A file that is missing or damaged is an error of its caller's."""
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_jobs(tmp_path / "missing.csv")
    for name, data in (("jobs.csv.gz", b"\x1f\x8bno"), ("jobs.csv", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidInputError, match=r"must be a CSV file|cannot be read"):
            read_jobs(tmp_path / name)


def test_every_policy_runs_jobs(tiny: Path) -> None:
    """All that can be named end all jobs; the oracle's mean is the least."""
    jobs = read_jobs(tiny).jobs
    rules = JobRules(groups={"a": [2, 1], "b": [4]})
    means = {}
    for name in [*JOB_POLICIES, "hermes", "las", "round-robin", "asha"]:
        check_simulated_policy(name, JOB_POLICIES)
        trace = simulate_jobs(jobs, name, rules)
        assert len(trace.records) == len(jobs)
        means[name] = measure_jobs(trace).mean_completion_seconds
    assert min(means.values()) == pytest.approx(min(means["sjf"], means["srtf"]))


def test_what_came_before_is_learned_from(tiny: Path) -> None:
    """A policy that has read the first half estimates the second better from the start."""
    jobs = read_jobs(tiny).jobs
    rules = JobRules(groups={"a": [1], "b": [2]})
    cold = measure_jobs(simulate_jobs(jobs[20:], "qssf", rules))
    warm = measure_jobs(simulate_jobs(jobs[20:], "qssf", rules, past=jobs[:20]))
    assert warm.mean_completion_seconds <= cold.mean_completion_seconds


def test_hosts_of_one_size() -> None:
    """The last host is smaller where the devices do not come out even."""
    assert one_group(20, 8) == {None: [8, 8, 4]}
    with pytest.raises(InvalidInputError, match="got 0 devices"):
        one_group(0, 8)


def test_simulate_jobs_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints settings and a result for each policy, the reference among them."""
    options = ["--policy", "qssf,sjf", "--devices", "2", "--devices-per-host", "2", "--json"]
    assert run(["simulate", "--jobs", str(tiny), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["policies"] == ["qssf", "sjf", "fifo"]
    assert document["settings"]["jobs"] == 40
    by_name = {row["policy"]: row for row in document["results"]}
    assert set(by_name) == {"qssf", "sjf", "fifo"}
    assert by_name["sjf"]["mean_queueing_seconds"] < by_name["fifo"]["mean_queueing_seconds"]
    assert all(row["trace"] == "tiny" and row["jobs"] == 40 for row in by_name.values())


def test_simulate_jobs_as_a_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is a table, and a note about jobs that fit nowhere."""
    assert run(["simulate", "--jobs", str(tiny), "--devices", "1", "--slice-seconds", "60"]) == 0
    shown = capsys.readouterr()
    assert "tiny: 20 of 40 jobs, 1 device" in shown.out
    assert "1.00x" in shown.out
    assert shown.err == "20 jobs left out that want more than 1 device.\n"


def test_jobs_of_no_device_or_no_time_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published traces have jobs of processors alone, and some that ended as they began."""
    path = tmp_path / "helios.csv"
    path.write_text("submit_time,duration,gpu_num\n0,60,0\n5,60,1\n6,0,1\n7,9,2\n")
    found = read_jobs(path)
    assert [(job.number, job.submitted) for job in found.jobs] == [(0, 5.0), (1, 7.0)]
    assert found.left_out == 2
    assert run(["simulate", "--jobs", str(path), "--devices", "2"]) == 0
    shown = capsys.readouterr()
    assert "helios: 2 jobs, 2 devices" in shown.out
    assert shown.err == "2 jobs left out that had no device or took no time.\n"


def test_policies_that_need_slices_are_named(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing interrupts jobs they decide as another one, and do so with that."""
    options = ["simulate", "--jobs", str(tiny), "--devices", "2", "--policy", "las,qssf"]
    assert run(options) == 0
    said = capsys.readouterr().err
    assert said == "Without --slice-seconds fifo-backfill decides as they do: las.\n"
    assert run([*options, "--slice-seconds", "600"]) == 0
    assert capsys.readouterr().err == ""
    jobs, rules = read_jobs(tiny).jobs, JobRules(groups={"a": [2, 1], "b": [4]})
    (backfill, *others) = (
        simulate_jobs(jobs, name, rules).records for name in ("fifo-backfill", *NEED_SLICES)
    )
    assert others == [backfill] * len(NEED_SLICES)


def test_policies_that_need_values_are_named(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs report none, so they decide as another one; slices do not help."""
    options = ["simulate", "--jobs", str(tiny), "--devices", "2", "--slice-seconds", "600"]
    assert run([*options, "--policy", "hermes,las,asha"]) == 0
    said = capsys.readouterr().err
    assert said == "As jobs report no values fifo-backfill decides as they do: hermes, asha.\n"
    jobs = read_jobs(tiny).jobs
    for seconds in (None, 60.0):
        rules = JobRules(groups={"a": [2], "b": [2]}, slice_seconds=seconds)
        (backfill, *others) = (
            simulate_jobs(jobs, name, rules).records for name in ("fifo-backfill", *NEED_VALUES)
        )
        assert others == [backfill] * len(NEED_VALUES)


def test_srtf_interrupts_jobs_by_itself(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The title says so, and its slices are bounded as any."""
    options = ["--policy", "srtf", "--devices", "2"]
    assert run(["simulate", "--jobs", str(tiny), *options]) == 0
    title = " ".join(capsys.readouterr().out.split())
    assert "never interrupted, but by srtf every 10:00 min, at no cost" in title
    assert run(["simulate", "--jobs", str(tiny), *options, "--slice-seconds", "60"]) == 0
    title = " ".join(capsys.readouterr().out.split())
    assert "srtf every" not in title
    assert "interrupted every 1:00 min, at no cost" in title
    years = tmp_path / "years.csv"
    years.write_text("submitted,seconds\n0,1e12\n")
    assert run(["simulate", "--jobs", str(years), *options]) == 2
    assert "Without --slice-seconds srtf must give 1000000 slices" in capsys.readouterr().err


@pytest.mark.parametrize(("slice_seconds", "end"), [(None, 700.0), (60.0, 160.0)])
def test_srtf_has_slices_of_its_own_only_where_none_are_given(
    slice_seconds: float | None, end: float
) -> None:
    """A short job that comes next begins when the slice of the long one is over."""
    jobs = [
        ClusterJob(number=number, submitted=float(number), work=FixedWork(seconds), devices=1)
        for number, seconds in enumerate((2000.0, 100.0))
    ]
    rules = JobRules(groups={None: [1]}, slice_seconds=slice_seconds)
    ends = {each.job.number: each.finished for each in simulate_jobs(jobs, "srtf", rules).records}
    assert ends == {0: 2100.0, 1: end}


def test_jobs_that_all_want_more_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says how many devices there would have to be."""
    path = tmp_path / "wide.csv"
    path.write_text("submitted,seconds,devices\n0,9,4\n1,9,2\n")
    assert run(["simulate", "--jobs", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must fit on 1 device but each wants 2 or more" in line


def test_las_has_thresholds_of_hours(tmp_path: Path) -> None:
    """A job of minutes overtakes one of hours: both are not in the last queue after a slice."""
    path = tmp_path / "two.csv"
    path.write_text("submitted,seconds\n0,20000\n100,7000\n")
    rules = JobRules(groups={None: [1]}, slice_seconds=600)
    assert [
        each.job.number for each in simulate_jobs(read_jobs(path).jobs, "las", rules).records
    ] == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "With jobs a policy must be one of hermes, "),
        (["--policy", "srft"], "CLASS, but got 'srft': did you mean 'srtf'?"),
        (["--policy", "energy:fifo"], "got 'energy:fifo': name 'fifo' alone"),
        (["--study-name", "s"], "--jobs goes without"),
        (["--sampler", "TPESampler"], "--jobs goes without"),
        (["--slice-seconds", "0"], "slice_seconds must be above 0"),
        (["--slice-seconds", "1e-300"], "must give 1000000 slices at most, so be "),
        (["--switch-cost", "1"], "--switch-cost goes without --jobs but got 1"),
        (["--trials", "5"], "--trials goes without --jobs and --sampler but got 5"),
    ],
)
def test_bad_input_ends_with_status_2(
    tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """One line says what is wrong."""
    assert run(["simulate", "--jobs", str(tiny), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_options_of_jobs_need_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused without a file of jobs."""
    assert run(["simulate", "--slice-seconds", "5"]) == 2
    assert "need --jobs" in capsys.readouterr().err
