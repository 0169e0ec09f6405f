"""Iterators of the standard library that stand between a loop and the batches it asks for."""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, GeneratorType
from typing import TypeVar

from optuna_hermes import _heap

Item = TypeVar("Item")

_OF_ITERTOOLS = tuple(each for each in vars(itertools).values() if isinstance(each, type))
_WITHOUT_STATE = (itertools.starmap, itertools.filterfalse, itertools.takewhile)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
_LOOPS = ("FOR_ITER", "SEND", "YIELD_FROM")
_APPENDING = ("LIST_APPEND", "SET_ADD", "MAP_ADD")


class CountedOn(Iterator[Item]):
    """Items from a later one on: ``enumerate`` around this counts those before it, too.

    Args:
        items: the items that are left.
        before: returns the number of those before, once the first of these is there.
    """

    __slots__ = ("_before", "_counts", "_items")  # it is found by what refers to it

    def __init__(self, items: Iterator[Item], before: Callable[[], int]) -> None:
        self._items = items
        self._before: Callable[[], int] | None = before
        self._counts = False

    def __next__(self) -> Item:
        if self._counts:
            return None  # type: ignore[return-value]  # ``_count`` drops it
        item = next(self._items)
        if self._before is not None:
            before, self._before = self._before, None
            self._count(before())
        return item

    def _count(self, number: int) -> None:
        """Let ``enumerate`` have so many items more.

        It reads its count only once it has the item that it is asking for at this moment.
        """
        self._counts = True
        try:
            for each in gc.get_referrers(self) if number else ():
                if type(each) is enumerate:
                    deque(itertools.islice(each, number), maxlen=0)
        finally:
            self._counts = False


_PASSING_ON = (enumerate, filter, map, CountedOn, *_WITHOUT_STATE)
"""Those that do the same from any item on; ``enumerate`` right around a ``CountedOn`` does."""


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
        asked = tuple(found)
        # Since Python 3.13 the tuple of the arguments is among the referrers, and always a new one.
        referrers = (each for each in gc.get_referrers(*asked) if each is not asked)
        # By the class alone: ``isinstance`` runs the code of proxies.
        holders = [each for each in referrers if type(each) in kinds]
        for each in holders:
            if _begins_anew(each):
                return f"{type(each).__name__}()"
        found = [each for each in holders if id(each) not in seen]
        seen.update(map(id, found))
    return None


def collecting(frame: FrameType | None) -> str | None:
    """Name of what takes items of a generator which now runs, and is not kept: it has no variable.

    A comprehension has made a part of its result, and the counter of a loop that calls ``next()``
    would begin anew.

    Args:
        frame: the generator's frame, or that of a function which it has called.

    Returns:
        None if it is a loop that asks for one item after another.
    """
    for each in _generators(frame):
        asking = each.f_back
        while asking is not None and _is_passed_on(asking):
            asking = asking.f_back
        if asking is None:
            continue
        if asking.f_code.co_name in COMPREHENSIONS:
            return "a comprehension"
        place = place_of(asking)
        if _opcode(asking, place) not in _LOOPS:
            return "a call such as next() or sum()"
        if _appends(asking, place):
            return "a comprehension"
    return None


def place_of(frame: FrameType) -> int:
    """Offset of the instruction that a frame is at; a specialised one may stand in its cache."""
    offset = frame.f_lasti
    while offset > 0 and _opcode(frame, offset) == "CACHE":
        offset -= 2
    return offset


def _opcode(frame: FrameType, offset: int) -> str:
    return dis.opname[frame.f_code.co_code[offset]]


def _appends(frame: FrameType, begin: int) -> bool:
    """True in a comprehension's loop, which from Python 3.12 on has no frame of its own."""
    code = list(dis.get_instructions(frame.f_code))
    ends = {each.offset: each.argval for each in code if each.opname == "FOR_ITER"}
    for each in code:
        if each.opname in _APPENDING and begin < each.offset < ends.get(begin, -1):
            inner = sum(begin < at < each.offset < end for at, end in ends.items())
            # It is one more than the loops of its comprehension, which ``[*some, another]`` lacks.
            if inner < each.argval - 1:
                return True
    return False


def _generators(frame: FrameType | None) -> Iterator[FrameType]:
    """The innermost generator's frame, and those of generators that ask it for items in turn."""
    while frame is not None and not _is_generator(frame):
        frame = frame.f_back
    while frame is not None and (_is_generator(frame) or _is_passed_on(frame)):
        if _is_generator(frame):
            yield frame
        frame = frame.f_back


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _is_passed_on(frame: FrameType) -> bool:
    """True in a class that wraps an iterator."""
    return frame.f_code.co_name == "__next__"


def _begins_anew(holder: object) -> bool:
    if type(holder) is map:  # of several iterators it is a ``zip``
        return any(type(each) is tuple and len(each) > 1 for each in gc.get_referents(holder))
    return type(holder) is not tuple and type(holder) not in _PASSING_ON
