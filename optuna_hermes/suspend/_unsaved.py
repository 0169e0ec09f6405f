"""Attributes that change during training but are in no ``state_dict``: saved, or reported."""

from __future__ import annotations

import dis
import functools
import logging
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._fingerprint import (
    CODE,
    DATA,
    bound_to,
    fingerprint,
    is_referred_to,
    outside,
)
from optuna_hermes.suspend._generators import dict_of
from optuna_hermes.suspend._tree import NUMBERS, storable

log = logging.getLogger(__name__)

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(type, types.FunctionType, types.ModuleType),
)
_MOST_REACHED = 20_000
_MOST_SIMPLE = 50_000
"""Parts up to which a value is looked through: those of more cannot be written."""
_Place = tuple[str, ...]
_GONE = ["gone"]
"""In the place of a tree: the attribute was deleted."""


class Named:
    """Known objects by names that are the same in each process: references are stored so."""

    def __init__(self, objects: Mapping[str, object] | None = None) -> None:
        self.objects = objects or {}
        self.names = {id(each): name for name, each in self.objects.items()}


class Attributes:
    """The attributes of one object that change during training.

    Args:
        ignores: called with an attribute's name and value; True to leave it out.
        known: ids of objects that are saved elsewhere.
        deletes: called with a name; True to delete also such an attribute that is left out.
    """

    def __init__(
        self,
        name: str,
        owner: object,
        ignores: Callable[[str, Any], bool] = lambda name, value: False,
        known: Collection[int] = (),
        deletes: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.lost: set[str] = set()
        """Names of the attributes that have changed and cannot be saved."""
        self.unmade: set[str] = set()
        self.named = Named()
        """The known objects that may be referred to by their names."""
        self._there: dict[_Place, object] | None = None
        self._name = name
        self._owner = owner
        self._ignores = ignores
        self._known = known
        self._deletes = deletes
        self._before: dict[str, int] = {}
        self._changed: set[str] = set()
        self._given: dict[int, object] = {}
        self._made: WeakValueDictionary[int, Any] | None = None

    def classes(self) -> dict[_Place, object]:
        """Classes of the present values and their parts, for ``note``; see ``needed_of``."""
        return {
            (name, *place): kind
            for name, value in self._all().items()
            for place, kind in _classes_in(value, self._known).items()
        }

    def note(self, there: dict[_Place, object]) -> None:
        """Note what each process makes before it trains.

        Where others are needed that cannot be saved, the trial must not be stored.
        """
        self._there = there

    def begin(self) -> None:
        """Begin to watch, before the first batch of this process."""
        self._before = self.fingerprints()
        if self._made is None:
            self._made = self._arrays()

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the present values, by name; 0 for those that are left out."""
        left_out = dict.fromkeys(filter(self._deletes, self._attributes()), 0)
        return left_out | {name: self._fingerprint(each) for name, each in self._all().items()}

    def changed_since(self, before: dict[str, int]) -> None:
        """Count attributes as changed that can be saved and had other fingerprints before."""
        now = self.fingerprints()
        changed = {name for name in now if now[name] != before.get(name)} - self._changed
        self._changed |= self._gone(before)
        for name in changed:
            value = self._attributes()[name]
            try:
                self._written(name, value)
            except Exception:
                # Nothing is said of those that each process makes, mostly by the same hooks.
                if self._is_there(name, value) or self._makes_again(name, value):
                    continue
            self._changed.add(name)

    def state_dict(self) -> dict[str, Any]:
        """The changed attributes, as trees."""
        gone = self._gone({*self._before, *self._changed})
        self._changed |= gone
        return {**self._trees(self._all()), **dict.fromkeys(gone, _GONE)}

    def _gone(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are no attributes any more; parts of modules are restored so."""
        own = self._attributes()
        kinds = ("_parameters", "_buffers", "_modules")
        parts = {name for kind in kinds for name in own.get(kind, {}).keys()}  # noqa: SIM118
        return {name for name in names if name not in own and name not in parts}

    def find_unmade(self) -> set[str]:
        """Names of those that hold what the next process would lack at present; see ``note``."""
        # At each suspension, not with each checkpoint only: so what takes long is left out.
        attributes = self._all().items()
        self._trees({name: each for name, each in attributes if not _is_simple(each, self._known)})
        return self.unmade

    def _trees(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Those of the attributes that have changed, as trees."""
        state = {}
        self.unmade = set()
        for name, value in attributes.items():
            if name not in self._changed:
                # What has not changed since the first batch the objective makes again.
                if self._before.get(name) == self._fingerprint(value):
                    continue
                if name not in self._before and self._makes_again(name, value):
                    continue
                self._changed.add(name)  # saved from now on, without comparing fingerprints
            try:
                node = self._written(name, value)
            except Exception as error:  # also of a user's class: the training goes on
                log.debug("%s.%s: %s", self._name, name, error)
                lost = self.lost if self._is_there(name, value) else self.unmade
                lost.add(f"{self._name}.{name}")
            else:
                if node != ["present"]:
                    state[name] = node
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
            if node == _GONE:
                attributes.pop(name, None)
                continue
            reader = ValueReader(classes, self._given, named=self.named)
            try:
                attributes[name] = reader.node(node, attributes.get(name))
            except Exception as error:  # one lost attribute must not stop the rest from resuming
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")
            given |= {id(each): each for each in reader.arrays if not self._is_made(each)}
        self._given = given

    def _fingerprint(self, value: Any) -> int:
        known = self._known
        if bound_to(value) is not None:  # which may be the value of another attribute
            others = [each for each in self._all().values() if each is not value]
            known = {*known, id(self._owner), *reachable(others, known=known)}
        return fingerprint(value, known)

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
        from optuna_hermes.suspend._values import Classes, Unmade, write_value

        unmade = None
        if self._there is not None:
            unmade = Unmade(self._there, Classes.of(self._owner), self._known)
        node = write_value(
            name, value, self._known, made=self._made, unmade=unmade, named=self.named
        )
        if unmade is not None and unmade.found:
            log.debug("%s: %s", self._name, unmade.found)
            self.unmade.add(f"{self._name}.{name}")
        return node

    def _is_there(self, name: str, value: Any) -> bool:
        """True if each process makes a value of this kind, as far as that was noted."""
        if self._there is None:
            return True
        there = self._there.get((name,), type(None))
        is_code = isinstance(there, type) and issubclass(there, CODE)
        return there is type(value) or (is_code and isinstance(value, CODE))

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
            if issubclass(type(each), np.ndarray | torch.Tensor) and key not in self._given
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


@functools.cache
def set_by(kind: Any, packages: tuple[str, ...]) -> frozenset[str]:
    """Names of attributes that those classes set, of a class and its bases, which packages have.

    Args:
        packages: first parts of these classes' modules.
    """
    return frozenset(
        name
        for each in kind.__mro__
        if each.__module__.startswith(packages)
        for name in _stored(each)
    )


def _stored(kind: type) -> Iterator[str]:
    for each in vars(kind).values():
        function = getattr(each, "fget", each) if isinstance(each, property) else each
        if isinstance(function, types.FunctionType):
            for instruction in dis.get_instructions(function):
                if instruction.opname == "STORE_ATTR":
                    yield instruction.argval


def is_private(name: str, value: Any) -> bool:
    """True for attributes that libraries set on tensors which are not theirs."""
    return name.startswith("_")


def optimizer_attributes(
    name: str, optimizer: Any, known: Collection[int]
) -> dict[str, Attributes]:
    """The attributes of an optimizer that has torch's ``state_dict``, which lacks them.

    Args:
        name: the optimizer's name in messages.
        known: ids of objects that are saved elsewhere.
    """
    kind = type(optimizer)
    inherited = getattr(kind, "state_dict", None) is torch.optim.Optimizer.state_dict
    if not inherited or kind.__module__.startswith("torch."):
        return {}
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    kept = Attributes(name, optimizer, _is_of_every_optimizer, own.union(known))
    return {f"optimizer {name}": kept}


def _is_of_every_optimizer(name: str, value: Any) -> bool:
    return name in _of_every_optimizer()


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Attributes that torch, schedulers and scalers set; ``state`` is saved apart."""
    bare = torch.optim.SGD([torch.zeros(1)])
    added = ("step", "_opt_called", "_step_supports_amp_scaling", "grad_scale", "found_inf")
    return frozenset({*vars(bare), *added})


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
    roots: Iterable[Any], *, through_data: bool = False, known: Collection[int] = ()
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
        if id(each) in found or id(each) in known or issubclass(type(each), _LEAVES):
            continue
        if issubclass(type(each), DATA) and not through_data and id(each) not in own:
            continue
        if type(each) is tuple and not each:  # there is one for all, as of the values above
            continue
        found[id(each)] = each
        if issubclass(type(each), dict):
            waiting += each.values()
        elif issubclass(type(each), list | tuple | set):
            waiting += each
        waiting += dict_of(each).values()
    return found


def needed_of(value: object, known: Collection[int]) -> object:
    """The class that a value of the next process must have, or the id where it must be this one."""
    return id(value) if is_referred_to(value, known) else type(value)


def _classes_in(root: object, known: Collection[int]) -> dict[_Place, object]:
    """Classes of a value and its parts by place, where a checkpoint's reader uses what is there."""
    found: dict[_Place, object] = {}
    seen: set[int] = set()
    waiting: list[tuple[_Place, Any]] = [((), root)]
    while waiting and len(found) < _MOST_REACHED:
        place, value = waiting.pop()
        if type(value) in NUMBERS:
            continue
        found[place] = needed_of(value, known)
        if id(value) in known or id(value) in seen or outside(value):
            continue
        seen.add(id(value))
        inside: list[tuple[Any, Any]] = list(dict_of(value).items())
        if issubclass(type(value), dict):
            inside = list(value.items())
        elif issubclass(type(value), list | tuple | deque):
            inside = list(enumerate(value))
        # In the order of the writer, which writes what is at two places at the first of them.
        waiting += [((*place, str(name)), each) for name, each in reversed(inside)]
    return found


def _is_simple(root: object, known: Collection[int]) -> bool:
    """True for numbers, text, arrays and tensors in containers, which any process can make."""
    seen: set[int] = set()
    waiting = [root]
    left = _MOST_SIMPLE
    while waiting:
        value = waiting.pop()
        kind = type(value)
        left -= 1
        if left < 0:
            return False
        if kind in NUMBERS or id(value) in seen:
            continue
        if id(value) in known:
            return False
        seen.add(id(value))
        if kind in (list, tuple, deque):
            waiting += value  # type: ignore[arg-type]
        elif kind is dict:
            waiting += value  # type: ignore[arg-type]
            waiting += value.values()  # type: ignore[attr-defined]
        elif not (storable(value) if kind is torch.Tensor else kind is np.ndarray):
            return False
    return True


class Unsaved:
    """The changing attributes of several objects.

    Args:
        parts: by a key that is the same in the trial's next process.
        named: returns the known objects that are there at present, by names of which the same
            holds: attributes may refer to these.
    """

    def __init__(
        self, parts: dict[str, Attributes], named: Callable[[], Mapping[str, object]] = dict
    ) -> None:
        self._parts = parts
        self._named = named

    @property
    def lost(self) -> list[str]:
        return sorted(name for part in self._parts.values() for name in part.lost)

    def classes(self) -> dict[str, dict[_Place, object]]:
        """Classes of the present values by part, for ``note``."""
        return {key: part.classes() for key, part in self._parts.items()}

    def note(self, there: dict[str, dict[_Place, object]]) -> None:
        """Note what each process makes before it trains; see ``Attributes``."""
        for key, part in self._parts.items():
            part.note(there.get(key, {}))

    def unmade(self) -> list[str]:
        """Names of attributes that hold what the next process would lack at present."""
        return sorted(name for part in self._present().values() for name in part.find_unmade())

    def begin(self) -> None:
        for part in self._parts.values():
            part.begin()

    def fingerprints(self) -> dict[str, dict[str, int]]:
        """Fingerprints of the present values by part, for ``changed_since``."""
        return {key: part.fingerprints() for key, part in self._parts.items()}

    def changed_since(self, before: dict[str, dict[str, int]]) -> None:
        """Count attributes as changed that can be saved and had other fingerprints before."""
        for key, part in self._present().items():
            if key in before:
                part.changed_since(before[key])

    def state_dict(self) -> dict[str, Any]:
        states = {key: part.state_dict() for key, part in self._present().items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = self._present()
        for key, saved in state.items():
            if key in parts:
                parts[key].load_state_dict(saved)

    def _present(self) -> dict[str, Attributes]:
        """The parts, which know the named objects of this moment: each may be another by now."""
        named = Named(self._named())
        for part in self._parts.values():
            part.named = named
        return self._parts
