"""Random generators of data sets, collate functions and samplers, and of the training's code.

Code holds generators where functions close over them, have them as defaults or find them in their
module, and where classes have them as attributes.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import random
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from optuna_hermes.errors import SuspendError

log = logging.getLogger(__name__)

_KINDS: dict[str, Any] = {"RandomState": np.random.RandomState, "Random": random.Random}
GENERATORS = (torch.Generator, np.random.Generator, *_KINDS.values())
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
GLOBALS: dict[str, Any] = {
    "RandomState": np.random.mtrand._rand,
    "Random": random.seed.__self__,  # type: ignore[attr-defined]
    "cpu": torch.default_generator,
}
"""The generators of the process by their kinds."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray)
_LEAVES = (type(None), *_PLAIN, types.ModuleType, DataLoader, *GENERATORS)
_OUTSIDE = ("logging", "optuna", "optuna_hermes")
"""Packages of which nothing is data: a study's sampler must draw on from where it is."""
_MOST_DEPTH = 8
_MOST_ITEMS = 1000
"""Longer lists and dictionaries hold samples, not parts of a data set."""
_MOST_VALUES = 10_000
_MOST_NEAR = 16


class GeneratorOwner(NamedTuple):
    """An object, container, function or class that may hold generators, and where it was found."""

    place: str
    owner: Any
    in_code: bool = False
    """True for a function or class, and for what only these lead to."""


def holders_in(*roots: GeneratorOwner) -> list[GeneratorOwner]:
    """The holders of generators in objects and functions and all their parts, nearest first."""
    found: list[GeneratorOwner] = []
    values, places, kinds = 0, Counter[str](), _Kinds()
    waiting = deque((0, root) for root in roots if not kinds.is_leaf(root.owner))
    seen: set[int] = set()
    while waiting and values < _MOST_VALUES:
        depth, holder = waiting.popleft()
        if id(holder.owner) in seen:
            continue
        seen.add(id(holder.owner))
        if issubclass(type(holder.owner), _CODE):
            holder = holder._replace(in_code=True)
        parts = [*_parts(holder), *kinds.classes(holder.owner)]
        values += 1 + len(parts)
        places[holder.place] += 1
        found.append(holder._replace(place=_numbered(holder.place, places[holder.place])))
        if depth < _MOST_DEPTH:
            waiting += [(depth + 1, part) for part in parts if not kinds.is_leaf(part.owner)]
    if any(each.place.startswith("dataset") and not each.in_code for _, each in waiting):
        _note_many()
    return found


class FoundGenerators:
    """The generators of some data, which are read more often than they are searched for."""

    def __init__(self) -> None:
        self._found: list[GeneratorOwner] = []
        self._objects: dict[str, Any] = {}
        """Attributes of the found at the last search, by their places."""
        self._without: set[tuple[str, type]] = set()
        """Places and classes of objects that led to no generator."""
        self._times = 0

    def states(self, search: Callable[[], list[GeneratorOwner]]) -> list[Any]:
        """See ``states_of``; ``search`` returns the holders, which may take milliseconds."""
        self._times += 1
        # At powers of two, as what is made in training is mostly made with its first samples, and
        # where an attribute is another object, such as the transform of a new epoch.
        others = self._others()
        if others or self._times & (self._times - 1) == 0:
            self._found = _with_generators(search())
            self._objects = _objects_in(self._found)
        states = states_of(self._found)
        if others:  # which is rare, and this is done with each batch
            leading = {place for place, *_ in states}
            self._without |= {
                (place, kind)
                for place, kind in others
                if not any(f"{each}.".startswith(f"{place}.") for each in leading)
            }
        return states

    def _others(self) -> set[tuple[str, type]]:
        """Places and classes of the objects that are others than at the last search."""
        now = _objects_in(self._found).items()
        others = {(n, type(each)) for n, each in now if self._objects.get(n) is not each}
        return others - self._without


def _objects_in(holders: Iterable[GeneratorOwner]) -> dict[str, Any]:
    """The attributes of holders, but numbers and the like, by their places; those of code stay."""
    return {
        f"{place}.{name}": value
        for place, owner, in_code in holders
        if not in_code
        for name, value in items_of(owner).items()
        if not issubclass(type(value), _LEAVES)
    }


def _with_generators(holders: Iterable[GeneratorOwner]) -> list[GeneratorOwner]:
    """The holders that have generators, and the nearest objects, which may make one yet."""
    found, left = [], _MOST_NEAR
    for each in holders:
        near = left > 0 and not issubclass(type(each.owner), list | tuple | dict)
        left -= near
        if near or any(map(_is_own, items_of(each.owner).values())):
            found.append(each)
    return found


def states_of(holders: Iterable[GeneratorOwner]) -> list[Any]:
    """Place, name, kind and state of each generator."""
    states: list[Any] = []
    seen: set[int] = set()
    for place, owner in _by_place(holders).items():
        for name, value in items_of(owner).items():
            if _is_own(value) and id(value) not in seen:
                seen.add(id(value))
                states.append([place, name, kind_of(value), generator_state(value)])
    return states


