"""The objects that a user's loop passes to ``suspendable``, and their state."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes.errors import (
    CheckpointError,
    InvalidInputError,
    SuspendError,
    UnstorableError,
)
from optuna_hermes.suspend._state import copied, moved, on_device, plain
from optuna_hermes.suspend._tree import frozen, storable
from optuna_hermes.suspend._unsaved import Attributes, Unsaved

if TYPE_CHECKING:
    from optuna_hermes.suspend._values import Classes, ValueWriter

_CONTAINERS = (list, tuple, dict)
_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_OF_TORCH = frozenset(vars(nn.Module()))
_LEAVES = (*_NUMBERS, torch.Size, torch.dtype, torch.device)
SMALL_BYTES = 1 << 20
"""Most bytes that are copied of a value at each epoch's begin."""
_SETTINGS = (type(None), bool, int, float, str)
_SCHEDULES = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class NamedObjects:
    """The named objects that a loop changes, and the values in ``run.kept``.

    Args:
        owners: modules, optimizers and so on, by the names used in messages.
        classes: the classes that kept objects may have; None for none.

    Raises:
        InvalidInputError: one of them has no ``state_dict`` or ``load_state_dict``.
    """

    def __init__(self, owners: Mapping[str, Any], classes: Classes | None = None) -> None:
        for name, owner in owners.items():
            _check(name, owner)
        self.kept: dict[str, Any] = {}
        self._classes = classes
        self._readable: set[str] = set()
        self._given: dict[int, object] = {}
        self._owners = {**owners, **_held(owners)}
        self._unsaved = _attributes(self._owners)
        self._shapes = {name: _shape(each) for name, each in self._owners.items()}

    def roots(self) -> list[object]:
        """Objects that lead to every tensor."""
        return [*self._owners.values(), self.kept]

    @property
    def reshaped(self) -> list[str]:
        """Names of objects that have other parameters than when they were named."""
        return [name for name, each in self._owners.items() if _shape(each) != self._shapes[name]]

    @property
    def lost(self) -> list[str]:
        """Names of attributes that have changed and cannot be stored."""
        return self._unsaved.lost

    def begin(self) -> None:
        """Begin to watch attributes, before the first batch: changes from here on are stored."""
        self._unsaved.begin()

    def state_dict(self) -> dict[str, Any]:
        """The state of all, as a tree of tensors and plain values; the tensors are not copied.

        Raises:
            UnstorableError: a kept value could not be made again.
        """
        return {
            "owners": {name: _state_of(owner) for name, owner in self._owners.items()},
            "trained": {
                name: [(each, _gradient(each.grad)) for each in parameters]
                for name, parameters in _trained(self._owners).items()
            },
            "unsaved": self._unsaved.state_dict(),
            "kept": self._written(),
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
        present, trained = _trained(self._owners), state.get("trained", {})
        groups = _first_with_groups(self._owners)
        for name, owner in self._owners.items():
            try:
                _put_back(owner, saved[name])
                if name in trained:
                    _put_parameters_back(present[name], trained[name])
            except Exception as error:
                raise SuspendError(f"{name} cannot be loaded from it: {error}") from error
        for optimizer, first in groups:
            if optimizer.param_groups is not first.param_groups:
                optimizer.param_groups = first.param_groups
        self._unsaved.load_state_dict(state.get("unsaved", {}))
        self._read(state["kept"], state["kept_order"])

    def small_state(self) -> dict[str, Any]:
        """A copy of what is small: all but modules, the states of optimizers, and large values.

        It is made at each epoch's begin, so that the code before its batches can run again from
        there: what that computes may depend on schedules, settings of optimizers and kept values.
        """
        try:
            kept = _if_small(self._written())
        except UnstorableError:  # it is raised where the checkpoint is written
            kept = None
        groups, others = {}, {}
        for name, owner in self._owners.items():
            if isinstance(owner, torch.optim.Optimizer):
                groups[name] = [_settings(group) for group in owner.param_groups]
            elif not isinstance(owner, nn.Module):
                others[name] = _if_small(owner.state_dict())
        state = {"groups": groups, "others": others, "kept": kept, "kept_order": list(self.kept)}
        return cast("dict[str, Any]", frozen(state))

    def load_small_state(self, state: dict[str, Any]) -> None:
        """Restore what ``small_state`` has returned."""
        for name, saved in state["groups"].items():
            for group, settings in zip(self._owners[name].param_groups, saved, strict=False):
                for each, value in settings.items():
                    group[each] = copied(group.get(each), value)
        for name, own in state["others"].items():
            if own is not None:
                self._owners[name].load_state_dict(own)
        if state["kept"] is not None:
            self._read(state["kept"], state["kept_order"])

    def _written(self) -> dict[str, list[Any]]:
        """The kept values by name, trees in the order in which they must be read."""
        memories = {name: _memories_of_plain(value) for name, value in self.kept.items()}
        counts = Counter(each for found in memories.values() for each in found or ())
        shared = {each for each, count in counts.items() if count > 1}
        trees = self._trees(memories, shared) if shared or None in memories.values() else {}
        return {name: [tree, False, True] for name, tree in trees.items()} | {
            name: [value, on_device(value), False]
            for name, value in self.kept.items()
            if name not in trees
        }

    def _trees(
        self, memories: Mapping[str, list[Hashable] | None], shared: set[Hashable]
    ) -> dict[str, list[Any]]:
        """Trees of the values that are not plain, or that share parts with themselves or others."""
        from optuna_hermes.suspend._values import ValueWriter

        writer = ValueWriter(whole=True)
        names = [name for name, found in memories.items() if found is None]
        trees = {name: self._tree(writer, name) for name in names}
        shared = shared | {_memory(each) for each in writer.objects}
        names = [name for name, found in memories.items() if found and shared.intersection(found)]
        trees |= {name: self._tree(writer, name) for name in names}
        try:
            writer.refuse_overlaps()
        except CheckpointError as error:
            raise UnstorableError(str(error)) from error
        self._check_readable(trees)
        return trees

    def _tree(self, writer: ValueWriter, name: str) -> list[Any]:
        with _named_in_errors(name):
            return writer.write(f"run.kept[{name!r}]", self.kept[name])

    def _check_readable(self, trees: Mapping[str, list[Any]]) -> None:
        """Read new values once, so that one that cannot be restored fails while it is there."""
        if self._readable.issuperset(trees):
            return
        from optuna_hermes.suspend._values import ValueReader

        reader = ValueReader(self._classes)
        for name, tree in trees.items():
            with _named_in_errors(name):
                reader.node(frozen(tree))
        self._readable.update(trees)  # only now: an error is caught at an epoch's begin

    def _read(self, nodes: Mapping[str, list[Any]], order: list[str]) -> None:
        kept, reader = {}, None
        for name, (value, was_on_device, is_tree) in nodes.items():
            present = self.kept.get(name)
            if is_tree:
                from optuna_hermes.suspend._values import ValueReader

                reader = reader or ValueReader(self._classes, self._given)
                kept[name] = reader.node(value, present)
                continue
            if was_on_device:
                value = moved(value, torch.accelerator.current_accelerator())
            kept[name] = _put_into(present, value, self._given)
        # In place: the objective may hold the dictionary.
        self.kept.clear()
        self.kept.update({name: kept[name] for name in order})
        # A second call may fill these in place; other arrays may be parts of a model.
        arrays = [*_leaves(kept), *(reader.arrays if reader is not None else ())]
        self._given = {id(each): each for each in arrays}


@contextlib.contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (SuspendError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnstorableError(
            f"run.kept[{name!r}] must be made of numbers, text, arrays, tensors, random "
            "generators, containers, and objects of classes of your own whose attributes are "
            f"such, but it could not be made again: {error}."
        ) from error


def _memories_of_plain(value: object) -> list[Hashable] | None:
    """Keys of a plain value's containers, arrays and tensors, one at each reference to them.

    None if it is not plain. Plain are scalars, arrays and tensors, also in containers: a tree holds
    them as they are.
    """
    memories: list[Hashable] = []
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if type(each) in _NUMBERS:
            continue
        if type(each) in (list, dict):
            memories.append(_memory(each))
        if type(each) in _CONTAINERS:
            if id(each) not in seen:
                seen.add(id(each))
                waiting += each.values() if isinstance(each, dict) else cast("list[object]", each)
        elif isinstance(each, torch.Tensor | np.ndarray):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                return None  # it would come back without that
            memories.append(_memory(each))
        elif type(each) not in _LEAVES and not isinstance(each, np.generic):
            return None
    return memories


def _memory(value: object) -> Hashable:
    """A key that is the same for arrays and tensors in the same memory."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray | torch.Tensor):
        value = value.base
    if isinstance(value, np.ndarray):
        return ("memory", value.__array_interface__["data"][0])
    if isinstance(value, torch.Tensor) and storable(value):
        return ("memory", value.untyped_storage().data_ptr())
    return id(value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _if_small(tree: Any) -> Any:
    """A tree, or None if its arrays and tensors are too large to be copied in each epoch."""
    left, waiting = SMALL_BYTES, [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor | np.ndarray):
            left -= each.nbytes
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        left -= 8
        if left < 0:
            return None
    return tree


def _shape(owner: Any) -> Hashable:
    """The names of a module's parameters and buffers, or the sizes of an optimizer's groups."""
    if isinstance(owner, nn.Module):
        return frozenset(owner.state_dict())
    if isinstance(owner, torch.optim.Optimizer):
        return tuple(len(group["params"]) for group in owner.param_groups)
    return None


def _held(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers and schedulers in attributes of owners, whose ``state_dict`` may lack them."""
    held: dict[str, Any] = {}
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
                held[place] = each
                waiting.append((place, each))
    return held


def _parts(name: str, owner: object) -> Iterator[tuple[str, object]]:
    """The attributes of an object, and the items of those that are containers."""
    for attribute, value in getattr(owner, "__dict__", {}).items():
        yield f"{name}.{attribute}", value
        if isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{attribute}.{place}", each) for place, each in items)


def _first_with_groups(owners: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Each optimizer, with the first one that has the same groups of parameters."""
    optimizers = [each for each in owners.values() if isinstance(each, torch.optim.Optimizer)]
    first: dict[tuple[int, ...], Any] = {}
    return [
        (each, first.setdefault(tuple(map(id, each.param_groups)), each)) for each in optimizers
    ]


def _attributes(owners: Mapping[str, Any]) -> Unsaved:
    """Attributes of modules and their parts that are in no ``state_dict``."""
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
    return Unsaved(parts)


def _ignores(part: nn.Module) -> Callable[[str, Any], bool]:
    if type(part).__module__.startswith("torch."):
        return _is_no_setting
    return functools.partial(_is_saved_apart, part)


def _is_no_setting(name: str, value: Any) -> bool:
    """True for what torch's own modules manage, False for what users set, as ``Dropout.p``."""
    return type(value) not in _SETTINGS or name in _OF_TORCH or name.startswith("_")


def _is_saved_apart(part: nn.Module, name: str, value: Any) -> bool:
    is_metric = isinstance(part, _of_torchmetrics("Metric"))
    return name in _OF_TORCH or (is_metric and of_metrics(part, name))


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


def _leaves(value: object) -> Iterator[object]:
    """The arrays and tensors in lists and dictionaries."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif isinstance(value, np.ndarray | torch.Tensor):
        yield value


def _put_into(present: Any, value: Any, given: Mapping[int, object]) -> Any:
    """Return ``value``, in the present lists and dictionaries: the objective may refer to them."""
    # Only arrays and tensors of an earlier call are filled: others may be parts of a model.
    if id(present) in given:
        return copied(present, value)
    if type(present) is list and type(value) is list:
        present[:] = value
        return present
    if type(present) is dict and type(value) is dict:
        merged = {n: _put_into(present.get(n), each, given) for n, each in value.items()}
        present.clear()
        present.update(merged)
        return present
    return value


def _state_of(owner: Any) -> dict[str, Any]:
    """The state of an object, as a tree for ``_put_back``."""
    state = owner.state_dict()
    if not isinstance(owner, nn.Module):
        return {"state": state}
    parameters = dict(owner.named_parameters())
    return {
        # None of the rest is in a module's ``state_dict``, and all of it matters to the bit.
        "state": state,
        "buffers": {name: part for name, part in owner.named_buffers() if name not in state},
        "gradients": {
            name: _gradient(p.grad) for name, p in parameters.items() if p.grad is not None
        },
        **modes(owner),
        "metrics": {name: metric_state(metric) for name, metric in _metrics(owner)},
    }


def _put_back(owner: Any, state: dict[str, Any]) -> None:
    """Restore an object's state; the tensors of ``state`` may be taken over."""
    owner.load_state_dict(state["state"])
    if isinstance(owner, torch.optim.Optimizer):
        _undo_casts(owner, state["state"])
        vars(owner)["_opt_called"] = True  # else schedules warn that they are stepped before it
    if not isinstance(owner, nn.Module):
        return
    set_buffers(owner, state["buffers"])
    for name, parameter in owner.named_parameters():
        _set_gradient(parameter, state["gradients"].get(name))
    restore_metrics(owner, state["metrics"])
    set_modes(owner, state)


def _put_parameters_back(parameters: list[torch.Tensor], states: list[Any]) -> None:
    for parameter, (value, gradient) in zip(parameters, states, strict=True):
        with torch.no_grad():
            parameter.copy_(value)
        _set_gradient(parameter, gradient)


def _gradient(gradient: torch.Tensor | None) -> Any:
    """A gradient for a tree, in parts if it is sparse, as that of an embedding may be."""
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(),  # also of one that is not coalesced
        "values": gradient._values(),
        "size": list(gradient.shape),
        "coalesced": gradient.is_coalesced(),
    }


def _set_gradient(parameter: torch.Tensor, gradient: Any) -> None:
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


def _undo_casts(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give states back their dtypes: ``load_state_dict`` casts nearly all to the parameter's."""
    numbers = [each for group in saved.get("param_groups", ()) for each in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # some have no such groups
        if number in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _uncast(loaded, saved["state"][number], parameter)


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
    cast = loaded.dtype == parameter.dtype and loaded.dtype != saved.dtype
    return _laid_out(saved.to(loaded.device) if cast else loaded, parameter)


def set_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore buffers by name, of any shape; the tensors may be taken over."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.data = buffers[name].to(buffer.device)


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


def _metrics(module: nn.Module) -> list[tuple[str, Any]]:
    kind = _of_torchmetrics("Metric")
    return [(name, part) for name, part in module.named_modules() if isinstance(part, kind)]


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
    kind = _of_torchmetrics("MetricTracker")
    trackers = [(place, part) for place, part in module.named_modules() if isinstance(part, kind)]
    for place, part in trackers:
        while any(f"{name}.".startswith(f"{place}.{len(part)}.".lstrip(".")) for name in states):
            part.increment()
    for name, metric in _metrics(module):
        if name in states:
            restore_metric(metric, moved(states[name], metric.device))


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = state["computed"]
    metric._forward_cache = state["forward"]
