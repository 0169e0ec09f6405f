"""The moves of a suspended trial between tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna_hermes.errors import CheckpointError, SuspendError, UnwritableError
from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.suspend._base import CleanPoint, Footprint
from optuna_hermes.suspend._tiers._disk import write
from optuna_hermes.suspend._tiers._host import HostTier
from optuna_hermes.suspend._tiers._tensor_storages import held_bytes, settled

log = logging.getLogger(__name__)


class TierMover:
    """Moves a trial between the tiers; falls back to another tier if one cannot take it.

    Args:
        known: the checkpoints that the ledger names, whose files must stay.
        url: see ``Session.checkpoint_url``.
    """

    def __init__(
        self,
        folder: Path | None,
        known: Callable[[], Collection[Checkpoint]],
        url: str | None = None,
    ) -> None:
        self.tier: TierName | None = None
        self._folder = folder
        self._url = url
        self._known = known
        self._host = HostTier()
        self._footprint = Footprint(device_bytes=0)
        self._refused = False
        self._unwritable = False

    def can_store(self, state: CleanPoint) -> bool:
        """True if the trial can go to disk from its present tier."""
        return state.can_store and self._folder is not None and not self._refused

    def put(self, state: CleanPoint, tier: TierName) -> Footprint:
        """Put a trial into ``tier``, from its device or from its present tier.

        ``self.tier`` is afterwards the tier it is in: a trial that host memory cannot take goes to
        disk; one that cannot be stored, or whose checkpoint cannot be written, stays where it is.

        Raises:
            SuspendError: it is in host memory, should be ``resident``, and the device has no room;
                it is still in host memory.
            CheckpointError: it is on its device, should go to disk, and holds something that
                cannot be stored.
        """
        if tier == "host" and not self._in_host(state):
            tier = "disk"
        if tier == "disk" and self.can_store(state):
            self._store(state)
        # The resident tier takes every trial, also one that host memory and disk have refused.
        if tier == "resident" or self.tier is None:
            if self.tier == "host":
                self.back()  # host memory is kept: it trains next, and may need it again
            elif self.tier is None:
                self._host.free()  # others may need it
            held = replace(resident(state), host_bytes=self._host.size_bytes)
            self.tier, self._footprint = "resident", held
        return self._footprint

    def back(self) -> None:
        """Bring the trial back onto its device.

        Raises:
            SuspendError: the device has no room; the trial is still in host memory.
        """
        if self.tier == "host":
            self._host.resume()
        self.tier, self._refused = None, False

    def leave(self) -> None:
        """Leave the tier before the process ends; the trial's tensors may still be read safely."""
        if self.tier == "host":
            self._host.abandon()
        self.tier = None

    def _in_host(self, state: CleanPoint) -> bool:
        if self.tier == "host":
            return True
        try:
            self._footprint = self._host.suspend(state)
        except SuspendError:
            return False
        self.tier = "host"
        return True

    def _store(self, state: CleanPoint) -> None:
        assert self._folder is not None
        try:
            stored = state.saved() or self._written(state, self._folder)
        except CheckpointError as error:
            if self.tier is None and not isinstance(error, UnwritableError):
                raise
            if not self._unwritable:  # once for each time that the file system takes nothing
                log.warning("%s waits where it is: %s", state.name.capitalize(), error)
            self._unwritable = isinstance(error, UnwritableError)
            self._refused = not self._unwritable  # a later attempt may find room on the disk
            return
        self._unwritable = False
        self.leave()
        self.tier, self._footprint = "disk", Footprint(device_bytes=0, stored=stored)

    def _written(self, state: CleanPoint, folder: Path) -> Checkpoint:
        # In host memory the trial's own storages are empty, so that ``dump`` could not be stored.
        tree: dict[str, Any] = self._host.tree() if self.tier == "host" else state.dump()
        known = self._known()
        return write(folder, tree, trial=state.name, units=state.units, known=known, url=self._url)


def resident(state: CleanPoint) -> Footprint:
    """Footprint of a trial in the resident tier: it keeps its device memory, nothing is copied."""
    roots = list(state.roots())
    # Else the next trial's time on the device would begin with the rest of this one's work.
    return Footprint(device_bytes=held_bytes(roots, settled(roots)))
