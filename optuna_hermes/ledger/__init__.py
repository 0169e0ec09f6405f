"""The ledger: durable records of trials, reports, leases, checkpoints, memory and events."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optuna_hermes.ledger._records import (
    DEAD_SECONDS,
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)

if TYPE_CHECKING:
    from optuna_hermes.ledger._away import FULL, is_full, lost_race, mends
    from optuna_hermes.ledger._base import Ledger, live_hosts
    from optuna_hermes.ledger._engine import few_connections, rest_when_idle
    from optuna_hermes.ledger._schema import SCHEMA_VERSION, schema_version
    from optuna_hermes.ledger._sql import MemoryLedger, SqlLedger

__all__ = [
    "DEAD_SECONDS",
    "FULL",
    "SCHEMA_VERSION",
    "CheckpointRecord",
    "EventRecord",
    "HostRecord",
    "LeaseRecord",
    "Ledger",
    "MemoryLedger",
    "ReportRecord",
    "SqlLedger",
    "TrialRecord",
    "few_connections",
    "is_full",
    "live_hosts",
    "load",
    "lost_race",
    "mends",
    "open_ledger",
    "rest_when_idle",
    "schema_version",
]

_HOMES = {
    "FULL": "_away",
    "Ledger": "_base",
    "MemoryLedger": "_sql",
    "SCHEMA_VERSION": "_schema",
    "SqlLedger": "_sql",
    "few_connections": "_engine",
    "is_full": "_away",
    "live_hosts": "_base",
    "lost_race": "_away",
    "mends": "_away",
    "rest_when_idle": "_engine",
    "schema_version": "_schema",
}


def __getattr__(name: str) -> Any:
    # SQLAlchemy takes long to import: a broker listens before it has.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load() -> None:
    """Import what opening a ledger in a database takes, so that the first is opened sooner."""
    importlib.import_module(f"{__name__}._sql")


def open_ledger(url: str) -> Ledger:
    """Open the ledger at a URL, and create its tables if they are missing.

    Args:
        url: a database URL as for SQLAlchemy and Optuna, or ``memory:`` for a ledger that ends
            with this process.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of another version.

    Example:
        >>> open_ledger("memory:").load_trials("a study's key")
        []
    """
    from optuna_hermes.ledger._sql import MemoryLedger, SqlLedger

    return MemoryLedger() if url == "memory:" else SqlLedger(url)
