"""``once``: a value that is the same for all trials, computed once and inherited by processes.

A worker that has computed such a value names it to its fork server. That one forks a successor,
which computes the value too and forks all later workers: they share it by copy on write.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.workers._imports import after_import
from optuna_hermes.workers._words import LONGEST_REASON

if TYPE_CHECKING:
    from optuna_hermes.suspend._tiers._accelerators import Accelerator

P = ParamSpec("P")
T = TypeVar("T")
Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""A call that another process can repeat: module, qualified name and arguments of its function."""

_LONGEST_CALL = 3000
"""Characters of a packed call in a message, which must fit into a pipe's atomic write."""

_log = logging.getLogger("optuna_hermes.once")


class _Process:
    """The values of this process, and how it shares them with others."""

    def __init__(self) -> None:
        self.renew_lock()
        self.values: dict[object, Any] = {}
        self.shared: set[str] = set()
        """The packed calls of those values that were computed for the processes it forks."""
        self.noted: set[str] = set()
        self.owner: FunctionType | None = None
        """The objective's function, if its module cannot be imported under its name."""
        self.seed_torch: Callable[[Any], None] = lambda torch: torch.default_generator.seed()
        """Seeds torch once a call that has imported it is over."""
        self.share: Callable[[str], None] | None = None
        self.note: Callable[[str], None] = _log.warning

    def renew_lock(self) -> None:
        """Take a new lock: in a fork, the thread that held the old one does not go on."""
        self.lock = threading.RLock()


_process = _Process()
os.register_at_fork(after_in_child=lambda: _process.renew_lock())


