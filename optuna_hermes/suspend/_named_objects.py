"""The objects that a user's loop passes to ``suspendable``, and their state."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes.errors import InvalidInputError, SuspendError, UnstorableError
from optuna_hermes.suspend._state import copied, moved, on_device, plain
from optuna_hermes.suspend._tree import frozen
from optuna_hermes.suspend._unsaved import Attributes, Unsaved

if TYPE_CHECKING:
    from optuna_hermes.suspend._values import Classes

_CONTAINERS = (list, tuple, dict)
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, np.ndarray)
_OF_TORCH = frozenset(vars(nn.Module()))
_LEAVES = (*_NUMBERS, torch.Size, torch.dtype, torch.device)


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
        self._owners = owners
        self._unsaved = _attributes(owners)

    def roots(self) -> list[object]:
        """Objects that lead to every tensor."""
        return [*self._owners.values(), self.kept]

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
                name: [(each, each.grad) for each in parameters]
                for name, parameters in _trained(self._owners).items()
            },
            "unsaved": self._unsaved.state_dict(),
            "kept": {name: self._written(name, value) for name, value in self.kept.items()},
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
        for name, owner in self._owners.items():
            try:
                _put_back(owner, saved[name])
                if name in trained:
                    _put_parameters_back(present[name], trained[name])
            except Exception as error:
                raise SuspendError(f"{name} cannot be loaded from it: {error}") from error
        self._unsaved.load_state_dict(state.get("unsaved", {}))
        kept = {name: self._read(name, *node) for name, node in state["kept"].items()}
        # In place: the objective may hold the dictionary.
        self.kept.clear()
        self.kept.update(kept)
        # A second call may fill these in place; other arrays may be parts of a model.
        self._given = {id(each): each for each in _leaves(kept)}

    def _written(self, name: str, value: Any) -> list[Any]:
        if _is_plain(value):
            return [value, on_device(value), False]
        from optuna_hermes.suspend._values import read_value, write_value

        try:
            tree = write_value(f"run.kept[{name!r}]", value, whole=True)
            if name not in self._readable:
                # Read back once, so that a value that cannot be restored fails while it is there.
                self._readable.add(name)
                read_value(frozen(tree), None, self._classes)
        except (SuspendError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UnstorableError(
                f"run.kept[{name!r}] must be made of numbers, text, arrays, tensors, random "
                "generators, containers, and objects of classes of your own whose attributes are "
                f"such, but it could not be made again: {error}."
            ) from error
        return [tree, False, True]

    def _read(self, name: str, value: Any, was_on_device: bool, is_tree: bool) -> Any:
        present = self.kept.get(name)
        if is_tree:
            from optuna_hermes.suspend._values import read_value

            return read_value(value, present, self._classes)
        if was_on_device:
            value = moved(value, torch.accelerator.current_accelerator())
        return _put_into(present, value, self._given)


def _is_plain(value: object) -> bool:
    """True for scalars, arrays and tensors, also in containers: a tree holds them as they are."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if type(each) in _CONTAINERS:
            if id(each) not in seen:
                seen.add(id(each))
                waiting += each.values() if isinstance(each, dict) else cast("list[object]", each)
        elif isinstance(each, torch.Tensor):
            if each.requires_grad:  # else it would come back without that
                return False
        elif type(each) not in _LEAVES and not isinstance(each, np.generic):
            return False
    return True


def _attributes(owners: Mapping[str, Any]) -> Unsaved:
    """Attributes of the users' own modules that are in no ``state_dict``."""
    modules = {name: each for name, each in owners.items() if isinstance(each, nn.Module)}
    known = {
        id(part) for each in modules.values() for part in (*each.modules(), *each.parameters())
    }
    known |= {id(each) for each in owners.values()}
    parts = {
        f"{name}.{place}": Attributes(
            f"{name}.{place}".rstrip("."), part, functools.partial(_is_saved_apart, part), known
        )
        for name, each in modules.items()
        for place, part in each.named_modules()
        if not type(part).__module__.startswith("torch.")
    }
    return Unsaved(parts)


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
        "gradients": {name: p.grad for name, p in parameters.items() if p.grad is not None},
        **modes(owner),
        "metrics": {name: metric_state(metric) for name, metric in _metrics(owner)},
    }


def _put_back(owner: Any, state: dict[str, Any]) -> None:
    """Restore an object's state; the tensors of ``state`` may be taken over."""
    owner.load_state_dict(state["state"])
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


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None if gradient is None else gradient.to(parameter.device)


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
