"""Health of a device by the answers to its readings. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optuna_hermes.model import Device

LOST_SECONDS = 5.0
"""A device that answers with errors for this long is lost; some say at once that they are."""


@dataclass(kw_only=True)
class Health:
    """Knowledge of a device from earlier readings."""

    failing_since: float | None = None
    """Time of the first error, None if it answers."""
    lost: bool = False
    """It does not answer, and is not waited for."""
    fault: str = ""
    """Its last report of a fault of its own, empty if there is none."""

    def unread(self, device: Device, error: str, now: float, *, gone: bool, look: str) -> Device:
        """The device after a reading that failed with an error.

        Args:
            now: seconds of the monotonic clock.
            gone: whether that means that it is lost.
            look: where its user finds out more.
        """
        if self.failing_since is None:
            self.failing_since = now
        self.lost = self.lost or gone or now - self.failing_since >= LOST_SECONDS
        way_out = "reset it, or restart the host" if self.lost else look
        problem = f"it cannot be read ({error}): {way_out}"
        healthy = not (self.lost or self.fault)
        return replace(device, healthy=healthy, lost=self.lost, problem=problem)

    def answers(self) -> bool:
        """Note that it was read; True if it was lost until now."""
        was_lost = self.lost
        self.failing_since, self.lost = None, False
        if was_lost:  # it was reset, so that what it reported before is over
            self.fault = ""
        return was_lost
