"""``quickstart``: run the bundled study, with explanations."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._optimize import Devices, conclude, run_shown
from optuna_hermes.cli._output import note, show, show_json, show_result
from optuna_hermes.cli._studies import MOST_TRIALS, PROGRAM, SEED, Json, study_to_optimize
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view.formats import number, plural, sparkline
from optuna_hermes.view.tables import summary_view

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.workers._optimize import OptimizeResult

OBJECTIVE = "optuna_hermes.quickstart:objective"
STUDY_NAME = "quickstart"
# Shorter than the default of `optimize`: the whole study shall take less than a minute.
SLICE_SECONDS = 0.5
MOST_CURVES = 16

# Packages, each with the modules of which one must be there.
_NEEDED = {
    "torch": ("torch",),
    "lightning": ("lightning", "pytorch_lightning"),
    "scikit-learn": ("sklearn",),
}


def quickstart(
    devices: Devices = "auto",
    n_trials: Annotated[
        int, typer.Option(min=1, max=MOST_TRIALS, metavar="N", help="Trials to train.")
    ] = 16,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep the study there.")
    ] = None,
    seed: Annotated[int, SEED] = 0,
    json: Json = False,
) -> int:
    """Tune a small network on real data, in under a minute.

    It learns handwritten digits on the GPUs there are, or on two CPU slots, and ends with the best
    trial, the learning curves, and what was suspended and resumed on the way.

    \b
    Example:
      optuna-hermes quickstart --devices cpu:2
    """
    from optuna_hermes.broker._devices._source import parse_devices
    from optuna_hermes.workers._settings import OptimizeSettings
    from optuna_hermes.workers._worker_pool import start

    _require_packages()
    slots = [slot.id for slot in parse_devices(devices)]
    url = storage or f"sqlite:///{tempfile.mkdtemp(prefix='optuna-hermes-')}/study.db"
    settings = OptimizeSettings(
        n_trials=n_trials, devices=devices, slice_seconds=SLICE_SECONDS, seed=seed
    )
    with (
        start(OBJECTIVE, settings, STUDY_NAME) as pool,
        study_to_optimize(url, STUDY_NAME, make=True) as study,
    ):
        note(
            f"{plural(n_trials, 'trial')} of a small network on scikit-learn's digits share "
            f"{plural(len(slots), 'device')} ({', '.join(slots)}).\n"
            f"Each trains for {SLICE_SECONDS} s or so, then the most promising one is next; the "
            "others are suspended\nand carried on later. None is killed. (Importing torch takes a "
            "moment.)"
        )
        result = run_shown(study, pool, settings)
    unprinted = show_result(
        lambda: show_json(result.document()) if json else _show_all(study, result, url)
    )
    options = ["--storage", url, "--devices", devices, "--n-trials", str(n_trials)]
    again = _command("quickstart", *options, "--seed", str(seed))
    status = conclude(result, again, n_trials)
    return status or unprinted


def _require_packages() -> None:
    missing = [
        package
        for package, modules in _NEEDED.items()
        if not any(map(importlib.util.find_spec, modules))
    ]
    if missing:
        raise InvalidInputError(
            f"The quickstart needs {' and '.join(missing)}: install with "
            "`python -m pip install 'optuna-hermes[lightning]'`."
        )


def _show_all(study: Study, result: OptimizeResult, url: str) -> None:
    show(summary_view(result.document()))
    _show_curves(study)
    if not result.unfinished and not result.interrupted:
        where = ("--storage", url, "--study-name", STUDY_NAME)
        steps = [_command(verb, *where) for verb in ("best-trial", "status", "gc")]
        show("\n  ".join(["\nNext:", *steps, _command("optimize", "--help")]))


def _show_curves(study: Study) -> None:
    losses = {
        trial.number: [loss for _, loss in sorted(trial.intermediate_values.items())]
        for trial in study.get_trials(deepcopy=False)
        if trial.intermediate_values
    }
    best = sorted(losses, key=lambda trial: losses[trial][-1])[:MOST_CURVES]
    if not best:
        return
    show("\nValidation loss by epoch, and the last one:")
    digits = len(str(max(best)))
    # A terminal would wrap wider lines, which leaves nothing of the curves.
    room = shutil.get_terminal_size().columns - digits - len("  trial     1.234e-05")
    width = max(2, min(room, max(len(losses[trial]) for trial in best)))
    for trial in best:
        curve = sparkline(losses[trial], width)
        show(f"  trial {trial:<{digits}}  {curve:<{width}}  {number(losses[trial][-1])}")


def _command(*words: str) -> str:
    from optuna_hermes import _optuna

    return shlex.join([PROGRAM, *map(_optuna.without_password, words)])
