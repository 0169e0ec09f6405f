"""Where one run waits, and its ways from one tier to another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from optuna_hermes.errors import CheckpointError, SuspendError, UnwritableError
from optuna_hermes.model import TierName
from optuna_hermes.suspend._base import Held, State, StoredState
from optuna_hermes.suspend._disk import write
from optuna_hermes.suspend._host import Host
from optuna_hermes.suspend._resident import Resident

log = logging.getLogger(__name__)


class Parking:
    """Moves a run between the tiers; a tier that cannot take it is replaced by one that can.

    Args:
        folder: where its checkpoints go, None if it has no such place.
        known: the checkpoints that the ledger names, whose files must stay.
    """

    def __init__(self, folder: Path | None, known: Callable[[], Collection[StoredState]]) -> None:
        self.tier: TierName | None = None
        self._folder = folder
        self._known = known
        self._resident = Resident()
        self._host = Host()
        self._held = Held(device_bytes=0)
        self._refused = False
        self._unwritable = False

    def stores(self, state: State) -> bool:
        """Whether the run can be put on disk from where it is."""
        return state.stores and self._folder is not None and not self._refused

    def put(self, state: State, tier: TierName) -> Held:
        """Put a run into ``tier``, from its device or from the tier it is in.

        ``self.tier`` says afterwards where it is: a run that host memory cannot take goes to disk,
        and one that cannot be stored, or that the file system does not take, stays where it is.

        Raises:
            CheckpointError: it is on its device, should go to disk, and holds something that
                cannot be stored.
        """
        if tier == "host" and not self._in_host(state):
            tier = "disk"
        if tier == "disk" and self.stores(state):
            self._store(state)
        if tier == "resident" or self.tier is None:
            if self.tier == "host":
                self._host.resume()
            self.tier, self._held = "resident", self._resident.suspend(state)
        return self._held

    def back(self) -> None:
        """Bring the run back onto its device.

        Raises:
            SuspendError: the device has no room; the run is still in host memory.
        """
        if self.tier == "host":
            self._host.resume()
        self.tier, self._refused = None, False

    def leave(self) -> None:
        """The process will end: whoever still reads a tensor of the run finds memory there."""
        if self.tier == "host":
            self._host.abandon()
        self.tier = None

    def _in_host(self, state: State) -> bool:
        if self.tier == "host":
            return True
        try:
            self._held = self._host.suspend(state)
        except SuspendError:
            return False
        self.tier = "host"
        return True

    def _store(self, state: State) -> None:
        assert self._folder is not None
        tree: dict[str, Any] = self._host.tree() if self.tier == "host" else state.dump()
        try:
            stored = write(
                self._folder, tree, run=state.name, units=state.units, known=self._known()
            )
        except CheckpointError as error:
            if self.tier is None and not isinstance(error, UnwritableError):
                raise
            if not self._unwritable:  # once for each time that the file system takes nothing
                log.warning("%s waits where it is: %s", state.name.capitalize(), error)
            self._unwritable = isinstance(error, UnwritableError)
            self._refused = not self._unwritable  # who asks again may find room
            return
        self._unwritable = False
        self.leave()
        self.tier, self._held = "disk", Held(device_bytes=0, stored=stored)
