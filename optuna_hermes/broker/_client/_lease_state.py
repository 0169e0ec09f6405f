"""Lease state of a trial, kept for a broker that does not have it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import msgspec

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import BatchSizes, Checkpoint, TierName

MOST_REPORTS = 4096
"""Most reports that are kept: a broker that dies loses those of its last quarter of a second, or
those of an outage."""


@dataclass(kw_only=True)
class LeaseState:
    """A lease as its client knows it; ``Resume`` says what the fields mean.

    Args:
        granted_at: time of the grant, on the clock of ``resume``.
        reports: with the times at which they were made.
        checkpoints: by path, those that are not known to be in the ledger.
        end: that the lease is over.
    """

    epoch: int = 0
    device: str = ""
    number: int | None = None
    trial_id: int | None = None
    granted_at: float = 0.0
    training: bool = False
    asked: TierName | None = None
    stores: bool = False
    need_bytes: int | None = None
    units_left: int | None = None
    params: wire.Params = field(default_factory=dict)
    reports: deque[tuple[float, wire.Report]] = field(
        default_factory=lambda: deque(maxlen=MOST_REPORTS)
    )
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    parked: wire.Parked | None = None
    end: wire.Ended | wire.Released | None = None
    sizes: BatchSizes | None = None
    others: tuple[str, ...] = ()

    def granted(self, grant: wire.Grant, now: float) -> LeaseState:
        """State under the next lease: the ledger has earlier reports then, not all checkpoints."""
        return replace(
            self,
            epoch=grant.epoch,
            device=grant.devices[0],
            others=grant.devices[1:],
            number=self.number if grant.number is None else grant.number,
            trial_id=self.trial_id if grant.trial_id is None else grant.trial_id,
            granted_at=now,
            training=False,
            asked=None,
            reports=deque(maxlen=MOST_REPORTS),
            parked=None,
        )

    def resume(self, study: wire.StudySpec, now: float, device_seconds: float) -> wire.Resume:
        return wire.Resume(
            study=study,
            epoch=self.epoch,
            device=self.device,
            number=self.number,
            trial_id=self.trial_id,
            held_seconds=now - self.granted_at,
            device_seconds=device_seconds,
            training=self.training,
            asked=self.asked,
            stores=self.stores,
            need_bytes=self.need_bytes,
            units_left=self.units_left,
            params=self.params,
            reports=tuple(
                # Without parameters: the message has those of the trial once.
                msgspec.structs.replace(report, params={}, age_seconds=now - at)
                for at, report in self.reports
            ),
            checkpoints=tuple(self.checkpoints.values()),
            parked=self.parked,
            sizes=self.sizes,
            others=self.others,
        )
