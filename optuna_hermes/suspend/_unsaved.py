"""Attributes that change during training but are in no ``state_dict``: saved, or reported."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._fingerprint import CODE, DATA, fingerprint, outside

log = logging.getLogger(__name__)

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(type, types.FunctionType, types.ModuleType),
)
_MOST_REACHED = 20_000
_UNWRITABLE = (CheckpointError, TypeError, ValueError, RuntimeError, AttributeError)


class Attributes:
    """The attributes of one object that change during training.

    Args:
        ignores: called with an attribute's name and value; True to leave it out.
        known: ids of objects that are saved elsewhere.
    """

    def __init__(
        self,
        name: str,
        owner: object,
        ignores: Callable[[str, Any], bool] = lambda name, value: False,
        known: Collection[int] = (),
    ) -> None:
        self.lost: set[str] = set()
        """Names of the attributes that have changed and cannot be saved."""
        self._name = name
        self._owner = owner
        self._ignores = ignores
        self._known = known
        self._before: dict[str, int] = {}
        self._changed: set[str] = set()
        self._given: dict[int, object] = {}
        self._made: WeakValueDictionary[int, Any] | None = None

    def begin(self) -> None:
        """Begin to watch, before the first batch of this process."""
        self._before = self.fingerprints()
        if self._made is None:
            self._made = self._arrays()

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the present values, by name."""
        return {name: fingerprint(each, self._known) for name, each in self._all().items()}

    def changed_since(self, before: dict[str, int]) -> None:
        """Count attributes as changed that can be saved and had other fingerprints before."""
        now = self.fingerprints()
        changed = {name for name in now if now[name] != before.get(name)} - self._changed
        for name in changed:
            # Of others nothing is said: bars and files are mostly made again by the same hooks.
            with contextlib.suppress(*_UNWRITABLE):
                self._written(name, self._attributes()[name])
                self._changed.add(name)

    def state_dict(self) -> dict[str, Any]:
        """The changed attributes, as trees."""
        state = {}
        for name, value in self._all().items():
            if name not in self._changed:
                # What has not changed since the first batch the objective makes again.
                if self._before.get(name) == fingerprint(value, self._known):
                    continue
                if name not in self._before and self._makes_again(name, value):
                    continue
                self._changed.add(name)  # saved from now on, without comparing fingerprints
            try:
                state[name] = self._written(name, value)
            except _UNWRITABLE as error:
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore changed attributes; to be called before ``begin``."""
        # Before they are replaced: those that are made here may be parts of others.
        self._made = self._arrays()
        if not state:
            return
        from optuna_hermes.suspend._values import Classes, ValueReader

        classes = Classes.of(self._owner)
        attributes = self._attributes()
        given: dict[int, object] = {}
        for name, node in state.items():
            self._changed.add(name)
            reader = ValueReader(classes, self._given)
            try:
                attributes[name] = reader.node(node, attributes.get(name))
            except Exception as error:  # one lost attribute must not stop the rest from resuming
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")
            given |= {id(each): each for each in reader.arrays if not self._is_made(each)}
        self._given = given

    def _makes_again(self, name: str, value: Any) -> bool:
        """True for a new attribute that is a function as any process makes it.

        These are cached ones, and methods that libraries put over themselves, as DDP's ``forward``.
        """
        if isinstance(getattr(type(self._owner), name, None), functools.cached_property):
            return isinstance(value, CODE)
        if not isinstance(value, types.MethodType):
            return False
        owner = value.__self__
        is_known = owner is self._owner or id(owner) in self._known
        return is_known and value.__func__ is getattr(type(owner), name, None)

    def _written(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, CODE):
            raise CheckpointError(f"{name} is another {type(value).__name__} than before")
        # Loaded on first use: what most trainings change is in a ``state_dict``.
        from optuna_hermes.suspend._values import write_value

        return write_value(name, value, self._known, made=self._made)

    def _all(self) -> dict[str, Any]:
        every = self._attributes().items()
        return {name: value for name, value in every if not self._ignores(name, value)}

    def _attributes(self) -> dict[str, Any]:
        return vars(self._owner)

    def _arrays(self) -> WeakValueDictionary[int, Any]:
        """The arrays and tensors in the attributes that are not from a checkpoint, by ``id``."""
        roots = [each for each in self._all().values() if not outside(each)]
        found = reachable(roots, known=self._known)
        return WeakValueDictionary(
            (key, each)
            for key, each in found.items()
            if isinstance(each, np.ndarray | torch.Tensor) and key not in self._given
        )

    def _is_made(self, value: object) -> bool:
        return self._made is not None and self._made.get(id(value)) is value


class TensorAttributes(Attributes):
    """The attributes of a parameter or buffer of a module, whichever tensor that is at the time.

    Args:
        tensor: its name in the module.
    """

    def __init__(
        self, name: str, owner: nn.Module, tensor: str, known: Collection[int] = ()
    ) -> None:
        super().__init__(name, owner, is_private, known)
        self._tensor = tensor

    def _attributes(self) -> dict[str, Any]:
        return getattr(getattr(self._owner, self._tensor, None), "__dict__", {})


def is_private(name: str, value: Any) -> bool:
    """True for attributes that libraries set on tensors which are not theirs."""
    return name.startswith("_")


def tensor_attributes(
    name: str, module: nn.Module, known: Collection[int]
) -> dict[str, Attributes]:
    """The attributes of a module's parameters and buffers, by keys for ``Unsaved``.

    Args:
        name: the module's name in messages.
        known: ids of objects that are saved elsewhere.
    """
    return {
        f"tensor {name}.{place}": TensorAttributes(f"{name}.{place}", part, tensor, known)
        for place, part, tensor in _tensors(module)
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The place of each parameter and buffer, with its owner and its name there."""
    for place, part in module.named_modules():
        for tensor in (*part._parameters.keys(), *part._buffers.keys()):
            yield f"{place}.{tensor}".lstrip("."), part, tensor


