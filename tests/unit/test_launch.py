"""Launchers: what they hand to their engines, and what they read in the answers."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from optuna_hermes._programs import ask
from optuna_hermes.cli._app import run
from optuna_hermes.errors import ExitStatus, InvalidInputError, LaunchError
from optuna_hermes.launch import LAUNCHERS, Job, Launch, kept, launcher, record

URL = "postgresql+psycopg://user:secret@db/optuna"
ARGUMENTS = ("train.py:objective", "--study-name", "digits", "--n-trials", "64")
Engine = Callable[..., Path]


def job(**changed: Any) -> Job:
    told = {"name": "digits", "arguments": ARGUMENTS, "storage": URL, "hosts": 3, **changed}
    return Job(**told)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Put a program of an engine on the path; it notes its arguments and input in the file.

    It ends with the status and the error if ``only`` is among its arguments. Asked for its
    configuration it shows the file ``context``, else it has none.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def add(name: str, answer: str = "", status: int = 0, error: str = "", only: str = "") -> Path:
        noted = tmp_path / f"{name}.txt"
        said = tmp_path / f"{name}.answer"
        said.write_text(answer)
        program = folder / name
        program.write_text(
            f'#!/bin/bash\nif [ "$1" = config ]; then cat {tmp_path / "context"}; exit; fi\n'
            f'echo "$@" >> {noted}\n[ -p /dev/stdin ] && cat >> {noted}\n'
            f'echo "storage=$OPTUNA_STORAGE" >> {noted}\n'
            f'if [[ "$*" != *{only!r}* ]]; then cat {said}; exit 0; fi\n'
            f"cat {said}\necho {error!r} >&2\nexit {status}\n"
        )
        program.chmod(0o755)
        return noted

    return add


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of `optimize`, in a folder that has the objective."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("train.py").write_text("def objective(trial): return 0.0\n")
    return [*ARGUMENTS, "--storage", URL]


# -- what is handed over -----------------------------------------------------------------------


def test_a_script_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An array of jobs; the driver takes the place of the shell, and no password is in it."""
    monkeypatch.chdir(tmp_path)
    asked = job(gpus=2, cpus=8, time_limit="4:00:00", extra=("--partition=gpu",))
    lines = launcher("slurm").render(asked).splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in (
        "--job-name=digits", "--array=0-2", "--gres=gpu:2", "--cpus-per-task=8", "--time=4:00:00",
        "--signal=B:TERM@120", "--requeue", f"--chdir={tmp_path}", "--partition=gpu",
    ):  # fmt: skip
        assert f"#SBATCH {option}" in lines
    # Each job has its own, but SLURM hands on those of this shell.
    assert lines[-2] == "unset OPTUNA_HERMES_HOST OPTUNA_HERMES_RUNTIME_DIR"
    assert lines[-1] == (
        f"exec {sys.executable} -m optuna_hermes optimize --grace 120 --requeue "
        "train.py:objective --study-name digits --n-trials 64"
    )
    assert not any("secret" in line for line in lines)


def test_a_script_of_slurm_is_one_that_a_shell_takes() -> None:
    """Also with arguments that a shell would take apart."""
    script = launcher("slurm").render(job(arguments=("it's.py:objective", "--study-name", "a b")))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_cores_are_slots_unless_devices_are_named() -> None:
    """A host without GPUs has as many slots as cores; with GPUs, or devices named, it has those."""
    assert "--devices cpu:4" in launcher("slurm").render(job(cpus=4))
    assert "--devices" not in launcher("slurm").render(job(cpus=4, gpus=1))
    named = launcher("slurm").render(job(cpus=4, devices="cpu:2"))
    assert "--devices cpu:2" in named
    assert named.count("--devices") == 1


def test_a_manifest_of_kubernetes() -> None:
    """An Indexed Job that counts neither suspensions nor preemptions as failures."""
    kubernetes = launcher("kubernetes", image="registry/train:1", claim="checkpoints")
    text = kubernetes.render(job(gpus=1, grace_seconds=300))
    assert "secret@db" not in text
    manifest = yaml.safe_load(text)
    spec = manifest["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 300)
    (container,) = pod["containers"]
    folder = ["--checkpoint-dir", "/checkpoints"]  # also in a job of another name, for its study
    assert container["command"] == ["optuna-hermes", "optimize", *folder, *ARGUMENTS]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts == {"/dev/shm": "shm", "/checkpoints": "checkpoints"}
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # 64 MiB are too few for loaders
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
    ]
    ignored = {"action": "Ignore", "onExitCodes": {
        "containerName": "optimize", "operator": "In", "values": [int(ExitStatus.SUSPENDED)],
    }}  # fmt: skip
    assert ignored in spec["podFailurePolicy"]["rules"]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["OPTUNA_STORAGE"]["valueFrom"]["secretKeyRef"]["name"] == "digits-storage"
    assert variables["OPTUNA_HERMES_GRACE_SECONDS"]["value"] == "300"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_options_come_before_the_arguments(name: str) -> None:
    """After a `--` among those, each host would refuse them."""
    told = {"image": "train:1", "claim": "c"} if name == "kubernetes" else {}
    words = ("--study-name", "digits", "--", "train.py:objective")
    text = launcher(name, **told).render(job(cpus=4, arguments=words))
    end = text.rindex("train.py:objective")
    added = {"slurm": "--requeue", "kubernetes": "--checkpoint-dir", "ray": "--devices"}[name]
    assert text.rindex("--study-name") < end
    assert max(text.rindex("cpu:4"), text.rindex(added)) < text.rindex("--study-name")


