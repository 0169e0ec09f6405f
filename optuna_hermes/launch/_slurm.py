"""SLURM: each host is a task of a job array."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from optuna_hermes.errors import ExitStatus, LaunchError
from optuna_hermes.launch._base import Host, HostState, Launch, Launcher
from optuna_hermes.launch._job import Job
from optuna_hermes.launch._programs import ask

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
"""Every other state is a failure: OUT_OF_MEMORY, BOOT_FAIL, DEADLINE, and most often FAILED."""


class Slurm(Launcher):
    """Asks ``sbatch``, ``squeue``, ``scontrol`` and ``scancel``."""

    name = "slurm"

    def render(self, job: Job) -> str:
        optimize = [
            *(sys.executable, "-m", "optuna_hermes", "optimize", *job.arguments, *job.devices),
            *("--grace", str(job.grace_seconds), "--requeue"),
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
            f"--chdir={Path.cwd()}",
            f"--output={job.name}-%A-%a.log",
            *job.extra,
        ]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {each}" for each in options),
                ': "${OPTUNA_STORAGE:?must hold the URL of the storage}"',
                # In place of the shell: signals reach the driver, and its exit status the engine.
                f"exec {shlex.join(optimize)}",
                "",
            ]
        )

    def start(self, job: Job) -> Launch:
        said = ask(["sbatch", "--parsable"], self.render(job), {"OPTUNA_STORAGE": job.storage})
        number = said.strip().partition(";")[0]  # a federation's cluster may follow
        return Launch(launcher=self.name, name=job.name, id=number, folder=str(Path.cwd()))

    def hosts(self, launch: Launch) -> tuple[Host, ...]:
        # All of the user's, for a job that the controller has forgotten is an error by its number.
        said = ask(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%F|%K|%T|%N|%r"])
        rows = sorted((line.split("|") for line in said.splitlines()), key=lambda r: r[1].zfill(9))
        found = []
        for number, task, known, node, reason in rows:
            if number == launch.id:
                state, detail = _STATES.get(known, "failed"), "" if reason == "None" else reason
                if known == "FAILED" and _is_suspended(f"{number}_{task}"):
                    state, detail = "suspended", ""
                host = Host(name=f"{launch.name}-{task}", state=state, node=node, detail=detail)
                found.append(host)
        return tuple(found)

    def stop(self, launch: Launch) -> None:
        # A driver that suspends puts its job back into the queue, unless SLURM refuses.
        for host in self.hosts(launch):
            if host.state in ("waiting", "running"):
                task = host.name.rpartition("-")[2]
                ask(["scontrol", "update", f"JobId={launch.id}_{task}", "Requeue=0"])
        ask(["scancel", "--state=PENDING", launch.id])
        ask(["scancel", "--state=RUNNING", "--batch", "--signal=TERM", launch.id])

    def logs(self, launch: Launch) -> Iterator[str]:
        pattern = f"{launch.name}-{launch.id}-*.log"
        for path in sorted(Path(launch.folder).glob(pattern)):
            task = path.stem.rpartition("-")[2]
            for line in path.read_text(errors="replace").splitlines():
                yield f"{launch.name}-{task}: {line}"


def _is_suspended(task: str) -> bool:
    """True if it has ended with the status of a driver that has suspended its trials."""
    try:
        said = ask(["scontrol", "show", "job", task])
    except LaunchError:  # the controller has forgotten it by now
        return False
    return f"ExitCode={ExitStatus.SUSPENDED:d}:0" in said.split()
