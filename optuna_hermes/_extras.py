"""Import errors of optional packages, with the command that installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
            f"optuna_hermes.{name} needs {missing}, which is not installed: run `pip install "
            f"'optuna-hermes[{name}]'`.",
            name=error.name,
        ) from error
