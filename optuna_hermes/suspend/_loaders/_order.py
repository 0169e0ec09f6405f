"""The order of samples in loaders that a training makes anew, as by hard-example mining.

It depends on the weights of that moment: a process that comes later would draw another one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from optuna_hermes.suspend._state import copied
from optuna_hermes.suspend._values._tree import frozen, same, storable

_PARTS = ("batch_sampler", "sampler", "dataset")
SAMPLES = ("data_source", "dataset")
"""Names by which samplers and subsets hold data: as a list or a tensor, all samples."""


def order_of(loaders: Any) -> dict[str, dict[str, Any]]:
    """The numbers of the samplers of new loaders and the indices of their subsets, by place."""
    order: dict[str, dict[str, Any]] = {}
    for place, own in _samplers(loaders).items():
        stored = {name: _stored(value) for name, value in own.items() if name not in SAMPLES}
        order[place] = frozen({name: each for name, each in stored.items() if each is not None})
    return order


def set_order(loaders: Any, order: dict[str, dict[str, Any]]) -> None:
    """Give loaders that are made again what ``order_of`` returned; before they are counted."""
    for place, own in _samplers(loaders).items():
        for name, value in frozen(order.get(place, {})).items():
            present = own.get(name)
            if same(_stored(present), value):
                continue
            # In place where it can be: the objective may hold the same list.
            if type(present) is list and isinstance(value, np.ndarray | torch.Tensor):
                plain = not present or type(present[0]) in (int, float)
                present[:] = value.tolist() if plain else list(value)
            elif type(present) is type(value):
                own[name] = copied(present, value)


def _samplers(loaders: Any) -> dict[str, dict[str, Any]]:
    """The attributes of samplers, and of subsets and what joins them, in some loaders."""
    leaves = [each for leaf in tree_leaves(loaders) for each in getattr(leaf, "flattened", [leaf])]
    found, seen = {}, set()
    waiting = [(str(number), each) for number, each in enumerate(leaves)]
    for place, each in waiting:  # which grows
        own = getattr(each, "__dict__", {})
        if id(each) in seen or not own:
            continue
        seen.add(id(each))
        if type(each).__module__.startswith("optuna_hermes."):  # of a loader that is hooked into
            own = {"sampler": getattr(each, "sampler", None)}
        elif isinstance(each, Subset | ConcatDataset) or (
            # Not of a data set without torch's class, which may hold all its samples.
            place.endswith("sampler") and not isinstance(each, DataLoader | Dataset)
        ):
            found[place] = own
        waiting += [(f"{place}.{name}", own.get(name)) for name in _PARTS]
        several = own.get("datasets")
        if isinstance(several, list):
            waiting += [(f"{place}.{number}", part) for number, part in enumerate(several)]
    return {place: own for place, own in found.items() if "." in place}


def joined(items: list[Any]) -> Any:
    """The numbers of a list, or its tensors of one number, as one array or tensor; else None."""
    kinds = set(map(type, items))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in (int, float) or (kind is not None and issubclass(kind, np.number | np.bool_)):
        return np.asarray(items)  # of objects, if a number is too large
    # As of ``list(order)``.
    if kind is torch.Tensor and not any(each.ndim for each in items):
        alike = len({(each.dtype, each.device) for each in items}) == 1
        return torch.stack(items) if alike and all(map(storable, items)) else None
    return None


def _stored(value: Any) -> Any:
    """A value of a sampler as it is stored, lists as arrays; None for what is not."""
    if type(value) is list:
        value = joined(value)
    numbers = type(value) is np.ndarray and value.dtype.kind in "biuf"  # in memory, not in a file
    return value if numbers or type(value) in (bool, int, float) or storable(value) else None
