"""The parts of a module, or the parameters of an optimizer, which a saved state must fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optuna_hermes.suspend._modules._metrics import is_metric


@dataclass(frozen=True, kw_only=True)
class StateShape:
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

    def converted(self, now: StateShape) -> StateShape:
        """These parts, with what the code that each process runs has made of them since."""
        return replace(self, kinds=now.kinds, ids=now.ids)

    def fit(self, others: StateShape) -> bool:
        """True if an object with these parts can load a state of one with those others."""
        own, now = self.sizes, others.sizes
        # Layers that are added without parameters are made on first use, by each process.
        if not self.kinds.items() <= others.kinds.items():
            return False
        return own.keys() <= now.keys() <= own.keys() | self.unset and all(
            size is None or size == now[name] for name, size in own.items()
        )


def parts_of(owner: object) -> StateShape:
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
    return StateShape(sizes=sizes, unset=frozenset(unset), kinds=kinds, ids=ids)


def changed(first: Mapping[str, StateShape], now: Mapping[str, StateShape]) -> list[str]:
    """Names of those that can load no state of the ``first`` ones any more."""
    return [name for name, each in first.items() if not each.fit(now[name])] or _retied(first, now)


def _retied(first: Mapping[str, StateShape], now: Mapping[str, StateShape]) -> list[str]:
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


def why_not_loadable(name: str, module: Any) -> str | None:
    """The reason why a module would refuse its own ``state_dict``, None if it would not.

    Or why an optimizer gives none, such as ``ZeroRedundancyOptimizer``: each process has a part.
    """
    if isinstance(module, torch.optim.Optimizer):
        try:
            module.state_dict()
        except RuntimeError as error:
            return f"{name} gives no state_dict ({str(error).split('. ')[0]})"
        return None
    if not _has_torch_s(module, "load_state_dict"):  # it may take anything
        return None
    if not any(map(_adds_keys, module.modules())):  # no state is made in vain
        return None
    try:
        key = next((key for key in module.state_dict() if not _loads(module, str(key))), None)
    except Exception:  # it fails with the first checkpoint, unless it needs a batch before
        return None
    if key is None:
        return None
    return f"the state_dict of {name} holds {key}, which its load_state_dict refuses"


def _adds_keys(part: nn.Module) -> bool:
    return bool(part._state_dict_hooks) or not _has_torch_s(part, "_save_to_state_dict")


def _loads(part: nn.Module, key: str) -> bool:
    """True if torch's own ``load_state_dict`` takes a value of this key, or code of others may."""
    if not _has_torch_s(part, "_load_from_state_dict"):
        return True
    if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
        return True
    name, dot, rest = key.partition(".")
    if dot:
        inner = part._modules.get(name)
        return name in part._modules and (inner is None or _loads(inner, rest))
    if name == "_extra_state":
        return not _has_torch_s(part, "set_extra_state")
    saved = name in part._buffers and name not in part._non_persistent_buffers_set
    return saved or name in part._parameters


def _has_torch_s(part: nn.Module, method: str) -> bool:
    return getattr(getattr(part, method), "__func__", None) is getattr(nn.Module, method)
