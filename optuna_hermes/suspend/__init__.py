"""Suspension and resumption of trials: their state, and the tiers where that state waits."""

from __future__ import annotations

from optuna_hermes.suspend._base import (
    CleanPoint,
    Footprint,
    Session,
)
from optuna_hermes.suspend._state import kept_rng, rng_state, set_rng_state
from optuna_hermes.suspend._tiers._disk import read, write

__all__ = [
    "CleanPoint",
    "Footprint",
    "Session",
    "kept_rng",
    "read",
    "rng_state",
    "set_rng_state",
    "write",
]
