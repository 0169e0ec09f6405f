"""The trainings of ``race.py`` as their authors would write them, without this project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _race_tasks import Params
from _race_watch import Watch

Report = Callable[[float, Callable[[Path], None]], object]
"""Called with a unit's value, and a function that saves the training into a folder; may raise."""


def train(
    task: Any, trial: object, params: Params, report: Report, resumed: Path | None = None
) -> None:
    """Train a configuration, from its beginning or from where a folder has it."""
    _KINDS[task.KIND](task, trial, params, report, resumed)


def _train_loop(
    task: Any, trial: object, params: Params, report: Report, resumed: Path | None
) -> None:
    import torch

    training = task.begin(params)
    watch = Watch.start(trial, params, len(training.loader))
    done = 0
    if resumed is not None:
        state = torch.load(resumed / "state.pt", weights_only=True)
        training.load_state_dict(state["training"])
        done = state["done"]

    def report_unit(value: float) -> None:
        nonlocal done
        done += 1
        report(value, save)

    def save(folder: Path) -> None:
        torch.save({"training": training.state_dict(), "done": done}, folder / "state.pt")

    training.train(watch, report_unit, done=done)


def _train_lightning(
    task: Any, trial: object, params: Params, report: Report, resumed: Path | None
) -> None:
    watch = Watch.start(trial, params, task.n_batches(params))
    task.fit(params, watch, [task.Reported(report)], resumed)


def _train_lightgbm(
    task: Any, trial: object, params: Params, report: Report, resumed: Path | None
) -> None:
    watch = Watch.start(trial, params, task.n_batches(params))
    task.boost(params, watch, [task.Reported(report)], resumed)


_KINDS = {"loop": _train_loop, "lightning": _train_lightning, "lightgbm": _train_lightgbm}
