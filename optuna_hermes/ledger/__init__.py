"""The ledger: durable records of trials, reports, leases, checkpoints, memory and events."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optuna_hermes.ledger._records import DEAD_SECONDS as DEAD_SECONDS
from optuna_hermes.ledger._records import CheckpointRecord as CheckpointRecord
from optuna_hermes.ledger._records import EventRecord as EventRecord
from optuna_hermes.ledger._records import HostRecord as HostRecord
from optuna_hermes.ledger._records import LeaseRecord as LeaseRecord
from optuna_hermes.ledger._records import ReportRecord as ReportRecord
from optuna_hermes.ledger._records import TrialRecord as TrialRecord

if TYPE_CHECKING:
    from optuna_hermes.ledger._engine import check_shared_url as check_shared_url
    from optuna_hermes.ledger._engine import few_connections as few_connections
    from optuna_hermes.ledger._engine import is_database as is_database
    from optuna_hermes.ledger._engine import is_other_file as is_other_file
    from optuna_hermes.ledger._engine import limited_time as limited_time
    from optuna_hermes.ledger._engine import rest_when_idle as rest_when_idle
    from optuna_hermes.ledger._engine import with_connect_args as with_connect_args
    from optuna_hermes.ledger._engine import with_password as with_password
    from optuna_hermes.ledger._ledger import Ledger as Ledger
    from optuna_hermes.ledger._ledger import live_hosts as live_hosts
    from optuna_hermes.ledger._outage_words import FULL as FULL
    from optuna_hermes.ledger._outage_words import is_full as is_full
    from optuna_hermes.ledger._outage_words import outage_phrase as outage_phrase
    from optuna_hermes.ledger._schema import SCHEMA_VERSION as SCHEMA_VERSION
    from optuna_hermes.ledger._schema import knows as knows
    from optuna_hermes.ledger._schema import schema_version as schema_version
    from optuna_hermes.ledger._transient import is_transient as is_transient
    from optuna_hermes.ledger._transient import lost_race as lost_race

_HOMES = {
    **dict.fromkeys(("lost_race", "is_transient"), "_transient"),
    **dict.fromkeys(
        (
            *("check_shared_url", "few_connections", "is_database", "rest_when_idle"),
            *("is_other_file", "limited_time", "with_connect_args", "with_password"),
        ),
        "_engine",
    ),
    **dict.fromkeys(("Ledger", "live_hosts"), "_ledger"),
    **dict.fromkeys(("FULL", "outage_phrase", "is_full"), "_outage_words"),
    **dict.fromkeys(("SCHEMA_VERSION", "knows", "schema_version"), "_schema"),
}


def __getattr__(name: str) -> Any:
    # SQLAlchemy takes long to import: a broker listens before it has.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load() -> None:
    """Import what opening a ledger in a database takes, so that the first is opened sooner."""
    importlib.import_module(f"{__name__}._ledger")


def open_ledger(url: str) -> Ledger:
    """Open the ledger at a URL, and create its tables if they are missing.

    Args:
        url: a database URL as for SQLAlchemy and Optuna.

    Raises:
        LedgerError: the database cannot be reached, or holds a ledger of another version.
    """
    from optuna_hermes.ledger._ledger import Ledger

    return Ledger(url)
