"""Import errors of optional packages, with the command that installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from optuna_hermes.errors import InvalidInputError


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Context of imports that need the extra of this name, in the module of this name.

    Raises:
        ModuleNotFoundError: with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        # A module of this package itself is missing, which no extra repairs.
        if missing == "optuna_hermes":
            raise
        raise ModuleNotFoundError(
            _advice(f"optuna_hermes.{name} needs {missing}", name), name=error.name
        ) from error


@contextlib.contextmanager
def needed(what: str, *, extra: str, other: str = "") -> Iterator[None]:
    """Context of imports that need an extra: ``what`` says for what, and which package.

    Raises:
        InvalidInputError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidInputError(_advice(what, extra, other)) from error


def _advice(what: str, name: str, other: str = "") -> str:
    return f"{what}, which is not installed: run `pip install 'optuna-hermes[{name}]'`{other}."