def set_states(holders: Iterable[GeneratorOwner], states: Iterable[Any]) -> None:
    """Restore what ``states_of`` returned, and make generators that are not yet made here."""
    owners = _by_place(holders)
    for place, name, kind, state in states:
        if not _restored_in(owners.get(place), name, kind, state):
            _warn_of_missing(f"{place}.{name}")


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python, in plain values, tensors and arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return {**bits.state, "seeds": _seeds_of(bits)}
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        if state["seeds"] is not None:
            # Only its constructor sets these, and the generator must stay the same object.
            bits.__init__(np.random.SeedSequence(**state["seeds"]))
        bits.state = {name: each for name, each in state.items() if name != "seeds"}
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))


def restored(present: Any, kind: str, state: Any) -> Any:
    """A generator with this state: ``present``, if it is of the same kind, or a new one.

    Raises:
        SuspendError: there is no such generator.
    """
    try:
        generator = present if _is_own(present) and kind_of(present) == kind else _made(kind)
    except RuntimeError as error:
        raise SuspendError(f"it holds a {kind}, which is no generator here") from error
    set_generator_state(generator, state)
    return generator


def _seeds_of(bits: np.random.BitGenerator) -> dict[str, Any] | None:
    """The seeds that ``spawn`` makes children from, which a generator's state is without."""
    seeds = bits.seed_seq
    if type(seeds) is not np.random.SeedSequence:
        return None
    names = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
    return {name: getattr(seeds, name) for name in names}


def _is_own(value: object) -> bool:
    # Not isinstance: it reads __class__, which runs the code of proxies.
    if not issubclass(type(value), GENERATORS) or isinstance(value, random.SystemRandom):
        return False
    return all(value is not each for each in GLOBALS.values())


class _Kinds:
    """The knowledge of types in one search: values are many, their types few."""

    def __init__(self) -> None:
        self._opened: set[type] = set()
        self._leaves: dict[type, bool] = {}

    def classes(self, value: Any) -> list[GeneratorOwner]:
        """The classes of the user that a value is, or is an instance of; each once."""
        kinds = (type(value), value) if issubclass(type(value), type) else (type(value),)
        new = [each for each in kinds if each not in self._opened]
        self._opened.update(new)
        lineage = (each for kind in new for each in kind.__mro__)
        return [
            GeneratorOwner(each.__qualname__, each, True) for each in lineage if is_users_type(each)
        ]

    def is_leaf(self, value: Any) -> bool:
        """True for a value that leads to no generator."""
        kind = type(value)
        if kind not in self._leaves:
            packages = {_module(each).partition(".")[0] for each in kind.__mro__}
            outside = not packages.isdisjoint(_OUTSIDE)
            self._leaves[kind] = outside or issubclass(kind, _LEAVES)
        if self._leaves[kind]:
            return True
        if issubclass(kind, type):
            return not is_users_type(value)
        if not issubclass(kind, list | tuple):
            return False
        # A sample neither holds a generator nor has room for one.
        return len(value) > _MOST_ITEMS or all(issubclass(k, _PLAIN) for k in {*map(type, value)})


def _parts(holder: GeneratorOwner) -> list[GeneratorOwner]:
    """The attributes or items of a holder."""
    place, owner, in_code = holder
    items = items_of(owner).items()
    return [GeneratorOwner(f"{place}.{name}", value, in_code) for name, value in items]


def items_of(owner: Any) -> dict[Any, Any]:
    """The attributes or items of an object, read without running its code."""
    kind = type(owner)
    if issubclass(kind, list | tuple):
        return {} if len(owner) > _MOST_ITEMS else dict(enumerate(owner))
    if issubclass(kind, dict):
        items = dict.items(owner) if len(owner) <= _MOST_ITEMS else ()
        return {name: value for name, value in items if type(name) in (str, int)}
    if kind is types.FunctionType:
        return _items_of_function(owner)
    for each, names in _SLOTS.items():
        if issubclass(kind, each):
            return {name: getattr(owner, name) for name in names}
    return dict_of(owner) | slots_in(owner)


def dict_of(value: object) -> dict[str, Any]:
    """The attributes in the ``__dict__`` of an object, if it has one that can be read."""
    try:
        return getattr(value, "__dict__", {})
    except Exception:  # of a proxy whose object is gone
        return {}


def slots_in(value: object) -> dict[str, Any]:
    """The attributes that an object keeps outside of its ``__dict__``; None for those not set."""
    return {name: _slot(value, name) for name in slots_of(type(value))}


def _slot(value: object, name: str) -> Any:
    try:
        # Not getattr: where nothing is set it calls the class's own __getattr__, which may raise.
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def slots_of(kind: type) -> list[str]:
    """Names of the attributes that objects of a class keep outside of their ``__dict__``."""
    return [
        name  # as it is in the class: another one than in ``__slots__`` if it is private
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, slot in vars(each).items()
        if type(slot) is types.MemberDescriptorType
    ]


_SLOTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
_CODE = (types.FunctionType, type, *_SLOTS)


