"""Checks of this host: its limits, its GPUs, its broker, SLURM, a container, and this folder."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from optuna_hermes._cgroups import left_bytes
from optuna_hermes._job_environment import end_of_job, job_environment
from optuna_hermes.cli._checks import LITTLE_BYTES, Check, State, enough, judged
from optuna_hermes.cli._checks._software import version
from optuna_hermes.cli._studies import broker_status
from optuna_hermes.view.formats import duration, plural, size

SHARED_MEMORY = Path("/dev/shm")
FEW_FILES = 1024
NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"}
)
_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/singularity"))
_INTERACTIVE = ("bash", "interactive")


def room() -> Iterator[Check]:
    """Check free memory and free disk."""
    available = psutil.virtual_memory().available
    left = left_bytes()
    name = "free memory"
    if left is not None and left < available:
        available, name = left, "free memory, by the limit of its container or slice"
    yield enough(name, available, "A worker with torch takes about 1 GiB.")
    disk = psutil.disk_usage(str(Path.cwd())).free
    yield enough("free disk here", disk, "Suspended trials are kept on disk; `gc` frees some.")


def limits() -> Iterator[Check]:
    """Check system limits that are reached only late in a study."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a broker raises its limit to this one
    few = 0 <= files < FEW_FILES
    problem = "A broker needs two files a worker: have root raise `ulimit -Hn` to 4096."
    found = "no limit" if files < 0 else f"{files} at most"
    yield judged("open files", found, problem if few else "")
    if SHARED_MEMORY.is_dir() and os.path.ismount(SHARED_MEMORY):
        total = psutil.disk_usage(str(SHARED_MEMORY)).total
        yield shared_memory(total)


def shared_memory(total_bytes: int) -> Check:
    """Check the shared memory through which data loaders of several trials pass batches."""
    problem = (
        "Data loaders with workers hand batches over there, and end by SIGBUS when it is full: "
        "`docker run --ipc=host`, or --shm-size=8g, or num_workers=0."
        if total_bytes < LITTLE_BYTES
        else ""
    )
    return judged("shared memory", size(total_bytes), problem)


def nvidia_driver() -> Iterator[Check]:
    """Check the NVIDIA driver and the GPUs that ``auto`` leaves out, mostly without a message."""
    from optuna_hermes.broker._devices import _nvml as nvml

    try:
        with nvml.driver() as binding:
            troubles = dict(nvml.troubles(binding))
    except nvml.NoDriverError as error:
        if error.installed:
            yield judged("NVIDIA driver", "does not work", str(error))
        return
    for index, words in troubles.items():
        hint = f"See `nvidia-smi -i {index}`; reset it, or restart the host."
        yield judged(f"GPU {index}", words, hint)


def devices() -> Iterator[Check]:
    """Check the devices that a broker takes by ``auto``."""
    from optuna_hermes.broker._devices._source import Devices, parse_devices

    source = Devices(parse_devices("auto"), named=False)
    try:
        polled = source.poll().devices
    finally:
        source.close()
    for device in polled:
        memory = "" if device.memory_bytes is None else f", {size(device.memory_bytes)}"
        state: State = "fail" if not device.healthy else "warn" if device.problem else "ok"
        yield Check(
            name=f"device {device.id}",
            state=state,
            found=("healthy" if device.healthy else "not healthy") + memory,
            hint=device.problem,
        )
    torch = version("torch") or ""
    if torch.endswith("+cpu") and any(device.kind == "gpu" for device in polled):
        problem = "Install a build of torch with CUDA, or say --devices cpu:2."
        yield judged("torch and GPUs", f"torch {torch}", problem)


def runtime_folder() -> Iterator[Check]:
    """Check the broker's private folder; an error is raised if others have access to it."""
    from optuna_hermes.broker._election import runtime_dir

    path = runtime_dir()
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    yield judged("runtime folder", f"{path}, uid {status.st_uid}, mode {mode:04o}")


def broker() -> Iterator[Check]:
    """Check that the broker answers, and report the problems of its studies."""
    from optuna_hermes.broker import _election as election

    status = broker_status()
    if status is None:
        yield judged("broker", "none runs; `optimize` starts one")
        return
    directory = election.runtime_dir()
    mode = stat.S_IMODE(election.socket_path(directory).stat().st_mode)
    yield judged("socket", f"{election.socket_path(directory)}, mode {mode:04o}")
    studies = plural(len(status.studies), "study", "studies")
    problems = [study.problem for study in status.studies if study.problem]
    words = f"{plural(len(status.devices), 'device')}, {studies}"
    yield judged("broker", words, "; ".join(problems))


def slurm(environment: Mapping[str, str], now: float) -> Iterator[Check]:
    """Check the variables of a job of SLURM: Lightning reads them, and its time is limited."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return
    tasks = environment.get("SLURM_NTASKS", "")
    by_srun = tasks and environment.get("SLURM_JOB_NAME") not in _INTERACTIVE
    problem = (
        f"Lightning takes every trial for one of {tasks} processes of this job, and refuses other "
        "numbers of devices: ask for --ntasks=1, or `unset SLURM_NTASKS` before optuna-hermes."
    )
    many = by_srun and tasks != "1"
    yield judged(f"SLURM job {job}", f"{tasks or '?'} tasks", problem if many else "")
    known = job_environment(environment)
    ends_at, grace = end_of_job(known), f"{known.grace_seconds:g} s"
    if ends_at is None:
        found = "its end is not known"
        problem = f"Say --timeout {grace} less than its time, so that trials are suspended."
    else:
        left = ends_at - now
        found = f"{duration(max(0.0, left))} left, all trials are suspended {grace} before its end"
        is_over = left <= known.grace_seconds
        problem = "Nothing is trained any more: submit it again." if is_over else ""
    yield judged("time of the job", found, problem)


def container() -> Iterator[Check]:
    """Report a container, which hides the processes of others on its GPUs."""
    if any(mark.exists() for mark in _MARKS):
        yield judged(
            "container",
            "yes; a GPU that another container uses shows by its memory only, so give each "
            "container GPUs of its own",
        )


def working_folder(folder: Path, kind: str) -> Iterator[Check]:
    """Check the folder where Lightning and SQLite put their files by default."""
    writable = os.access(folder, os.W_OK)
    network = kind in NETWORK_KINDS
    problem = "" if writable else "Logs and SQLite files are put here: go to a folder of yours."
    if writable and network:
        problem = (
            "SQLite's locks may fail on a network: put the study on a local disk, or on PostgreSQL."
        )
    yield judged("working folder", f"{folder} ({kind or 'unknown'})", problem)
    left = sorted(path.name for path in folder.glob("hpc_ckpt_*"))
    if left:
        problem = (
            "Lightning resumes any fit from it whose Trainer has this default_root_dir: move it "
            "away. Trials with HermesCallback have folders of their own."
        )
        yield judged("checkpoint of another job", ", ".join(left), problem)


def kind_of(path: Path) -> str:
    """The kind of the file system that a path, or what it links to, lies on; empty if unknown."""
    path, mounts = path.resolve(), psutil.disk_partitions(all=True)
    above = [mount for mount in reversed(mounts) if path.is_relative_to(mount.mountpoint)]
    # Of several at one place the last: autofs has one of its own there, below the real one.
    nearest = max(above, key=lambda mount: len(mount.mountpoint), default=None)
    return "" if nearest is None else nearest.fstype
