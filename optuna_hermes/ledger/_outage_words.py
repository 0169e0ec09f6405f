"""Words for an outage of a database, by the reason that the database gives."""

from __future__ import annotations

_NO_CONNECTION = (
    *("too many clients", "too many connections", "connection slots"),
    "max_user_connections",
)
FULL = (
    "It takes no more connections: end what else is connected, or raise its limit "
    "(max_connections)."
)

_DISK_FULL = ("disk is full", "no space left on device", "quota exceeded")
"""SQLite's and the system's words."""


def is_full(reason: str) -> bool:
    """True if a database refuses because it takes no more connections."""
    return any(each in reason.lower() for each in _NO_CONNECTION)


def outage_phrase(reason: str) -> str:
    """A predicate for the database, such as "does not answer"."""
    full = any(each in reason.lower() for each in _DISK_FULL)
    return "cannot be written, as its disk is full" if full else "does not answer"
