"""What a run says of itself, as messages hold it, and back."""

from __future__ import annotations

from pathlib import Path

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.suspend._base import BatchSizes, StoredState


def wired(state: StoredState) -> wire.SavedCheckpoint:
    """A checkpoint for a message."""
    return wire.SavedCheckpoint(
        path=str(state.path),
        units=state.units,
        size_bytes=state.size_bytes,
        sha256=state.sha256,
    )


def unwired(saved: wire.SavedCheckpoint) -> StoredState:
    """A checkpoint of a message."""
    return StoredState(
        path=Path(saved.path),
        units=saved.units,
        size_bytes=saved.size_bytes,
        sha256=saved.sha256,
    )


def wired_sizes(sizes: BatchSizes) -> wire.BatchSizes:
    """Batch sizes for a message: the speeds of so many that were measured last."""
    return wire.BatchSizes(
        now=sizes.now,
        least=sizes.least,
        most=sizes.most,
        seconds=dict([*sizes.seconds.items()][-wire.MOST_SIZES :]),
        unit_samples=sizes.unit_samples,
        most_devices=sizes.most_devices,
    )
