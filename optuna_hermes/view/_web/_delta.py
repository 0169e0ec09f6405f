"""Differences between two pages: a page is sent whole once, then only its changes; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYED = ("trials", "bars")
"""Parts that are compared entry by entry; a removed entry is sent as None."""

GROWING = "curves"
"""The part whose entries are curves; of each only the points after the common start are sent."""


def delta(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that turn ``before`` into ``after``; empty if they are equal.

    Example:
        >>> delta({"trials": {"0": "parked"}}, {"trials": {"0": "parked", "1": "pending"}})
        {'trials': {'1': 'pending'}}
    """
    changes: dict[str, Any] = {}
    for name, part in after.items():
        old = before.get(name)
        if part is old or part == old:
            continue
        if name in KEYED:
            changes[name] = _entries(old or {}, part)
        elif name == GROWING:
            changes[name] = _curves(old or {}, part)
        else:
            changes[name] = part
    return changes


def _entries(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    gone = {key: None for key in before if key not in after}
    return {**gone, **{key: value for key, value in after.items() if before.get(key) != value}}


def _curves(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {key: None for key in before if key not in after}
    for key, curve in after.items():
        old = before.get(key)
        if curve is not old and curve != old:
            changes[key] = _grown(old, curve)
    return changes


def _grown(before: Mapping[str, list[Any]] | None, after: Mapping[str, list[Any]]) -> Any:
    """The columns of a curve from its first new point on; ``from`` is the index of that point."""
    count = 0 if before is None else _common(before, after)
    return {"from": count, **{name: column[count:] for name, column in after.items()}}


def _common(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> int:
    """The number of equal points at the beginning of two curves."""
    old = list(zip(*(before[name] for name in after), strict=True))
    new = list(zip(*after.values(), strict=True))
    same = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(same, min(len(old), len(new)))
