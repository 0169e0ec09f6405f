"""One process per host that owns its devices, and the clients that ask it for time on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._client._connection import (
    Connection,
    broker_status,
    connect,
    connect_or_start,
    connect_patiently,
)
from optuna_hermes.broker._client._sessions import Held, sessions
from optuna_hermes.broker._client._unheard import unheard
from optuna_hermes.broker._protocol import OpenStudy, StudySpec

if TYPE_CHECKING:
    from optuna_hermes.broker._client._session import RunSession

__all__ = [
    "Connection",
    "Held",
    "OpenStudy",
    "RunSession",
    "StudySpec",
    "broker_status",
    "connect",
    "connect_or_start",
    "connect_patiently",
    "sessions",
    "unheard",
]


def __getattr__(name: str) -> Any:
    # A session suspends, for which it imports NumPy: who only asks for the status waits for less.
    if name == "RunSession":
        from optuna_hermes.broker._client._session import RunSession

        return RunSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
