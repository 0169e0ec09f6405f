"""The objects that a user's loop passes to ``suspendable``, and their state."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from optuna_hermes.errors import (
    InvalidInputError,
    SuspendError,
    UnstorableError,
)
from optuna_hermes.suspend._hooks import Hooks
from optuna_hermes.suspend._state import copied, moved, on_device, plain
from optuna_hermes.suspend._tree import NUMBERS, frozen
from optuna_hermes.suspend._unsaved import (
    Attributes,
    Unsaved,
    is_private,
    optimizer_attributes,
    tensor_attributes,
)

# Else imported inside of functions: a trial that keeps nothing needs none of it.
if TYPE_CHECKING:
    from optuna_hermes.suspend._values import Classes, Memory, Owned, ValueWriter

_CONTAINERS = (list, tuple, dict)
_OF_TORCH = frozenset(vars(nn.Module()))
_LEAVES = (*NUMBERS, torch.Size, torch.dtype, torch.device)
SMALL_BYTES = 1 << 20
"""Most bytes that are copied of all values at each epoch's begin."""
_PLAIN_BYTES, _PART_BYTES, _ARRAY_BYTES = 8, 64, 256
"""Least sizes of a number in a plain value, of another part of a value, and of an array."""
_MOST_EPOCHS = 64
"""Most epochs until an object whose state was too large is asked for it again."""
_SETTINGS = (type(None), bool, int, float, str)
_UNREADABLE = (SuspendError, TypeError, ValueError, RuntimeError, AttributeError)
_SCHEDULES = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class NamedObjects:
    """The named objects that a loop changes, and the values in ``run.kept``.

    Args:
        owners: modules, optimizers and so on, by the names used in messages.
        classes: the classes that kept objects may have; None for none.
        others: attributes of other objects that change, too, by keys for ``Unsaved``.

    Raises:
        InvalidInputError: one of them has no ``state_dict`` or ``load_state_dict``.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        classes: Classes | None = None,
        others: Mapping[str, Attributes] | None = None,
    ) -> None:
        for name, owner in owners.items():
            _check(name, owner)
        self.kept: dict[str, Any] = {}
        self._classes = classes
        self._foreign: set[str] | None = None
        self._noted = False
        self._readable: set[str] = set()
        self._given: dict[int, object] = {}
        self._too_large: dict[str, _Wait] = {}
        self._owners = {**owners, **held(owners)}
        self._unsaved = Unsaved({**_attributes(self._owners), **(others or {})})
        self._hooks = Hooks(self._owners)
        self._parts = {name: parts_of(each) for name, each in self._owners.items()}

    def roots(self) -> list[object]:
        """Objects that lead to every tensor."""
        return [*self._owners.values(), self.kept]

    @property
    def reshaped(self) -> list[str]:
        """Names of objects whose state does not fit them as they were before the loop."""
        now = {name: parts_of(each) for name, each in self._owners.items()}
        unfit = [name for name, each in self._parts.items() if not each.fit(now[name])]
        return unfit or retied(self._parts, now)

    def note_classes(self) -> None:
        """Note classes, dtypes and shared parts; right before the loop, where all are converted."""
        for name, each in self._owners.items():
            self._parts[name] = self._parts[name].converted(parts_of(each))

    def note_kept(self) -> None:
        """Note the packages of what is kept, right before the loop: their objects may be made.

        Classes of theirs that the user's code cannot name, such as an environment's of gymnasium,
        are not made of a checkpoint before: the objective makes such an object first.
        """
        self.note_attributes()
        self._foreign = set()
        if self._classes is not None:
            packages = {n: self._classes.others_in(each) for n, each in self.kept.items()}
            self._foreign = {name for name, others in packages.items() if others}
            self._classes.packages.update(*packages.values())

    def note_attributes(self) -> None:
        """Note attributes right before the loop: each process makes them so."""
        if not self._noted:
            self._noted = True
            self._unsaved.note(self._unsaved.classes())

    def unmade(self) -> list[str]:
        """Names of attributes that hold what the next process would lack."""
        return self._unsaved.unmade()

    def can_keep(self, value: object) -> bool:
        """True for a value that can be stored if it is put into ``kept`` before the loop."""
        from optuna_hermes.suspend._values import ValueWriter

        with contextlib.suppress(*_UNREADABLE):
            ValueWriter(whole=True).write("", value)
            return True
        return False

    @property
    def lost(self) -> list[str]:
        """Names of attributes and hooks that have changed and cannot be stored."""
        return [*self._unsaved.lost, *self._hooks.lost]

    def begin(self) -> None:
        """Begin to watch attributes, before the first batch: changes from here on are stored."""
        self.note_attributes()
        self._unsaved.begin()
        self._hooks.begin()

    def state_dict(self) -> dict[str, Any]:
        """The state of all, as a tree of tensors and plain values; the tensors are not copied.

        Raises:
            UnstorableError: a kept value could not be made again.
        """
        owners = {name: _state_of(owner) for name, owner in self._owners.items()}
        return {
            "owners": owners,
            "trained": {
                name: [(each, gradient(each.grad), each.requires_grad) for each in parameters]
                for name, parameters in _trained(self._owners).items()
            },
            "unsaved": self._unsaved.state_dict(),
            "kept": self._written(list(self.kept), lambda: self._tensors(owners)),
            "kept_order": list(self.kept),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all; the tensors of ``state`` may be taken over.

        Raises:
            SuspendError: the state is not of these objects.
        """
        saved = state["owners"]
        if saved.keys() != self._owners.keys():
            named = ", ".join(self._owners) or "nothing"
            raise SuspendError(f"it holds {', '.join(saved) or 'nothing'}, not {named}")
        present, trained = _trained(self._owners), state["trained"]
        with kept_groups(self._owners.values()):
            for name, owner in self._owners.items():
                try:
                    put_back(owner, saved[name])
                    if name in trained:
                        _put_parameters_back(present[name], trained[name])
                except Exception as error:
                    raise SuspendError(f"{name} cannot be loaded from it: {error}") from error
        self._unsaved.load_state_dict(state["unsaved"])
        self.load_kept(state)

    def load_kept(self, state: dict[str, Any]) -> None:
        """Restore the kept values only.

        Raises:
            SuspendError: the state is not of these values and objects.
        """
        self._read(state["kept"], state["kept_order"])

    def small_state(self) -> dict[str, Any]:
        """A copy of what is small: all but modules, the states of optimizers, and large values.

        It is made at each epoch's begin, so that the code before its batches can run again from
        there: what that computes may depend on schedules, settings of optimizers and kept values.
        """
        groups, others = {}, {}
        for name, owner in self._owners.items():
            if isinstance(owner, torch.optim.Optimizer):
                groups[name] = [_settings(group) for group in owner.param_groups]
            elif not isinstance(owner, nn.Module):
                others[name] = self._small_state_of(name, owner)
        kept, order = self._small_kept(), list(self.kept)
        state = {"groups": groups, "others": others, "kept": kept, "kept_order": order}
        return cast("dict[str, Any]", frozen(state))

    def _small_state_of(self, name: str, owner: Any) -> Any:
        """An object's state, None if it is too large, or was so lately: making it takes time."""
        wait = self._too_large.get(name, _Wait())
        if wait.left:
            self._too_large[name] = _Wait(left=wait.left - 1, epochs=wait.epochs)
            return None
        state = _if_small(owner.state_dict())
        if state is None:
            epochs = min(2 * wait.epochs, _MOST_EPOCHS)
            self._too_large[name] = _Wait(left=epochs, epochs=epochs)
        else:
            self._too_large.pop(name, None)
        return state

    def _small_kept(self) -> dict[str, list[Any]]:
        """The kept values that are small together; those that are large are not even written."""
        small, left = [], SMALL_BYTES
        for name, value in self.kept.items():
            size = _size(value, left)
            if size <= left:
                small.append(name)
                left -= size
        try:
            # Weights in them are copied: those of the present epoch are not those of its begin.
            return _if_small(self._written(small, dict)) or {}
        except UnstorableError:  # it is raised where the checkpoint is written
            return {}

    def load_small_state(self, state: dict[str, Any]) -> None:
        """Restore what ``small_state`` has returned."""
        for name, saved in state["groups"].items():
            for group, settings in zip(self._owners[name].param_groups, saved, strict=False):
                for each, value in settings.items():
                    group[each] = copied(group.get(each), value)
        for name, own in state["others"].items():
            if own is not None:
                self._owners[name].load_state_dict(own)
        self._read(state["kept"], state["kept_order"])

    def _tensors(self, states: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The tensors of the named objects, at the same places in each process."""
        found: dict[str, Any] = {}
        for name, parameters in _trained(self._owners).items():
            found[f"trained by {name}"] = _with_gradients(enumerate(parameters))
        for name, owner in self._owners.items():
            if isinstance(owner, nn.Module):
                buffers = dict(owner.named_buffers(remove_duplicate=False))
                weights = owner.named_parameters(remove_duplicate=False)
                found[name] = buffers | _with_gradients(weights)
            else:
                found[name] = owner.state_dict() if states is None else states[name]["state"]
        return found

    def _written(
        self, names: list[str], tensors: Callable[[], dict[str, Any]]
    ) -> dict[str, list[Any]]:
        """The kept values of these names, trees in the order in which they must be read.

        They may be parts of these ``tensors`` of the named objects, which are written elsewhere.
        """
        if not names:
            return {}
        from optuna_hermes.suspend._values import Memory, Owned, ValueWriter, memory_of

        owned = Owned(tensors)
        writer = ValueWriter(whole=True, owned=owned)
        memories = ((name, _memories_of_plain(self.kept[name])) for name in names)
        plain = {name: found for name, found in memories if found is not None}
        # Those last that may be restored later: none is read before one that it refers to.
        names = sorted(names, key=lambda name: name in (self._foreign or ()))
        trees = {name: self._tree(writer, name) for name in names if name not in plain}
        in_trees = {memory_of(each) for each in writer.objects}
        shared = sharing(plain, lambda memory: memory in in_trees or owned.holds(memory))
        trees |= {name: self._tree(writer, name) for name in shared}
        writer.refuse_overlaps()
        self._check_readable(trees, owned)
        nodes = {name: [tree, False, True] for name, tree in trees.items()}
        for name in (each for each in plain if each not in trees):
            value, has_arrays = self.kept[name], Memory in map(type, plain[name])
            nodes[name] = [value, has_arrays and on_device(value), False]
        return nodes

    def _tree(self, writer: ValueWriter, name: str) -> list[Any]:
        with _named_in_errors(name):
            return writer.write(f"run.kept[{name!r}]", self.kept[name])

    def _check_readable(self, trees: Mapping[str, list[Any]], owned: Owned) -> None:
        """Read new values once, so that one that cannot be restored fails while it is there."""
        if self._readable.issuperset(trees):
            return
        from optuna_hermes.suspend._values import ValueReader

        reader = ValueReader(self._classes, owned=owned)
        for name, tree in trees.items():
            with _named_in_errors(name):
                reader.node(frozen(tree))
        self._readable.update(trees)  # only now: an error is caught at an epoch's begin

    def _read(self, nodes: Mapping[str, list[Any]], order: list[str]) -> None:
        """Restore kept values; those of ``order`` without a node stay as they are."""
        if not (nodes or self.kept):
            return
        from optuna_hermes.suspend._objects import UnknownClassError
        from optuna_hermes.suspend._values import Owned, ValueReader

        later = False
        kept = {name: self.kept[name] for name in order if name in self.kept}
        reader = ValueReader(self._classes, self._given, Owned(self._tensors))
        for name, (value, was_on_device, is_tree) in nodes.items():
            present = self.kept.get(name)
            if is_tree and later:
                continue
            if is_tree:
                try:
                    kept[name] = reader.node(value, present)
                except UnknownClassError as error:
                    if self._foreign is not None:
                        raise SuspendError(
                            f"run.kept[{name!r}] is restored only where your code puts such an "
                            f"object there before the loop: {error}"
                        ) from error
                    later = True  # also of those after it, which may refer to its parts
                continue
            if was_on_device:
                value = moved(value, torch.accelerator.current_accelerator())
            kept[name] = reader.plain(value, present)
        # In place: the objective may hold the dictionary.
        self.kept.clear()
        self.kept.update({name: kept[name] for name in order if name in kept})
        # A second call may fill these in place; other arrays may be parts of a model.
        self._given |= {id(each): each for each in reader.arrays}


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """The epochs until an object is asked for its state again: those left, and all."""

    left: int = 0
    epochs: int = 1


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise UnstorableError(
            f"run.kept[{name!r}] must be made of numbers, text, arrays, tensors, random "
            "generators, containers, and objects whose attributes are such, of classes of your own "
            "or of a package of which it held objects before the loop, but it could not be made "
            f"again: {error}. Make it anew in each epoch instead, from a seed, or give what holds "
            "it state_dict() and load_state_dict() and name it in suspendable()."
        ) from error


def _memories_of_plain(value: object) -> list[Memory | int] | None:
    """Keys of a plain value's containers, arrays and tensors, one at each reference to them.

    None if it is not plain. Plain are scalars, arrays and tensors, also in containers: a tree holds
    them as they are.
    """
    from optuna_hermes.suspend._values import memory_of

    memories: list[Memory | int] = []
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if type(each) in _CONTAINERS:
            items = each.values() if isinstance(each, dict) else cast("list[object]", each)
            others = _no_numbers(items)
            if others or type(each) is not tuple:
                memories.append(memory_of(each))  # of a tuple, too: it may hold a list
            if id(each) not in seen:
                seen.add(id(each))
                waiting += others
        elif type(each) in NUMBERS:
            continue
        elif isinstance(each, torch.Tensor | np.ndarray):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                return None  # it would come back without that
            memories.append(memory_of(each))
        elif type(each) not in _LEAVES and not isinstance(each, np.generic):
            return None
    return memories


def sharing(
    memories: Mapping[str, Collection[Memory | int]], elsewhere: Callable[[Memory | int], bool]
) -> list[str]:
    """Names of values that refer to a part twice, or to one that is in another or ``elsewhere``."""
    counts = Counter(each for found in memories.values() for each in found)
    return [n for n, found in memories.items() if any(counts[m] > 1 or elsewhere(m) for m in found)]


def _with_gradients(parameters: Iterable[tuple[Any, torch.Tensor]]) -> dict[Any, Any]:
    pairs = list(parameters)
    gradients = ((name, each.grad) for name, each in pairs)
    return dict(pairs) | {f"{name}.grad": each for name, each in gradients if each is not None}


def _size(value: object, most: int) -> int:
    """About the bytes of a value, or of that part of it which is more than ``most``."""
    number = _PLAIN_BYTES if type(value) in _CONTAINERS else _PART_BYTES
    size, waiting, seen = _PART_BYTES, [value], set()
    while waiting and size <= most:
        each = waiting.pop()
        if id(each) in seen or type(each) in NUMBERS:
            continue
        seen.add(id(each))
        size += _PART_BYTES
        if isinstance(each, torch.Tensor | np.ndarray):
            size += _ARRAY_BYTES + each.nbytes
        items = _inside(each)
        size += number * len(items)
        if size <= most:
            waiting += _no_numbers(items)
    return size


def _no_numbers(items: Iterable[Any]) -> list[Any]:
    return [each for each in items if type(each) not in NUMBERS]


def _inside(value: Any) -> Collection[Any]:
    """The parts of a value that a tree of it would hold; those of a ``state_dict`` are unknown."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, torch.Tensor | np.ndarray) or hasattr(type(value), "state_dict"):
        return ()
    return getattr(value, "__dict__", {}).values()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _if_small(tree: Any) -> Any:
    """A tree, or None if its arrays and tensors are too large to be copied in each epoch."""
    left, waiting = SMALL_BYTES, [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor | np.ndarray):
            left -= each.nbytes
        elif isinstance(each, Mapping | list | tuple):
            left -= 8 * len(each)
            waiting += _no_numbers(each.values() if isinstance(each, Mapping) else each)
        left -= 8
        if left < 0:
            return None
    return tree


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that a state must fit: a module's weights, or the parameters of an optimizer."""

    sizes: dict[Any, torch.Size | None]
    """By name or number; None if any size can be loaded, as of buffers and parameters without one.

    Of buffers, those that ``state_dict`` holds.
    """
    unset: frozenset[str] = frozenset()
    """Names of such buffers that are None, and may be made in training."""
    kinds: dict[Any, object] = field(default_factory=dict)
    """Classes of a module and of its parts by place, or that of an optimizer; and dtypes.

    Without metrics, which trackers add in training.
    """
    ids: dict[Any, int] = field(default_factory=dict)
    """Of a module's parts, parameters and buffers by place, or of an optimizer's parameters."""

    def converted(self, now: Parts) -> Parts:
        """These parts, with what the code that each process runs has made of them since."""
        return replace(self, kinds=now.kinds, ids=now.ids)

    def fit(self, others: Parts) -> bool:
        """True if an object with these parts can load a state of one with those others."""
        own, now = self.sizes, others.sizes
        # Layers that are added without parameters are made on first use, by each process.
        if not self.kinds.items() <= others.kinds.items():
            return False
        return own.keys() <= now.keys() <= own.keys() | self.unset and all(
            size is None or size == now[name] for name, size in own.items()
        )


def parts_of(owner: object) -> Parts:
    sizes: dict[Any, torch.Size | None] = {}
    unset: set[str] = set()
    kinds: dict[Any, object] = {}
    ids: dict[Any, int] = {}
    if isinstance(owner, nn.Module):
        # Not of ``state_dict``, which takes its time.
        for place, part in owner.named_modules(remove_duplicate=False):
            kind = type(part)
            if not (is_metric(part) or kind.__module__.startswith("torchmetrics.")):
                # A lazy one becomes this with its first batch.
                kinds[place] = getattr(kind, "cls_to_become", None) or kind
                ids[place] = id(part)
            prefix = f"{place}." if place else ""
            for name, each in part._parameters.items():
                if each is not None:
                    sizes[prefix + name] = _size_of(each)
                    kinds[prefix + name] = each.dtype
                    ids[prefix + name] = id(each)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    ids[prefix + name] = id(buffer)
                if name in part._non_persistent_buffers_set:
                    continue
                if buffer is None:
                    unset.add(prefix + name)
                else:
                    sizes[prefix + name] = None
    elif isinstance(owner, torch.optim.Optimizer):
        kinds[""] = type(owner)
        for number, group in enumerate(owner.param_groups):
            sizes[number] = None
            for place, each in enumerate(group["params"]):
                sizes[number, place] = _size_of(each)
                kinds[number, place] = each.dtype
                ids[number, place] = id(each)
    return Parts(sizes=sizes, unset=frozenset(unset), kinds=kinds, ids=ids)


def retied(first: Mapping[str, Parts], now: Mapping[str, Parts]) -> list[str]:
    """Names of those in which parts have become one, as tied weights are, or are one no longer."""
    pairs = {
        (name, place): (number, now[name].ids[place])
        for name, each in first.items()
        for place, number in each.ids.items()
        if place in now[name].ids
    }
    before = Counter(number for number, _ in set(pairs.values()))
    after = Counter(number for _, number in set(pairs.values()))
    names = (name for (name, _), (a, b) in pairs.items() if before[a] > 1 or after[b] > 1)
    return list(dict.fromkeys(names))


def _size_of(parameter: torch.Tensor) -> torch.Size | None:
    return None if is_lazy(parameter) else parameter.shape


def make_room(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Make the buffers that are to be loaded and are None here, or have another shape or dtype."""
    here = dict(module.named_buffers(remove_duplicate=False))
    unset = parts_of(module).unset
    others = {
        name: value.clone()  # it is still to be loaded, and handed to hooks of the user
        for name, value in weights.items()
        if name in unset or _reshaped(here.get(name), value)
    }
    set_buffers(module, others)


def _reshaped(buffer: torch.Tensor | None, value: torch.Tensor) -> bool:
    if buffer is None or is_lazy(buffer):
        return False
    return (buffer.shape, buffer.dtype) != (value.shape, value.dtype)


def held(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers and schedulers in attributes of owners, whose ``state_dict`` may lack them."""
    found: dict[str, Any] = {}
    known = {id(each) for each in owners.values()}
    waiting = list(owners.items())
    while waiting:
        name, owner = waiting.pop()
        # The attributes of modules are watched, and torch's own classes store what they hold.
        if isinstance(owner, nn.Module) or type(owner).__module__.startswith("torch."):
            continue
        for place, each in _parts(name, owner):
            if isinstance(each, _SCHEDULES) and id(each) not in known:
                known.add(id(each))
                found[place] = each
                waiting.append((place, each))
    return found


def _parts(name: str, owner: object) -> Iterator[tuple[str, object]]:
    """The attributes of an object, and the items of those that are containers."""
    for attribute, value in getattr(owner, "__dict__", {}).items():
        yield f"{name}.{attribute}", value
        if isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{attribute}.{place}", each) for place, each in items)


@contextlib.contextmanager
def kept_groups(owners: Iterable[object]) -> Iterator[None]:
    """Let optimizers keep their groups within: others may hold these, or have the same ones.

    Loading a state makes new ones.
    """
    before = [
        (each, each.param_groups, [*each.param_groups])
        for each in owners
        if isinstance(each, torch.optim.Optimizer)
    ]
    yield
    for optimizer, groups, first in before:
        now = optimizer.param_groups
        if now is groups:
            continue
        for group, loaded in zip(first, now, strict=False):
            settings = dict(loaded)
            group.clear()
            group.update(settings)
        groups[:] = [*first, *now[len(first) :]]
        with contextlib.suppress(AttributeError):  # of one that wraps another
            optimizer.param_groups = groups


def _attributes(owners: Mapping[str, Any]) -> dict[str, Attributes]:
    """Attributes of modules, their parts and optimizers that are in no ``state_dict``."""
    modules = {name: each for name, each in owners.items() if isinstance(each, nn.Module)}
    known = {
        id(part) for each in modules.values() for part in (*each.modules(), *each.parameters())
    }
    known |= {id(each) for each in owners.values()}
    parts = {
        f"{name}.{place}": Attributes(f"{name}.{place}".rstrip("."), part, _ignores(part), known)
        for name, each in modules.items()
        for place, part in each.named_modules()
    }
    for name, each in modules.items():
        parts |= tensor_attributes(name, each, known)
    for name, trained in _trained(owners).items():
        for number, tensor in enumerate(trained):
            place = f"parameter {number} of {name}"
            parts[place] = Attributes(place, tensor, is_private, known)
    for name, owner in owners.items():
        parts |= optimizer_attributes(name, owner, known)
    return parts


def _ignores(part: nn.Module) -> Callable[[str, Any], bool]:
    if type(part).__module__.startswith("torch."):
        return _is_no_setting
    return functools.partial(_is_saved_apart, part)


def _is_no_setting(name: str, value: Any) -> bool:
    """True for what torch's own modules manage, False for what users set, as ``Dropout.p``."""
    return type(value) not in _SETTINGS or name in _OF_TORCH or name.startswith("_")


def _is_saved_apart(part: nn.Module, name: str, value: Any) -> bool:
    return name in _OF_TORCH or (is_metric(part) and of_metrics(part, name))


def _trained(owners: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The parameters that named optimizers train and that are in no named module."""
    modules = [each for each in owners.values() if isinstance(each, nn.Module)]
    known = {id(parameter) for each in modules for parameter in each.parameters()}
    return {
        name: [
            parameter
            for group in owner.param_groups
            for parameter in group["params"]
            if id(parameter) not in known
        ]
        for name, owner in owners.items()
        if isinstance(owner, torch.optim.Optimizer)
    }


def _check(name: str, owner: object) -> None:
    if isinstance(owner, DataLoader):
        raise InvalidInputError(
            f"suspendable({name}=...) must not be a loader, but is a {type(owner).__name__}: give "
            "it to run.batches(), which keeps its position."
        )
    methods = [getattr(owner, method, None) for method in ("state_dict", "load_state_dict")]
    if isinstance(owner, type) or not all(callable(method) for method in methods):
        raise InvalidInputError(
            f"suspendable({name}=...) must have state_dict() and load_state_dict(), but is "
            f"{_short(owner)}: write these two methods, or keep plain values in run.kept."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"of {type(value).__name__}"


def _state_of(owner: Any) -> dict[str, Any]:
    """The state of an object, as a tree for ``put_back``."""
    state = owner.state_dict()
    if not isinstance(owner, nn.Module):
        return {"state": state}
    parameters = dict(owner.named_parameters())
    return {
        # None of the rest is in a module's ``state_dict``, and all of it matters to the bit.
        "state": state,
        "buffers": {name: part for name, part in all_buffers(owner) if name not in state},
        "gradients": {
            name: gradient(p.grad) for name, p in parameters.items() if p.grad is not None
        },
        **modes(owner),
        "metrics": {name: metric_state(metric) for name, metric in metrics_in(owner)},
    }


def put_back(owner: Any, state: dict[str, Any]) -> None:
    """Restore an object's state; the tensors of ``state`` may be taken over."""
    if isinstance(owner, nn.Module):
        # Fabric's wrapper loads by the names within the module that it wraps.
        make_room(getattr(owner, "_original_module", owner), state["state"])
    owner.load_state_dict(state["state"])
    if isinstance(owner, torch.optim.Optimizer):
        undo_casts(owner, state["state"])
        vars(owner)["_opt_called"] = True  # else schedules warn that they are stepped before it
    if not isinstance(owner, nn.Module):
        return
    set_buffers(owner, state["buffers"])
    for name, parameter in owner.named_parameters():
        set_gradient(parameter, state["gradients"].get(name))
    restore_metrics(owner, state["metrics"])
    set_modes(owner, state)


def _put_parameters_back(parameters: list[torch.Tensor], states: list[Any]) -> None:
    for parameter, (value, gradient, trains) in zip(parameters, states, strict=True):
        with torch.no_grad():
            parameter.copy_(value)
        parameter.requires_grad_(trains)
        set_gradient(parameter, gradient)


def gradient(value: torch.Tensor | None) -> Any:
    """A gradient for a tree, in parts if it is sparse, as that of an embedding may be."""
    if value is None or value.layout is not torch.sparse_coo:
        return value
    return {
        "indices": value._indices(),  # also of one that is not coalesced
        "values": value._values(),
        "size": list(value.shape),
        "coalesced": value.is_coalesced(),
    }


def set_gradient(parameter: torch.Tensor, gradient: Any) -> None:
    """Restore a gradient from what ``gradient`` has returned."""
    if isinstance(gradient, dict):
        parameter.grad = torch.sparse_coo_tensor(
            gradient["indices"], gradient["values"], gradient["size"], device=parameter.device,
            is_coalesced=gradient["coalesced"], check_invariants=False,
        )  # fmt: skip
        return
    parameter.grad = None if gradient is None else _laid_out(gradient, parameter)


def _laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with the device and memory format of a parameter, as gradients have them."""
    tensor = tensor.to(parameter.device)
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def undo_casts(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give states back their dtypes: ``load_state_dict`` casts nearly all to the parameter's."""
    numbers = [each for group in saved.get("param_groups", ()) for each in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    states = saved.get("state", {})
    for number, parameter in zip(numbers, parameters, strict=False):  # some have no such groups
        if number in states and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _uncast(loaded, states[number], parameter)


def _uncast(loaded: Any, saved: Any, parameter: torch.Tensor) -> Any:
    if type(loaded) is dict and type(saved) is dict:
        names = loaded.keys() & saved.keys()
        return loaded | {name: _uncast(loaded[name], saved[name], parameter) for name in names}
    if type(loaded) is type(saved) and type(loaded) in (list, tuple):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(_uncast(*pair, parameter) for pair in pairs)
    if not (isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor)):
        return loaded
    # Another dtype than the parameter's is a choice of the optimizer's own method.
    if loaded.dtype == parameter.dtype and loaded.dtype != saved.dtype:
        loaded = saved.to(loaded.device)
    # Torch keeps the number of steps in main memory, where reading it does not wait for a device.
    return _laid_out(loaded, parameter) if loaded.device == parameter.device else loaded


def all_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """All buffers by name, also those that are None."""
    seen: set[int] = set()
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{place}.{name}".lstrip("."), buffer


def set_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Restore buffers by name, of any shape, or None; the tensors may be taken over."""
    parts, filled = dict(module.named_modules()), set()
    for place, value in buffers.items():
        owner, _, name = place.rpartition(".")
        own = parts[owner]._buffers if owner in parts else {}
        if name not in own:
            continue
        present = own[name]
        if value is None or present is None or id(present) in filled:
            own[name] = None if value is None else value.to(_device_of(present, module))
        else:
            present.data = value.to(present.device)
            filled.add(id(present))


def _device_of(buffer: torch.Tensor | None, module: nn.Module) -> torch.device:
    """That of a buffer, or of its module for one that begins as None."""
    tensors = (each for some in (module.parameters(), module.buffers()) for each in some)
    first = next(tensors, None) if buffer is None else buffer
    return torch.device("cpu") if first is None else first.device


def modes(module: nn.Module) -> dict[str, list[str]]:
    """The parts of a module that evaluate, and its frozen parameters."""
    return {
        "evaluating": [name for name, part in module.named_modules() if not part.training],
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
    }


def set_modes(module: nn.Module, state: Mapping[str, Any]) -> None:
    for name, part in module.named_modules():
        part.training = name not in state["evaluating"]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])


def _of_torchmetrics(name: str) -> Any:
    """A class of torchmetrics, for ``isinstance``; an empty tuple if it is not imported."""
    return getattr(sys.modules.get("torchmetrics"), name, ())


def is_metric(part: object) -> bool:
    """True for a metric; an abstract class takes long to answer that for each in a new process."""
    return _of_torchmetrics("Metric") in type(part).__mro__


def metrics_in(module: nn.Module) -> list[tuple[str, Any]]:
    """The metrics among a module and its parts, by their places."""
    return [(name, part) for name, part in module.named_modules() if is_metric(part)]


def parts_with_metrics(value: object) -> list[tuple[str, nn.Module]]:
    """A module and its parts, by their places, if there are metrics among them; else none."""
    parts = list(value.named_modules()) if isinstance(value, nn.Module) else []
    return parts if any(is_metric(part) for _, part in parts) else []


def attributes_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module that neither ``state_dict`` nor ``metric_state`` holds."""
    ignores = _ignores(part)
    return {name: each for name, each in vars(part).items() if not ignores(name, each)}


def of_metrics(metric: Any, name: str) -> bool:
    """True for an attribute that ``metric_state`` saves, or that torchmetrics sets up itself."""
    return name in metric._defaults or name in _of_every_metric()


@functools.cache
def _of_every_metric() -> frozenset[str]:
    methods = {"update": lambda self: None, "compute": lambda self: None}
    return frozenset(vars(type("_Bare", (_of_torchmetrics("Metric"),), methods)()))


def metric_state(metric: Any) -> dict[str, Any]:
    """The state of a torchmetrics metric, which its ``state_dict`` mostly leaves out."""
    return {
        "states": dict(metric.metric_state),
        "updates": metric._update_count,
        "computed": metric._computed if plain(metric._computed) else None,
        "forward": metric._forward_cache if plain(metric._forward_cache) else None,
    }


def restore_metrics(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the metrics of a module and its parts, also those that trackers have added."""
    grow_trackers(module, states)
    for name, metric in metrics_in(module):
        if name in states:
            restore_metric(metric, moved(states[name], metric.device))


def grow_trackers(module: nn.Module, names: Collection[str]) -> None:
    """Let trackers add metrics until there are all of these names."""
    kind = _of_torchmetrics("MetricTracker")
    trackers = [(place, part) for place, part in module.named_modules() if isinstance(part, kind)]
    for place, part in trackers:
        while any(f"{name}.".startswith(f"{place}.{len(part)}.".lstrip(".")) for name in names):
            part.increment()


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = state["computed"]
    metric._forward_cache = state["forward"]