def test_pods_need_a_place_for_checkpoints() -> None:
    """A pod's own files are lost with it."""
    kubernetes = launcher("kubernetes", image="registry/train:1")
    with pytest.raises(InvalidInputError, match="--claim"):
        kubernetes.render(job())
    text = kubernetes.render(job(checkpoint_dir="s3://bucket/digits"))
    assert "persistentVolumeClaim" not in text
    assert "s3://bucket/digits" in text
    with pytest.raises(InvalidInputError, match="--image"):
        launcher("kubernetes", claim="checkpoints").render(job())


@pytest.mark.parametrize(
    ("claim", "folder", "kept"),
    [
        ("checkpoints", "/checkpoints/mine", True),
        ("checkpoints", "/shared/digits", False),
        ("", "/shared/digits", False),
        ("", "s3://bucket/digits", True),
        ("", "file:///shared/digits", False),
        ("", "local:///checkpoints/digits", False),
        ("checkpoints", "file:///checkpoints/mine", True),
    ],
)
def test_a_folder_inside_of_a_pod_keeps_nothing(claim: str, folder: str, kept: bool) -> None:
    """Checkpoints there would go with the pod, and no other pod would see them."""
    kubernetes = launcher("kubernetes", image="registry/train:1", claim=claim)
    asked = job(checkpoint_dir=folder)
    if kept:
        assert kubernetes.render(asked).count("--checkpoint-dir") == 1
        return
    with pytest.raises(InvalidInputError, match=f"but got --checkpoint-dir {folder}.*--claim"):
        kubernetes.render(asked)


@pytest.mark.parametrize("claim", ["checkpoints", ""])
@pytest.mark.parametrize(
    ("storage", "kept"),
    [
        ("sqlite:///study.db", False),
        ("sqlite:////data/study.db", False),
        ("sqlite:////checkpoints/study.db", True),
        ("study.log", False),
        ("/checkpoints/study.log", True),
    ],
)
def test_a_study_inside_of_a_pod_is_not_kept(claim: str, storage: str, kept: bool) -> None:
    """After a preemption the next pod would begin an empty one."""
    kubernetes = launcher("kubernetes", image="registry/train:1", claim=claim)
    asked = job(storage=storage, hosts=1, checkpoint_dir="s3://bucket/digits")
    if claim and kept:
        assert "OPTUNA_STORAGE" in kubernetes.render(asked)
        return
    with pytest.raises(InvalidInputError, match=f"but got --storage {storage}: keep the study in"):
        kubernetes.render(asked)


def test_a_kubelet_puts_no_variable_into_an_argument() -> None:
    """It would replace `$(NAME)`, and make one dollar of two."""
    words = ("train.py:objective", "--study-name", "$(HOME) for 5 $$")
    text = launcher("kubernetes", image="train:1", claim="c").render(job(arguments=words))
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "$$(HOME) for 5 $$$$"


def test_a_script_of_slurm_from_a_folder_with_a_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`sbatch` takes options apart at spaces, but for quotes."""
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert f"#SBATCH --chdir='{folder}'\n" in launcher("slurm").render(job())


def test_code_for_ray() -> None:
    """Python that starts it, without the password."""
    code = launcher("ray", address="head:6379").render(job(cpus=4))
    compile(code, "launch", "exec")
    assert "address='head:6379'" in code
    assert "'--devices', 'cpu:4'" in code
    assert "secret" not in code


@pytest.mark.parametrize("name", ["Digits", "a b", "", "-a", "x" * 60, "a/b"])
def test_names_that_an_engine_would_refuse(name: str) -> None:
    """A job's name is one in each of the engines."""
    with pytest.raises(InvalidInputError, match="--name"):
        job(name=name)


