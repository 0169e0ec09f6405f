"""Lease state of a trial, kept for a broker that does not have it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import MOST_SECONDS, Checkpoint

MOST_REPORTS = 4096
"""Most reports that are kept: a broker that dies loses those of its last quarter of a second, or
those of an outage."""


@dataclass(kw_only=True)
class LeaseState:
    """A lease as its client knows it.

    Args:
        reattach: the message to the next broker, without what ``message`` adds.
        granted_at: time of the grant, on the clock of ``message``.
        reports: with the times at which they were made.
        checkpoints: by path, those that are not known to be in the ledger.
        end: that the lease is over.
    """

    reattach: wire.Reattach
    granted_at: float = 0.0
    reports: deque[tuple[float, wire.Report]] = field(
        default_factory=lambda: deque(maxlen=MOST_REPORTS)
    )
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    end: wire.Ended | wire.Released | None = None

    @classmethod
    def none(cls, study: wire.StudySpec) -> LeaseState:
        """State of a client without a lease, whose epoch is 0."""
        return cls(reattach=wire.Reattach(study=study, epoch=0, devices=()))

    @property
    def epoch(self) -> int:
        return self.reattach.epoch

    def change(self, **fields: Any) -> None:
        """Change fields of the message to the next broker."""
        self.reattach = msgspec.structs.replace(self.reattach, **fields)

    def granted(self, grant: wire.Grant, now: float) -> None:
        """Begin the next lease: the ledger has earlier reports then, not all checkpoints."""
        self.change(
            epoch=grant.epoch,
            devices=grant.devices,
            number=self.reattach.number if grant.number is None else grant.number,
            trial_id=self.reattach.trial_id if grant.trial_id is None else grant.trial_id,
            training=False,
            requested_tier=None,
            parked=None,
        )
        self.granted_at = now
        self.reports.clear()

    def message(self, now: float, device_seconds: float) -> wire.Reattach:
        """Message to the next broker, which does not know this one's clock."""
        return msgspec.structs.replace(
            self.reattach,
            held_seconds=now - self.granted_at,
            device_seconds=device_seconds,
            reports=tuple(
                # Without parameters: the message has those of the trial once.
                msgspec.structs.replace(report, params={}, age_seconds=min(now - at, MOST_SECONDS))
                for at, report in self.reports
            ),
            checkpoints=tuple(self.checkpoints.values()),
            ended=isinstance(self.end, wire.Ended),
        )
