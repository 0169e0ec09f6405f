"""Decisions as policies return them: made plain, and errors that name the policy."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision


def plain(decision: Decision) -> Decision:
    """The decision of tuples, Python's own numbers and JSON: nothing else can be sent or kept."""
    given = tuple(
        replace(
            each,
            trial=None if each.trial is None else operator.index(each.trial),
            devices=tuple(each.devices),
            slice_seconds=None if each.slice_seconds is None else float(each.slice_seconds),
        )
        for each in decision.assignments
    )
    return Decision(
        assignments=given,
        pruned=tuple(decision.pruned),
        powered_down=tuple(decision.powered_down),
        memory=json.loads(json.dumps(decision.memory)),  # raises for what the ledger could not keep
    )


@contextmanager
def named(policy: object) -> Iterator[None]:
    """Turn errors of a policy's code, which may be the user's, into one that names it.

    Raises:
        InvalidInputError: the policy raised, or would have ended the interpreter.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        *_, (frame, line) = walk_tb(error.__traceback__)
        raise InvalidInputError(
            f"Policy {type(policy).__name__} raised {error!r} at {frame.f_code.co_filename}:{line}:"
            " mend it first."
        ) from error
