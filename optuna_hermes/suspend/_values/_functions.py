"""Functions and loggers in kept values, to which checkpoints refer by name.

Who can write a checkpoint must not choose what code runs: a name is looked up only if it is of the
table here, or of a function that the trial itself had kept before its loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from optuna_hermes.suspend._values._objects import UnknownClassError

_LEVELS = frozenset(("debug", "info", "warning", "error", "critical", "exception", "log"))
_HARMLESS: dict[str, Collection[str]] = {
    "_operator": ("eq", "ge", "gt", "le", "lt", "ne"),
    "builtins": ("abs", "len", "max", "min", "print", "round", "sorted", "sum"),
    "logging": _LEVELS,
}
FUNCTIONS = ("function", "logger")
"""Nodes of what is referred to by name."""
FunctionName = tuple[str, str]
"""A module and the function's qualified name in it."""


def node_of(value: Any) -> list[Any] | None:
    """The node of a function, a logger or a logger's method that has a name; None for others."""
    logger: Any = value
    method = ""
    if type(value) is MethodType:
        logger, method = value.__self__, value.__name__
    if issubclass(type(logger), logging.Logger) and method in ("", *_LEVELS):
        return ["logger", logger.name, method] if _is_found(logger) else None
    if type(value) is np.ufunc:
        name = "numpy", value.__name__
    elif type(value) in (FunctionType, BuiltinFunctionType):
        name = value.__module__, value.__qualname__
    else:
        return None
    return ["function", *name] if _named(*name) is value else None


def name_of(node: list[Any] | None) -> FunctionName | None:
    """The name in a node of ``node_of`` that is looked up only where it was kept before the loop.

    None for other nodes.
    """
    if node is None or node[0] != "function" or is_harmless(node[1], node[2]):
        return None
    return node[1], node[2]


def value_of(node: list[Any], kept: Collection[FunctionName]) -> Any:
    """The function or logger that a node of ``node_of`` refers to.

    Args:
        kept: the names of functions of which there were any in values kept before the loop.

    Raises:
        UnknownClassError: it is none of these, and may be anything.
    """
    kind, first, second = node
    if kind == "logger" and second in ("", *_LEVELS):
        logger = logging.getLogger(first)
        return getattr(logger, second) if second else logger
    if kind == "function" and (is_harmless(first, second) or (first, second) in kept):
        return _named(first, second)
    raise UnknownClassError(
        f"it holds the function {first}.{second}, as nothing did that was kept before the loop"
    )


def is_harmless(module: str, name: str) -> bool:
    """True for a function that only computes, compares or prints, which any value may have."""
    if module == "numpy":
        return type(vars(np).get(name)) is np.ufunc
    return name in _HARMLESS.get(module, ())


def _is_found(logger: logging.Logger) -> bool:
    return logger is logging.root or logging.root.manager.loggerDict.get(logger.name) is logger


def _named(module: str | None, name: str) -> Any:
    found: Any = None if module is None or "<" in name else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
