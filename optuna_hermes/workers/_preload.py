"""Imports by the fork server for all workers: the libraries that the objective's code names.

Without it each worker would repeat an import inside a function. Libraries that the code does not
name are not imported, since they would cost time for nothing.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_LIBRARIES = {
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "scipy": ("scipy",),
    "sklearn": ("sklearn",),
    # The first optimizer that a process makes imports the second one, which takes a second.
    "torch": (
        *("torch", "torch._dynamo", "optuna_hermes.suspend._tiers._copies"),
        *("optuna_hermes.suspend._tiers._tier_mover", "optuna_hermes.suspend._values._custom"),
        *("optuna_hermes.suspend._modules._inner", "torch.profiler._cupti_monitor"),
        "safetensors.torch",
    ),
    "torchvision": ("torchvision",),
    "torchmetrics": ("torchmetrics",),
    "lightning": ("lightning.pytorch", "optuna_hermes.lightning"),
    "pytorch_lightning": ("pytorch_lightning", "optuna_hermes.lightning"),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "optuna_hermes.HermesCallback": ("optuna_hermes.lightning",),
    "optuna_hermes.lightning": ("optuna_hermes.lightning",),
    "optuna_hermes.suspendable": ("optuna_hermes.pytorch",),
    "optuna_hermes.pytorch": ("optuna_hermes.pytorch",),
}
"""Libraries whose import takes long, and starts neither threads nor devices; with the modules to
import for them."""

_OF_WORKERS = (
    "sqlalchemy.dialects.sqlite",
    "numpy.random",
    "optuna_hermes.sampler",
    "optuna_hermes.pruner",
)
"""Modules that every worker imports as it begins, whatever the objective."""


def preload(objective: Any) -> None:
    """Import the libraries that an objective, or other code of its module, will import.

    Errors of an import are left to the worker that needs it.
    """
    named = {*imported_late(objective), *(name for name in _LIBRARIES if name in sys.modules)}
    wanted = dict.fromkeys(each for name in named for each in _LIBRARIES.get(name, ()))
    for name in (*_OF_WORKERS, *wanted):
        try:
            __import__(name)
        except Exception:
            sys.modules.pop(name, None)
    if "optuna_hermes.lightning" in sys.modules:
        with contextlib.suppress(Exception):
            # An objective may use a logger before it makes its callback.
            sys.modules["optuna_hermes.lightning"].watch_versions()


def read_code(objective: Any) -> None:
    """Read which names the objective's code uses, as each worker would before its first batch."""
    function = function_of(objective)
    if function is not None:
        global_names(function)
    generators = sys.modules.get("optuna_hermes.suspend._values._generators")
    if generators is not None:
        with contextlib.suppress(Exception):  # it fails again in the worker that needs it
            generators.holders_in(generators.GeneratorOwner("objective", function))


@functools.lru_cache(maxsize=1)
def global_names(objective: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Names that the code of an objective's module uses, and those that functions there assign."""
    used, assigned = set[str](), set[str]()
    for code in _codes(objective):
        used.update(code.co_names)
        each = dis.get_instructions(code)
        assigned.update(str(one.argval) for one in each if one.opname == "STORE_GLOBAL")
    return frozenset(used), frozenset(assigned)


def imported_late(objective: Any) -> set[str]:
    """The modules, and their first parts, that functions import when they are called."""
    found: set[str] = set()
    for code in _codes(objective):
        module = ""
        for each in dis.get_instructions(code):
            if each.opname == "IMPORT_NAME":
                module = str(each.argval)
                found |= {module, module.partition(".")[0]}
            elif each.opname == "IMPORT_FROM":
                found.add(f"{module}.{each.argval}")
    return found


def function_of(objective: Any) -> FunctionType | None:
    """The function that an objective calls, None if it is not one of Python."""
    called = getattr(objective, "func", objective)  # of a partial
    function = inspect.unwrap(getattr(called, "__func__", called))
    if not isinstance(function, FunctionType):
        function = getattr(type(function), "__call__", None)  # noqa: B004  # it may be inherited
    return function if isinstance(function, FunctionType) else None


def _codes(objective: Any) -> Iterator[CodeType]:
    """The code of an objective, and of the functions and classes that it finds in its module."""
    function = function_of(objective)
    if function is None:
        return
    owner = function.__module__
    waiting: list[Any] = [function, *_own(function.__globals__, owner)]
    seen: set[CodeType] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, type):
            waiting += [part for part in vars(each).values() if isinstance(part, FunctionType)]
            continue
        code = each.__code__ if isinstance(each, FunctionType) else each
        if code not in seen:
            seen.add(code)
            waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
            yield code


def _own(names: dict[str, Any], owner: str) -> list[Any]:
    """The functions and classes that a module defines itself."""
    # Not isinstance: it reads __class__, which runs the code of proxies.
    found = (each for each in names.values() if issubclass(type(each), (FunctionType, type)))
    return [each for each in found if each.__module__ == owner]
