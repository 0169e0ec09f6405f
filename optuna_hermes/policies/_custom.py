"""User-written policies, loaded by the name of their class."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.policies.base import Policy
from optuna_hermes.policies.decisions import said


def load_policy(target: str) -> Policy:
    """Load a user's policy class by ``FILE.py:CLASS`` or ``module:CLASS``, and return an object.

    A file is run anew each time, so that changes in it take effect. A module that cannot be
    imported is looked for as a file of this folder.

    Raises:
        UnknownPolicyError: there is no such file, module or class.
        InvalidInputError: it cannot be imported, is no ``Policy``, or needs arguments.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UnknownPolicyError(
            f"A policy of your own is FILE.py:CLASS or module:CLASS but got {target!r}."
        )
    made = _named(place, name)
    if made is None:
        raise UnknownPolicyError(f"There must be a class {name!r} in {place} but there is none.")
    if not (isinstance(made, type) and issubclass(made, Policy)):
        raise InvalidInputError(
            f"A policy must be a subclass of optuna_hermes.policies.Policy but {target!r} is not."
        )
    try:
        return made()
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"A policy must be made without arguments but {target!r} raised {said(error)}: give "
            "each parameter a default, and write decide()."
        ) from error


def _named(place: str, name: str) -> Any:
    try:
        if place.endswith(".py"):
            return _run_file(place).get(name)
        found = _import_module(place)
        # By attribute: a module may define __getattr__ and import its classes on first use.
        return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    except (UnknownPolicyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a script may end its interpreter
        raise InvalidInputError(
            f"Importing {place} raised {said(error)}: mend that first."
        ) from error


def _run_file(path: str) -> Mapping[str, Any]:
    # Opened here first, so that an OSError of the script itself is not taken for a missing file.
    try:
        with open(path):
            pass
    except OSError as error:
        raise UnknownPolicyError(
            f"A policy's file must be there but {path!r} cannot be read: {error.strerror}."
        ) from error
    # For modules beside it, now and in its methods; last, so that nothing is hidden.
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    return runpy.run_path(path, run_name=path.rpartition("/")[2].removesuffix(".py"))


def _import_module(name: str) -> ModuleType | Mapping[str, Any]:
    try:
        return importlib.import_module(name)
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
