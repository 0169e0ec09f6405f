"""Broker, the one process per host that owns its devices, and its clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.broker._client._connection import (
        Connection,
        broker_status,
        connect,
        connect_patiently,
    )
    from optuna_hermes.broker._client._reconnecting import pending_endings
    from optuna_hermes.broker._client._session import TrialSession
    from optuna_hermes.broker._client._sessions import OwnSession, sessions
    from optuna_hermes.broker._client._starting import connect_or_start
    from optuna_hermes.broker._protocol import OpenStudy, StudySpec

__all__ = [
    "Connection",
    "OpenStudy",
    "OwnSession",
    "StudySpec",
    "TrialSession",
    "broker_status",
    "connect",
    "connect_or_start",
    "connect_patiently",
    "pending_endings",
    "sessions",
]


_MODULES = {
    "Connection": "_client._connection",
    "OpenStudy": "_protocol",
    "OwnSession": "_client._sessions",
    "TrialSession": "_client._session",
    "StudySpec": "_protocol",
    "broker_status": "_client._connection",
    "connect": "_client._connection",
    "connect_or_start": "_client._starting",
    "connect_patiently": "_client._connection",
    "pending_endings": "_client._reconnecting",
    "sessions": "_client._sessions",
}


def __getattr__(name: str) -> Any:
    # The broker's own process is no client, and a client that only asks for the status needs no
    # session, which imports NumPy to suspend.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
