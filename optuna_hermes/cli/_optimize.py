"""``optimize`` and ``quickstart``: run a study, and say what came of it."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._output import BAD_INPUT, INTERRUPTED, complain, note, show, show_json
from optuna_hermes.cli._studies import (
    Json,
    Storage,
    StudyName,
    same_command,
    study_to_optimize,
)
from optuna_hermes.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.workers import OptimizeResult, Settings

Devices = Annotated[
    str,
    typer.Option(
        envvar="OPTUNA_HERMES_DEVICES",
        metavar="SPEC",
        help="auto, or a list of cpu:N, GPU-uuid and MIG-uuid with commas.",
    ),
]


def optimize(
    objective: Annotated[
        str, typer.Argument(help="FILE.py:NAME or module:NAME.", show_default=False)
    ],
    storage: Storage,
    study_name: StudyName,
    n_trials: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Trials the study shall have; its own count."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, metavar="S", help="Suspend all after S seconds.")
    ] = None,
    device_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="S", help="Suspend all after S seconds of device time."),
    ] = None,
    devices: Devices = "auto",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Who trains next: hermes, fifo or round-robin.")
    ] = "hermes",
    slice_seconds: Annotated[
        float, typer.Option(min=0.001, metavar="S", help="Least length of a slice.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Sampler and trials draw from it.")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For suspended trials; else beside the database."),
    ] = None,
    json: Json = False,
) -> int:
    """Run a study with many more live trials than devices; none is killed.

    Trials train in slices. The most promising go on, the others are suspended and carried on
    later, exactly where they were. After Ctrl-C, a timeout or a crash the same command goes on.
    The study is made if the storage is empty; `create-study` makes one that maximises.

    \b
    Example:
      optuna-hermes optimize train.py:objective --storage sqlite:///study.db \\
          --study-name digits --n-trials 64
    """
    from optuna_hermes.broker._devices import parse_devices
    from optuna_hermes.policies import make_policy

    make_policy(policy)
    parse_devices(devices)
    with study_to_optimize(storage, study_name) as study:
        from optuna_hermes.workers import Settings

        settings = Settings(
            n_trials=n_trials,
            timeout=timeout,
            device_seconds=device_seconds,
            devices=devices,
            policy=policy,
            slice_seconds=slice_seconds,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
        )
        result = _run(study, objective, settings)
    if json:
        show_json(result.document())
    else:
        from optuna_hermes.view import summary_view

        show(summary_view(result.document()))
    return _conclude(result, same_command())


def _run(study: Study, objective: str, settings: Settings) -> OptimizeResult:
    from optuna_hermes.view import make_progress
    from optuna_hermes.workers import run_study

    progress = make_progress(True, total=settings.n_trials)
    try:
        return run_study(study, objective, settings, progress)
    finally:
        progress.close()


def _conclude(result: OptimizeResult, again: str) -> int:
    """Say what is left to do, and how; the exit status."""
    from optuna_hermes.view import plural

    left = plural(result.unfinished, "trial")
    if result.problem is not None:
        return complain(result.problem, BAD_INPUT)
    if result.unfinished:
        note(f"{left} suspended. To go on:\n  {again}")
    elif result.interrupted:
        note(f"Stopped; nothing is left suspended. To go on:\n  {again}")
    return INTERRUPTED if result.interrupted else 0


# -- quickstart --------------------------------------------------------------------------------

_OBJECTIVE = "optuna_hermes.quickstart:objective"
_STUDY = "quickstart"
_SLICE_SECONDS = 0.5


def quickstart(
    devices: Devices = "auto",
    n_trials: Annotated[int, typer.Option(min=1, metavar="N", help="Trials to train.")] = 16,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep the study there.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampler and trials draw from it.")] = 0,
    json: Json = False,
) -> int:
    """Tune a small network on real data (handwritten digits), in under a minute.

    It takes the GPUs there are, or two CPU slots, and ends with the best trial, a chart of all
    learning curves, and what was suspended and resumed on the way.

    \b
    Example:
      optuna-hermes quickstart --devices cpu:2
    """
    from optuna_hermes.broker._devices import parse_devices

    _require("lightning", "sklearn")
    slots = parse_devices(devices)
    url = storage or f"sqlite:///{Path(tempfile.mkdtemp(prefix='optuna-hermes-')) / 'study.db'}"
    _explain(n_trials, [slot.id for slot in slots], url)
    with study_to_optimize(url, _STUDY) as study:
        from optuna_hermes.workers import Settings

        settings = Settings(
            n_trials=n_trials, devices=devices, slice_seconds=_SLICE_SECONDS, seed=seed
        )
        result = _run(study, _OBJECTIVE, settings)
    if json:
        show_json(result.document())
    else:
        _show_all(study, result, url)
    return _conclude(result, _again(url, n_trials, devices))