def test_hosts_cannot_share_a_file_of_sqlite() -> None:
    """One host may have one."""
    with pytest.raises(InvalidInputError, match="PostgreSQL"):
        job(storage="sqlite:///study.db")
    assert job(storage="sqlite:///study.db", hosts=1).hosts == 1


# -- what is asked -----------------------------------------------------------------------------


def test_slurm_is_asked(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed the script and the storage, and its states are told in plain words."""
    monkeypatch.chdir(tmp_path)
    submitted = engine("sbatch", "17;cluster\n")
    launched = launcher("slurm").start(job())
    assert launched == Launch(
        launcher="slurm", name="digits", id="17", folder=str(tmp_path), place="cluster"
    )
    assert f"storage={URL}" in submitted.read_text()
    engine(
        "squeue",
        "17|0|RUNNING|n1|None\n17|10|PENDING||BeginTime\n17|2|TIMEOUT|n2|TimeLimit\n"
        "18|0|RUNNING|n3|None\n17|3|OUT_OF_MEMORY|n4|None\n17|4|FAILED|n5|NonZeroExitCode\n",
    )
    task = "JobId=21 ArrayJobId=17 ArrayTaskId=4 JobState=FAILED Reason=NonZeroExitCode"
    engine("scontrol", f"{task} ExitCode=1:0\n")
    hosts = launcher("slurm").hosts(launched)
    assert [(host.name, host.state, host.node, host.detail) for host in hosts] == [
        ("digits-0", "running", "n1", ""),
        ("digits-2", "suspended", "n2", "TimeLimit"),
        ("digits-3", "failed", "n4", ""),
        ("digits-4", "failed", "n5", "NonZeroExitCode"),
        ("digits-10", "waiting", "", "BeginTime"),
    ]
    engine("scontrol", f"{task} ExitCode=75:0\n")  # its trials are on disk
    assert launcher("slurm").hosts(launched)[3].state == "suspended"
    changed, cancelled = engine("scontrol"), engine("scancel")
    launcher("slurm").stop(launched)
    assert "-M cluster update JobId=17_0 Requeue=0" in changed.read_text()
    assert "-M cluster --state=RUNNING --batch --signal=TERM 17" in cancelled.read_text()
    assert "-M cluster --me" in (tmp_path / "squeue.txt").read_text()
    (tmp_path / "digits-17-0.log").write_text("one\ntwo\n")
    assert list(launcher("slurm").logs(launched)) == ["digits-0: one", "digits-0: two"]


def array(
    monkeypatch: pytest.MonkeyPatch, states: Sequence[str], then: str, refused: str, problem: str
) -> tuple[list[str], Launch]:
    """An array of tasks in SLURM: what it is asked, and the launch.

    Task 1 is in the state ``then`` from the second look on; SLURM refuses one command.
    """
    asked: list[str] = []

    def answer(command: list[str]) -> str:
        asked.append(" ".join(command))
        if asked[-1] == refused:
            raise LaunchError(problem)
        now = states if len(asked) == 1 else (states[0], then, *states[2:])
        return "".join(f"17|{task}|{state}|n1|None\n" for task, state in enumerate(now))

    monkeypatch.setattr("optuna_hermes.launch._slurm.ask", answer)
    return asked, Launch(launcher="slurm", name="digits", id="17")


@pytest.mark.parametrize("then", ["COMPLETED", "PENDING"])
def test_tasks_that_no_state_of_scancel_finds_are_cancelled(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares with all flags: one that begins, or goes into the queue again, trained later."""
    tasks = ("CONFIGURING", "COMPLETING", "RUNNING", "SIGNALING")
    asked, launched = array(monkeypatch, tasks, then, "scancel 17_1", "17_1 is already done")
    is_queued = pytest.raises(LaunchError, match="17_1 is already done")
    with is_queued if then == "PENDING" else contextlib.nullcontext():
        launcher("slurm").stop(launched)
    assert asked[1:6] == [
        *("scancel 17_0", "scancel 17_1", "scontrol update JobId=17_2 Requeue=0"),
        "scancel --state=PENDING 17",
        "scancel --state=RUNNING --batch --signal=TERM 17",
    ]


@pytest.mark.parametrize("then", ["RUNNING", "COMPLETED"])
def test_a_task_that_cannot_be_changed_holds_up_no_other_one(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have just ended; one that is still at work would begin again, which is said."""
    change = "scontrol update JobId=17_1 Requeue=0"
    asked, launched = array(monkeypatch, ("RUNNING",) * 3, then, change, "17_1 is completing")
    is_at_work = pytest.raises(LaunchError, match="17_1 is completing")
    with is_at_work if then == "RUNNING" else contextlib.nullcontext():
        launcher("slurm").stop(launched)
    assert asked[1:6] == [
        *(f"scontrol update JobId=17_{task} Requeue=0" for task in range(3)),
        "scancel --state=PENDING 17",
        "scancel --state=RUNNING --batch --signal=TERM 17",
    ]


def test_logs_that_are_nowhere(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of an --output of one's own: the folder that was looked through is named."""
    engine("sbatch")
    with record("digits") as keep:
        keep(Launch(launcher="slurm", name="digits", id="17", folder=str(tmp_path)))
    assert run(["launch", "logs", "digits"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert f"No output of 'digits' was found in {tmp_path}" in "".join(said.err.split("\n"))


def test_kubectl_is_asked(engine: Engine) -> None:
    """Pods are read with their exit statuses: 75 is suspended, others have failed."""

    def pod(name: str, phase: str, code: int | None = None, **metadata: str) -> dict[str, Any]:
        ended = [] if code is None else [{"state": {"terminated": {"exitCode": code}}}]
        return {
            "metadata": {"name": name, **metadata},
            "spec": {"nodeName": "n1"},
            "status": {"phase": phase, "containerStatuses": ended},
        }

    pods = [
        pod("digits-0", "Running"),
        pod("digits-1", "Failed", 75),
        pod("digits-2", "Failed", 2),
        pod("digits-3", "Succeeded", 0),
        pod("digits-4", "Running", deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    noted = engine("kubectl", json.dumps({"items": pods}))
    kubernetes = launcher("kubernetes", namespace="ml")
    launched = Launch(launcher="kubernetes", name="digits", id="digits", place="ml")
    states = [host.state for host in kubernetes.hosts(launched)]
    assert states == ["running", "suspended", "failed", "done", "stopping"]
    assert "--namespace ml get pods -l job-name=digits" in noted.read_text()


def test_a_pod_that_has_replaced_another_one_is_the_host(engine: Engine) -> None:
    """Its forerunner has ended, and would be taken for a job that is to be launched again."""

    def pod(name: str, index: int, minute: int, phase: str) -> dict[str, Any]:
        told = {"batch.kubernetes.io/job-completion-index": str(index)}
        created = f"2026-01-01T00:{minute:02}:00Z"
        return {
            "metadata": {"name": name, "annotations": told, "creationTimestamp": created},
            "spec": {},
            "status": {"phase": phase},
        }

    pods = [
        pod("digits-0-a", 0, 9, "Running"),
        pod("digits-0-z", 0, 2, "Failed"),
        pod("digits-1-b", 1, 1, "Failed"),
    ]
    noted = engine("kubectl", json.dumps({"items": pods}))
    launched = Launch(launcher="kubernetes", name="digits", id="digits")
    hosts = launcher("kubernetes").hosts(launched)
    assert [(host.name, host.state) for host in hosts] == [
        ("digits-0-a", "running"),
        ("digits-1-b", "failed"),
    ]
    assert list(launcher("kubernetes").logs(launched))
    for name in ("digits-0-a", "digits-0-z", "digits-1-b"):
        assert f"logs {name}\n" in noted.read_text()


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {
                "reason": "ImagePullBackOff", "message": "no image train:2",
            }}}]},
            "ImagePullBackOff: no image train:2",
        ),
        (
            {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": "0/3 nodes are available"},
            ]},
            "Unschedulable: 0/3 nodes are available",
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}],
          "conditions": [{"type": "PodScheduled", "status": "True"}]}, "ContainerCreating"),
        ({}, ""),
    ],
)  # fmt: skip
def test_why_a_pod_waits(status: dict[str, Any], detail: str, engine: Engine) -> None:
    """One that can never start would wait without a word."""
    pod = {"metadata": {"name": "digits-0"}, "spec": {}, "status": {"phase": "Pending", **status}}
    engine("kubectl", json.dumps({"items": [pod]}))
    (host,) = launcher("kubernetes").hosts(Launch(launcher="kubernetes", name="d", id="d"))
    assert (host.state, host.detail) == ("waiting", detail)


