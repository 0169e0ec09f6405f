"""How many units a training still has."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer


def units_left(trainer: Trainer, *, units: int, by_validation: bool) -> int | None:
    """Units until ``max_epochs``, None if nothing but the training itself knows.

    Args:
        trainer: after its first batch.
        units: how many were reported.
        by_validation: whether each validation is a unit, or else each epoch.
    """
    epochs = trainer.max_epochs
    if epochs is None or epochs < 0 or trainer.max_steps >= 0:
        return None
    total = _validations(trainer, epochs) if by_validation else epochs
    return None if total is None else max(0, total - units)


def _validations(trainer: Trainer, epochs: int) -> int | None:
    interval, batches = trainer.val_check_batch, trainer.num_training_batches
    every = trainer.check_val_every_n_epoch
    if interval is None or math.isinf(interval) or interval == batches:  # at the end of an epoch
        return epochs // (every or 1)
    if math.isinf(batches):
        return None
    if every is None:  # epochs do not matter
        return int(epochs * batches // interval)
    return (epochs // every) * int(batches // interval)
