"""Checkpoints and batch sizes as messages hold them, and back."""

from __future__ import annotations

from pathlib import Path

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.suspend._base import BatchChoice, StoredState


def wired(state: StoredState) -> wire.SavedCheckpoint:
    """Checkpoint as a message holds it."""
    return wire.SavedCheckpoint(
        path=str(state.path), units=state.units, size_bytes=state.size_bytes, sha256=state.sha256
    )


def unwired(saved: wire.SavedCheckpoint) -> StoredState:
    """Checkpoint of a message, as the rest of the package holds it."""
    return StoredState(
        path=Path(saved.path), units=saved.units, size_bytes=saved.size_bytes, sha256=saved.sha256
    )


def wired_sizes(sizes: BatchChoice) -> wire.BatchSizes:
    """Batch sizes as a message holds them, with the ``MOST_SIZES`` speeds measured last."""
    return wire.BatchSizes(
        now=sizes.now,
        least=sizes.least,
        most=sizes.most,
        seconds=dict([*sizes.seconds.items()][-wire.MOST_SIZES :]),
        unit_samples=sizes.unit_samples,
        most_devices=sizes.most_devices,
    )
