"""Optimizers and schedules of a trainer, as far as Lightning's checkpoints lack or round them."""

from __future__ import annotations

from typing import Any

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.suspend._modules._module_state import kept_groups, put_back, undo_casts
from optuna_hermes.suspend._modules._named_objects import held


def inner(trainer: Trainer) -> dict[str, Any]:
    """Optimizers and schedules in attributes of the trainer's, such as SAM's, by place."""
    return held(_own(trainer))


def inner_states(trainer: Trainer) -> dict[str, Any]:
    """Their states, which those of the trainer's own mostly lack."""
    return {place: each.state_dict() for place, each in inner(trainer).items()}


def optimizers_of(trainer: Trainer) -> list[object]:
    """All optimizers and schedules."""
    return [*_own(trainer).values(), *inner(trainer).values()]


def restore_optimizers(
    trainer: Trainer, states: list[dict[str, Any]], inner_states: dict[str, Any]
) -> None:
    """Make whole what Lightning has loaded; the tensors may be taken over.

    Args:
        states: those that Lightning has loaded.
    """
    for optimizer, state in zip(trainer.optimizers, states, strict=False):
        undo_casts(optimizer, state)
    with kept_groups(optimizers_of(trainer)):
        for place, each in inner(trainer).items():
            if place in inner_states:
                put_back(each, {"state": inner_states[place]})


def _own(trainer: Trainer) -> dict[str, Any]:
    optimizers = {f"optimizer {i}": each for i, each in enumerate(trainer.optimizers)}
    configs = enumerate(trainer.lr_scheduler_configs)
    return {**optimizers, **{f"scheduler {i}": each.scheduler for i, each in configs}}
