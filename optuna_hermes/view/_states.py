"""What state a run is in: what the ledger says may be older than the end of a process."""

from __future__ import annotations

import socket
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.ledger import RunRecord


def serves(broker: Mapping[str, Any] | None, key: str) -> bool:
    """Whether this host's broker serves a study."""
    return broker is not None and any(entry["key"] == key for entry in broker["studies"])


def holds(run: RunRecord, *, served: bool, alive: Container[str]) -> bool:
    """Whether a process may have a run, as the ledger says.

    Args:
        run: the run.
        served: whether this host's broker serves its study.
        alive: the brokers that other hosts would hear of.
    """
    if run.host in (None, socket.gethostname()):
        return served
    return run.owner is None or run.owner in alive


def state_of(run: RunRecord, end: str | None, *, held: bool, stored: bool) -> str:
    """The state of a run; what the ledger says may be older than the end of a process.

    Args:
        run: the run.
        end: how its trial has ended as Optuna knows it, None if it has not.
        held: see ``holds``.
        stored: whether it has a checkpoint.
    """
    if end is not None:
        return end
    if run.state in ("running", "parked") and not held:
        return "stored" if stored else "pending"
    return run.state