def once(load: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``load(*args, **kwargs)``, computed once for all trials instead of once for each.

    For what each trial would do again with the same result, such as reading and preparing data.
    Under ``optimize`` the first trials compute it themselves, and so does the process that workers
    are forked from; later trials find it in memory, shared among them until one writes to it. Under
    plain Optuna it is computed once in each process.

    Whatever the process, ``load`` draws the same random numbers, and the trial's own go on as if it
    had not been called. What it raises is raised here, and the next call tries again.

    Args:
        load: a function of a module or of the script: one inside of another function, or a lambda,
            has no name by which other processes find it, and is called each time. Its result must
            not be changed, and must not be on a device or hold open files to be shared.
        args: its arguments, hashable; each combination is computed once, and kept. Processes share
            the values of the first 16.
        kwargs: likewise.

    Raises:
        InvalidInputError: an argument is not hashable.

    Example:
        >>> from optuna_hermes import once
        >>> from sklearn.datasets import load_digits
        >>> def objective(trial):
        ...     data = once(load_digits, n_class=4)
        ...     return data.data.mean() * trial.suggest_float("x", 0, 1)
    """
    call = _call(load, args, kwargs)
    if call is None:
        name = getattr(load, "__qualname__", repr(load))
        _note(
            f"once() calls {name} in each trial, since other processes cannot find it: make it a "
            "function of the file, and give what it needs as arguments."
        )
        return call_alike(0, load, *args, **kwargs)
    key = _key(call)
    if key not in _process.values:  # else nobody waits while another value is computed
        with _process.lock:
            if key not in _process.values:
                _process.values[key] = call_alike(0, load, *args, **kwargs)
                _share(call)
    return _process.values[key]  # type: ignore[no-any-return]


def set_objective(function: FunctionType | None) -> None:
    """Find functions of the objective's module also if it was sent here by value."""
    _process.owner = function


def begin_worker(share: Callable[[str], None] | None, note: Callable[[str], None]) -> None:
    """Prepare a worker; ``share`` sends a packed call to the fork server that it is a fork of."""
    _process.share = share
    _process.note = note


def begin_trial(seed: int) -> None:
    """Seed torch with a trial's seed if ``once`` is what imports it."""
    _process.seed_torch = lambda torch: torch.manual_seed(seed)


def compute(packed: str) -> str:
    """Compute a packed call's value for processes to fork; the reason if they cannot share it."""
    files = _open_files()
    try:
        # Here alone: what arguments import or raise must not harm a process that serves.
        call: Call = pickle.loads(base64.b64decode(packed.partition(" ")[0]))
        module, name, args, kwargs = call
        if _owner_of(module) is None and module not in sys.modules:
            # Not imported here: what that draws, and whether torch is there, would not be as where
            # the objective does it.
            return "only the objective imports its module: import it at the top of the file"
        _process.values[_key(call)] = call_alike(0, _find(module, name), *args, **kwargs)
    except BaseException as error:
        return f"it raised {repr(error)[:LONGEST_REASON]} in another process than the trial's"
    _process.shared.add(packed)
    return "it keeps files open" if _open_files() - files else ""


def n_computed() -> int:
    """Number of values that were computed for the processes that this one forks."""
    return len(_process.shared)


def is_computed(packed: str) -> bool:
    """True if the value of a packed call was computed for the processes that this one forks."""
    return packed in _process.shared


def name_of(packed: str) -> str:
    return packed.partition(" ")[2]


def used_accelerator() -> Accelerator | None:
    """The accelerator that this process has used; None too where torch is not imported."""
    if "torch" not in sys.modules:
        return None
    from optuna_hermes.suspend._tiers import _accelerators

    return _accelerators.used_accelerator()


def _call(load: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    module, name = getattr(load, "__module__", None), getattr(load, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and _find(module, name) is load:
        return module, name, args, kwargs
    return None


def _owner_of(module: str) -> FunctionType | None:
    """The objective's function, if it is of this module, which was sent here by value."""
    owner = _process.owner
    return owner if owner is not None and owner.__module__ == module else None


def _find(module: str, name: str) -> Any:
    """The function of this name, None if there is none."""
    owner = _owner_of(module)
    if owner is not None:
        found = owner.__globals__.get(name.partition(".")[0])
    else:
        found = getattr(sys.modules.get(module), name.partition(".")[0], None)
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def _key(call: Call) -> object:
    module, name, args, kwargs = call
    named = sorted(kwargs.items())
    values = (*args, *(value for _, value in named))
    words = tuple(word for word, _ in named)
    key = (module, name, len(args), words, values, _unlike_equals(values))
    try:
        hash(key)
    except TypeError as error:
        raise InvalidInputError(
            f"The arguments of {name} in once() must be hashable but got {values}: give numbers, "
            "texts and tuples of them."
        ) from error
    return key


def _unlike_equals(value: object) -> object:
    """A key that differs for equal values of other types, as 1, 1.0 and True, or 0.0 and -0.0."""
    if isinstance(value, float):
        return type(value), str(value)
    if isinstance(value, frozenset):
        return type(value), frozenset((each, _unlike_equals(each)) for each in value)
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = list(value) if isinstance(value, tuple) else []
    return type(value), *map(_unlike_equals, parts)


def _share(call: Call) -> None:
    """Have later processes inherit a value that this one had to compute."""
    if _process.share is None:
        return
    name = call[1]
    if used_accelerator() is not None:
        why = "it, or the trial before it, has used an accelerator"
    else:
        try:
            # With its name: only a process that computes the value unpacks the rest.
            packed = f"{base64.b64encode(pickle.dumps(call)).decode()} {name}"
        except Exception as error:
            why = f"its arguments cannot be sent to another process: {error}"
        else:
            long = len(json.dumps(packed)) > _LONGEST_CALL
            why = "its arguments are too long" if long else ""
    if why:
        _note(not_shared(name, why))
    else:
        _process.share(packed)


def not_shared(name: str, why: str) -> str:
    """The note that each trial computes a value itself."""
    return f"once() calls {name} in each trial, since {why}."


def _note(text: str) -> None:
    if text not in _process.noted:
        _process.noted.add(text)
        _process.note(text)


def call_alike(seed: int, load: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call with random numbers that begin with ``seed`` in every process; restore them then."""
    with _own_random_numbers(seed):
        return load(*args, **kwargs)


@contextlib.contextmanager
def _own_random_numbers(seed: int) -> Iterator[None]:
    from optuna_hermes.suspend._state import entropy_of, kept_rng, use_bits

    torch, accelerator = sys.modules.get("torch"), used_accelerator()
    seed_torch = partial(_seed_torch, seed)
    # What is drawn after a call within this one must be the same in every process, too.
    seed_then, _process.seed_torch = _process.seed_torch, seed_torch
    try:
        with kept_rng(), entropy_of(seed), after_import("torch", seed_torch):
            random.seed(seed)
            use_bits()  # others cannot be seeded
            np.random.seed(seed)
            if torch is not None:
                seed_torch(torch)
            if accelerator is not None:
                accelerator.seed(seed)
            yield
    finally:
        _process.seed_torch = seed_then
        if torch is None and (imported := sys.modules.get("torch")) is not None:
            seed_then(imported)  # as if it had been imported before


def _seed_torch(seed: int, torch: Any) -> None:
    # Not by torch.manual_seed(): accelerators not in use remember that.
    torch.default_generator.manual_seed(seed)


def _open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
