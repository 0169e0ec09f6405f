"""``optimize``: run a study, and print its result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes._job_environment import GRACE_VARIABLE, job_environment
from optuna_hermes._job_environment import requeue as ask_for_requeue
from optuna_hermes.cli._output import (
    complain,
    discard_unwritten,
    note,
    show,
    show_json,
    show_result,
)
from optuna_hermes.cli._studies import (
    MOST_TRIALS,
    SEED,
    Json,
    Storage,
    StudyName,
    same_command,
    seconds,
    study_to_optimize,
)
from optuna_hermes.errors import DatabaseOutageError, ExitStatus, InvalidInputError, LaunchError
from optuna_hermes.policies import POLICIES
from optuna_hermes.view.progress import make_progress
from optuna_hermes.view.tables import summary_view

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.workers._optimize import OptimizeResult
    from optuna_hermes.workers._settings import OptimizeSettings
    from optuna_hermes.workers._worker_pool import WorkerPool

Devices = Annotated[
    str,
    typer.Option(
        envvar="OPTUNA_HERMES_DEVICES",
        metavar="SPEC",
        help="auto, or a list of cpu:N, GPU-uuid, MIG-uuid and FILE.json with commas.",
    ),
]

PowerDown = Annotated[
    str | None,
    typer.Option(
        metavar="CMD", help="Run for a device that energy:... powers down; {device} is its id."
    ),
]
PowerUp = Annotated[str | None, typer.Option(metavar="CMD", help="Run before it is used again.")]


def optimize(
    objective: Annotated[
        str,
        typer.Argument(
            metavar="OBJECTIVE", help="FILE.py:NAME or module:NAME.", show_default=False
        ),
    ],
    storage: Storage,
    study_name: StudyName,
    n_trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TRIALS,
            metavar="N",
            help="Trials that the study shall have in the end, those it has now included.",
        ),
    ] = None,
    timeout: Annotated[float | None, seconds("Suspend all S seconds after this call.")] = None,
    device_seconds: Annotated[
        float | None, seconds("Suspend all after S seconds of this call's device time.")
    ] = None,
    devices: Devices = "auto",
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Who trains next: {', '.join(POLICIES)}; module:CLASS or FILE.py:CLASS is one of "
            "your own. energy:hermes, or energy: before any other, powers idle devices down.",
        ),
    ] = "hermes",
    slice_seconds: Annotated[float, seconds("Least length of a slice.", least=0.001)] = 1.0,
    seed: Annotated[int | None, SEED] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Or a URL, for checkpoints; else beside an SQLite file or in ~/.local/state.",
        ),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A database for all hosts of a study in a journal or proxy."
        ),
    ] = None,
    hang_seconds: Annotated[
        float | None,
        seconds("End a process that says and does nothing for so long; else 300.", least=1.0),
    ] = None,
    grace: Annotated[
        float | None,
        seconds(
            f"From a manager's signal to its SIGKILL; else ${GRACE_VARIABLE}, or 30 in a job of "
            "SLURM and 15 elsewhere.",
            least=1.0,
        ),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Let SLURM begin the job again when suspended.")
    ] = False,
    power_down_command: PowerDown = None,
    power_up_command: PowerUp = None,
    json: Json = False,
) -> int:
    """Run a study with many more live trials than devices.

    None is killed: trials train in slices, the most promising go on, and the others are
    suspended and carried on later, exactly where they were. After Ctrl-C, a timeout or a crash the
    same command goes on. The study is made if the storage is empty; `create-study` makes one that
    maximises.

    \b
    Exit status:
      0    done, or --timeout or --device-seconds is used up
      1    failed
      2    bad input
      3    no trial has succeeded
      75   suspended by a signal, the end of its job, or a database or checkpoints
           that were away: run the same command again
      130  suspended by Ctrl-C

    \b
    Example:
      optuna-hermes optimize train.py:objective --storage sqlite:///study.db \\
          --study-name digits --n-trials 64
    """
    from optuna_hermes.broker._devices._source import parse_devices
    from optuna_hermes.broker._power_commands import commands_for
    from optuna_hermes.workers._settings import OptimizeSettings
    from optuna_hermes.workers._worker_pool import start

    parse_devices(devices)
    job = job_environment(os.environ).job
    if requeue and job is None:
        raise InvalidInputError(
            "--requeue must be given in a job of SLURM but $SLURM_JOB_ID is not set: leave it out."
        )
    settings = OptimizeSettings(
        n_trials=n_trials,
        timeout=timeout,
        device_seconds=device_seconds,
        devices=devices,
        policy=policy,
        slice_seconds=slice_seconds,
        seed=seed,
        checkpoint_dir=checkpoint_dir,
        ledger=ledger,
        hang_seconds=hang_seconds,
        grace=grace,
        power=commands_for(policy, power_down_command, power_up_command),
    )
    unprinted = 0
    try:
        # Workers import the objective while the study is opened.
        with (
            start(objective, settings, study_name) as pool,
            study_to_optimize(storage, study_name) as study,
        ):
            result = run_shown(study, pool, settings)
    except DatabaseOutageError as error:
        status = complain(str(error), ExitStatus.SUSPENDED)
    else:
        document = result.document()
        unprinted = show_result(
            lambda: show_json(document) if json else show(summary_view(document))
        )
        status = conclude(result, same_command(), n_trials)
    if requeue and job is not None and status == ExitStatus.SUSPENDED:
        # Said before: SLURM ends the job, and this process, as soon as it is asked.
        note(f"Asking SLURM to begin job {job} again.")
        try:
            ask_for_requeue(job)
        except LaunchError as error:
            note(f"Submit the job again yourself: {error}")
    return status or unprinted


def run_shown(study: Study, pool: WorkerPool, settings: OptimizeSettings) -> OptimizeResult:
    """Run a study with progress on standard error."""
    from optuna_hermes.workers._optimize import run_study

    progress = make_progress(True)
    try:
        return run_study(study, pool, settings, progress)
    finally:
        progress.close()
        # It may have ended before: what it could not write would be tried once more at the end.
        discard_unwritten()


def conclude(result: OptimizeResult, again: str, n_trials: int | None) -> int:
    """Print the problem of a study, or the command line ``again``; return the exit status."""
    if result.problem is not None:
        may_pass = result.problem_may_pass
        return complain(result.problem, ExitStatus.SUSPENDED if may_pass else ExitStatus.BAD_INPUT)
    if result.failure is not None and not (result.interrupted or result.suspended):
        rest = f" To go on: {again}" if result.stopped else ""
        return complain(result.failure + rest, ExitStatus.NOTHING_SUCCEEDED)
    if result.taken_by is not None:
        note(f"{result.outlook} To wait again:\n  {again}")
    elif result.unfinished or result.stopped or result.interrupted:
        if result.unfinished or n_trials is None or result.finished < n_trials:
            note(f"{result.remainder}. To go on:\n  {again}")
        else:
            note("All trials were over before they could be suspended.")
    if result.interrupted:
        return ExitStatus.INTERRUPTED
    return ExitStatus.SUSPENDED if result.suspended else 0
