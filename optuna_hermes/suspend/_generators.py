"""Random generators in the attributes of data sets, collate functions and samplers."""

from __future__ import annotations

import functools
import logging
import random
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

log = logging.getLogger(__name__)

# A torch generator's kind is its device.
_KINDS: dict[str, Any] = {
    "Generator": np.random.Generator,
    "RandomState": np.random.RandomState,
    "Random": random.Random,
}
GENERATORS = (torch.Generator, *_KINDS.values())
_BITS: dict[str, Any] = {
    each.__name__: each
    for each in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
# Their states are of the process, see ``rng_state``; scikit-learn puts one into attributes.
_GLOBAL: tuple[Any, ...] = (
    np.random.mtrand._rand,
    torch.default_generator,
    random.seed.__self__,  # type: ignore[attr-defined]
)
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, type),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(torch.Tensor, np.ndarray, *GENERATORS, DataLoader),
)
_MOST_DEPTH = 8
_MOST_ITEMS = 1000
"""Longer lists and dictionaries hold samples, not parts of a data set."""
_MOST_VALUES = 10_000


class Holder(NamedTuple):
    """An object or container that may hold generators, and the place where it was found."""

    place: str
    owner: Any


def own_generators(data: object, place: str = "dataset") -> list[Holder]:
    """The holders of generators in a data set or function and in all its parts, nearest first."""
    found: list[Holder] = []
    waiting, seen = deque([(0, Holder(place, data))]), set()
    values = 0
    while waiting and values < _MOST_VALUES:
        depth, holder = waiting.popleft()
        if id(holder.owner) in seen or issubclass(type(holder.owner), _LEAVES):
            continue
        seen.add(id(holder.owner))
        items = _items(holder.owner)
        values += 1 + len(items)
        found.append(holder)
        if depth < _MOST_DEPTH:
            waiting += [
                (depth + 1, Holder(f"{holder.place}.{name}", value))
                for name, value in items.items()
                if not issubclass(type(value), _LEAVES)
            ]
    return found


def states_of(holders: Iterable[Holder]) -> list[Any]:
    """Place, name, kind and state of each generator."""
    states: list[Any] = []
    seen: set[int] = set()
    for place, owner in _by_place(holders).items():
        for name, value in _items(owner).items():
            if _is_own(value) and id(value) not in seen:
                seen.add(id(value))
                states.append([place, name, _kind(value), generator_state(value)])
    return states


def set_states(holders: Iterable[Holder], states: Iterable[Any]) -> None:
    """Restore what ``states_of`` returned, and make generators that are not yet made here."""
    owners = _by_place(holders)
    for place, name, kind, state in states:
        if not _restored(owners.get(place), name, kind, state):
            _warn_of_missing(f"{place}.{name}")


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python, in plain values, tensors and arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))


def _is_own(value: object) -> bool:
    # Not isinstance: it reads __class__, which runs the code of proxies.
    if not issubclass(type(value), GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return all(value is not each for each in _GLOBAL)


def _items(owner: Any) -> dict[Any, Any]:
    """The attributes or items of an object, read without running its code."""
    kind = type(owner)
    if kind is types.MethodType:
        return {"__self__": owner.__self__}
    if issubclass(kind, functools.partial):
        return {"func": owner.func, "args": owner.args, "keywords": owner.keywords}
    if issubclass(kind, list | tuple):
        return {} if len(owner) > _MOST_ITEMS else dict(enumerate(owner))
    if issubclass(kind, dict):
        items = dict.items(owner) if len(owner) <= _MOST_ITEMS else ()
        return {name: value for name, value in items if type(name) in (str, int)}
    return getattr(owner, "__dict__", {})


def _by_place(holders: Iterable[Holder]) -> dict[str, Any]:
    """The owners by their places, which are numbered where several loaders have the same."""
    owners: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for place, owner in holders:
        number = counts[place] = counts.get(place, 0) + 1
        owners[place if number == 1 else f"{place}#{number}"] = owner
    return owners


def _kind(generator: Any) -> str:
    names = (name for name, kind in _KINDS.items() if isinstance(generator, kind))
    return next(names, None) or str(generator.device)


def _restored(owner: Any, name: Any, kind: str, state: Any) -> bool:
    """Set the state of one generator; False if there is none and none can be made."""
    items = _items(owner)
    generator = items.get(name)
    if generator is None:  # made with its first number, or in an epoch
        generator = _made(kind, state)
        if not _put(owner, name, generator):
            return False
    if not isinstance(generator, _KINDS.get(kind, torch.Generator)):
        return False
    set_generator_state(generator, state)
    return True


def _put(owner: Any, name: Any, generator: Any) -> bool:
    if isinstance(owner, dict) or (isinstance(owner, list) and name < len(owner)):
        owner[name] = generator
    elif (
        isinstance(name, str) and type(owner) is not types.MethodType and hasattr(owner, "__dict__")
    ):
        vars(owner)[name] = generator
    else:
        return False
    return True


def _made(kind: str, state: Any) -> Any:
    if kind == "Generator":
        return np.random.Generator(_BITS[state["bit_generator"]]())
    return _KINDS[kind]() if kind in _KINDS else torch.Generator(kind)


@functools.cache
def _warn_of_missing(place: str) -> None:
    log.warning(
        "A random generator was stored of %s, but none is there now: it begins anew. Make the same "
        "data sets and functions whenever the objective runs.",
        place,
    )
