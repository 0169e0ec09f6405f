"""Attributes that change during training but are in no ``state_dict``: saved, or reported."""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._modules._hooks import Hooks
from optuna_hermes.suspend._modules._inner_names import InnerNames
from optuna_hermes.suspend._values._fingerprint import (
    CODE,
    DATA,
    bound_to,
    fingerprint,
    identity_of,
    is_referred_to,
    outside,
)
from optuna_hermes.suspend._values._generators import dict_of
from optuna_hermes.suspend._values._tree import NUMBERS, each_once, storable

if TYPE_CHECKING:
    from optuna_hermes.suspend._values._classes import Classes

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(type, types.FunctionType, types.ModuleType),
)
_MOST_REACHED = 20_000
_MOST_PARTS = 50_000
"""Most parts of a value: writing more would take longer than training a unit."""
_Place = tuple[str, ...]
_GONE = ["gone"]
"""In the place of a tree: the attribute was deleted."""
_CACHED = ["cached"]
"""In the place of a tree: code that is made on first use, and was made before the first batch."""


class NameTable:
    """Known objects by names that are the same in each process: references are stored so.

    Args:
        made: ids of those that each process makes, and that are saved wherever they are held.
    """

    def __init__(
        self, objects: Mapping[str, object] | None = None, made: Collection[int] = ()
    ) -> None:
        self.objects = objects or {}
        self.names = {id(each): name for name, each in self.objects.items()}
        self.made = made


