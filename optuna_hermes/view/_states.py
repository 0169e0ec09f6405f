"""The current state of a trial: its ledger's state may be from before the end of a process."""

from __future__ import annotations

import socket
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.ledger import RunRecord


def serves(broker: Mapping[str, Any] | None, key: str) -> bool:
    """True if this host's broker serves a study."""
    return broker is not None and any(entry["key"] == key for entry in broker["studies"])


def holds(run: RunRecord, *, served: bool, alive: Container[str]) -> bool:
    """True if a process may have a trial, by its row of the ledger.

    Args:
        run: its row.
        served: true if this host's broker serves its study.
        alive: the brokers of all hosts whose heartbeat in the ledger is recent.
    """
    if run.host in (None, socket.gethostname()):
        return served
    return run.owner is None or run.owner in alive


def state_of(run: RunRecord, end: str | None, *, held: bool, stored: bool) -> str:
    """The state of a trial: its end in Optuna, else the ledger's state if that can still be true.

    Args:
        run: its row of the ledger.
        end: its end in Optuna, None if it has not ended.
        held: see ``holds``.
        stored: true if it has a checkpoint.
    """
    if end is not None:
        return end
    if run.state in ("running", "parked") and not held:
        return "stored" if stored else "pending"
    return run.state
