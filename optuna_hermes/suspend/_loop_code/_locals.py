"""Live variables of a user's loop, found by dataflow analysis of its bytecode.

A variable is carried from round to round if a round may read it before it sets it. Beside local
ones these are those of ``nonlocal`` and ``global`` statements, which any call may read, and those
that functions close over, which are read where such a function is read.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from optuna_hermes.suspend._loop_code._iterators import COMPREHENSIONS
from optuna_hermes.suspend._values._fingerprint import fingerprint, is_referred_to, outside
from optuna_hermes.suspend._values._generators import GENERATORS, cells_of, content_of, dict_of

_NO_NEXT = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_AT_ONCE = ("<genexpr>", *COMPREHENSIONS)
"""Names of functions that are called where they are made, and nowhere else."""
_OF_OPTIMIZERS = ("step", "load_state_dict")
"""Methods that optimizers and schedulers have, and loaders and loggers have not."""
_PASSING = ("training", "scaler", "_is_overflow", "_accelerate_step_called")
"""Attributes of wrappers around modules and optimizers that are set anew, or saved elsewhere."""
_OWN_REFERENCES = 3
"""References to what shows a frame's variables if only the frame and ``_shown`` hold it."""
_Key = tuple[CodeType, str]
_Closed = frozenset[tuple[str, str]]
"""Pairs of a function's name and that of a variable which it closes over."""


class Locals:
    """The variables of a loop over epochs, and of the loop over batches in it."""

    def __init__(self) -> None:
        self._first_epoch: dict[_Key, int] | None = None
        self._at_batch: dict[_Key, int] = {}
        self._lost: set[str] = set()
        self._first_attributes: dict[int, dict[str, int]] = {}
        """Fingerprints of the attributes of each ``self``, by its id."""
        self._lost_attributes: set[str] = set()
        self._referred: frozenset[int] | None = None
        """Ids of the objects of which it counts which one a variable refers to."""
        self._kept_then: Mapping[str, str] = {}
        self._loaded: Mapping[str, object] = {}

    def epoch(self, frame: FrameType | None, known: Mapping[int, object]) -> None:
        """Begin an epoch, which the loop of ``frame`` waits for."""
        if self._referred is None:  # of each process: what the training makes may be kept
            own = (key for key, each in known.items() if _lasts(each, known))
            self._referred = frozenset(own)
        if self._first_epoch is None:
            self._first_epoch = self._carried(frame, known, cells=True)
        self._note_selves(frame, known)
        # The next process has what they were before the first epoch of this one.
        self._lost |= _changed(self._first_epoch, self._carried(frame, known))

    def batches(self, frame: FrameType | None, known: Collection[int]) -> None:
        self._at_batch = self._carried(frame, known, cells=True)
        self._note_selves(frame, known)

    def lost(self, frame: FrameType | None, known: Collection[int], batch: int) -> set[str]:
        """Names of the variables that would have other values if the trial were resumed here.

        In place of ``self`` those of its attributes.
        """
        if batch:
            # A trial that resumes within an epoch executes the code before its batches again.
            self._lost |= _changed(self._at_batch, self._carried(frame, known))
        if "self" not in self._lost:
            return set(self._lost)
        for each in _selves(frame):
            before = self._first_attributes.get(id(each), {})
            now = _attributes(each, known) if before else {}
            changed = (name for name, value in now.items() if before.get(name) != value)
            self._lost_attributes |= {f"self.{name}" for name in changed}
        return self._lost - {"self"} | (self._lost_attributes or {"self"})

    def kept(
        self, frame: FrameType | None, known: Collection[int], kept: Mapping[str, object]
    ) -> dict[str, str]:
        """The variables that refer to kept values, each with the name that its value has there.

        No change of theirs is seen by ``lost``: it is up to the next process to set them, too.
        """
        names = {id(value): name for name, value in kept.items() if id(value) in known}
        live = ((_place(key), names.get(id(value))) for key, value in _live(frame))
        return {place: name for place, name in live if name is not None}

    def resume(self, kept_then: Mapping[str, str], loaded: Mapping[str, object]) -> None:
        """Note what ``kept`` has returned in the process before, and the values now loaded."""
        self._kept_then, self._loaded = kept_then, loaded

    def unset(self, frame: FrameType | None, kept: Mapping[str, object]) -> dict[str, str]:
        """Those that refer to another value here, where the trial was stored."""
        if not self._kept_then:
            return {}
        found = {}
        for key, value in _live(frame):
            name = self._kept_then.get(_place(key), "")
            if name in self._loaded:
                loaded = self._loaded[name]
                if not any(_alike(value, each) for each in (loaded, kept.get(name, loaded))):
                    found[key[1]] = name
        self._kept_then, self._loaded = {}, {}
        return found

    def _note_selves(self, frame: FrameType | None, known: Collection[int]) -> None:
        for each in _selves(frame):
            if id(each) not in self._first_attributes:
                self._first_attributes[id(each)] = _attributes(each, known)

    def _carried(
        self, frame: FrameType | None, known: Collection[int], *, cells: bool = False
    ) -> dict[_Key, int]:
        """The variables that the loops of a user carry on from here, each with a fingerprint.

        Args:
            frame: that of a generator's caller, which waits for the next item.
            known: ids of objects that are saved elsewhere.
            cells: True for all variables that functions close over, too, which one that the loop is
                still to make may read.
        """
        found: dict[_Key, int] = {}
        held = _held(frame)
        if held:  # all variables are in there, also those that each round sets anew
            known = {*known, *held}
        for key, value in _live(frame, cells=cells):
            if key[1] in self._lost:
                continue
            if id(value) not in known:
                found[key] = _fingerprint(value, known)
            elif id(value) in (self._referred or ()):
                found[key] = id(value)
        return found


