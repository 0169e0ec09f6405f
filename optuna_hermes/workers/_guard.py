"""Refusal of ``optimize`` in processes that it started: they would start others without end."""

from __future__ import annotations

import os

from optuna_hermes.broker import sessions
from optuna_hermes.errors import ObjectiveError

INSIDE_VARIABLE = "OPTUNA_HERMES_INSIDE"
"""Set in every process that ``optimize`` starts; those that an objective starts inherit it."""


def refuse_inside() -> None:
    """Raise in a process that ``optimize`` has started.

    Raises:
        ObjectiveError: this is the fork server, a worker or a process of one.
    """
    if sessions.worker is not None:
        raise ObjectiveError("optimize() cannot be called in an objective: call it in a script.")
    if INSIDE_VARIABLE in os.environ:
        raise ObjectiveError(
            "optimize() was called in a process that it has started, by what that imports: put the "
            'call under `if __name__ == "__main__":`.'
        )