def _items_of_function(function: types.FunctionType) -> dict[str, Any]:
    """The values that a function finds at each call, without its arguments."""
    code = function.__code__
    arguments = reversed(code.co_varnames[: code.co_argcount])
    defaults = reversed(function.__defaults__ or ())
    return {
        **{name: content_of(cell) for name, cell in cells_of(function).items()},
        **dict(zip(arguments, defaults, strict=False)),
        **(function.__kwdefaults__ or {}),
        **_items_of_module(function),
        **vars(function),
    }


def _items_of_module(function: types.FunctionType) -> dict[str, Any]:
    """The values that a function uses of its module; of a library's, its generators only."""
    scope, found = function.__globals__, {}
    users = _is_users(str(scope.get("__name__")))
    for name, *attributes in _global_names(function.__code__):
        value = scope.get(name)
        while attributes and type(value) is types.ModuleType and _is_users(_name(value)):
            name, value = f"{name}.{attributes[0]}", vars(value).get(attributes.pop(0))
        if users or _is_own(value):
            found[name] = value
    return found


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The global names that a function and those within it read, each with attributes of it."""
    chains: list[list[str]] = []
    follows = False
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([each.argval])
            follows = True
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and follows:
            chains[-1].append(each.argval)
        else:
            follows = follows and each.opname == "EXTENDED_ARG"
    inner = (_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys((*map(tuple, chains), *(name for names in inner for name in names))))


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """The variables that a function closes over."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not set yet
        return None


@functools.lru_cache(maxsize=4096)
def _is_users(module: str) -> bool:
    """True for a module that is neither of Python nor of an installed package."""
    package = module.partition(".")[0]
    if package in ("__main__", *_OUTSIDE):
        return package == "__main__"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built in, or of no file: a notebook's
        return package not in sys.stdlib_module_names
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not path.is_relative_to(os.path.dirname(os.__file__))


def _name(module: types.ModuleType) -> str:
    return str(vars(module).get("__name__"))


def is_users_type(kind: type) -> bool:
    return _is_users(_module(kind))


def is_users_function(function: types.FunctionType) -> bool:
    return _is_users(str(function.__globals__.get("__name__")))


def _module(kind: type) -> str:
    module = vars(kind).get("__module__")
    return module if isinstance(module, str) else "builtins"


def _by_place(holders: Iterable[GeneratorOwner]) -> dict[str, Any]:
    """The owners by their places, which are numbered where several loaders have the same."""
    owners, counts = {}, Counter[str]()
    for place, owner, _ in holders:
        counts[place] += 1
        owners[_numbered(place, counts[place])] = owner
    return owners


def _numbered(place: str, number: int) -> str:
    return place if number == 1 else f"{place}#{number}"


def kind_of(generator: Any) -> str:
    """The name of a generator's class, of its bit generator (NumPy), or of its device (torch)."""
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__name__
    names = (name for name, kind in _KINDS.items() if isinstance(generator, kind))
    return next(names, None) or str(generator.device)


def _restored_in(owner: Any, name: Any, kind: str, state: Any) -> bool:
    """Set the state of one generator; False if there is none and none can be made."""
    items = items_of(owner)
    generator = items.get(name)
    if generator is None:  # made with its first number, or in an epoch
        generator = _made(kind)
        if not _put(owner, name, generator):
            return False
    if not _is_own(generator) or kind_of(generator) != kind:
        return False
    set_generator_state(generator, state)
    return True


def _put(owner: Any, name: Any, generator: Any) -> bool:
    kind = type(owner)
    if kind is types.FunctionType:
        return _put_in_function(owner, name, generator)
    if isinstance(owner, dict) or (isinstance(owner, list) and name < len(owner)):
        owner[name] = generator
    elif issubclass(kind, type) and isinstance(name, str):
        type.__setattr__(owner, name, generator)
    elif isinstance(name, str) and kind is not types.MethodType and hasattr(owner, "__dict__"):
        vars(owner)[name] = generator
    elif name in slots_of(kind):
        object.__setattr__(owner, name, generator)
    else:
        return False
    return True


def _put_in_function(function: types.FunctionType, name: str, generator: Any) -> bool:
    cells, scope = cells_of(function), function.__globals__
    if name in vars(function):
        vars(function)[name] = generator
    elif name in cells:
        cells[name].cell_contents = generator
    elif (name,) in _global_names(function.__code__) and scope.get(name) is None:
        scope[name] = generator
    else:
        return False
    return True


def _made(kind: str) -> Any:
    if kind in _BITS:
        return np.random.Generator(_BITS[kind]())
    return _KINDS[kind]() if kind in _KINDS else torch.Generator(kind)


@functools.cache
def _note_many() -> None:
    log.info(
        "Random generators in data sets are looked for among %d values: one that is beyond those "
        "begins anew when the trial comes back from disk. Keep samples in arrays, or set the "
        "attribute that leads to a generator before them.",
        _MOST_VALUES,
    )


@functools.cache
def _warn_of_missing(place: str) -> None:
    log.warning(
        "A random generator was stored of %s, but none is there now: it begins anew. Make the same "
        "data sets and functions whenever the objective runs.",
        place,
    )
