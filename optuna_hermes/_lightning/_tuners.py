"""Callbacks of Lightning that train on their own account to find a setting, before the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name, _LRFinder
from lightning.pytorch.utilities.parsing import lightning_setattr


def tunes(trainer: Trainer | None, callback: Callback) -> bool:
    """Whether one of them trains just now: it leaves all other callbacks out."""
    return callback not in getattr(trainer, "callbacks", ())  # asked before every batch


def tuner_state(trainer: Trainer) -> dict[str, Any]:
    """What they have found."""
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
    """Callbacks that need not look once more, each with what is to be done in ``on_fit_start``."""
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
    finder.optimal_lr = result = _LRFinder.__new__(_LRFinder)
    vars(result).update(found)
    rate = result.suggestion() if finder._update_attr else None
    if rate is not None:  # optimizers get it with their state
        lightning_setattr(module, _determine_lr_attr_name(module, finder._attr_name), rate)


def _take_size(
    finder: BatchSizeFinder,
    found: dict[str, Any] | None,
    trainer: Trainer,
    module: LightningModule,
) -> None:
    if found is None:
        return
    finder.optimal_batch_size = found["batch_size"]
    lightning_setattr(module, finder._batch_arg_name, found["batch_size"])
    loop = trainer.fit_loop
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
