"""Random generators in objects' attributes, and their states."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARTS = ("dataset", "datasets", "transform", "transforms", "target_transform")
# Its state is one of the process, see ``rng_state``; scikit-learn puts it into attributes.
_GLOBAL: Any = np.random.mtrand._rand


def generators_in(owner: object) -> list[Any]:
    """The generators among an object's attributes, without NumPy's global one."""
    values = getattr(owner, "__dict__", {}).values()
    return [each for each in values if isinstance(each, GENERATORS) and each is not _GLOBAL]


def own_generators(data: Any) -> list[Any]:
    """Random generators that a data set, its transforms and its parts keep in their attributes."""
    found: list[Any] = []
    left, seen = [data], set()
    while left:
        each = left.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        found += generators_in(each)
        for name in _PARTS:
            part = getattr(each, "__dict__", {}).get(name)
            left += part if isinstance(part, list | tuple) else [part]
    return found


def states_of(generators: Iterable[Any]) -> list[Any]:
    """The states of several generators, see ``generator_state``."""
    return [generator_state(each) for each in generators]


def set_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    # Not strict: an objective that was edited may make fewer, or more.
    for generator, state in zip(generators, states, strict=False):
        set_generator_state(generator, state)


def generator_state(generator: Any) -> Any:
    """The state of one of ``GENERATORS``, in plain values, tensors and arrays."""
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