def test_a_job_without_a_pod_is_shown(engine: Engine) -> None:
    """As where a quota is used up: the job itself waits."""
    engine("kubectl", json.dumps({"items": [], "status": {}}))
    launched = Launch(launcher="kubernetes", name="digits", id="digits", place="one/ml")
    (host,) = launcher("kubernetes").hosts(launched)
    assert (host.name, host.state) == ("digits", "waiting")
    assert "`kubectl --context one --namespace ml describe job digits` says why" in host.detail
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    engine("kubectl", json.dumps({"items": [], "status": ended}))
    assert launcher("kubernetes").hosts(launched) == ()


def test_logs_that_are_not_there_or_are_cut(engine: Engine, tmp_path: Path) -> None:
    """Those of the other pods are shown, also where a character is incomplete."""
    pods = [
        {
            "metadata": {"name": name},
            "spec": {},
            "status": {"phase": "Failed", "reason": "Eviction"},
        }
        for name in ("digits-0", "digits-1")
    ]
    engine("kubectl", status=1, error="not found", only="logs digits-0")
    answer = json.dumps({"items": pods}).encode().replace(b"Eviction", b"Evicted\xe2")
    (tmp_path / "kubectl.answer").write_bytes(answer)
    launched = Launch(launcher="kubernetes", name="digits", id="digits")
    first, second = launcher("kubernetes").logs(launched)
    assert first.startswith("digits-0: ")
    assert "not found" in first
    assert second == f"digits-1: {answer.decode(errors='replace')}"