class Attributes:
    """The attributes of one object that change during training.

    Args:
        ignores: called with an attribute's name and value; True to leave it out.
        known: ids of objects that are saved elsewhere.
        always: called with a value; True to save it of whatever size, also if it has not changed.
        makes: True if the next process may make any objects with a state before they are restored.
    """

    def __init__(
        self,
        name: str,
        owner: object,
        ignores: Callable[[str, Any], bool] = lambda name, value: False,
        known: Collection[int] = (),
        always: Callable[[Any], bool] = lambda value: False,
        *,
        makes: bool = False,
    ) -> None:
        self.lost: set[str] = set()
        """Names of the attributes that have changed and cannot be saved."""
        self.unmade: set[str] = set()
        self.named = NameTable()
        """The known objects that may be referred to by their names."""
        self._there: dict[_Place, object] | None = None
        self._name = name
        self.owner = owner
        """The object whose attributes they are."""
        self._ignores = ignores
        self.known = known
        """Ids of objects that are saved elsewhere."""
        self._always = always
        self._makes = makes
        self._at_start: dict[str, int] | None = None
        self._before: dict[str, int] = {}
        self._changed: set[str] = set()
        self._given: dict[int, object] = {}
        self._made: WeakValueDictionary[int, Any] | None = None
        self._cached: set[str] = set()
        """Names of functions and classes that the validation before the first batch has made."""

    def classes(self) -> dict[_Place, object]:
        """Classes of the present values and their parts, for ``note``; see ``needed_of``."""
        return {
            (name, *place): kind
            for name, value in self.watched().items()
            for place, kind in _classes_in(value, self.known).items()
        }

    def note(self, there: dict[_Place, object]) -> None:
        """Note what each process makes before it trains.

        Where others are needed that cannot be saved, the trial must not be stored.
        """
        self._there = there
        if self._at_start is not None:
            new = self.watched().keys() - self._at_start
            self._cached |= {name for name in new if isinstance(self._all()[name], CODE)}

    def note_more(self, before: dict[_Place, object]) -> None:
        """Note also what is made anew since there were the classes ``before``."""
        if self._there is not None:
            new = (each for each in self.classes().items() if each not in before.items())
            self._there.update(new)

    def said(self, place: str) -> str:
        """A place in the values, for messages."""
        return f"{self._name}.{place}"

    def inner(
        self,
        place: str,
        owner: object,
        ignores: Callable[[str, Any], bool],
        known: Collection[int],
    ) -> Attributes:
        """The attributes of an object that one of the values holds, at a place."""
        name = self.said(place)
        return Attributes(name, owner, ignores, known, self._always, makes=self._makes)

    def move_to(self, other: Attributes) -> None:
        """Go on with the object of ``other``, which is in the place of this one by now."""
        self.owner, self._ignores, self.known = other.owner, other._ignores, other.known

    def let_go(self) -> None:
        """Hold the object and its values no more, until ``move_to`` gives it back."""
        self.owner, self._ignores, self.named = None, lambda name, value: False, NameTable()

    def start(self) -> None:
        """Note the attributes where a process that resumes does not change them any more."""
        self._at_start = self.fingerprints()

    def note_made(self) -> None:
        """Note the present arrays: each process makes these, perhaps as parts of others."""
        self._made = self._arrays()

    def begin(self, *, resumed: bool = True) -> None:
        """Begin to watch, before the first batch of this process.

        Args:
            resumed: False to count as changed what can be saved and has changed since ``start``.
        """
        now = self._before = self.fingerprints()
        if not resumed and self._at_start is not None:
            self._changed_from(self._at_start, now)
        if self._made is None:
            self.note_made()

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the present values, by name."""
        return {name: self._fingerprint(each) for name, each in self.watched().items()}

    def _changed_from(self, before: dict[str, int], now: dict[str, int]) -> None:
        changed = {name for name in now if now[name] != before.get(name)} - self._changed
        self._changed |= self._gone(before)
        for name in changed:
            value = self._all()[name]
            try:
                self._written(name, value)
            except Exception:
                # Nothing is said of those that each process makes, mostly by the same hooks.
                if self._is_there(name, value) or self._makes_again(name, value):
                    continue
            self._changed.add(name)

    def state_dict(self) -> dict[str, Any]:
        """The changed attributes, as trees."""
        gone = self._gone({*self._before, *self._changed})
        self._changed |= gone
        # The next process has no validation before its first batch.
        cached = dict.fromkeys(self._cached, _CACHED)
        return {**cached, **self._trees(self.watched()), **dict.fromkeys(gone, _GONE)}

    def _gone(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are no attributes any more; parts of modules are restored so."""
        own = self._all()
        kinds = ("_parameters", "_buffers", "_modules")
        parts = {name for kind in kinds for name in own.get(kind, {}).keys()}  # noqa: SIM118
        return {name for name in names if name not in own and name not in parts}

    def find_unmade(self) -> set[str]:
        """Names of those that hold what the next process would lack at present; see ``note``."""
        # At each suspension, not with each checkpoint only: so what takes long is left out.
        attributes = self.watched().items()
        self._trees({name: each for name, each in attributes if not _is_simple(each, self.known)})
        return self.unmade

    def _trees(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Those of the attributes that have changed, as trees."""
        state = {}
        self.unmade = set()
        for name, value in attributes.items():
            if not (self._always(value) or self._has_changed(name, value)):
                continue
            try:
                node = self._written(name, value)
            except Exception as error:  # also of a user's class: the training goes on
                if not self._has_changed(name, value):
                    continue
                log.debug("%s.%s: %s", self._name, name, error)
                lost = self.lost if self._is_there(name, value) else self.unmade
                lost.add(f"{self._name}.{name}")
            else:
                if node != ["present"]:
                    state[name] = node
        return state

    def _has_changed(self, name: str, value: Any) -> bool:
        """True if it has since the first batch; else the objective makes it again."""
        if name not in self._changed:
            same = self._before.get(name) == self._fingerprint(value)
            if same and id(value) not in self.known and _has_gradient(value):
                same = False  # of batches before the one that changes the tensor
            if same or (name not in self._before and self._makes_again(name, value)):
                return False
            self._changed.add(name)  # saved from now on, without comparing fingerprints
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore changed attributes; to be called before ``begin``."""
        self.note_made()  # before they are replaced
        attributes = self._all()
        self._cached |= {name for name, node in state.items() if node == _CACHED}
        self._changed |= state.keys() - self._cached
        others: dict[str, list[Any]] = {}
        for name, node in state.items():
            if node == _CACHED:
                continue
            if node == _GONE:
                attributes.pop(name, None)
            elif node[0] == "plain":
                attributes[name] = node[1]
            else:
                others[name] = node
        if others:
            self._read(others, attributes)

    def _read(self, nodes: dict[str, list[Any]], attributes: dict[str, Any]) -> None:
        from optuna_hermes.suspend._values._custom import ValueReader

        classes = self._nameable()
        given: dict[int, object] = {}
        made: Mapping[int, Any] = self._made or {}
        for name, node in nodes.items():
            reader = ValueReader(classes, self._given, named=self.named)
            try:
                attributes[name] = reader.node(node, attributes.get(name))
            except Exception as error:  # one lost attribute must not stop the rest from resuming
                log.debug("%s.%s: %s", self._name, name, error)
                self.lost.add(f"{self._name}.{name}")
            others = (each for each in reader.arrays if made.get(id(each)) is not each)
            given |= {id(each): each for each in others}
        self._given = given

    def _fingerprint(self, value: Any) -> int:
        known = self.known
        if bound_to(value) is not None:  # which may be the value of another attribute
            others = [each for each in self.watched().values() if each is not value]
            known = {*known, id(self.owner), *reachable(others, known=known)}
        return fingerprint(value, known)

    def _makes_again(self, name: str, value: Any) -> bool:
        """True for a new attribute that is a function as any process makes it.

        These are cached ones, and methods that libraries put over themselves, as DDP's ``forward``.
        """
        is_cached = isinstance(getattr(type(self.owner), name, None), functools.cached_property)
        if is_cached or name in self._cached:
            return isinstance(value, CODE)
        if not isinstance(value, types.MethodType):
            return False
        owner = value.__self__
        is_known = owner is self.owner or id(owner) in self.known
        return is_known and value.__func__ is getattr(type(owner), name, None)

    def _written(self, name: str, value: Any) -> list[Any]:
        if type(value) in NUMBERS:
            return ["plain", value]
        if isinstance(value, CODE):
            raise CheckpointError(f"{name} is another {type(value).__name__} than before")
        # Loaded on first use: what most trainings change is in a ``state_dict``.
        from optuna_hermes.suspend._values._custom import UnrestorableParts, ValueWriter

        unmade = None
        if self._there is not None and not _is_simple(value, self.known):
            unmade = UnrestorableParts(self._there, self._nameable(), self.known, makes=self._makes)
        writer = ValueWriter(
            self.known,
            made=self._made,
            unmade=unmade,
            named=self.named,
            most=math.inf if self._always(value) else _MOST_PARTS,
        )
        node = writer.write_only(name, value)
        if unmade is not None and unmade.found:
            log.debug("%s: %s", self._name, unmade.found)
            self.unmade.add(f"{self._name}.{name}")
        return node

    def _nameable(self) -> Classes:
        """The classes that the owner's code can name."""
        from optuna_hermes.suspend._values._classes import Classes

        return Classes.of(self.owner)

    def _is_there(self, name: str, value: Any) -> bool:
        """True if each process makes a value of this kind, as far as that was noted."""
        if self._there is None:
            return True
        there = self._there.get((name,), type(None))
        is_code = isinstance(there, type) and issubclass(there, CODE)
        return there is type(value) or (is_code and isinstance(value, CODE))

    def watched(self) -> dict[str, Any]:
        """The present values, by name."""
        every = self._all().items()
        return {name: value for name, value in every if not self._ignores(name, value)}

    def _all(self) -> dict[str, Any]:
        return vars(self.owner)

    def _arrays(self) -> WeakValueDictionary[int, Any]:
        """The arrays and tensors in the attributes that are not from a checkpoint, by ``id``."""
        roots = [each for each in self.watched().values() if not outside(each)]
        found = reachable(roots, known=self.known)
        return WeakValueDictionary(
            (key, each)
            for key, each in found.items()
            if issubclass(type(each), np.ndarray | torch.Tensor) and key not in self._given
        )


def _cached_by_class(find: Callable[..., _Found]) -> Callable[..., _Found]:
    """Cache what is found of a class, as long as there is that class: an objective may make it."""
    found: WeakKeyDictionary[type, dict[Any, _Found]] = WeakKeyDictionary()

    @functools.wraps(find)
    def cached(kind: type, *args: Any) -> _Found:
        of_kind = found.setdefault(kind, {})
        if args not in of_kind:
            of_kind[args] = find(kind, *args)
        return of_kind[args]

    return cached


@_cached_by_class
def is_of(kind: Any, packages: tuple[str, ...]) -> bool:
    """True for a class of these packages that has no user's class among its bases.

    Torch makes classes of its own from those of modules that are parametrized.
    """
    modules = (each.__module__ for each in kind.__mro__)
    others = (each for each in modules if not each.startswith(packages))
    return all(each.partition(".")[0] in sys.stdlib_module_names for each in others)


@_cached_by_class
def set_by(kind: Any, packages: tuple[str, ...]) -> frozenset[str]:
    """Names of attributes that those classes set, of a class and its bases, which packages have.

    Args:
        packages: first parts of these classes' modules.
    """
    kinds = (each for each in kind.__mro__ if each.__module__.startswith(packages))
    return frozenset[str]().union(*map(_set_by_own, kinds))


@_cached_by_class
def _set_by_own(kind: type) -> frozenset[str]:
    """Names of attributes that the methods of a class itself set; each has many subclasses."""
    methods = vars(kind).values()
    found = [each.fget if isinstance(each, property) else each for each in methods]
    codes = [each.__code__ for each in found if isinstance(each, types.FunctionType)]
    return frozenset[str]().union(*map(set_in, codes))


def set_in(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes that a code sets."""
    found = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    return frozenset(found)


def is_private(name: str, value: Any) -> bool:
    """True for attributes that libraries set on tensors which are not theirs."""
    return name.startswith("_")


def is_added(kind: type, name: str, value: Any) -> bool:
    """True for a plain value that a user has added to an object of a class of torch's own."""
    of_torch = is_private(name, value) or name in set_by(kind, ("torch.",))
    # Others may be parts that torch or a library has put there.
    return not of_torch and _is_simple(value, ())


def optimizer_attributes(
    name: str, optimizer: Any, known: Collection[int]
) -> dict[str, Attributes]:
    """The attributes of an optimizer that has torch's ``state_dict``, which lacks them.

    Of one of torch's own classes, those that users have added.

    Args:
        name: the optimizer's name in messages.
        known: ids of objects that are saved elsewhere.
    """
    kind = type(optimizer)
    if getattr(kind, "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return {}
    of_torch = kind.__module__.startswith("torch.")

    def ignores(name: str, value: Any) -> bool:
        return name in _of_every_optimizer() or (of_torch and not is_added(kind, name, value))

    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return {f"optimizer {name}": Attributes(name, optimizer, ignores, own.union(known))}


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Attributes that torch, schedulers and scalers set; ``state`` is saved apart."""
    bare = torch.optim.SGD([torch.zeros(1)])
    added = ("step", "_opt_called", "_step_supports_amp_scaling", "grad_scale", "found_inf")
    return frozenset({*vars(bare), *added})


def engine_attributes(name: str, engine: Any, known: Collection[int]) -> dict[str, Attributes]:
    """The values in the ``state`` of an engine of Ignite, of whose ``state_dict`` few are part.

    Args:
        name: the engine's name in messages.
        known: ids of objects that are saved elsewhere.
    """
    kind = getattr(sys.modules.get("ignite.engine"), "Engine", ())
    if not isinstance(engine, kind):
        return {}
    # Each run sets these.
    ignored = vars(type(engine.state)()).keys() - {"metrics"}
    place = f"{name}.state"
    state = Attributes(place, engine.state, lambda name, value: name in ignored, known)
    return {f"engine {place}": state}


def tensor_attributes(
    name: str, module: nn.Module, known: Collection[int]
) -> dict[str, Attributes]:
    """The attributes of a module's parameters and buffers, by keys for ``ChangedAttributes``.

    For example the real weights of a binarised network.

    Args:
        name: the module's name in messages.
        known: ids of objects that are saved elsewhere.
    """
    return {
        f"tensor {name}.{place}": Attributes(f"{name}.{place}", each, is_private, known)
        for place, each in (*module.named_parameters(), *module.named_buffers())
    }


def reachable(
    roots: Iterable[Any], *, through_data: bool = False, known: Collection[int] = ()
) -> dict[int, object]:
    """The objects that ``roots`` lead to by attributes and items, by ``id``; the nearest of many.

    Args:
        known: ids of objects that are left out.
        through_data: True to look into data sets and loaders that are no roots, too; no checkpoint
            of a training holds these.
    """
    found: dict[int, object] = {}
    waiting = deque(roots)
    own = {id(each) for each in waiting}
    while waiting and len(found) < _MOST_REACHED:
        each = waiting.popleft()
        # By identity: comparing values would run code of the user.
        if id(each) in found or id(each) in known or issubclass(type(each), _LEAVES):
            continue
        if issubclass(type(each), DATA) and not through_data and id(each) not in own:
            continue
        if type(each) is tuple and not each:  # there is one for all, as of the values above
            continue
        found[id(each)] = each
        if issubclass(type(each), dict):
            waiting += each.values()
        elif issubclass(type(each), list | tuple | set):
            waiting += each
        waiting += dict_of(each).values()
    return found


def _has_gradient(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and value.is_leaf and value.grad is not None


def needed_of(value: object, known: Collection[int]) -> object:
    """The class that a value of the next process must have, or a number if it must be this one."""
    return identity_of(value) if is_referred_to(value, known) else type(value)


def _classes_in(root: object, known: Collection[int]) -> dict[_Place, object]:
    """Classes of a value and its parts by place, where a checkpoint's reader uses what is there."""
    found: dict[_Place, object] = {}
    seen: set[int] = set()
    waiting: list[tuple[_Place, Any]] = [((), root)]
    while waiting and len(found) < _MOST_REACHED:
        place, value = waiting.pop()
        if type(value) in NUMBERS:
            continue
        found[place] = needed_of(value, known)
        if id(value) in known or id(value) in seen or outside(value):
            continue
        seen.add(id(value))
        inside: list[tuple[Any, Any]] = list(dict_of(value).items())
        if issubclass(type(value), dict):
            inside = list(value.items())
        elif issubclass(type(value), list | tuple | deque):
            inside = list(enumerate(value))
        # In the order of the writer, which writes what is at two places at the first of them.
        waiting += [((*place, str(name)), each) for name, each in reversed(inside)]
    return found


def _is_simple(root: object, known: Collection[int]) -> bool:
    """True for numbers, text, arrays and tensors in containers, which any process can make."""
    left = _MOST_PARTS - 1
    for value, parts in each_once(root, _in_containers):
        kind = type(value)
        left -= len(parts)
        if id(value) in known or left < 0:  # it could not be written
            return False
        is_array = storable(value) if kind is torch.Tensor else kind is np.ndarray
        if not (is_array or kind in (list, tuple, deque, dict)):
            return False
    return True


def _in_containers(value: Any) -> Collection[Any]:
    if type(value) is dict:
        return (*value, *value.values())
    return value if type(value) in (list, tuple, deque) else ()


class ChangedAttributes:
    """The changing attributes of several objects, and their hooks.

    Args:
        make: returns them by keys that are the same in the trial's next process.
        named: returns the known objects that are there at present, by names of which the same
            holds: attributes may refer to these.
        hooked: returns modules and optimizers by their names in messages.
    """

    def __init__(
        self,
        make: Callable[[], Mapping[str, Attributes]],
        named: Callable[[], Mapping[str, object]] = dict,
        hooked: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._make = make
        self._named = named
        self._hooked = hooked
        self._parts: dict[str, Attributes] = {}
        self._inner: dict[str, Attributes] = {}
        """Those of objects in lists, which hold these while they are looked at only."""
        self._names = InnerNames()
        self._clashes: list[str] = []
        self._has_inner = False
        self._hooks = Hooks({})
        self._noted = self._begun = False

    @property
    def lost(self) -> list[str]:
        """Names of attributes and hooks that have changed and cannot be stored."""
        parts = (*self._parts.values(), *self._inner.values())
        return sorted([*(name for part in parts for name in part.lost), *self._hooks.lost])

    def note(self) -> None:
        """Note what each process makes or registers before it trains."""
        self._noted = True
        self._hooks = Hooks(self._hooked())
        with self._present(first=True) as parts:
            for part in parts.values():
                part.note(part.classes())

    @contextlib.contextmanager
    def note_more(self) -> Iterator[None]:
        """Note also what is made within, unless ``note`` is still to be called."""
        if not self._noted:
            yield
            return
        with self._present() as parts:
            before = {key: part.classes() for key, part in parts.items()}
        yield
        with self._present() as parts:
            for key, part in parts.items():
                part.note_more(before.get(key, {}))

    def note_made(self) -> None:
        """Note the arrays that each process makes, if not those before the first batch."""
        with self._present() as parts:
            for part in parts.values():
                part.note_made()

    def start(self, but: Collection[str] = ()) -> None:
        """Note attributes where a trial that is resumed has not what the first epoch changes.

        Args:
            but: keys of those that each process changes.
        """
        with self._present() as parts:
            for key, part in parts.items():
                if key not in but:
                    part.start()

    def unmade(self) -> list[str]:
        """Names of attributes that hold what the next process would lack at present."""
        # At each suspension: looking for other parts is left to ``state_dict`` where it can be.
        same = contextlib.nullcontext(self._with_names(self._parts))
        with self._present() if self._has_inner else same as parts:
            names = {name for part in parts.values() for name in part.find_unmade()}
        return sorted(names.union(self._clashes))

    def begin(self, *, resumed: bool = True) -> None:
        """Begin to watch, before the first batch.

        Args:
            resumed: True if a checkpoint was loaded, which holds the changes since the start.
        """
        if not self._noted:
            self.note()
        with self._present() as parts:
            for part in parts.values():
                part.begin(resumed=resumed)
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        with self._present() as parts:
            states = {key: part.state_dict() for key, part in parts.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._present(first=not self._noted) as parts:  # later they may be elsewhere
            for key, saved in state.items():
                if key in parts:
                    parts[key].load_state_dict(saved)

    @contextlib.contextmanager
    def _present(self, *, first: bool = False) -> Iterator[dict[str, Attributes]]:
        """The parts as of this moment: there may be new ones, and others in their places.

        Args:
            first: True where each process has the same objects in lists: these have their names.
        """
        # Loaded on first use: it imports this module.
        from optuna_hermes.suspend._modules._inner import InnerModules

        outer = self._make()
        inner = InnerModules(outer, self._names)
        self._clashes, self._has_inner = inner.clashes, bool(inner.named)
        if first:
            inner.note_names()
        for parts, found in ((self._parts, outer), (self._inner, inner.attributes)):
            for key, each in found.items():
                if key not in parts:
                    parts[key] = each
                    if self._begun:
                        each.begin()
                parts[key].move_to(each)
        here = {key: self._inner[key] for key in inner.attributes}
        yield self._with_names({**self._parts, **here}, inner.named, inner.made)
        # Not until the next time: the training may drop objects to have their memory.
        for part in here.values():
            part.let_go()
        self._with_names(self._parts)

    def _with_names(
        self,
        parts: dict[str, Attributes],
        inner: Mapping[str, object] | None = None,
        made: Collection[int] = (),
    ) -> dict[str, Attributes]:
        """The parts, which know the named objects of this moment: each may be another by now."""
        named = NameTable({**(inner or {}), **self._named()}, made)
        for part in parts.values():
            part.named = named
        return parts
