"""One process per host that owns its devices, and the clients that ask it for time on them."""

from __future__ import annotations

from optuna_hermes.broker._client import (
    Connection,
    connect,
    connect_or_start,
    connect_patiently,
)
from optuna_hermes.broker._protocol import OpenStudy, StudySpec
from optuna_hermes.broker._session import RunSession
from optuna_hermes.broker._sessions import session_of, sessions

__all__ = [
    "Connection",
    "OpenStudy",
    "RunSession",
    "StudySpec",
    "connect",
    "connect_or_start",
    "connect_patiently",
    "session_of",
    "sessions",
]
