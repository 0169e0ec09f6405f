"""Optimizers and schedules of a trainer, as far as Lightning's checkpoints lack or round them."""

from __future__ import annotations

from typing import Any

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.suspend._modules._module_state import (
    beside_own_state,
    kept_groups,
    put_back,
    put_beside_own_state,
    state_of,
    undo_casts,
)
from optuna_hermes.suspend._modules._named_objects import held
from optuna_hermes.suspend._values._tree import with_references, without_references

_STATES = ("optimizer_states", "lr_schedulers")
"""Keys of the states in Lightning's checkpoints."""


def optimizers_of(trainer: Trainer) -> dict[str, Any]:
    """All optimizers and schedules, by names that are the same in each process."""
    return {**_own(trainer), **inner(trainer)}


def inner(trainer: Trainer) -> dict[str, Any]:
    """Optimizers and schedules in attributes of the trainer's, such as SAM's, by place."""
    return held(_own(trainer))


def inner_states(trainer: Trainer) -> dict[str, Any]:
    """Their states, which those of the trainer's own mostly lack."""
    names = _names(trainer)
    return {place: with_references(state_of(each), names) for place, each in inner(trainer).items()}


def beside_own_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Values that optimizers with a ``state_dict`` of their own may leave out of it, in order."""
    return [beside_own_state(each) for each in trainer.optimizers]


def put_references(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put references in place of the optimizers and schedules that are in the states of others."""
    names = _names(trainer)
    for key in checkpoint.keys() & set(_STATES):
        checkpoint[key] = with_references(checkpoint[key], names)


def follow_references(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put this process's optimizers and schedules in place of the references to them."""
    every = optimizers_of(trainer)
    for key in checkpoint.keys() & set(_STATES):
        checkpoint[key] = without_references(checkpoint[key], every)


def restore_optimizers(
    trainer: Trainer,
    states: list[dict[str, Any]],
    inner_states: dict[str, Any],
    beside: list[dict[str, Any]],
) -> None:
    """Make whole the ``states`` that Lightning has loaded; the tensors may be taken over."""
    for optimizer, state, others in zip(trainer.optimizers, states, beside, strict=False):
        undo_casts(optimizer, state)
        put_beside_own_state(optimizer, others)
    every = optimizers_of(trainer)
    with kept_groups(every.values()):
        for place, each in inner(trainer).items():
            if place in inner_states:
                put_back(each, without_references(inner_states[place], every))


def _names(trainer: Trainer) -> dict[int, str]:
    return {id(each): name for name, each in optimizers_of(trainer).items()}


def _own(trainer: Trainer) -> dict[str, Any]:
    optimizers = {f"optimizer {i}": each for i, each in enumerate(trainer.optimizers)}
    configs = enumerate(trainer.lr_scheduler_configs)
    return {**optimizers, **{f"scheduler {i}": each.scheduler for i, each in configs}}
