"""State of a module and its parts beside weights and buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from optuna_hermes._lightning._namespace import LightningDataModule, LightningModule, parts
from optuna_hermes._lightning._pruning import is_masked
from optuna_hermes.suspend._generators import GENERATORS, generator_state, set_generator_state
from optuna_hermes.suspend._named_objects import modes, set_modes
from optuna_hermes.suspend._state import filled, moved, on_device, plain

_SAVED_ELSEWHERE = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    DataLoader,
    LightningDataModule,
)

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module of torch."""


def module_state(module: LightningModule) -> dict[str, Any]:
    """Modes, frozen parameters, plain attributes and hidden stateful objects of a user's module."""
    attributes = {
        name: {
            n: (value, on_device(value)) for n, value in _attributes(part).items() if plain(value)
        }
        for name, part in _parts(module)
    }
    return {
        **modes(module),
        "attributes": {name: values for name, values in attributes.items() if values},
        "hidden": {place: _state_of(each) for place, each in _hidden(module)},
    }


def restore_module(module: LightningModule, state: dict[str, Any]) -> None:
    set_modes(module, state)
    restore_attributes(module, state)
    for place, each in _hidden(module):
        if place in state["hidden"]:
            if isinstance(each, GENERATORS):
                set_generator_state(each, state["hidden"][place])
            else:
                each.load_state_dict(state["hidden"][place])


def restore_attributes(module: LightningModule, state: dict[str, Any]) -> None:
    """Restore plain attributes, such as a batch size."""
    for name, part in _parts(module):
        for attribute, (value, was_on_device) in state["attributes"].get(name, {}).items():
            if was_on_device:
                value = moved(value, module.device)
            # In place where it can be: the objective may hold the same list.
            in_place = type(value) in (list, dict)
            present = vars(part).get(attribute)
            vars(part)[attribute] = filled(present, type(value), value) if in_place else value


def is_saved(part: nn.Module, name: str, value: Any) -> bool:
    """True if ``module_state``, Lightning or torch saves an attribute of a part."""
    if of_libraries(part, name) or plain(value):
        return True
    items = _items(value)  # what ``_hidden`` yields of it
    return bool(items) and all(_has_state(each, set()) for _, each in items)


def of_libraries(part: nn.Module, name: str) -> bool:
    """True if an attribute of a part belongs to Lightning or torch."""
    return name in _own_attributes() or name in _OF_TORCH or is_masked(part, name)


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Attributes of every LightningModule, which Lightning restores or sets up itself."""
    modules = (each.LightningModule() for each in parts("core.module"))
    return frozenset().union(*map(vars, modules), {"_hparams_name", "_log_hyperparams"})


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and its parts, without metrics, which are saved separately."""
    return [(name, part) for name, part in module.named_modules() if not is_metric(part)]


def is_metric(part: nn.Module) -> TypeGuard[Metric]:
    """True for a metric; an abstract class takes long to answer that for each in a new process."""
    return Metric in type(part).__mro__


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(part).items()
        if name not in _own_attributes() and not is_masked(part, name)
    }


def _hidden(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects with a state in the module's attributes that are no submodules of it, by place.

    For example averages of the weights in a list, or random generators.
    """
    known = {id(each) for each in (*module.modules(), *module.parameters())}
    for name, part in _parts(module):
        for attribute, value in _attributes(part).items():
            for key, each in _items(value):
                if _has_state(each, known):
                    yield f"{name}.{attribute}.{key}", each


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value if isinstance(value, list | tuple) else [value]))


def _has_state(value: Any, known: set[int]) -> bool:
    if isinstance(value, GENERATORS):
        return True
    if id(value) in known or isinstance(value, _SAVED_ELSEWHERE):
        return False
    if isinstance(value, nn.Module) and any(id(p) in known for p in value.parameters()):
        return False
    kind = type(value)
    return (
        hasattr(kind, "load_state_dict")
        and hasattr(kind, "state_dict")
        and plain(dict(value.state_dict()))
    )


def _state_of(value: Any) -> Any:
    return generator_state(value) if isinstance(value, GENERATORS) else dict(value.state_dict())