def _selves(frame: FrameType | None) -> Iterator[object]:
    """The objects whose methods have the user's loops."""
    for (_, name), value in _live(frame, cells=True):
        if name == "self" and not hasattr(type(value), "load_state_dict"):
            yield value


def _attributes(value: object, known: Collection[int]) -> dict[str, int]:
    return {name: _fingerprint(each, known) for name, each in dict_of(value).items()}


def _fingerprint(value: object, known: Collection[int]) -> int:
    kind = type(value)
    trains = issubclass(kind, nn.Module) or all(hasattr(kind, name) for name in _OF_OPTIMIZERS)
    # Those of Accelerate and Fabric, around the objects that change.
    if trains and outside(value):
        value = {name: each for name, each in dict_of(value).items() if name not in _PASSING}
    return fingerprint(value, known, with_processes=True)


def _place(key: _Key) -> str:
    """The variable that a key is of, in any process."""
    return f"{key[0].co_name}.{key[1]}"


def _alike(one: object, other: object) -> bool:
    return one is other or fingerprint(one) == fingerprint(other)


def _lasts(value: object, known: Collection[int]) -> bool:
    """True for an object that stays the same one: no tensor that a training may make anew."""
    anew = issubclass(type(value), torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_referred_to(value, known) and not anew


def _live(frame: FrameType | None, *, cells: bool = False) -> Iterator[tuple[_Key, Any]]:
    """The variables, with their values, that the loops of a user may read before they set them."""
    read: dict[str, object] = {}
    for each in frames_of_user(frame):
        values, shared = variables(each), _shared(each)
        names = _live_after(each.f_code, each.f_lasti, shared, _closed_over(values))
        # Those that functions read which are live in the frames below this one.
        names |= {name for name, value in read.items() if name in values and values[name] is value}
        if cells:
            names = names.union(each.f_code.co_cellvars, each.f_code.co_freevars)
        for name in names:
            # "." begins the names of comprehensions' own variables.
            if name == "_" or name.startswith(".") or not (name in values or name in shared):
                continue
            value = values[name] if name in values else each.f_globals.get(name)
            read.update(_read_by(value))
            yield (each.f_code, name), value


def _closed_over(values: Mapping[str, Any]) -> _Closed:
    """The functions among the variables of a frame, each with the variables that it reads."""
    return frozenset(
        (function, name)
        for function, value in values.items()
        for name, read in _read_by(value)
        if name in values and values[name] is read
    )


def _read_by(value: Any) -> Iterator[tuple[str, object]]:
    """The variables that a function closes over, and those of functions among these.

    Without generators, which are restored where code closes over them.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if issubclass(type(each), functools.partial):
            each = each.func
        if type(each) is not FunctionType or id(each) in seen:
            continue
        seen.add(id(each))
        for name, cell in cells_of(each).items():
            content = content_of(cell)
            waiting.append(content)
            if not issubclass(type(content), GENERATORS):
                yield name, content


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, and those of functions around it that it uses."""
    return _shown(frame)[0]


def _held(frame: FrameType | None) -> set[int]:
    """Ids of what ``locals()`` has returned in the user's frames, where a user still has it."""
    ids = (_shown(each)[1] for each in frames_of_user(frame))
    return {each for each in ids if each is not None}


def _shown(frame: FrameType) -> tuple[dict[str, Any], int | None]:
    """The variables of a frame, and the id of the dictionary that shows them, if a user has it."""
    values = frame.f_locals
    found = dict(values)
    if type(values) is not dict:  # since Python 3.13, where ``locals()`` returns another one
        return found, None
    # In a class's body, and in code for ``exec``, it shows nothing but is where they are.
    shows = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if not shows or sys.getrefcount(values) > _OWN_REFERENCES:
        return found, id(values)
    values.clear()  # it would keep the values alive
    return found, None


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
def _live_after(
    code: CodeType, offset: int, shared: frozenset[str], closed: _Closed
) -> frozenset[str]:
    """Variables that are live after an instruction: they may be read before they are set.

    After the instruction that fetches a loop's next item, these are the variables of the next
    round. Those in ``shared`` are read by each call, and those in ``closed`` with their functions.
    """
    flow = _Flow(code, shared, closed)
    return flow.live_before[flow.next_of(offset)]


class _Flow:
    """Control flow of a function's instructions, and the variables that are live before each."""

    def __init__(self, code: CodeType, shared: frozenset[str], closed: _Closed) -> None:
        self._shared, self._closed = shared, closed
        self._cells = frozenset((*code.co_cellvars, *code.co_freevars))
        bytecode = dis.Bytecode(code)
        self._all = list(bytecode)
        self._index = {each.offset: number for number, each in enumerate(self._all)}
        self.live_before = self._solve(self._handlers(bytecode))

    def next_of(self, offset: int) -> int:
        """Index of the instruction after the one at an offset, which may be in its inline cache."""
        return min(bisect.bisect(list(self._index), offset), len(self._all) - 1)

    def _solve(self, handlers: Iterable[tuple[int, int]]) -> list[frozenset[str]]:
        live = [frozenset[str]() for _ in self._all]
        follows = [self._follows(number) for number in range(len(self._all))]
        for end, handler in handlers:
            follows[end].append(handler)
        uses = [list(_uses(each, self._shared, self._closed, self._cells)) for each in self._all]
        self._leave_out_comprehensions(uses)
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

    def _handlers(self, bytecode: dis.Bytecode) -> Iterator[tuple[int, int]]:
        """The last instruction of each block with a handler, and the first one of that.

        What the block sets is set in the handler, too: else it would seem carried wherever one
        reads it. Python 3.10 has no table of them: there what only handlers read is not live.
        """
        entries: Any = getattr(bytecode, "exception_entries", ())
        last = {each.target: each.end for each in entries}
        offsets = list(self._index)
        for target, end in last.items():
            yield bisect.bisect_left(offsets, end) - 1, self._index[target]

    def _leave_out_comprehensions(self, uses: list[list[tuple[bool, str]]]) -> None:
        """Leave out comprehensions' own variables: since Python 3.12 they are in no other frame.

        Each sets the loop's variable of that name aside, and back right after its own loop.
        """
        for begin in range(len(self._all) - 1, -1, -1):  # one within another comes first
            name = self._all[begin].argval
            if self._all[begin].opname != "LOAD_FAST_AND_CLEAR" or name in self._cells:
                continue
            rest = self._all[begin:]
            loop = next(each for each in rest if each.opname.startswith(("FOR_ITER", "STORE_")))
            if loop.opname != "FOR_ITER":  # but an asynchronous one
                continue
            end = self._index[loop.argval]
            while (False, name) not in uses[end]:
                end += 1
            uses[end].remove((False, name))
            for number in range(begin, end):
                uses[number] = [use for use in uses[number] if use[1] != name]

    def _follows(self, number: int) -> list[int]:
        each = self._all[number]
        found = []
        jumps = each.opcode in (*dis.hasjrel, *dis.hasjabs)
        # With SETUP_WITH and the like Python 3.10 begins a block that may go to its handler.
        if jumps and not each.opname.startswith("SETUP_") and each.argval in self._index:
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


def _uses(
    instruction: dis.Instruction,
    shared: Collection[str],
    closed: _Closed,
    cells: Collection[str],
) -> Iterator[tuple[bool, str]]:
    """The variables that an instruction reads (True) or sets or deletes (False), in its order.

    Reading a function counts as reading what it closes over, which its next call may do.
    """
    for loads, name in _own_uses(instruction, shared):
        # Since Python 3.13 a function that is made takes its cells as if they were variables.
        if name in cells and "_FAST" in instruction.opname:
            continue
        yield loads, name
        if loads:
            yield from ((True, each) for function, each in closed if function == name)


def _own_uses(instruction: dis.Instruction, shared: Collection[str]) -> Iterator[tuple[bool, str]]:
    names: Any = instruction.argval
    if instruction.opname.startswith("CALL"):
        yield from ((True, name) for name in shared)
    if instruction.opname.endswith("_GLOBAL") and names not in shared:
        return
    if isinstance(names, CodeType) and names.co_name in _AT_ONCE:
        yield from ((True, name) for name in names.co_freevars)
    kinds = re.findall(r"(LOAD|STORE|DELETE)_(?:FAST|DEREF|GLOBAL)", instruction.opname)
    if len(kinds) == 1 and isinstance(names, str):
        yield kinds[0] == "LOAD", names
    elif isinstance(names, tuple):  # two in one, since Python 3.13
        halves = re.findall(r"(LOAD|STORE)_FAST", instruction.opname)
        yield from zip((half == "LOAD" for half in halves), names, strict=False)
