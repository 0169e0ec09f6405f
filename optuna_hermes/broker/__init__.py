"""Broker, the one process per host that owns its devices, and its clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.broker._client._connection import Connection as Connection
    from optuna_hermes.broker._client._connection import broker_status as broker_status
    from optuna_hermes.broker._client._connection import connect as connect
    from optuna_hermes.broker._client._connection import connect_if_any as connect_if_any
    from optuna_hermes.broker._client._connection import connect_with_retry as connect_with_retry
    from optuna_hermes.broker._client._reconnecting import pending_endings as pending_endings
    from optuna_hermes.broker._client._session import TrialSession as TrialSession
    from optuna_hermes.broker._client._sessions import INSIDE_VARIABLE as INSIDE_VARIABLE
    from optuna_hermes.broker._client._sessions import SessionEntry as SessionEntry
    from optuna_hermes.broker._client._sessions import StudyIdentity as StudyIdentity
    from optuna_hermes.broker._client._sessions import sessions as sessions
    from optuna_hermes.broker._client._starting import connect_or_start as connect_or_start
    from optuna_hermes.broker._client._starting import end_idle as end_idle
    from optuna_hermes.broker._client._starting import with_other_devices as with_other_devices
    from optuna_hermes.broker._client._watched_study import WatchedStudy as WatchedStudy
    from optuna_hermes.broker._protocol import OpenStudy as OpenStudy
    from optuna_hermes.broker._protocol import StudySpec as StudySpec

_MODULES = {
    "Connection": "_client._connection",
    "OpenStudy": "_protocol",
    "INSIDE_VARIABLE": "_client._sessions",
    "SessionEntry": "_client._sessions",
    "TrialSession": "_client._session",
    "StudyIdentity": "_client._sessions",
    "StudySpec": "_protocol",
    "WatchedStudy": "_client._watched_study",
    "broker_status": "_client._connection",
    "connect": "_client._connection",
    "connect_if_any": "_client._connection",
    "connect_or_start": "_client._starting",
    "connect_with_retry": "_client._connection",
    "end_idle": "_client._starting",
    "pending_endings": "_client._reconnecting",
    "sessions": "_client._sessions",
    "with_other_devices": "_client._starting",
}


def __getattr__(name: str) -> Any:
    # The broker's own process is no client, and a client that only asks for the status needs no
    # session, which imports NumPy to suspend.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
