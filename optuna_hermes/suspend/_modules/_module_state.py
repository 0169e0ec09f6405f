"""The whole state of a module or an optimizer: also what its ``state_dict`` leaves out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optuna_hermes.suspend._modules._metrics import (
    fit_trackers,
    is_metric,
    metric_state,
    metrics_in,
    of_metrics,
    restore_metrics,
)
from optuna_hermes.suspend._modules._parts import parts_of
from optuna_hermes.suspend._modules._unsaved import is_added, is_of
from optuna_hermes.suspend._state import copied, plain
from optuna_hermes.suspend._values._tree import mapped, storable, tensors_in

OF_LAZY_MODULES = ("_initialize_hook", "_load_hook")
"""Attributes that these lose with their first batch, in each process."""
_OF_TORCH = frozenset({*vars(nn.Module()), *OF_LAZY_MODULES})
_NUMBERS = (bool, int, float)
_SETTINGS = (type(None), *_NUMBERS, str)


def state_of(owner: Any) -> dict[str, Any]:
    """The state of an object, as a tree for ``put_back``."""
    state = owner.state_dict()
    if isinstance(owner, torch.optim.Optimizer):  # which moves its state to its parameters' devices
        return {"state": state, **beside_own_state(owner)}
    if not isinstance(owner, nn.Module):
        return with_places(state)
    buffers = {name: part for name, part in all_buffers(owner) if name not in state}
    others = {"buffers": buffers, "left_out": left_out(owner, state)}
    return {"state": state, **others, **beside_weights(owner)}


def with_places(state: Any) -> dict[str, Any]:
    """A state with the places of its tensors on accelerators: a checkpoint is in main memory."""
    try:
        places = [place for place, each in tensors_in(state, ()) if each.device.type != "cpu"]
    except RecursionError:  # ``pack`` raises its error
        places = []
    return {"state": state, "on_device": list(map(list, places))}


def at_places(saved: Mapping[str, Any]) -> Any:
    """The state that was given to ``with_places``, with those tensors on this process's device."""
    places = {tuple(each) for each in saved.get("on_device", ())}
    if not places:
        return saved["state"]
    device = torch.accelerator.current_accelerator()
    there = {id(each) for place, each in tensors_in(saved["state"], ()) if place in places}
    return mapped(saved["state"], lambda leaf: leaf.to(device) if id(leaf) in there else leaf)


def beside_weights(module: nn.Module) -> dict[str, Any]:
    """The state that no ``state_dict`` holds, beside buffers; all of it matters to the bit."""
    parameters = list(module.named_parameters())
    return {
        "gradients": {name: each.grad for name, each in parameters if each.grad is not None},
        "frozen": [name for name, each in parameters if not each.requires_grad],
        "evaluating": [name for name, part in module.named_modules() if not part.training],
        "metrics": {name: metric_state(metric) for name, metric in metrics_in(module)},
    }


