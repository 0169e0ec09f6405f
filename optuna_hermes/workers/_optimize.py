"""``optimize``: worker processes for a study whose trials take turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import optuna

from optuna_hermes import _optuna
from optuna_hermes.broker._power_commands import commands_for
from optuna_hermes.errors import (
    CheckpointUnreachableError,
    ExitStatus,
    HermesError,
    InvalidInputError,
    StorageError,
    TrialsFailedError,
    require,
)
from optuna_hermes.sampler import HermesSampler, devices_of, devices_text
from optuna_hermes.view.formats import plural
from optuna_hermes.view.progress import ProgressDisplay, make_progress
from optuna_hermes.workers._objective import Objective
from optuna_hermes.workers._result import OptimizeResult, TrialResult
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._worker_pool import WorkerPool, start

if TYPE_CHECKING:
    from optuna_hermes.workers._notices import Callback

__all__ = ["OptimizeResult", "TrialResult", "optimize", "run_study"]


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_OF_OPTUNA = {
    "n_jobs": "the devices decide how many trials train at once, so leave it out",
    "catch": "a trial whose code raises is FAIL and the others go on, so leave it out",
    "gc_after_trial": "each trial has a process of its own, so leave it out",
    "show_progress_bar": "write show_progress",
}
"""Arguments of ``study.optimize`` alone, and what there is in their place."""


def _refuse_options_of_optuna(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Answer arguments of ``study.optimize`` that a function does not have by what to write."""

    @functools.wraps(function)
    def refusing(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        for name, instead in _OF_OPTUNA.items():
            if name in options:
                raise InvalidInputError(f"optimize() has no {name}: {instead}.")
        try:
            return function(*args, **options)
        except InvalidInputError as error:
            raise error.with_traceback(None) from None  # the mistake is in the caller's line

    return refusing


@_refuse_options_of_optuna
def optimize(
    study: optuna.Study,
    objective: Objective | str,
    n_trials: int | None = None,
    timeout: float | None = None,
    *,
    device_seconds: float | None = None,
    devices: str | None = None,
    policy: str = "hermes",
    slice_seconds: float = 1.0,
    seed: int | None = None,
    checkpoint_dir: str | Path | None = None,
    ledger: str | None = None,
    hang_seconds: float | None = None,
    grace: float | None = None,
    power_down_command: str | None = None,
    power_up_command: str | None = None,
    callbacks: Iterable[Callback] | None = None,
    show_progress: bool = True,
) -> OptimizeResult:
    """Optimize an objective with more live trials than devices; trials are paused, not killed.

    Trials train in worker processes, take turns on the devices, and are suspended in between. A
    call that ends early (``timeout``, ``device_seconds``, a callback, Ctrl-C) leaves the
    unfinished ones suspended; the same call carries on with them. One that finds the study
    optimized by another process of this host waits until that one has ended, then carries on.

    Args:
        study: in a storage that other processes can reach. Its sampler should be a
            ``HermesSampler`` and its pruner a ``HermesPruner``: Optuna stores neither, so set them
            after ``load_study``, too. Another pruner is refused if trials are suspended, which it
            would stop for good.
        objective: as for ``study.optimize``, or ``"FILE.py:NAME"`` or ``"module:NAME"``.
        n_trials: number of trials that the study shall have in the end; those it has count.
        timeout: seconds.
        device_seconds: device time to spend.
        devices: ``auto``, ``cpu:2`` or GPU UUIDs with commas; None for those of the study's
            ``HermesSampler``, else ``$OPTUNA_HERMES_DEVICES``, else ``auto``: every GPU, or those
            of a broker that is in use.
        policy: chooses the trials that train next: a name of ``optuna_hermes.policies.POLICIES``,
            or ``FILE.py:CLASS`` or ``module:CLASS`` for one's own. With the prefix ``energy:``
            devices that are not needed are powered down.
        slice_seconds: least length of a slice.
        seed: source of all random numbers of sampler and trials; None for the one that the study
            has, at first that of its ``HermesSampler``, or one that is drawn.
        checkpoint_dir: folder or URL for checkpoints. None for beside an SQLite file, else in the
            user's state folder.
        ledger: URL of a database that all hosts reach, for a study in a journal file or behind a
            gRPC proxy. None for that which the study has, at first a file of this host.
        hang_seconds: a process that trains, and neither reports nor computes for so long, is taken
            to hang: it is killed, and its trial goes on from its last checkpoint. None for 300.
            One that computes is given ten times that, and any time before its first unit.
        grace: seconds from a signal of a manager (SLURM, Kubernetes, systemd) to its SIGKILL. All
            but the last five of them are to suspend trials, those that have most to lose first.
            None for ``$OPTUNA_HERMES_GRACE_SECONDS``, else 30 in a job of SLURM and 15 elsewhere.
            Ctrl-C and the end of a budget give as long: what a trial has trained since its last
            checkpoint is trained again if it comes to no clean point by then.
        power_down_command: run for each device that ``energy`` powers down: a program and its
            arguments, ``{device}`` among them. No shell reads it.
        power_up_command: run before such a device is used again.
        callbacks: called here with study and trial after each trial that finishes meanwhile, on
            whatever host.
        show_progress: show progress on standard error. False for its warnings only (lost processes,
            failed trials, checkpoints that cannot be written, work that begins anew), by the logger
            ``optuna_hermes.optimize``, which has the other lines at level INFO.

    Returns:
        The outcome of the call, with every trial of the study.

    Raises:
        InvalidInputError: before anything is changed.
        CheckpointUnreachableError: no checkpoint could be read on this host for minutes, and every
            live trial is suspended: make the same call again.
        DatabaseOutageError: the database did not answer for minutes, and every live trial is
            suspended: make the same call again.
        TrialsFailedError: every trial has failed, or so many alike that it was stopped.
        KeyboardInterrupt: after Ctrl-C, once every live trial is suspended.
        SystemExit: with status 75, once every live trial is suspended after another signal or
            before the end of a job of SLURM: make the same call again. Or that of a callback.
    """
    _refuse_others(study, objective)
    functions = _functions(callbacks)
    settings = OptimizeSettings(
        n_trials=n_trials,
        timeout=timeout,
        device_seconds=device_seconds,
        devices=devices_text(devices_of(study.sampler) if devices is None else devices),
        policy=policy,
        slice_seconds=slice_seconds,
        seed=seed,
        checkpoint_dir=checkpoint_dir,
        ledger=ledger,
        hang_seconds=hang_seconds,
        grace=grace,
        power=commands_for(policy, power_down_command, power_up_command),
    )
    progress = make_progress(show_progress)
    try:
        _refuse_unshared(study)
        with start(objective, settings, study.study_name, study) as pool:
            result = run_study(study, pool, settings, progress, functions)
        if n_trials is not None and result.finished >= n_trials and not result.spent_seconds:
            progress.note(
                f"Nothing was left to train: n_trials={n_trials} is the number of trials that the "
                f"study shall have in the end, and it has {result.finished}."
            )
        if result.outlook:
            (progress.warn if result.begins_anew else progress.note)(result.outlook)
    finally:
        progress.close()
    if result.interrupted:
        raise KeyboardInterrupt(result.outlook)  # a notebook shows it as the cell's last line
    if result.suspended:
        raise SystemExit(int(ExitStatus.SUSPENDED))
    if result.problem:
        raise (CheckpointUnreachableError if result.problem_may_pass else HermesError)(
            result.problem
        )
    if result.failure:
        raise TrialsFailedError(result.failure)
    return result


def run_study(
    study: optuna.Study,
    pool: WorkerPool,
    settings: OptimizeSettings,
    progress: ProgressDisplay,
    callbacks: Sequence[Callback] = (),
) -> OptimizeResult:
    """As ``optimize``, for callers that start the pool and show progress and outcome themselves."""
    # Here: the fork server and the broker are being started meanwhile.
    from optuna_hermes.workers._driver import Driver

    _check_parts(study, progress)
    return Driver(study, pool, settings, progress, callbacks).run()


def _refuse_others(study: object, objective: object) -> None:
    require(
        isinstance(study, optuna.Study),
        "study must be an optuna.Study",
        study,
        "make it with optuna.create_study(), or load it with optuna.load_study()",
    )
    require(
        callable(objective) or isinstance(objective, str),
        "objective must be a function of a trial, FILE.py:NAME or module:NAME",
        objective,
        "give the function itself, and not what it returns",
    )


def _functions(callbacks: Iterable[Callback] | None) -> tuple[Callback, ...]:
    """The callbacks of a call: one that cannot be called would end it after its first trial."""
    rule = "callbacks must be a list of functions of a study and a trial"
    advice = "write callbacks=[function]"
    require(isinstance(callbacks, Iterable | None), rule, callbacks, advice)
    functions = tuple(callbacks or ())
    require(all(map(callable, functions)), rule, functions, advice)
    return functions


def _refuse_unshared(study: optuna.Study) -> None:
    if not _optuna.shared(study):
        raise StorageError(
            "optimize() trains in processes of their own and needs a storage that they can reach "
            "but this study is in memory: use create_study(storage='sqlite:///study.db', "
            "study_name='mine', load_if_exists=True)."
        )


def _check_parts(study: optuna.Study, progress: ProgressDisplay) -> None:
    """Refuse a pruner that would stop suspended trials; name parts that do not fit."""
    for part in (*_optuna.nested(study.sampler), *_optuna.nested_pruners(study.pruner)):
        if not _optuna.keeps_nothing(part):
            progress.note(
                f"Each trial has a copy of {type(part).__name__} as it was when this call began. "
                "If it keeps what it learns in itself, and does not read it from the study, it "
                "learns nothing: run study.optimize() in place of optimize()."
            )
    if len(_optuna.with_retry(lambda: study.directions)) > 1:
        return  # Optuna prunes no such trial, and has no values of theirs
    kind, pruner = type(study.pruner).__name__, study.pruner
    if not (getattr(pruner, "preempts", False) or isinstance(pruner, optuna.pruners.NopPruner)):
        trials = _optuna.with_retry(study.get_trials, deepcopy=False)
        unfinished = sum(map(_optuna.ours, trials))
        advice = (
            "(Optuna stores none with a study): write study.pruner = HermesPruner() before "
            f"optimize(), or HermesPruner({kind}(...)) if it shall stop trials."
        )
        if unfinished:
            raise InvalidInputError(
                f"The study has {plural(unfinished, 'unfinished trial')}, which its pruner {kind} "
                f"may stop for good {advice}"
            )
        progress.warn(
            f"The study's pruner {kind} stops trials for good, suspends none where they call "
            f"trial.should_prune(), and is refused once trials are suspended {advice}"
        )
    kind, sampler = type(study.sampler).__name__, study.sampler
    ours = any(isinstance(each, HermesSampler) for each in _optuna.nested(sampler))
    if not ours and _optuna.learns(sampler):
        progress.warn(
            f"The study's sampler {kind} takes suspended trials for bad ones, or ignores them: "
            "write study.sampler = HermesSampler() before optimize(), or "
            f"HermesSampler({kind}(...))."
        )
