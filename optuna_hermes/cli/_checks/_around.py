"""Checks of the surroundings: a job of SLURM, a container, the working folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from optuna_hermes.cli._checks import Check, good, judged
from optuna_hermes.view.formats import duration

NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"}
)
_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/singularity"))
_INTERACTIVE = ("bash", "interactive")
_HOUR = 3600.0


def slurm() -> Iterator[Check]:
    """Check a job of SLURM: Lightning reads its variables, and its time is limited."""
    yield from slurm_checks(os.environ, time.time())


def slurm_checks(environment: Mapping[str, str], now: float) -> Iterator[Check]:
    """Check the environment variables of a job.

    Args:
        environment: of a process.
        now: seconds since 1970.
    """
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
    yield judged(f"SLURM job {job}", f"{tasks or '?'} tasks", problem=problem if many else "")
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdigit():
        yield judged(
            "time of the job",
            f"{duration(max(0.0, int(end) - now))} left",
            problem="Say --timeout a minute less, so that trials are suspended before it ends."
            if int(end) - now < _HOUR
            else "",
        )


def container() -> Iterator[Check]:
    """Report a container, which hides the processes of others on its GPUs."""
    if any(mark.exists() for mark in _MARKS):
        yield good(
            "container",
            "yes; a GPU that another container uses shows by its memory only, so give each "
            "container GPUs of its own",
        )


def working_folder() -> Iterator[Check]:
    """Check the folder where Lightning and SQLite put their files by default."""
    yield from folder_checks(Path.cwd(), kind_of(Path.cwd()))


def folder_checks(folder: Path, kind: str) -> Iterator[Check]:
    """Check a working folder.

    Args:
        folder: the folder.
        kind: of its file system.
    """
    writable = os.access(folder, os.W_OK)
    network = kind in NETWORK_KINDS
    problem = "" if writable else "Logs and SQLite files are put here: go to a folder of yours."
    if writable and network:
        problem = (
            "SQLite's locks may fail on a network: put the study on a local disk, or on PostgreSQL."
        )
    yield judged("working folder", f"{folder} ({kind or 'unknown'})", problem=problem)
    left = sorted(path.name for path in folder.glob("hpc_ckpt_*"))
    if left:
        problem = (
            "Lightning resumes any fit from it whose Trainer has this default_root_dir: move it "
            "away. Trials with HermesCallback have folders of their own."
        )
        yield judged("checkpoint of another job", ", ".join(left), problem=problem)


def kind_of(path: Path) -> str:
    """The kind of the file system that a path lies on, empty if unknown."""
    mounts = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return "" if nearest is None else nearest.fstype
