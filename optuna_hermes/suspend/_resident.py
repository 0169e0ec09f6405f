"""The tier on the device itself."""

from __future__ import annotations

from optuna_hermes.model import TierName
from optuna_hermes.suspend._base import Footprint, Tier, TrialState
from optuna_hermes.suspend._storages import device_of, held_bytes


class Resident(Tier):
    """The resident tier: the trial keeps its device memory, nothing is copied."""

    name: TierName = "resident"

    def suspend(self, state: TrialState) -> Footprint:
        """See ``Tier``; every trial can wait here."""
        roots = list(state.roots())
        return Footprint(device_bytes=held_bytes(roots, device_of(roots)))

    def resume(self) -> None:
        """See ``Tier``; nothing was changed."""
