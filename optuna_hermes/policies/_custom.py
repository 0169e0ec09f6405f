"""A policy of the user's own, by the name of its class."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Mapping
from typing import Any

from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.policies._base import Policy


def load_policy(target: str) -> Policy:
    """An object of a user's class, with its default settings.

    A file is run anew each time, so that what was changed in it counts. A module that cannot be
    imported is looked for as a file of this folder.

    Args:
        target: ``FILE.py:CLASS`` or ``module:CLASS``.

    Raises:
        UnknownPolicyError: there is no such file, module or class.
        InvalidInputError: it cannot be imported, is no ``Policy``, or cannot be made without
            arguments.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UnknownPolicyError(
            f"A policy of your own is FILE.py:CLASS or module:CLASS but got {target!r}."
        )
    made = _names_of(place).get(name)
    if made is None:
        raise UnknownPolicyError(f"There must be a class {name!r} in {place} but there is none.")
    if not (isinstance(made, type) and issubclass(made, Policy)):
        raise InvalidInputError(
            f"A policy must be a subclass of optuna_hermes.policies.Policy but {target!r} is not."
        )
    try:
        return made()
    except Exception as error:
        raise InvalidInputError(
            f"A policy must be made without arguments but {target!r} raised {error!r}: give each "
            "parameter a default, and write decide()."
        ) from error


def _names_of(place: str) -> Mapping[str, Any]:
    """What a file or module defines."""
    try:
        return _run_file(place) if place.endswith(".py") else _import_module(place)
    except (UnknownPolicyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a script may end its interpreter
        raise InvalidInputError(f"Importing {place} raised {error!r}: mend that first.") from error


def _run_file(path: str) -> Mapping[str, Any]:
    try:
        with open(path):
            pass
    except OSError as error:
        raise UnknownPolicyError(
            f"A policy's file must be there but {path!r} cannot be read: {error.strerror}."
        ) from error
    return runpy.run_path(path, run_name=path.rpartition("/")[2].removesuffix(".py"))


def _import_module(name: str) -> Mapping[str, Any]:
    try:
        return vars(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a module that this one imports
    try:
        return _run_file(f"{name.replace('.', '/')}.py")
    except UnknownPolicyError:
        raise UnknownPolicyError(
            f"A policy's module must be importable but there is no {name!r}: give its file, "
            "FILE.py:CLASS."
        ) from None
