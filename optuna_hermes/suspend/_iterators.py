"""Iterators of the standard library that stand between a loop and the batches it asks for."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Iterator
from types import FrameType, GeneratorType

from optuna_hermes import _heap

_OF_ITERTOOLS = tuple(each for each in vars(itertools).values() if isinstance(each, type))
_WITHOUT_STATE = (itertools.starmap, itertools.filterfalse, itertools.takewhile)
_PASSING_ON = (enumerate, filter, map, *_WITHOUT_STATE)
"""Those that would do the same from any item on; of ``enumerate`` the docs say that it does not."""


def begun_anew(frame: FrameType | None) -> str | None:
    """Name of an iterator that takes items of a generator which now runs, and would begin anew.

    Such are ``zip``, beside whose items others would be, and ``islice``, which would count again.
    It looks through all objects of the process once or twice.

    Args:
        frame: the generator's frame, or that of a function which it has called.

    Returns:
        None if there is none.
    """
    running = {id(each) for each in _generators(frame)}
    generators = _heap.objects(GeneratorType)
    found: list[object] = [g for g in generators if g.gi_running and id(g.gi_frame) in running]
    seen: set[int] = set()
    while found:
        kinds = (tuple, zip, *_PASSING_ON, *_OF_ITERTOOLS)
        # By the class alone: ``isinstance`` runs the code of proxies.
        holders = [each for each in gc.get_referrers(*found) if type(each) in kinds]
        for each in holders:
            if _begins_anew(each):
                return type(each).__name__
        found = [each for each in holders if id(each) not in seen]
        seen.update(map(id, found))
    return None


def _generators(frame: FrameType | None) -> Iterator[FrameType]:
    """The innermost generator's frame, and those of generators that ask it for items in turn."""
    while frame is not None and not frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        yield frame
        frame = frame.f_back


def _begins_anew(holder: object) -> bool:
    if type(holder) is map:  # of several iterators it is a ``zip``
        return any(type(each) is tuple and len(each) > 1 for each in gc.get_referents(holder))
    return type(holder) is not tuple and type(holder) not in _PASSING_ON
