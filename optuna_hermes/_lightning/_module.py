"""State of a module and its parts beside weights and buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes._lightning._namespace import LightningDataModule, LightningModule, parts
from optuna_hermes._lightning._pruning import is_masked
from optuna_hermes.suspend._generators import GENERATORS, generator_state, set_generator_state
from optuna_hermes.suspend._metrics import is_metric, of_metrics, parts_with_metrics
from optuna_hermes.suspend._module_state import OF_LAZY_MODULES, modes, set_modes
from optuna_hermes.suspend._state import copied, filled, moved, on_device, plain
from optuna_hermes.suspend._tree import mapped, tensors_in

_SAVED_ELSEWHERE = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    DataLoader,
    LightningDataModule,
)

_Place = tuple[Any, ...]
"""Of a tensor: the name of the part, that of its attribute, and keys in lists and dictionaries."""


def tensors_of(module: LightningModule) -> Mapping[_Place, torch.Tensor]:
    """The tensors in plain attributes, as long as they are used."""
    return WeakValueDictionary(_tensors(_plain_attributes(module)))


def module_state(module: LightningModule, made: Mapping[_Place, torch.Tensor]) -> dict[str, Any]:
    """Modes, frozen parameters, plain attributes and hidden stateful objects of a user's module.

    Args:
        made: the tensors that ``tensors_of`` returned at the fit's beginning. Those that are still
            there are filled when they are restored: an optimizer or a sampler may hold them.
    """
    attributes = _plain_attributes(module)
    return {
        **modes(module),
        "attributes": attributes,
        "in_place": [n for n, each in _tensors(attributes).items() if made.get(n) is each],
        "hidden": {place: _state_of(each) for place, each in _hidden(module)},
    }


def restore_module(module: LightningModule, state: dict[str, Any]) -> list[str]:
    """Restore what ``module_state`` returned; return the places of objects that are not there."""
    set_modes(module, state)
    restore_attributes(module, state)
    left = dict(state["hidden"])
    for place, each in _hidden(module):
        if place in left:
            saved = left.pop(place)
            if isinstance(each, GENERATORS):
                set_generator_state(each, saved)
            else:
                each.load_state_dict(saved)
    return list(left)


def stateful(module: LightningModule) -> dict[str, list[Any]]:
    """The keys and classes of hidden objects that the objective must make, by their attribute."""
    found: dict[str, list[Any]] = {}
    for place, each in _hidden(module):
        if type(each) not in GENERATORS:  # which come back as attributes do
            attribute, _, key = place.rpartition(".")
            found.setdefault(attribute.lstrip("."), []).append((key, type(each)))
    return found


def restore_attributes(module: LightningModule, state: dict[str, Any]) -> None:
    """Restore plain attributes, such as a batch size."""
    attributes, there = state["attributes"], _tensors(_plain_attributes(module))
    saved = _tensors(attributes)
    in_place = {
        id(saved[place]): copied(there.get(place), saved[place]) for place in state["in_place"]
    }
    for name, part in module.named_modules():
        for attribute, (value, was_on_device) in attributes.get(name, {}).items():
            value = mapped(value, lambda leaf: in_place.get(id(leaf), leaf))
            if was_on_device:
                value = moved(value, module.device)
            # In place where it can be: the objective may hold the same list.
            is_container = type(value) in (list, dict)
            present = vars(part).get(attribute)
            vars(part)[attribute] = filled(present, type(value), value) if is_container else value


def _plain_attributes(module: LightningModule) -> dict[str, dict[str, tuple[Any, bool]]]:
    """By part and name, each with True if it is on a device."""
    found = {
        name: {n: (each, on_device(each)) for n, each in _attributes(part).items() if plain(each)}
        for name, part in module.named_modules()
    }
    return {name: values for name, values in found.items() if values}


def _tensors(attributes: dict[str, dict[str, tuple[Any, bool]]]) -> dict[_Place, torch.Tensor]:
    return {
        place: each
        for name, values in attributes.items()
        for attribute, (value, _) in values.items()
        for place, each in tensors_in(value, (name, attribute))
    }


def is_saved(part: nn.Module, name: str, value: Any, known: set[int]) -> bool:
    """True if ``module_state``, Lightning or torch saves an attribute of a part.

    Args:
        known: ids of objects that are saved elsewhere, but not which of them are in an attribute.
    """
    if of_libraries(part, name) or plain(value):
        return True
    items = _items(value)  # what ``_hidden`` yields of it
    # Of these the next process may have none yet: a generator can be made anew, others cannot.
    made = any(type(each) in GENERATORS for _, each in items)
    return bool(items) and not made and all(_has_state(each, known) for _, each in items)


def of_libraries(part: nn.Module, name: str) -> bool:
    """True if an attribute of a part belongs to Lightning, torch or torchmetrics."""
    own = name in _own_attributes() or is_masked(part, name)
    return own or (is_metric(part) and of_metrics(part, name))


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Attributes of every LightningModule, which Lightning or torch restores or sets up itself."""
    modules = (each.LightningModule() for each in parts("core.module"))
    others = ("_hparams_name", "_log_hyperparams", *OF_LAZY_MODULES)
    return frozenset().union(*map(vars, modules), others)


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in vars(part).items() if not of_libraries(part, name)}


def _hidden(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects with a state in the module's attributes that are no submodules of it, by place.

    For example averages of the weights in a list, or random generators.
    """
    known = {id(each) for each in (*module.modules(), *module.parameters())}
    for name, part in module.named_modules():
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
    if parts_with_metrics(value):  # what these hold is mostly not in ``state_dict``
        return False
    kind = type(value)
    return (
        hasattr(kind, "load_state_dict")
        and hasattr(kind, "state_dict")
        and plain(dict(value.state_dict()))
    )


def _state_of(value: Any) -> Any:
    return generator_state(value) if isinstance(value, GENERATORS) else dict(value.state_dict())
