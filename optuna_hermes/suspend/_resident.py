"""A run that waits on its device."""

from __future__ import annotations

from optuna_hermes.model import TierName
from optuna_hermes.suspend._base import Held, State, Tier
from optuna_hermes.suspend._storages import device_of, held_bytes


class Resident(Tier):
    """On the device: nothing is copied, and nothing is given back."""

    name: TierName = "resident"

    def suspend(self, state: State) -> Held:
        """See ``Tier``; every run can wait here."""
        roots = list(state.roots())
        return Held(device_bytes=held_bytes(roots, device_of(roots)))

    def resume(self) -> None:
        """See ``Tier``; nothing was changed."""
