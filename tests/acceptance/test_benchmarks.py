"""The benchmarks are scripts that anyone can run."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from optuna_hermes.cluster.job_replay import JobRules, simulate_jobs
from optuna_hermes.model import Snapshot
from optuna_hermes.policies import POLICIES, Qssf
from optuna_hermes.replay import SimulationRules, read_curve_set, simulate_one, tabulate
from optuna_hermes.replay._studies import StudyRules, simulate_study
from optuna_hermes.simulator import RIVALS, CurveSet, Recording, Slice, Trace
from support.benchmarks import BENCHMARKS, benchmark


def switch_cost(tmp_path: Path, *options: str) -> dict[str, Any]:
    script = str(BENCHMARKS / "switch_cost.py")
    short = ["--sizes=1", "--repetitions=1", "--switches=1", "--no-ray", "--json"]
    done = subprocess.run(
        [sys.executable, script, *short, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_switch_cost_measures_a_tier(tmp_path: Path) -> None:
    """Two trials that keep their processes take turns, and host memory is where they waited."""
    result = switch_cost(tmp_path, "--tiers=host")
    (parked,) = result["park_and_resume"]
    assert parked["moved_bytes"] >= parked["state_bytes"] > 0.9e6
    assert parked["park_seconds"] > 0
    (row,) = result["switches"]
    assert row["by"] == "hermes, host"
    assert row["processes"] == 2
    assert 0 < row["median_seconds"] < row["with_first_step_seconds"]


@pytest.mark.slow
def test_switch_cost_measures_every_tier(tmp_path: Path) -> None:
    """Its smallest case gives figures for all tiers; a run on disk has a process a slice."""
    result = switch_cost(tmp_path)
    assert [row["tier"] for row in result["park_and_resume"]] == ["resident", "host", "disk"]
    processes = {row["by"]: row["processes"] for row in result["switches"]}
    assert processes.pop("hermes, disk") > 2
    assert processes == {"hermes, resident": 2, "hermes, host": 2}
    assert all(row["switches"] >= 1 for row in result["switches"])


def run(script: str, *options: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A benchmark as a process, without any setting from outside."""
    environment = {k: v for k, v in os.environ.items() if k != "OPTUNA_HERMES_CURVES"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``call(script, *options, status=0)``: as ``run``, in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("OPTUNA_HERMES_CURVES", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(script: str, *options: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [script, *options])
        capsys.readouterr()
        try:
            code = importlib.import_module(script.removesuffix(".py")).main()
        except SystemExit as ended:  # of argparse
            code = ended.code
        told = capsys.readouterr()
        assert code == status, told.err
        return subprocess.CompletedProcess(sys.argv, code, told.out, told.err)

    return call


def test_decision_cost_grows_with_the_trials(tmp_path: Path) -> None:
    """Every policy is timed on all populations, and the exponent is that of its times."""
    options = ["--trials=10,100", "--repetitions=3", "--json"]
    result = json.loads(run("decision_cost.py", *options, cwd=tmp_path).stdout)
    timed = [(row["policy"], row["population"]) for row in result["rows"]]
    populations = ("level", "spread", "budget", "ends")
    assert timed == [(name, kind) for name in POLICIES for kind in populations]
    for row in result["rows"]:
        few, many = row["median_ms"]["10"], row["median_ms"]["100"]
        assert few > 0
        assert row["exponent"] == pytest.approx(math.log10(many / few), abs=0.05)
    assert result["limit"]["met"] is None


def test_decision_cost_prints_a_table(tmp_path: Path) -> None:
    """One line a population, with a column for each number of trials."""
    options = ["--policy=fifo", "--trials=5,50", "--repetitions=2"]
    lines = run("decision_cost.py", *options, cwd=tmp_path).stdout.splitlines()
    assert "| policy | population | 5 trials | 50 trials | exponent | the first |" in lines
    assert [line.split(" | ")[:2] for line in lines if line.startswith("| fifo")] == [
        ["| fifo", "level"],
        ["| fifo", "spread"],
        ["| fifo", "budget"],
        ["| fifo", "ends"],
    ]


def test_decision_cost_of_qssf_is_that_of_its_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trials end it learns of them, and of one more every fifth decision."""
    learned_from: list[int] = []
    service = Qssf._service

    def noted(self: Qssf, snapshot: Snapshot) -> Any:
        learned_from.append(len(snapshot.finished))
        found = service(self, snapshot)
        assert found is not None
        return found

    monkeypatch.setattr(Qssf, "_service", noted)
    decisions = benchmark("decision_cost").decisions(Qssf(), "ends", 20)
    assert all(seconds >= 0 for seconds in itertools.islice(decisions, 6))
    assert learned_from == [300] * 5 + [301]


def test_suggestion_cost_of_each_sampler(tmp_path: Path) -> None:
    """Each sampler is timed on studies of each size, and the limit is of 1,000 trials alone."""
    options = ["--sampler=hermes,TPESampler", "--trials=20,30", "--suggestions=2"]
    result = json.loads(run("suggestion_cost.py", *options, "--json", cwd=tmp_path).stdout)
    timed = [(row["sampler"], row["trials"]) for row in result["rows"]]
    assert timed == [(name, n) for n in (20, 30) for name in ("hermes", "TPESampler")]
    assert all(0 < row["median_ms"] <= row["longest_ms"] for row in result["rows"])
    assert result["limit"]["met"] is None
    lines = run("suggestion_cost.py", *options, cwd=tmp_path).stdout.splitlines()
    assert lines[-1] == "- hermes, 1,000 trials of 12 parameters, at most 100 ms: not measured"


def save_curves(folder: Path, name: str, seed: int) -> None:
    """A dozen trainings of up to eight units."""
    rng = np.random.default_rng(seed)
    length = rng.integers(2, 9, 12)
    value = np.cumsum(-rng.random((12, 9)), axis=1) * rng.random((12, 1)) + 10
    np.savez(
        folder / f"{name}.npz",
        value=np.where(np.arange(9) <= length[:, None], value, np.nan),
        seconds=rng.uniform(1, 2, (12, 8)),
        length=length,
        params=rng.random((12, 2)),
        param_names=["lr", "decay"],
        meta=json.dumps({"name": name, "family": f"family-{seed % 2}"}),
    )


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    for seed in range(3):
        save_curves(tmp_path, f"set-{seed}", seed)
    return tmp_path


def test_policies_compares_all(curves: Path, call: Callable[..., Any]) -> None:
    """The quick table has every policy for hosts and every rival, and says what each reaches."""
    options = [f"--curves={curves}", "--quick", "--processes=1", "--json"]
    result = json.loads(call("policies.py", *options).stdout)
    (block,) = result["blocks"]
    assert (block["devices"], block["cost"], block["seeds"]) == (1, 0.005, 1)
    rows = {row["policy"]: row for row in block["rows"]}
    assert set(rows) == {*POLICIES, *RIVALS} - {"qssf", "ones", "smd"}
    assert set(result["families"].values()) == {"family-0"}  # the first and the last set
    assert rows["fifo"]["fifo"] == dict.fromkeys(["best", "top 3", "near", "auc"], 1.0)
    assert rows["hermes"]["ours"]["best"] == 1.0
    assert rows["hermes"]["killed_best"] == 0.0
    ours, fifo = rows["hermes"]["fifo"]["best"], rows["fifo"]["ours"]["best"]
    assert ours == pytest.approx(fifo)
    assert rows["oracle"]["fifo"]["best"] == max(row["fifo"]["best"] for row in rows.values())


def test_policies_in_studies_with_a_budget(tmp_path: Path) -> None:
    """Each cost of an opening has a table; what is not finished is never better than what is."""
    options = ["--studies", "--quick", f"--out={tmp_path}", "--json"]
    result = json.loads(run("policies.py", *options, cwd=tmp_path).stdout)
    assert [block["opening"] for block in result["blocks"]] == [0.05, 0.3, 1.0]
    for block in result["blocks"]:
        rows = {(row["policy"], row["sampler"]): row for row in block["rows"]}
        assert {("hermes", "surrogate"), ("hermes", "TPE"), ("median-stop", "TPE")} <= set(rows)
        assert all(row["any"] <= row["fin"] for row in rows.values())
        assert all(row["finished"] <= row["opened"] for row in rows.values())
        assert set(rows["fifo", "TPE"]["as_fast"].values()) == {1.0}
    written = (tmp_path / "policies-studies.md").read_text()
    assert "## 1 device, 4 full trainings, opening a trial costs 0.3 units" in written


def test_policies_in_studies_are_what_simulate_says(curves: Path, call: Callable[..., Any]) -> None:
    """Sets, budgets, openings and contestants are as asked for; times are those of a study."""
    options = ["--studies", "--sets=1:", "--devices=2", "--budget=3,6", "--opening=0", "--json"]
    options += ["--policy=hermes,fifo", "--seeds=2", "--processes=1", f"--curves={curves}"]
    result = json.loads(call("policies.py", *options).stdout)
    sets = [read_curve_set(path) for path in sorted(curves.glob("*.npz"))[1:]]
    assert [block["budget"] for block in result["blocks"]] == [3.0, 6.0]
    for block in result["blocks"]:
        times = {}
        for policy, sampler in (("hermes", "surrogate"), ("fifo", "TPESampler")):
            rules = StudyRules(sampler=sampler, n_devices=2, budget=block["budget"])
            times[policy] = statistics.geometric_mean(
                statistics.fmean(
                    simulate_study(each, policy, rules, seed=seed).any5 for seed in range(2)
                )
                for each in sets
            )
        ours, plain = block["rows"]
        ratio = times["fifo"] / times["hermes"]
        assert ours["as_fast"]["any5"] == pytest.approx(ratio)
        assert set(plain["as_fast"].values()) == {1.0}


@pytest.mark.parametrize("wrong", ["--sets=9:", "--policy=nothing", "--policy=hermes/nothing"])
def test_policies_in_studies_refuse_what_does_not_exist(
    curves: Path, call: Callable[..., Any], wrong: str
) -> None:
    """One line, and status 2."""
    done = call("policies.py", "--studies", wrong, f"--curves={curves}", status=2)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--studies", "--cost=1"], "--cost goes without --studies"),
        (["--studies", "--trials=9"], "--trials goes without --studies"),
        (["--studies", "--seeds-elsewhere=2"], "--seeds-elsewhere goes without --studies"),
        (["--studies", "--check"], "--check goes without --studies"),
        (["--studies", "--case=noise-30"], "--studies has no case but nearly-equal"),
        (["--budget=9"], "--budget needs --studies"),
        (["--opening=0"], "--opening needs --studies"),
    ],
)
def test_policies_refuses_options_without_effect(
    call: Callable[..., Any], options: list[str], says: str
) -> None:
    """They are not left out in silence."""
    assert call("policies.py", *options, status=2).stderr.endswith(f"error: {says}\n")


@pytest.mark.parametrize(
    ("finals", "any_value", "fin"), [((1.0, 1.0), 0.0, 0.0), ((0.5, math.inf), 0.0, 1.0)]
)
def test_the_regret_of_a_study_is_a_share(
    monkeypatch: pytest.MonkeyPatch, finals: tuple[float, float], any_value: float, fin: float
) -> None:
    """Also where the set has no span, or where all that was finished diverged."""
    studies = benchmark("_policies_studies")
    recordings = tuple(
        Recording(values=(finals[0], final), seconds=(1.0, 1.0), params={"x": number})
        for number, final in enumerate(finals)
    )
    found = CurveSet(name="s", family="f", recordings=recordings)
    # Only the last one was finished.
    slices = tuple(Slice(0.0, 1.0, 0, n, 1, finals[0], True) for n in range(2))
    trace = Trace(
        slices=slices,
        finished={1: 2.0},
        pruned={},
        recordings=dict(enumerate(recordings)),
        decisions=2,
    )
    monkeypatch.setattr(studies, "study_trace", lambda *args, **options: trace)
    ending = studies._ending([found], (StudyRules(budget=2.0), ("fifo", "TPESampler"), 0, 0))
    assert (ending.any, ending.fin) == (any_value, fin)


def test_policies_is_what_simulate_says(curves: Path, call: Callable[..., Any]) -> None:
    """Each simulation ends with the best trial, and the measures are those of a whole one."""
    options = ["--devices=2", "--cost=0.25", "--seeds=2", "--seeds-elsewhere=2", "--json"]
    options += ["--policy=asha,asha-stop", "--processes=1", f"--curves={curves}"]
    result = json.loads(call("policies.py", *options).stdout)
    sets = [read_curve_set(path) for path in sorted(curves.glob("*.npz"))]
    rules = SimulationRules(n_devices=2, switch_cost=0.25)
    names = ["hermes", "fifo", "asha", "asha-stop"]
    jobs = product(range(len(sets)), names, (0, 1))
    rows = tabulate([simulate_one(sets, rules, job) for job in jobs])
    expected = {row["policy"]: row for row in rows}
    (block,) = result["blocks"]
    assert len(block["rows"]) == len(expected) == 4
    for row in block["rows"]:
        whole = expected[row["policy"]]
        found = [row["fifo"][name] for name in ("best", "top 3", "near", "auc")]
        assert found == pytest.approx(list(whole["ratios"]["fifo"].values()))
        assert row["families"] == pytest.approx(whole["families"])
        assert row["killed_best"] == whole["killed_best"]


def test_policies_writes_markdown(curves: Path) -> None:
    """A policy that beats ours is bold, each setting has a table, and seeds are as asked for."""
    out = curves / "out"
    options = ["--devices=1,2", "--cost=0.005,0.25", "--seeds=2", "--seeds-elsewhere=1"]
    policies = "--policy=asha,oracle"
    run("policies.py", f"--curves={curves}", *options, policies, f"--out={out}", cwd=curves)
    written = (out / "policies.md").read_text()
    assert [line for line in written.splitlines() if line.startswith("## ")] == [
        "## 1 device, a switch costs 0.5 % of a unit (2 seeds)",
        "## 2 devices, a switch costs 0.5 % of a unit (1 seed)",
        "## 1 device, a switch costs 25 % of a unit (1 seed)",
        "## 2 devices, a switch costs 25 % of a unit (1 seed)",
        "## Targets",
    ]
    cells = [line.strip("| ").split(" | ") for line in written.splitlines() if line[:2] == "| "]
    ours = [line for line in cells if line[0] == "hermes"]
    theirs = [line for line in cells if line[0] == "asha"]
    assert len(ours) == len(theirs) == 4
    assert not any("**" in each for line in ours for each in line)
    for mine, other in zip(ours, theirs, strict=True):
        for own, value in zip(mine[1:7], other[1:7], strict=True):
            better = float(value.strip("*")) - float(own)
            assert better >= 0 if "**" in value else better <= 0


def test_policies_of_nearly_equal_trials(curves: Path, call: Callable[..., Any]) -> None:
    """A case keeps the best tenth of the trials, and the target is not to fall behind."""
    options = ["--case=nearly-equal", "--devices=1", "--seeds=1", "--policy=fifo", "--json"]
    options += ["--processes=1", f"--curves={curves}"]
    result = json.loads(call("policies.py", *options).stdout)
    (target,) = result["targets"]
    assert target["name"] == "1 device, nearly-equal, against fifo >= 1"
    rows = {row["policy"]: row for row in result["blocks"][0]["rows"]}
    assert target["measured"] == pytest.approx(rows["hermes"]["fifo"]["best"])
    # Two of twelve trials: one after the other, and at best the right one first.
    assert 0.4 < rows["hermes"]["fifo"]["best"] < 4


@pytest.mark.parametrize("case", ["noise-30", "prices", "lengths", "crashes"])
def test_policies_of_other_trainings(curves: Path, call: Callable[..., Any], case: str) -> None:
    """An oracle knows how trainings end really, and does not go by what is reported of them."""
    options = [f"--case={case}", "--devices=1", "--seeds=2", "--policy=oracle", "--json"]
    options += ["--processes=1", f"--curves={curves}"]
    result = json.loads(call("policies.py", *options).stdout)
    rows = {row["policy"]: row for row in result["blocks"][0]["rows"]}
    assert rows["oracle"]["fifo"]["best"] >= rows["hermes"]["fifo"]["best"]
    assert rows["oracle"]["fifo"]["best"] > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--curves=nowhere"], "--curves must name a folder with .npz files but got nowhere."),
        (["--policy=none-such"], "A policy must be one of"),
    ],
)
def test_policies_says_what_is_wrong(
    curves: Path, call: Callable[..., Any], options: list[str], message: str
) -> None:
    """Bad input is one line, and status 2."""
    done = call("policies.py", f"--curves={curves}", *options, status=2)
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_broker_load_measures_grants(tmp_path: Path) -> None:
    """A small crowd is served: grants are timed, and so are the broker's processor and memory."""
    options = [
        "--clients=12",
        "--devices=2",
        "--seconds=1",
        "--trials=0",
        "--setting=all",
        "--json",
    ]
    script = [sys.executable, str(BENCHMARKS / "broker_load.py"), *options]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    (row,) = json.loads(done.stdout)["load"]
    assert row["grants"] >= 4
    assert 0 < row["grant_ms_median"] <= row["grant_ms_99"] <= row["grant_ms_max"]
    assert row["messages_per_second"] > 60
    assert 0 < row["broker_cores"] < 2
    assert row["broker_memory_bytes"] > 10e6


@pytest.mark.slow
def test_broker_load_times_status_on_every_database(tmp_path: Path) -> None:
    """The command is timed over a study in SQLite and in PostgreSQL."""
    options = ["--trials=200", "--setting=", "--json"]
    script = [sys.executable, str(BENCHMARKS / "broker_load.py"), *options]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["status"]
    assert [row["database"] for row in rows] == ["sqlite", "postgresql"]
    assert all(row["trials"] == 200 and row["seconds"] > 0 for row in rows)


@pytest.mark.slow
def test_hosts_counts_statements_rows_and_processor_time(tmp_path: Path) -> None:
    """Brokers that share a study are measured while nothing trains, and while something does."""
    pytest.importorskip("pgserver", reason="needs pgserver: pip install pgserver")
    options = ["--hosts=2", "--trials=10", "--seconds=4", "--json"]
    idle, busy = json.loads(run("hosts.py", *options, cwd=tmp_path).stdout)["rows"]
    assert (idle["setting"], busy["setting"], busy["hosts"]) == ("idle", "busy", 2)
    assert idle["grants_per_second"] == 0 < busy["grants_per_second"]
    assert 0 < idle["statements_per_second_per_host"] < busy["statements_per_second_per_host"]
    assert busy["rows_per_second_per_host"] > 0
    assert 0 < busy["broker_cores"] < 1


@pytest.mark.slow
def test_a_soak_serves_studies_and_measures(tmp_path: Path) -> None:
    """A short one counts what it did and what the broker took."""
    script = [sys.executable, str(BENCHMARKS / "soak.py"), "--minutes=0.2", "--json"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["studies"] >= 2
    assert result["trials"] >= 8
    assert result["handles"]["first"] > 5
    assert result["memory_bytes"]["last"] > 10e6


def test_energy_rows_replay_traces_of_clusters(tmp_path: Path) -> None:
    """Both kinds of trace are read, and every policy gets a row that others can be put beside."""
    _write_gzip(
        tmp_path / "philly" / "nodes_per_minute.csv.gz",
        ["time,active,total", *(f"-,{4 if i < 30 else 1},10" for i in range(600))],
    )
    states = ("running_gpu_num", "pending_gpu_num")
    columns = [f"{state}_{size}" for state in states for size in ("noless_8", "less_8")]
    header = ",".join(["total_gpujob_num", "running_gpu_num", "idle_gpu_num", *columns])
    # Two nodes for one job, one for two that share it, and 9 GPUs that wait for two more.
    row = "5,21,19,16,5,8,1"
    _write_gzip(
        tmp_path / "helios" / "Earth_vc_cluster_sequence_1min.csv.gz", [header, *[row] * 600]
    )
    options = ("--traces=.", "--json", "--out=out/new")
    rows = json.loads(run("_energy_rows.py", *options, cwd=tmp_path).stdout)
    assert "`energy`" in (tmp_path / "out" / "new" / "energy.md").read_text()
    found = {(each["trace"], each["policy"]): each for each in rows}
    assert found["philly-nodes", "fifo"]["utilisation"] == pytest.approx((120 + 570) / 6000)
    assert found["philly-nodes", "energy:fifo"]["gain"] > 1.5
    assert found["philly-nodes", "clairvoyant"]["utilisation"] == 1.0
    assert found["earth-vc", "fifo"]["utilisation"] == pytest.approx(3 / 5)
    assert found["earth-vc", "energy:fifo"]["utilisation"] == pytest.approx(3 / 5)
    assert all(each["delayed_fraction"] == 0 for each in rows)


def test_energy_rows_need_traces(tmp_path: Path) -> None:
    """A folder without traces is one line, and status 2."""
    done = run("_energy_rows.py", "--traces=.", cwd=tmp_path, status=2)
    assert done.stderr.startswith("--traces must name a folder with philly/ or helios/")


def _write_gzip(path: Path, lines: list[str]) -> None:
    path.parent.mkdir()
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


def jobs(folder: Path, *options: str) -> Any:
    script = str(BENCHMARKS / "jobs.py")
    done = subprocess.run(
        [sys.executable, script, "--traces", str(folder), "--json", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_jobs_compares_policies(tmp_path: Path) -> None:
    """A made-up trace of two virtual clusters gives a row for each setting and policy."""
    folder = tmp_path / "philly"
    folder.mkdir()
    lines = [
        f"{600 * n},{20000 if n % 4 else 900},{1 + n % 3},0,{'ab'[n % 2]}\n" for n in range(240)
    ]
    text = "timestamp,duration,num_gpus,gpu_time,cluster\n" + "".join(lines)
    (folder / "jobs.csv.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "vc_nodes.csv").write_text("vc,node num\na,5\nb,1\n")
    new = tmp_path / "out" / "new"
    rows = jobs(tmp_path, "--out", str(new))
    assert isinstance(rows, list)
    promised = (
        "trace policy mean_completion_seconds mean_queueing_seconds p99_completion_seconds "
        "utilisation utility delayed_fraction"
    )
    assert all(set(promised.split()) <= set(row) for row in rows)
    by_name = {(row["trace"], row["policy"]): row for row in rows}
    assert {"fifo", "qssf", "qssf-noise", "sjf", "srtf"} <= {policy for _, policy in by_name}
    assert by_name["philly", "fifo"]["nodes"] == 2
    assert by_name["philly-all-nodes", "fifo"]["nodes"] == 6
    assert by_name["philly", "fifo"]["completion_ratio"] == 1.0
    assert (new / "jobs.md").read_text().count("| `qssf` |") == 4


TRACES = "OPTUNA_HERMES_TRACES"


@pytest.mark.slow
@pytest.mark.skipif(TRACES not in os.environ, reason=f"{TRACES} names no folder with traces")
def test_the_whole_trace_takes_less_than_two_minutes() -> None:
    """Philly's 82,229 jobs under two policies, learning included, on one core."""
    found = benchmark("_jobs_philly").read_philly(Path(os.environ[TRACES]) / "philly")
    rules = JobRules(groups={name: [8] * nodes for name, nodes in found.nodes.items()})
    began = time.process_time()
    for policy in ("fifo", "qssf"):
        assert len(simulate_jobs(found.jobs, policy, rules).records) == 82_229
    assert time.process_time() - began < 120


@pytest.mark.slow
@pytest.mark.skipif(TRACES not in os.environ, reason=f"{TRACES} names no folder with traces")
def test_qssf_is_as_good_as_it_should_be(tmp_path: Path) -> None:
    """On Philly's last quarter the targets are met."""
    jobs(Path(os.environ[TRACES]), "--check")


RACE = [
    "--tasks=tabular",
    "--contestants=optuna,hermes",
    "--seeds=1",
    "--seconds=60",  # also where other tests have the processor
    "--unit-seconds=0.2",
    "--beside=2",
    "--out=out",
]


@pytest.mark.slow
def test_race_compares_what_trainings_wrote(tmp_path: Path) -> None:
    """Both contestants train the same curves, the report has both, and nothing is run again."""
    result = json.loads(run("race.py", *RACE, "--json", cwd=tmp_path).stdout)
    figures = {each["contestant"]: each["figures"] for each in result["contests"]}
    assert set(figures) == {"optuna", "hermes"}
    for each in figures.values():
        assert each["units"] > 0
        assert each["repeated"] == 0
        assert 0 < each["busy_share"] <= 1
        assert 0 < each["first_batch"] < 60
        assert each["cpu_seconds"] > 0
        assert each["begun"] >= each["finished"]
    assert figures["optuna"]["opening_wait"] is None
    assert figures["hermes"]["opening_wait"] >= 0
    assert result["exactness"]["differing"] == 0
    assert set(result["comparison"]["rows"]) == {"optuna", "hermes"}

    written = (tmp_path / "out" / "race.md").read_text()
    assert written.count("\n| `hermes` |") == 2
    assert (tmp_path / "out" / "race.svg").exists()
    again = run("race.py", *RACE, cwd=tmp_path)
    assert again.stderr.startswith("0 of 2 contests are left")
    done = run("race.py", *RACE, "--seconds=30", "--report", cwd=tmp_path, status=2)
    assert done.stderr.startswith("--seconds must be 60 as in out/race but got 30")


@pytest.mark.slow
def test_race_reaps_every_process_at_ctrl_c(
    tmp_path: Path, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """Interrupted in the middle, it leaves no process, and says how to go on."""
    script = [sys.executable, str(BENCHMARKS / "race.py"), *RACE, "--seconds=600"]
    environment = {**os.environ, "TMPDIR": str(runtime_dir)}  # short, for the sockets in it
    race = subprocess.Popen(
        script, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: len(list(runtime_dir.glob("race-*/watch-*.jsonl"))) >= 3, 120)
        children = psutil.Process(race.pid).children(recursive=True)
        assert len(children) > 6
        race.send_signal(signal.SIGINT)
        _, said = race.communicate(timeout=60)
    finally:
        race.kill()
        race.wait()
    assert race.returncode == 130
    assert "the same command goes on" in said
    assert not [each for each in children if each.is_running()]
    assert not list(runtime_dir.glob("race-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--report"], "--out must have records of these contests but out/race has none."),
        (["--ray-python=/nowhere"], "--ray-python must be a Python but got /nowhere"),
        (["--tasks=none-such"], "must be among digits, characters-gru, "),
        (["--seconds=x"], "must be a number above 0 but got x"),
        (["--beside=x"], "must be a whole number, at least 1, but got x"),
    ],
)
def test_race_says_what_is_wrong(
    call: Callable[..., Any], options: list[str], message: str
) -> None:
    """Bad input is said before anything runs: status 2."""
    assert message in call("race.py", *RACE, *options, status=2).stderr


def test_first_quarter_compares_early_figures_with_last_values(tmp_path: Path) -> None:
    """Each early figure has one row, and a task that is no training loop is refused."""
    options = ["--tasks=tabular", "--trainings=6"]
    result = json.loads(run("first_quarter.py", *options, "--json", cwd=tmp_path).stdout)
    rows = result["tasks"]["tabular"]
    assert len({row["early"] for row in rows}) == len(rows) == 7
    assert all(-1 <= row["correlation"] <= 1 for row in rows)
    refused = run("first_quarter.py", "--tasks=digits", cwd=tmp_path, status=2)
    assert "unknown task digits" in refused.stderr
