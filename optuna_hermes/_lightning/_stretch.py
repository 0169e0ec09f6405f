"""Checks if a training can change its batch size."""

from __future__ import annotations

from typing import Any

from optuna_hermes._lightning._namespace import GradientAccumulationScheduler, Trainer
from optuna_hermes.suspend._elastic import ElasticReplay, why_not_regrouped


def why_not_elastic(trainer: Trainer, scaling: str) -> str | None:
    """The reason why the batch size of a ``fit`` cannot change, None if it can."""
    loader_reason = _why_not_loader(trainer)
    if loader_reason is not None:
        return loader_reason
    if trainer.max_steps >= 0:
        return "max_steps counts steps, and would be another number of samples"
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        return "its validations are not at the ends of epochs"
    if any(isinstance(each, GradientAccumulationScheduler) for each in _callbacks(trainer)):
        return "GradientAccumulationScheduler changes its steps too"
    if not trainer.lightning_module.automatic_optimization:
        return "it optimizes by hand" if scaling == "accumulate" else None
    if scaling == "accumulate":
        own = trainer.strategy.handles_gradient_accumulation
        return "its strategy accumulates gradients by itself" if own else None
    paced = [each for each in trainer.lr_scheduler_configs if not each.reduce_on_plateau]
    if any(each.interval == "step" and each.frequency != 1 for each in paced):
        return "a scheduler of it steps after every few batches (frequency)"
    return None


def _why_not_loader(trainer: Trainer) -> str | None:
    combined = trainer.fit_loop._combined_loader
    if trainer.world_size > 1:
        return "it trains in several processes"
    if combined is None or len(combined.flattened) != 1:
        return "it must have one train loader"
    if trainer.overfit_batches:  # type: ignore[attr-defined]  # it is set by a connector
        return "overfit_batches repeats some of its batches"
    sampler = getattr(combined.flattened[0], "batch_sampler", None)
    if not isinstance(sampler, ElasticReplay):
        return why_not_regrouped(combined.flattened[0]) or "its train loader is another one"
    return None


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]  # it is set by a connector
