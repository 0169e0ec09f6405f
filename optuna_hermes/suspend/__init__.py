"""How a run is suspended and brought back: its state, and the places where that state waits."""

from __future__ import annotations

from optuna_hermes.suspend._base import Session, StoredState
from optuna_hermes.suspend._disk import newest_good, verify, write
from optuna_hermes.suspend._state import kept_rng, rng_state, set_rng_state

__all__ = [
    "Session",
    "StoredState",
    "kept_rng",
    "newest_good",
    "rng_state",
    "set_rng_state",
    "verify",
    "write",
]
