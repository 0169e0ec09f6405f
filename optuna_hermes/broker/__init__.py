"""Broker, the one process per host that owns its devices, and its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._client._connection import (
    Connection,
    broker_status,
    connect,
    connect_or_start,
    connect_patiently,
)
from optuna_hermes.broker._client._pending_endings import pending_endings
from optuna_hermes.broker._client._sessions import OwnSession, sessions
from optuna_hermes.broker._protocol import OpenStudy, StudySpec

if TYPE_CHECKING:
    from optuna_hermes.broker._client._session import RunSession

__all__ = [
    "Connection",
    "OpenStudy",
    "OwnSession",
    "RunSession",
    "StudySpec",
    "broker_status",
    "connect",
    "connect_or_start",
    "connect_patiently",
    "pending_endings",
    "sessions",
]


def __getattr__(name: str) -> Any:
    # A session imports NumPy to suspend; a client that only asks for the status need not.
    if name == "RunSession":
        from optuna_hermes.broker._client._session import RunSession

        return RunSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
