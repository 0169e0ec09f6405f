"""Transient errors of databases and storages: no answer, no room, or another was faster."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from optuna_hermes.errors import LedgerOutageError, causes_of

_SQLITE = ("database is locked", "disk i/o error", "database or disk is full")
# Servers raise OperationalError for these, too, which a retry cannot cure.
_NEVER = (
    *("authentication failed", "no password supplied", "no pg_hba.conf entry"),
    *("access denied", "command denied", "insecure transport"),
    *("does not exist", "unknown database"),
)
# SQLAlchemy's code of a statement whose transaction lost its connection in an earlier one.
_LOST_BEFORE = "8s2b"

# Statements of Optuna that create a new database's tables and store their version.
_SCHEMA = re.compile(r"^\s*CREATE\s|alembic_version|version_info", re.IGNORECASE)
_FASTER = frozenset(
    {
        *("42P07", "42710", "23505", "40001", "40P01"),  # PostgreSQL: is there, or serialised
        *("1050", "1062", "1205", "1213"),  # MySQL: is there, or waited for in vain
    }
)
_FASTER_SQLITE = ("already exists", "unique constraint failed")

# PostgreSQL's, of a server that is a standby just now or that ran out of disk.
_READ_ONLY = "25006"

# A journal's, on a disk or a file server.
_OF_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})

# Errors of libraries that need not be installed, and gRPC's codes.
_OF_REDIS = frozenset({"redis.ConnectionError", "redis.TimeoutError", "redis.ReadOnlyError"})
_OF_GRPC = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
BEHIND_PROXY = "An exception is raised during the commit."
"""Optuna's, of a proxy whose database does not answer, or refuses a value: it keeps the cause."""


def is_transient(error: BaseException) -> bool:
    """True if the error, or one it wraps, is a transient failure of a database or a storage."""
    for found in _of_database(error):
        return is_outage(found)
    causes = causes_of(error, contexts=True)
    return isinstance(error, LedgerOutageError) or any(map(_is_of_storage, causes))


def lost_race(error: BaseException) -> bool:
    """True if another process was faster to create Optuna's tables, or has SQLite's file locked."""
    for found in _of_database(error):
        if not isinstance(found, DBAPIError):
            return False
        text = str(found.orig).lower()
        if _is_sqlite(found):
            faster = any(each in text for each in _FASTER_SQLITE)
            return "database is locked" in text or (faster and _makes_schema(found))
        return _makes_schema(found) and _code(found.orig) in _FASTER
    return False


def _of_database(error: BaseException) -> Iterator[SQLAlchemyError]:
    """SQLAlchemy's errors among an error and its causes."""
    causes = causes_of(error, contexts=True)
    return (each for each in causes if isinstance(each, SQLAlchemyError))


def _is_of_storage(error: BaseException) -> bool:
    """True for a transient error of a journal's disk, of a gRPC proxy, or of Redis."""
    if isinstance(error, OSError):
        return error.errno in _OF_DISK
    bases = type(error).__mro__
    kinds = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in bases}
    if "grpc.RpcError" in kinds:
        code = getattr(error, "code", None)
        return (callable(code) and code().name in _OF_GRPC) or BEHIND_PROXY in str(error)
    return not _OF_REDIS.isdisjoint(kinds) and "redis.AuthenticationError" not in kinds


def _is_sqlite(error: DBAPIError) -> bool:
    return type(error.orig).__module__.partition(".")[0] == "sqlite3"


def _makes_schema(error: DBAPIError) -> bool:
    return _SCHEMA.search(error.statement or "") is not None


def _code(error: BaseException | None) -> str:
    """A server's code of an error, which does not depend on its language."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return str(state or (error.args[0] if error is not None and error.args else ""))


def is_outage(error: SQLAlchemyError) -> bool:
    """True if a retry may succeed: the database is unreachable, locked, full or read-only now."""
    if isinstance(error, PoolTimeoutError):
        return True
    if isinstance(error, PendingRollbackError):
        return error.code == _LOST_BEFORE
    if not isinstance(error, DBAPIError):
        return False
    text = str(error.orig).lower()
    if _is_sqlite(error):
        # Without room for one more file it cannot open its journal; a wrong path has no statement.
        if error.statement and "unable to open database file" in text:
            return True
        # For SQLite a missing table is an OperationalError too.
        return any(each in text for each in _SQLITE)
    if error.connection_invalidated or _code(error.orig) == _READ_ONLY:
        return True
    return isinstance(error, OperationalError) and not any(each in text for each in _NEVER)
