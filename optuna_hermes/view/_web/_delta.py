"""What has changed of a page, pure: the page is sent whole once, and then only this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYED = ("trials", "bars")
"""Parts whose entries change one by one: an entry that is gone is sent as None."""

GROWING = "curves"
"""The part whose entries grow: of one that has only grown the new end is sent."""


def delta(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What makes ``after`` of ``before``, empty if nothing.

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
    """Lists of one length, from the first point on that is new; all of them carry where it is."""
    count = 0 if before is None else _common(before, after)
    return {"from": count, **{name: column[count:] for name, column in after.items()}}


def _common(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> int:
    """How many points two curves have in common at their beginning."""
    old = list(zip(*(before[name] for name in after), strict=True))
    new = list(zip(*after.values(), strict=True))
    same = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(same, min(len(old), len(new)))
