"""The ledger: durable records of trials, reports, leases, checkpoints, memory and events."""

from __future__ import annotations

from optuna_hermes.ledger._away import FULL, is_full, lost_race, mends
from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.ledger._claims import DEAD_SECONDS
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
    "RunRecord",
    "SqlLedger",
    "few_connections",
    "is_full",
    "live_hosts",
    "lost_race",
    "mends",
    "open_ledger",
    "rest_when_idle",
    "schema_version",
]


def live_hosts(ledger: Ledger) -> list[HostRecord]:
    """The brokers that share a ledger and whose last heartbeat is under ``DEAD_SECONDS`` old."""
    return [host for host in ledger.load_hosts() if host.age_seconds < DEAD_SECONDS]


def open_ledger(url: str) -> Ledger:
    """Open the ledger at a URL, and create its tables if they are missing.

    Args:
        url: a database URL as for SQLAlchemy and Optuna, or ``memory:`` for a ledger that ends
            with this process.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of another version.

    Example:
        >>> open_ledger("memory:").load_runs("a study's key")
        []
    """
    return MemoryLedger() if url == "memory:" else SqlLedger(url)
