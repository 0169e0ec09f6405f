"""A disk tier, made of the functions that write and read checkpoints, for the contract of tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from optuna_hermes.errors import CheckpointError, SuspendError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import CleanPoint, Footprint, write
from optuna_hermes.suspend._tiers._disk import _load


class DiskTier:
    """The disk tier: the trial waits in a checkpoint, and its process may end."""

    def __init__(self, folder: Path, known: Callable[[], Collection[Checkpoint]]) -> None:
        self._folder = folder
        self._known = known
        self._stored: tuple[Checkpoint, str] | None = None

    def suspend(self, state: CleanPoint) -> Footprint:
        """Write its checkpoint. The caller frees what the trial has in memory."""
        if not state.can_store:
            raise SuspendError(
                f"{state.name.capitalize()} cannot be stored from here: suspend it in memory."
            )
        stored = write(
            self._folder, state.dump(), trial=state.name, units=state.units, known=self._known()
        )
        self._stored = stored, state.name
        return Footprint(device_bytes=0, stored=stored)

    def resume(self) -> Any:
        if self._stored is None:
            raise CheckpointError(
                f"A trial must be suspended into {self._folder} before it is resumed from there."
            )
        return _load(*self._stored)