def left_out(module: nn.Module, state: Any) -> dict[str, torch.Tensor]:
    """The parameters of a module that are not in its ``state_dict``, which a user may write."""
    try:
        saved = {_memory(each) for _, each in tensors_in(state, ()) if storable(each)}
    except RecursionError:  # ``pack`` raises its error
        return {}
    # By their memory: it may have other names there. One that is there as a copy (rounded, say) is
    # left out, too.
    return {
        name: each.detach()
        for name, each in module.named_parameters()
        if storable(each) and _memory(each) not in saved
    }


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def set_parameters(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Restore what ``left_out`` returned."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def put_back(owner: Any, state: dict[str, Any]) -> None:
    """Restore an object's state; the tensors of ``state`` may be taken over."""
    if isinstance(owner, nn.Module):
        fit_trackers(owner, state["metrics"])
        # Fabric's wrapper loads by the names within the module that it wraps.
        make_room(getattr(owner, "_original_module", owner), state["state"])
    _load(owner, at_places(state), strict=not state.get("left_out"))
    if isinstance(owner, torch.optim.Optimizer):
        undo_casts(owner, state["state"])
        put_beside_own_state(owner, state)
        vars(owner)["_opt_called"] = True  # else schedules warn that they are stepped before it
    if isinstance(owner, nn.Module):
        set_parameters(owner, state.get("left_out", {}))
        set_buffers(owner, state["buffers"])
        drop_buffers(owner, state["buffers"])
        put_beside_weights(owner, state)


def _load(owner: Any, state: Any, *, strict: bool) -> None:
    """Load a state, also one that lacks parameters if not ``strict`` and its owner allows that."""
    load = owner.load_state_dict
    if strict or not _may_be_loose(load):
        load(state)
    else:
        load(state, strict=False)


def _may_be_loose(load: Any) -> bool:
    if sys.version_info >= (3, 14):
        import annotationlib

        # There annotations are evaluated now, and names in them may be for type checkers only.
        lazy = annotationlib.Format.FORWARDREF
        return "strict" in inspect.signature(load, annotation_format=lazy).parameters
    return "strict" in inspect.signature(load).parameters


def put_beside_weights(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what ``beside_weights`` returned."""
    for name, parameter in module.named_parameters():
        set_gradient(parameter, state["gradients"].get(name))
        parameter.requires_grad_(name not in state["frozen"])
    restore_metrics(module, state["metrics"])
    for name, part in module.named_modules():
        part.training = name not in state["evaluating"]


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
    # A sparse one may have other indices, which not every layout can load.
    sparse = value.layout is not torch.strided
    return sparse or (buffer.shape, buffer.dtype) != (value.shape, value.dtype)


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
            # A learning rate may be a tensor, which the loop changes.
            settings = {name: copied(group.get(name), value) for name, value in loaded.items()}
            group.clear()
            group.update(settings)
        groups[:] = [*first, *now[len(first) :]]
        with contextlib.suppress(AttributeError):  # of one that wraps another
            optimizer.param_groups = groups


def attributes_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module that neither ``state_dict`` nor ``metric_state`` holds."""
    is_ignored = ignored_of(part)
    return {name: each for name, each in vars(part).items() if not is_ignored(name, each)}


def plain_attributes(part: nn.Module, kinds: Collection[type] = _SETTINGS) -> dict[str, Any]:
    """Those of them that are numbers, text, flags or None, or of fewer ``kinds``."""
    return {name: each for name, each in attributes_of(part).items() if type(each) in kinds}


def numbers_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The numbers and flags in attributes of a module's parts, by their places."""
    found = {}
    for place, part in module.named_modules():
        if own := plain_attributes(part, _NUMBERS):
            found[place] = own
    return found


def set_plain(parts: Mapping[str, nn.Module], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set plain attributes of modules by their places; those of parts that are gone are left."""
    for place, own in attributes.items():
        if place in parts:
            vars(parts[place]).update(own)


def ignored_of(part: nn.Module) -> Callable[[str, Any], bool]:
    """A test of an attribute's name and value: True if its owner saves it, or nothing has to."""
    kind: Any = type(part)
    if is_of(kind, ("torch.",)):
        return functools.partial(_is_of_torch, kind)
    return lambda name, value: name in _OF_TORCH or (is_metric(part) and of_metrics(part, name))


def _is_of_torch(kind: type, name: str, value: Any) -> bool:
    """True for what torch's own modules manage, False for what users set, as ``Dropout.p``."""
    if name in _OF_TORCH or name.startswith("_"):
        return True
    return type(value) not in _SETTINGS and not is_added(kind, name, value)


def all_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """All buffers by name, also those that are None."""
    seen: set[int] = set()
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{place}.{name}".lstrip("."), buffer


def set_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    """Restore buffers by name, of any shape, or None; the tensors may be taken over.

    Those that the training has registered are none of ``state_dict``, which others would not fit.
    """
    parts, filled = dict(module.named_modules()), set()
    for place, value in buffers.items():
        owner, _, name = place.rpartition(".")
        if owner not in parts:
            continue
        own = parts[owner]._buffers
        if name not in own:
            parts[owner].__dict__.pop(name, None)
            parts[owner].register_buffer(name, None, persistent=False)
        present = own[name]
        if value is None or present is None or id(present) in filled:
            own[name] = None if value is None else value.to(_device_of(present, module))
        else:
            _fill(present, value.to(present.device))
            filled.add(id(present))


def _fill(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Make a tensor the same as another one, of any shape; it stays the same object."""
    if value.layout is torch.strided:
        buffer.data = value
    else:  # where setting ``data`` may leave it as it is
        with torch.no_grad():
            buffer.resize_as_sparse_(value).copy_(value)


def drop_buffers(module: nn.Module, left: Collection[str]) -> None:
    """Delete the buffers that are in no ``state_dict``, but for those whose names are ``left``."""
    others: list[tuple[nn.Module, str, object]] = []
    stay: set[int] = set()
    for place, part in module.named_modules():
        for name, buffer in part._buffers.items():
            unsaved = name in part._non_persistent_buffers_set
            if unsaved and f"{place}.{name}".lstrip(".") not in left:
                others.append((part, name, buffer))
            elif buffer is not None:
                stay.add(id(buffer))
    for part, name, buffer in others:
        if id(buffer) not in stay:  # else it is a second name, which ``all_buffers`` leaves out
            delattr(part, name)


def _device_of(buffer: torch.Tensor | None, module: nn.Module) -> torch.device:
    """That of a buffer, or of its module for one that begins as None."""
    tensors = (each for some in (module.parameters(), module.buffers()) for each in some)
    first = next(tensors, None) if buffer is None else buffer
    return torch.device("cpu") if first is None else first.device


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None if gradient is None else _laid_out(gradient, parameter)


def _laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor with the device and memory format of a parameter, as gradients have them."""
    tensor = tensor.to(parameter.device)
    if any(each.layout is not torch.strided for each in (tensor, parameter)):
        return tensor
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def undo_casts(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give states back their dtypes: ``load_state_dict`` casts nearly all to the parameter's."""
    numbers = [each for group in saved.get("param_groups", ()) for each in group["params"]]
    states = saved.get("state", {})
    pairs = zip(numbers, trained_by(optimizer), strict=False)  # some have no such groups
    held = _by_parameter(getattr(optimizer, "state", {}))  # some have none either
    for number, parameter in pairs:
        if number in states and id(parameter) in held:
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


def beside_own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The plain values that an optimizer with a ``state_dict`` of its own has for its parameters.

    Its own one may lack them, or name them by addresses, which mean nothing in another process.
    """
    written_by = getattr(type(optimizer).state_dict, "__module__", "")
    state = getattr(optimizer, "state", None)
    if written_by.startswith("torch.") or not isinstance(state, dict):
        return {}
    found = []
    held = _by_parameter(state)
    for parameter in trained_by(optimizer):
        own = held.get(id(parameter))
        items = own.items() if isinstance(own, dict) else ()
        found.append({name: each for name, each in items if plain({name: each})})
    others = [key for key in state if type(key) is int]
    return {"by_parameter": with_places(found), "other_keys": others}


def put_beside_own_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what ``beside_own_state`` returned, where the optimizer has loaded anything else."""
    if "by_parameter" not in saved:
        return
    state: dict[Any, Any] = optimizer.state
    held = _by_parameter(state)
    parameters = trained_by(optimizer)
    apart = [not each for each in saved["by_parameter"]["state"]]
    # One that has nothing by itself may be named by its address in this process.
    right = {*saved["other_keys"], *map(id, itertools.compress(parameters, apart))}
    for key in [each for each in state if type(each) is int and each not in right]:
        del state[key]  # by an address of another process: each resumption would add more
    for parameter, values in zip(parameters, _each_at_places(saved["by_parameter"]), strict=False):
        if values:
            own = held.get(id(parameter))
            if own is None:
                own = state[parameter] = {}
            for name, value in values.items():
                own[name] = _exact(own.get(name), value, parameter)


def _by_parameter(state: Mapping[Any, Any]) -> dict[int, Any]:
    """The values that an optimizer holds of parameters, by their addresses.

    To ask its state for one is an error where that has such an address, too, which may be of
    another process: then a tensor and a number of the same hash are compared.
    """
    return {id(key): each for key, each in state.items() if isinstance(key, torch.Tensor)}


def _each_at_places(saved: Mapping[str, Any]) -> Iterator[Any]:
    """The items of a list that was given to ``with_places``, on this process's device in turn.

    It may have no room for all of them beside what the optimizer has loaded.
    """
    places: dict[int, list[Any]] = defaultdict(list)
    for number, *place in saved.get("on_device", ()):
        places[number].append(place)
    for number, state in enumerate(saved["state"]):
        yield at_places({"state": state, "on_device": places[number]})


def _exact(loaded: Any, saved: Any, parameter: torch.Tensor) -> Any:
    """The saved value: the loaded tensor if that is the same, as others may hold it."""
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(loaded, torch.Tensor) and _is_same(loaded, saved):
        return loaded
    return _laid_out(saved, parameter) if saved.device == parameter.device else saved


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(each.dtype, each.device, each.layout) for each in (one, other)]
    return kinds[0] == kinds[1] and one.layout is torch.strided and torch.equal(one, other)


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer's groups, in their order."""
    return [each for group in optimizer.param_groups for each in group["params"]]