def reachable(
    roots: Iterable[object], *, through_data: bool = False, known: Collection[int] = ()
) -> dict[int, object]:
    """The objects that ``roots`` lead to by attributes and items, by ``id``.

    Args:
        known: ids of objects that are left out.
        through_data: True to look into data sets and loaders that are no roots, too; no checkpoint
            of a training holds these.
    """
    found: dict[int, object] = {}
    waiting = list(roots)
    own = {id(each) for each in waiting}
    while waiting and len(found) < _MOST_REACHED:
        each = waiting.pop()
        # By identity: comparing values would run code of the user.
        if id(each) in found or id(each) in known or isinstance(each, _LEAVES):
            continue
        if isinstance(each, DATA) and not through_data and id(each) not in own:
            continue
        if type(each) is tuple and not each:  # there is one for all, as of the values above
            continue
        found[id(each)] = each
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each
        waiting += getattr(each, "__dict__", {}).values()
    return found


class Unsaved:
    """The changing attributes of several objects.

    Args:
        parts: by a key that is the same in the trial's next process.
    """

    def __init__(self, parts: dict[str, Attributes]) -> None:
        self._parts = parts

    @property
    def lost(self) -> list[str]:
        return sorted(name for part in self._parts.values() for name in part.lost)

    def begin(self) -> None:
        for part in self._parts.values():
            part.begin()

    def fingerprints(self) -> dict[str, dict[str, int]]:
        """Fingerprints of the present values by part, for ``changed_since``."""
        return {key: part.fingerprints() for key, part in self._parts.items()}

    def changed_since(self, before: dict[str, dict[str, int]]) -> None:
        """Count attributes as changed that can be saved and had other fingerprints before."""
        for key, part in self._parts.items():
            if key in before:
                part.changed_since(before[key])

    def state_dict(self) -> dict[str, Any]:
        states = {key: part.state_dict() for key, part in self._parts.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, saved in state.items():
            if key in self._parts:
                self._parts[key].load_state_dict(saved)
