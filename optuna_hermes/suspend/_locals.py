"""Live variables of a user's loop, found by dataflow analysis of its bytecode.

A variable is carried from round to round if a round may read it before it sets it. Beside local
ones these are those of ``nonlocal`` and ``global`` statements, which any call may read.
"""

from __future__ import annotations

import bisect
import dis
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from optuna_hermes.suspend._fingerprint import fingerprint, is_referred_to

_NO_NEXT = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_Key = tuple[CodeType, str]


class Locals:
    """The variables of a loop over epochs, and of the loop over batches in it."""

    def __init__(self) -> None:
        self._first_epoch: dict[_Key, int] | None = None
        self._at_epoch: dict[_Key, int] = {}
        self._at_batch: dict[_Key, int] = {}
        self._lost: set[str] = set()
        self._referred: frozenset[int] | None = None

    def epoch(self, frame: FrameType | None, known: Mapping[int, object]) -> None:
        """Begin an epoch, which the loop of ``frame`` waits for; see ``carried``."""
        if self._referred is None:  # of each process: what the training makes may be kept
            own = (key for key, each in known.items() if _lasts(each, known))
            self._referred = frozenset(own)
        self._at_epoch = self._carried(frame, known)
        if self._first_epoch is None:
            self._first_epoch = self._at_epoch
        # The next process has what they were before the first epoch of this one.
        self._lost |= _changed(self._first_epoch, self._at_epoch)

    def batches(self, frame: FrameType | None, known: Collection[int]) -> None:
        self._at_batch = self._carried(frame, known)

    def lost(self, frame: FrameType | None, known: Collection[int], batch: int) -> set[str]:
        """Names of the variables that would have other values if the trial were resumed here."""
        if batch:
            # A trial that resumes within an epoch executes the code before its batches again.
            self._lost |= _changed(self._at_batch, self._carried(frame, known))
        return set(self._lost)

    def _carried(self, frame: FrameType | None, known: Collection[int]) -> dict[_Key, int]:
        return carried(frame, known, self._lost, self._referred or ())


