"""Lightning's callbacks that find a setting by short trainings before the actual one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from optuna_hermes._lightning._namespace import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    LightningModule,
    Trainer,
    part,
)


def tunes(trainer: Trainer | None, callback: Callback) -> bool:
    """True while one of them trains: it removes all other callbacks for that time."""
    return callback not in getattr(trainer, "callbacks", ())  # asked before every batch


def tuner_state(trainer: Trainer) -> dict[str, Any]:
    """The settings that they have found, by the callback's ``state_key``."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # it is set by a connector
    found: dict[str, Any] = {}
    for each in callbacks:
        if isinstance(each, LearningRateFinder) and each.optimal_lr is not None:
            found[each.state_key] = vars(each.optimal_lr)
        if isinstance(each, BatchSizeFinder):
            found[each.state_key] = {"batch_size": each.optimal_batch_size}
    return found


def skip_tuners(
    trainer: Trainer, found: dict[str, Any]
) -> Iterator[tuple[Callback, Callable[..., None]]]:
    """Yield the callbacks that need not search again, with a replacement for ``on_fit_start``."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for each in callbacks:
        if isinstance(each, LearningRateFinder):
            yield each, functools.partial(_take_rate, each, found.get(each.state_key))
        elif isinstance(each, BatchSizeFinder):
            yield each, functools.partial(_take_size, each, found.get(each.state_key))


def _take_rate(
    finder: LearningRateFinder,
    found: dict[str, Any] | None,
    trainer: Trainer,
    module: LightningModule,
) -> None:
    if found is None:
        return
    tuner = part(trainer, "tuner.lr_finder")
    finder.optimal_lr = result = tuner._LRFinder.__new__(tuner._LRFinder)
    vars(result).update(found)
    rate = result.suggestion() if finder._update_attr else None
    if rate is not None:  # for the module only: optimizers get it with their state
        name = tuner._determine_lr_attr_name(module, finder._attr_name)
        part(trainer, "utilities.parsing").lightning_setattr(module, name, rate)


def _take_size(
    finder: BatchSizeFinder,
    found: dict[str, Any] | None,
    trainer: Trainer,
    module: LightningModule,
) -> None:
    if found is None:
        return
    finder.optimal_batch_size = found["batch_size"]
    parsing = part(trainer, "utilities.parsing")
    parsing.lightning_setattr(module, finder._batch_arg_name, found["batch_size"])
    # They may have been made with the size before: Lightning makes them again.
    loop = trainer.fit_loop
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
