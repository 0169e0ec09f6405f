"""Which errors of a database mend by waiting."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from optuna_hermes.errors import LedgerAwayError

_SQLITE = ("database is locked", "disk i/o error", "database or disk is full")
_NEVER = ("authentication failed", "access denied", "does not exist", "unknown database")
"""Said of what somebody has to change first, whichever the server."""
_LOST_BEFORE = "8s2b"
"""SQLAlchemy's code of a statement whose transaction lost its connection in an earlier one."""


def mends(error: BaseException) -> bool:
    """Whether what raised this may succeed later: some library wrapped what its database said."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, SQLAlchemyError):
            return is_away(seen)
        seen = seen.__cause__ or seen.__context__
    return isinstance(error, LedgerAwayError)


def is_away(error: SQLAlchemyError) -> bool:
    """Whether the same statement may succeed later: the database is not reached, locked or full."""
    if isinstance(error, PoolTimeoutError):
        return True
    if isinstance(error, PendingRollbackError):
        return error.code == _LOST_BEFORE
    if not isinstance(error, DBAPIError):
        return False
    text = str(error.orig).lower()
    if type(error.orig).__module__.partition(".")[0] == "sqlite3":
        # For SQLite a missing table is an OperationalError too.
        return any(each in text for each in _SQLITE)
    if error.connection_invalidated:
        return True
    return isinstance(error, OperationalError) and not any(each in text for each in _NEVER)