def _lasts(value: object, known: Collection[int]) -> bool:
    """True for an object that stays the same one: no tensor that a training may make anew."""
    anew = issubclass(type(value), torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_referred_to(value, known) and not anew


def carried(
    frame: FrameType | None,
    known: Collection[int],
    without: Collection[str] = (),
    referred: Collection[int] = (),
) -> dict[_Key, int]:
    """The variables that the loops of a user carry on from here, each with a fingerprint.

    Args:
        frame: that of a generator's caller, which waits for the next item.
        known: ids of objects that are saved elsewhere.
        without: names to leave out.
        referred: ids of those of which it counts which a variable refers to.
    """
    found: dict[_Key, int] = {}
    for each in frames_of_user(frame):
        values, shared = variables(each), _shared(each)
        for name in _live_after(each.f_code, each.f_lasti, shared):
            # "." begins the names of comprehensions' own variables.
            if name in without or name == "_" or name.startswith("."):
                continue
            value = values.get(name, each.f_globals.get(name) if name in shared else None)
            if not (name in values or name in shared):
                continue
            if id(value) not in known:
                found[each.f_code, name] = fingerprint(value, known)
            elif id(value) in referred:
                found[each.f_code, name] = id(value)
    return found


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, and those of functions around it that it uses."""
    values = frame.f_locals
    found = dict(values)
    if type(values) is dict:  # a copy before Python 3.13: it would keep the values alive
        values.clear()
    return found


def _changed(before: dict[_Key, int], now: dict[_Key, int]) -> set[str]:
    return {key[1] for key, value in now.items() if before.get(key) != value}


def frames_of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """The user's frames from here up to the objective, without those of libraries."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if package in ("optuna", "_pytest") or name.startswith("optuna_hermes.workers"):
            return
        library = package in sys.stdlib_module_names or package in ("tqdm", "rich", "optuna_hermes")
        if not library and frame.f_code.co_name != "<module>":
            yield frame
        frame = frame.f_back


def _shared(frame: FrameType) -> frozenset[str]:
    """Variables of a frame that functions which it may call set: its own ones, and global ones."""
    names = _set_within(frame.f_code)
    for name in _names(frame.f_code):
        function = frame.f_globals.get(name)
        if type(function) is FunctionType and function.__globals__ is frame.f_globals:
            names |= {each for each in _set_within(function.__code__) if each in frame.f_globals}
    return names


@functools.lru_cache(maxsize=256)
def _set_within(code: CodeType) -> frozenset[str]:
    """Global variables that a function sets, and those of any function around one within it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
    for inner in _inner(code):
        sets = (each for each in dis.get_instructions(inner) if each.opname == "STORE_DEREF")
        names |= {each.argval for each in sets if each.argval in inner.co_freevars}
        names |= _set_within(inner)
    return frozenset(names)


@functools.lru_cache(maxsize=256)
def _names(code: CodeType) -> frozenset[str]:
    """Names of global functions and other things that a function, or one within it, may use."""
    return frozenset(code.co_names).union(*map(_names, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


@functools.lru_cache(maxsize=256)
def _live_after(code: CodeType, offset: int, shared: frozenset[str]) -> frozenset[str]:
    """Variables that are live after an instruction: they may be read before they are set.

    After the instruction that fetches a loop's next item, these are the variables of the next
    round. Those in ``shared`` are read by each call.
    """
    flow = _Flow(code, shared)
    return flow.live_before[flow.next_of(offset)]


class _Flow:
    """Control flow of a function's instructions, and the variables that are live before each."""

    def __init__(self, code: CodeType, shared: frozenset[str]) -> None:
        self._shared = shared
        self._all = list(dis.get_instructions(code))
        self._index = {each.offset: number for number, each in enumerate(self._all)}
        self.live_before = self._solve()

    def next_of(self, offset: int) -> int:
        """Index of the instruction after the one at an offset, which may be in its inline cache."""
        return min(bisect.bisect(list(self._index), offset), len(self._all) - 1)

    def _solve(self) -> list[frozenset[str]]:
        live = [frozenset[str]() for _ in self._all]
        follows = [self._follows(number) for number in range(len(self._all))]
        uses = [list(_uses(each, self._shared)) for each in self._all]
        changes = True
        # Liveness flows backwards; loops need passes until nothing changes any more.
        while changes:
            changes = False
            for number in range(len(self._all) - 1, -1, -1):
                after = set().union(*(live[each] for each in follows[number]))
                for loads, name in reversed(uses[number]):
                    (after.add if loads else after.discard)(name)
                if after != live[number]:
                    live[number], changes = frozenset(after), True
        return live

    def _follows(self, number: int) -> list[int]:
        each = self._all[number]
        found = []
        if each.opcode in (*dis.hasjrel, *dis.hasjabs) and each.argval in self._index:
            found.append(self._index[each.argval])
        always = each.opname in _NO_NEXT or each.opname.startswith(("JUMP_BACK", "JUMP_FORWARD"))
        if not (always or each.opname == "JUMP_ABSOLUTE") and number + 1 < len(self._all):
            # Assume that a loop has a round: else what its rounds set first would seem carried.
            found.append(self._round_after(number) if each.opname == "GET_ITER" else number + 1)
        return found

    def _round_after(self, number: int) -> int:
        after = number + 1
        while self._all[after].opname == "EXTENDED_ARG":
            after += 1
        return after + 1 if self._all[after].opname == "FOR_ITER" else number + 1


def _uses(instruction: dis.Instruction, shared: Collection[str]) -> Iterator[tuple[bool, str]]:
    """The variables that an instruction reads (True) or sets or deletes (False), in its order."""
    names: Any = instruction.argval
    if instruction.opname.startswith("CALL"):
        yield from ((True, name) for name in shared)
    if instruction.opname.endswith("_GLOBAL") and names not in shared:
        return
    kinds = re.findall(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF|GLOBAL)", instruction.opname)
    if len(kinds) == 1 and isinstance(names, str):
        yield kinds[0] == "LOAD", names
    elif isinstance(names, tuple):  # two in one, since Python 3.12
        halves = re.findall(r"(LOAD|STORE)_FAST", instruction.opname)
        yield from zip((half == "LOAD" for half in halves), names, strict=False)
