"""SLURM: each host is a task of a job array."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from optuna_hermes._job_environment import HOST_VARIABLE
from optuna_hermes._programs import ask
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.errors import ExitStatus, LaunchError
from optuna_hermes.launch._base import Host, HostState, Launch, Launcher
from optuna_hermes.launch._job import Job

_STATES: dict[str, HostState] = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "RUNNING": "running",
    "COMPLETING": "stopping",
    "SIGNALING": "stopping",
    "STAGE_OUT": "stopping",
    "COMPLETED": "done",
    "CANCELLED": "suspended",
    "PREEMPTED": "suspended",
    "TIMEOUT": "suspended",
    "NODE_FAIL": "suspended",
    "RESIZING": "running",
}
"""Every other state is a failure: FAILED, which also a driver that has suspended its trials is to
SLURM, OUT_OF_MEMORY, BOOT_FAIL, DEADLINE."""
_QUEUED_AGAIN = ("waiting", "running")
"""States of tasks that go back into the queue when they are told to suspend."""
_CANCELLED_BY_NUMBER = ("CONFIGURING", "COMPLETING")
"""Tasks that begin, or may go back into the queue: no ``--state`` of ``scancel`` finds them."""
_FIELD = re.compile(r"(\w+)=(\S*)")


class Slurm(Launcher):
    """Asks ``sbatch``, ``squeue``, ``scontrol`` and ``scancel``."""

    name = "slurm"

    def render(self, job: Job) -> str:
        optimize = [
            *(sys.executable, "-m", "optuna_hermes", "optimize"),
            *("--grace", str(job.grace_seconds), "--requeue", *job.command),
        ]
        options = [
            f"--job-name={job.name}",
            f"--array=0-{job.hosts - 1}",
            "--ntasks=1",
            *([f"--cpus-per-task={job.cpus}"] if job.cpus else []),
            *([f"--gres=gpu:{job.gpus}"] if job.gpus else []),
            *([f"--time={job.time_limit}"] if job.time_limit else []),
            # To the batch process, which is the driver.
            f"--signal=B:TERM@{job.grace_seconds}",
            "--requeue",
            "--open-mode=append",
            f"--chdir={shlex.quote(str(Path.cwd()))}",  # sbatch takes lines apart as a shell does
            f"--output={job.name}-%A-%a.log",
            *job.extra,
        ]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {each}" for each in options),
                ': "${OPTUNA_STORAGE:?must hold the URL of the storage}"',
                # SLURM hands on those of the shell that launches; each job has its own.
                f"unset {HOST_VARIABLE} {RUNTIME_DIR_VARIABLE}",
                # In place of the shell: signals reach the driver, and its exit status the engine.
                f"exec {shlex.join(optimize)}",
                "",
            ]
        )

    def start(self, job: Job) -> Launch:
        look = f"squeue --name {job.name}"
        said = ask(["sbatch", "--parsable"], self.render(job), job.environment, look=look)
        # Of several clusters the one that has it follows.
        number, _, cluster = said.strip().partition(";")
        return Launch(
            launcher=self.name, name=job.name, id=number, folder=str(Path.cwd()), place=cluster
        )

    def _tasks(self, launch: Launch) -> list[list[str]]:
        """The rows of ``squeue``: of each task its array, index, state, node and reason."""
        # All of the user's, for a job that the controller has forgotten is an error by its number.
        squeue = _program("squeue", launch)
        said = ask([*squeue, "--me", "-h", "-r", "-t", "all", "-o", "%F|%K|%T|%N|%r"])
        rows = [line.split("|") for line in said.splitlines()]
        return sorted((row for row in rows if row[0] == launch.id), key=lambda row: int(row[1]))

    def hosts(self, launch: Launch) -> tuple[Host, ...]:
        tasks = self._tasks(launch)
        some_failed = any(state == "FAILED" for _, _, state, _, _ in tasks)
        suspended = _suspended(launch) if some_failed else frozenset()
        return tuple(
            Host(
                name=f"{launch.name}-{task}",
                state="suspended" if task in suspended else _STATES.get(state, "failed"),
                node=node,
                detail="" if reason == "None" or task in suspended else reason,
            )
            for _, task, state, node, reason in tasks
        )

    def stop(self, launch: Launch) -> None:
        # A driver that suspends puts its job back into the queue, unless SLURM refuses.
        scontrol, scancel = _program("scontrol", launch), _program("scancel", launch)
        refused: dict[str, LaunchError] = {}
        for _, task, state, _, _ in self._tasks(launch):
            number = f"{launch.id}_{task}"
            if state in _CANCELLED_BY_NUMBER:
                command = [*scancel, number]
            elif _STATES.get(state) in _QUEUED_AGAIN:
                command = [*scontrol, "update", f"JobId={number}", "Requeue=0"]
            else:
                continue
            try:
                ask(command)
            except LaunchError as error:  # it may have just ended, and others have not
                refused[f"{launch.name}-{task}"] = error
        try:
            ask([*scancel, "--state=PENDING", launch.id])
        finally:
            ask([*scancel, "--state=RUNNING", "--batch", "--signal=TERM", launch.id])
        for host in self.hosts(launch) if refused else ():
            if host.state in _QUEUED_AGAIN and host.name in refused:
                raise refused[host.name]

    def logs(self, launch: Launch) -> Iterator[str]:
        pattern = f"{launch.name}-{launch.id}-*.log"
        for path in sorted(Path(launch.folder).glob(pattern)):
            task = path.stem.rpartition("-")[2]
            for line in path.read_text(errors="replace").splitlines():
                yield f"{launch.name}-{task}: {line}"


def _program(name: str, launch: Launch) -> list[str]:
    return [name, *(["-M", launch.place] if launch.place else [])]


def _suspended(launch: Launch) -> frozenset[str]:
    """The tasks that have ended with the status of a driver that has suspended its trials."""
    try:
        said = ask([*_program("scontrol", launch), "--oneliner", "show", "job", launch.id])
    except LaunchError:  # the controller has forgotten it by now
        return frozenset()
    tasks = (dict(_FIELD.findall(line)) for line in said.splitlines())
    status = f"{ExitStatus.SUSPENDED:d}:0"
    return frozenset(
        task["ArrayTaskId"]
        for task in tasks
        if (task.get("JobState"), task.get("ExitCode")) == ("FAILED", status)
    )