@pytest.mark.parametrize(
    ("condition", "starts"), [("Complete", True), ("Failed", True), ("Suspended", False)]
)
def test_a_job_that_has_ended_makes_room_for_its_next(
    condition: str, starts: bool, engine: Engine
) -> None:
    """Kubernetes keeps it to be asked about; one that has not ended is left alone."""
    conditions = [{"type": condition, "status": "True"}]
    noted = engine("kubectl", json.dumps({"status": {"conditions": conditions}}))
    kubernetes = launcher("kubernetes", image="train:1", claim="c")
    if starts:
        kubernetes.start(job())
    else:
        # It is not on record here.
        words = "stop digits` where it was launched, or by `kubectl delete job digits`, or"
        with pytest.raises(LaunchError, match=f"'digits' is at work.*launch {words}"):
            kubernetes.start(job())
    said = noted.read_text()
    assert ("delete job digits" in said) is starts
    assert ("create -f -" in said) is starts


@pytest.mark.parametrize(
    ("state", "starts"), [("PENDING", False), ("RUNNING", False), ("TIMEOUT", True)]
)
def test_an_array_at_work_is_not_replaced(
    state: str,
    starts: bool,
    engine: Engine,
    objective: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its record has one array: of two under a name the first could not be stopped."""
    submitted = engine("sbatch", "18\n")
    engine("squeue", f"17|0|{state}|n1|None\n")
    with record("digits") as keep:
        keep(Launch(launcher="slurm", name="digits", id="17"))
    assert run(["launch", "slurm", "--", *objective]) == (0 if starts else 1)
    said = capsys.readouterr().err
    assert ("'digits' is at work: end it first by `optuna-hermes launch stop" in said) is not starts
    assert kept("digits").id == ("18" if starts else "17")
    assert submitted.exists() is starts


def test_a_job_at_work_elsewhere_is_not_replaced(
    engine: Engine, objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record has one place: the job in the other one could not be stopped."""
    submitted = engine("sbatch", "18\n")
    launch = ["launch", "kubernetes", "--image", "train:1", "--claim", "c", "--namespace"]
    engine("kubectl")
    assert run([*launch, "a", "--", *objective]) == 0
    noted = engine("kubectl", '{"status": {}}', 1, "no answer", only="create")
    noted.unlink()
    for words in ([*launch, "b"], ["launch", "slurm"]):
        assert run([*words, "--", *objective]) == 1
        assert "'digits' is at work" in capsys.readouterr().err
    assert noted.read_text().count("--namespace a get job digits") == 2
    assert "--namespace b" not in noted.read_text()
    engine("kubectl", status=1, error="no answer")
    assert run(["launch", "slurm", "--", *objective]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "(kubernetes a) may be at work: start another one by --name" in said
    assert "no answer" in said
    assert kept("digits").place == "a"
    assert not submitted.exists()
    engine("kubectl")  # it has been stopped
    assert run(["launch", "slurm", "--", *objective]) == 0
    assert kept("digits").launcher == "slurm"


@pytest.mark.parametrize(
    ("context", "namespace", "place"),
    [
        ("arn:aws:eks:cluster/one/ml", "", "arn:aws:eks:cluster/one/ml"),
        ("one/", "", "one/default"),
        ("one/ml", "mine", "one/mine"),
    ],
)
def test_a_job_stays_that_of_the_cluster_it_was_started_in(
    context: str, namespace: str, place: str, engine: Engine, objective: list[str], tmp_path: Path
) -> None:
    """Else `stop` would be told to kubectl's next cluster, while the pods train on."""
    noted = engine("kubectl")
    (tmp_path / "context").write_text(context)
    launch = ["launch", "kubernetes", "--image", "train:1", "--claim", "c"]
    assert run([*launch, "--namespace", namespace, "--", *objective]) == 0
    assert kept("digits").place == place
    (tmp_path / "context").write_text("other/other")
    assert run(["launch", "stop", "digits"]) == 0
    at, _, within = place.rpartition("/")
    words = f"--context {at} --namespace {within} "
    lines = noted.read_text().splitlines()
    assert f"{words}create -f -" in lines
    assert f"{words}delete job digits --wait=false --ignore-not-found" in lines


@pytest.mark.parametrize(
    ("given", "variable", "place"),
    [
        ("auto", "", "10.0.0.1:6379"),
        ("auto", "auto", "10.0.0.1:6379"),
        ("auto", "ray://head:10001", "ray://head:10001"),
        ("head:1", "ray://head:10001", "head:1"),
    ],
)
def test_a_job_stays_that_of_the_cluster_of_ray_it_was_started_in(
    given: str, variable: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then `auto` may be another one; from outside, an address within reaches none."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    ray = mock.MagicMock()
    ray.get_runtime_context().gcs_address = "10.0.0.1:6379"
    cluster = contextlib.nullcontext(ray)
    monkeypatch.setattr("optuna_hermes.launch._ray._cluster", lambda address: cluster)
    monkeypatch.setattr("optuna_hermes.launch._ray.ask", lambda *told, **more: "")
    assert launcher("ray", address=given).start(job()).place == place


def test_no_secret_is_left_of_a_job_that_is_refused(engine: Engine) -> None:
    """Nothing on record would lead to it."""
    noted = engine("kubectl", status=1, error="exceeded quota", only="create")
    with pytest.raises(LaunchError, match="exceeded quota"):
        launcher("kubernetes", image="train:1", claim="c", namespace="ml").start(job())
    assert "--namespace ml delete secret digits-storage" in noted.read_text()


def test_what_an_engine_says_against_it(engine: Engine) -> None:
    """Its own words, in one line, and the whole command: kubectl's verbs follow its options."""
    engine("sbatch", status=1, error="sbatch: error: invalid partition specified: gpu")
    with pytest.raises(LaunchError, match="invalid partition specified: gpu"):
        launcher("slurm").start(job())
    engine("kubectl", status=1, error="Forbidden")
    launched = Launch(launcher="kubernetes", name="digits", id="digits", place="prod/ml")
    command = "kubectl --context prod --namespace ml delete job digits --wait=false"
    with pytest.raises(LaunchError, match=f"`{command} --ignore-not-found` failed: Forbidden"):
        launcher("kubernetes").stop(launched)


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("slurm", "squeue --name digits"),
        ("kubernetes", "kubectl get job digits"),
        ("ray", "ray list actors --filter name=digits"),
    ],
)
def test_an_engine_that_answers_late_may_have_started_the_job(
    name: str, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not on record: the error has the command that shows it."""

    def answer(command: list[str], **others: Any) -> subprocess.CompletedProcess[bytes]:
        if {"create", "--parsable", "-"} & {*command[1:2]}:
            raise subprocess.TimeoutExpired(command, 60.0)
        return subprocess.CompletedProcess(command, "config" in command, b"", b"")

    monkeypatch.setattr(subprocess, "run", answer)
    cluster = contextlib.nullcontext(mock.MagicMock())
    monkeypatch.setattr("optuna_hermes.launch._ray._cluster", lambda address: cluster)
    told = {"image": "train:1", "claim": "c"} if name == "kubernetes" else {}
    with pytest.raises(LaunchError, match=f"may have been started: look by `{look}`"):
        launcher(name, **told).start(job())
    with pytest.raises(LaunchError, match=r"is the engine up\?$"):
        ask(["sbatch", "--parsable"])


def test_an_engine_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is said, with what can be done."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        with pytest.raises(LaunchError, match="program 'sbatch' cannot be run here"):
            launcher("slurm").start(job())
        (tmp_path / "sbatch").touch(mode=0o600)


# -- on record ---------------------------------------------------------------------------------


def test_launch_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """As the program alone does."""
    assert run(["launch"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: optuna-hermes launch [OPTIONS] COMMAND")
    assert shown.err == ""


def test_a_launch_on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is found by its name; one that is not there names those that are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    launched = Launch(launcher="slurm", name="digits", id="17", folder="/work")
    with record("digits") as keep:
        keep(launched)
    assert kept("digits") == launched
    with pytest.raises(InvalidInputError, match="there are digits"):
        kept("other")
    with pytest.raises(InvalidInputError, match="No launch"):
        kept("../digits")
    (tmp_path / "optuna-hermes" / "launches" / "digits.json").write_text("{")
    (tmp_path / "optuna-hermes" / "launches" / "folder.json").mkdir()
    for name in ("digits", "folder", "x" * 300):
        with pytest.raises(InvalidInputError, match="cannot be read"):
            kept(name)


def test_nothing_starts_where_no_record_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line says where; what cannot be written afterwards names the job that has started."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    state.write_text("a file in place of the folder")
    with pytest.raises(InvalidInputError, match="cannot be written"), record("digits"):
        pytest.fail("it must not begin")
    state.unlink()
    launched = Launch(launcher="slurm", name="digits", id="17", folder="/work")
    with record("digits") as keep:
        (state / "optuna-hermes" / "launches" / "digits.json").mkdir()
        with pytest.raises(LaunchError, match=r"slurm 17"):
            keep(launched)
    assert not list(state.rglob("*.new"))


# -- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_dry_run_starts_nothing(
    name: str, objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what would be handed over, and keeps nothing."""
    more = ["--image", "train:1", "--claim", "c"] if name == "kubernetes" else []
    assert run(["launch", name, "--hosts", "2", *more, "--dry-run", "--", *objective]) == 0
    shown = capsys.readouterr()
    assert "digits" in shown.out
    assert "user:secret" not in shown.out + shown.err
    assert run(["launch", "status", "digits"]) == 2


def test_arguments_that_optimize_would_refuse(
    objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before a job waits in a queue for hours."""
    assert run(["launch", "slurm", "--dry-run", "--", *objective, "--n-trals", "3"]) == 2
    assert "--n-trals" in capsys.readouterr().err
    assert run(["launch", "slurm", "--dry-run", "--", "away.py:objective", *objective[1:]]) == 2
    assert "No file 'away.py' here" in capsys.readouterr().err
    for option, value, word in (
        ("--policy", "hermez", "'hermez'"),
        ("--devices", "tpu", "'tpu'"),
        ("--checkpoint-dir", "s4://bucket", "s4"),
    ):
        assert run(["launch", "slurm", "--dry-run", "--", *objective, option, value]) == 2
        assert word in capsys.readouterr().err
    words = (*("--policy", "energy:fifo"), *("--power-down-command", "away down {device}"))
    for more, word in (
        ((), "add --power-up-command"),
        (("--power-up-command", "away up"), "{device} among them"),
        (("--power-up-command", "away up {device}", "--policy", "fifo"), "use --policy"),
    ):
        assert run(["launch", "slurm", "--dry-run", "--", *objective, *words, *more]) == 2
        assert word in " ".join(capsys.readouterr().err.split())
    # The hosts may have a program that is not here.
    words += ("--power-up-command", "away up {device}")
    assert run(["launch", "slurm", "--dry-run", "--", *objective, *words]) == 0
    named = ["--devices", "GPU-8a0d,cpu:1"]
    assert run(["launch", "slurm", "--dry-run", "--", *objective, *named]) == 0


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("words", [["--grace", "300"], ["--grace=300"], ["--requeue"]])
def test_options_of_the_launcher_come_before_the_arguments(
    name: str, words: list[str], objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts would suspend for longer than the engine waits, or refuse to begin."""
    launch = ["launch", name, *(["--image", "i", "--claim", "c"] if name == "kubernetes" else [])]
    assert run([*launch, "--dry-run", "--", *objective, *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"got {words[0][:9].partition('=')[0]} after the `--`" in said


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_shell_that_launches_acts_on_each_engine_alike(
    name: str,
    objective: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its devices are those of the hosts, unless others are named; its grace period is not."""
    launch = ["launch", name, *(["--image", "i", "--claim", "c"] if name == "kubernetes" else [])]

    def devices(*words: str) -> list[str]:
        assert run([*launch, "--cpus", "4", "--dry-run", "--", *objective, *words]) == 0
        shown = capsys.readouterr().out
        assert "80808" not in shown
        found: list[str] = re.findall(r"--devices\W+([a-z:0-9]+)", shown)
        return found

    assert devices() == ["cpu:4"]
    monkeypatch.setenv("OPTUNA_HERMES_DEVICES", "cpu:2")
    monkeypatch.setenv("OPTUNA_HERMES_GRACE_SECONDS", "80808")
    assert devices() == ["cpu:2"]
    assert devices("--devices=cpu:3", "--devices", "cpu:1") == ["cpu:1"]
    assert devices("--devices", "auto") == ["auto"]


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_of_an_option_that_is_repeated_the_last_counts(
    form: str, objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As for `optimize`: it is what a pod would use."""
    launch = ["launch", "kubernetes", "--image", "train:1", "--dry-run", "--", *objective]
    bucket, folder = (
        form.format("--checkpoint-dir", each).split() for each in ("s3://bucket/x", "/tmp/y")
    )
    assert run([*launch, *bucket, *folder]) == 2
    assert "but got --checkpoint-dir /tmp/y" in " ".join(capsys.readouterr().err.split())
    assert run([*launch, *folder, *bucket]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--checkpoint-dir") == 1
    assert "s3://bucket/x" in shown


def test_pods_bring_the_package_of_a_store(
    objective: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that starts them needs none; a password in the URL is refused all the same."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    launch = ["launch", "kubernetes", "--image", "train:1", "--dry-run", "--", *objective]
    assert run([*launch, "--checkpoint-dir", "s3://bucket/x"]) == 0
    assert run([*launch, "--checkpoint-dir", "s3://me:secret@bucket/x"]) == 2
    assert "password" in capsys.readouterr().err


def test_started_shown_and_stopped(
    engine: Engine, objective: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first command to the last one."""
    engine("sbatch", "17\n")
    engine("squeue", "17|0|RUNNING|n1|None\n")
    engine("scontrol")
    engine("scancel")
    assert run(["launch", "slurm", "--", *objective]) == 0
    assert "optuna-hermes launch status digits" in capsys.readouterr().err
    assert run(["launch", "status", "digits", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["hosts"] == [{"name": "digits-0", "state": "running", "node": "n1", "detail": ""}]
    assert run(["launch", "status", "digits"]) == 0
    assert "digits-0" in capsys.readouterr().out
    assert run(["launch", "stop", "digits"]) == 0


def test_a_manifest_names_the_secret_that_it_needs(
    objective: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever applies it by hand has none, or an empty one, and its pods would never start."""
    monkeypatch.setenv("PGPASSWORD", "sesame")
    launch = ["launch", "kubernetes", "--image", "train:1", "--claim", "c", "--namespace", "ml"]
    assert run([*launch, "--dry-run", "--", *objective]) == 0
    shown = capsys.readouterr().out
    (made,) = (line[2:] for line in shown.splitlines() if "create secret" in line)
    assert made == (
        "kubectl --namespace ml create secret generic digits-storage "
        '--from-literal=OPTUNA_STORAGE="${OPTUNA_STORAGE:?}" '
        '--from-literal=PGPASSWORD="${PGPASSWORD:?}"'
    )
    refused = subprocess.run(["bash", "-c", made], env={"PGPASSWORD": "s"}, capture_output=True)
    assert b"OPTUNA_STORAGE: parameter null or not set" in refused.stderr
    assert yaml.safe_load(shown)["kind"] == "Job"


def test_hosts_get_the_password_of_this_environment(
    engine: Engine,
    objective: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pods do not inherit $PGPASSWORD, by which `optimize` would work here; nothing shows it."""
    monkeypatch.setenv("PGPASSWORD", "sesame")
    words = [*objective[:-1], URL.replace(":secret", "")]
    launch = ["launch", "kubernetes", "--image", "train:1", "--claim", "c"]
    noted = engine("kubectl")
    assert run([*launch, "--dry-run", "--", *words]) == 0
    assert run([*launch, "--", *words]) == 0
    assert "sesame" not in "".join(capsys.readouterr())
    said = noted.read_text()
    (secret,) = (line for line in said.splitlines() if '"Secret"' in line)
    assert '"PGPASSWORD": "sesame"' in secret
    assert said.count("sesame") == 1
    assert "key: PGPASSWORD" in said
    more = ["--ledger", "postgresql+psycopg://user@db/hermes"]
    noted.unlink()
    assert run([*launch, "--", *objective[:-1], "grpc://host:13000", *more]) == 0
    assert '"PGPASSWORD": "sesame"' in noted.read_text()


@pytest.mark.parametrize("storage", ["journal.log", "redis://host/0", "grpc://host:13000"])
@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("slurm --hosts 2", "sbatch"),
        ("kubernetes --image train:1 --claim c", "kubectl"),
        ("ray --hosts 2", "python"),
    ],
)
def test_hosts_share_a_ledger(
    storage: str,
    words: str,
    program: str,
    engine: Engine,
    objective: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else it is a file of the first one, whose suspended trials are lost with its container."""
    noted = engine(program)
    assert run(["launch", *words.split(), "--", *objective[:-1], storage]) == 2
    assert "--ledger URL" in capsys.readouterr().err
    assert not noted.exists()


@pytest.mark.parametrize("storage", ["journal.log", "redis://host/0", "grpc://host:13000"])
def test_a_storage_that_is_no_database_is_handed_over_as_it_is(
    storage: str, engine: Engine, objective: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host may keep its ledger in a file; no password is put into such a URL."""
    monkeypatch.setenv("PGPASSWORD", "sesame")
    submitted = engine("sbatch", "17\n")
    assert run(["launch", "slurm", "--", *objective[:-1], storage]) == 0
    assert f"storage={storage}\n" in submitted.read_text()
