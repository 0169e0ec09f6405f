"""Records of the ledger: one class for each kind of row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.model import Checkpoint, TierName, TrialStatus

DEAD_SECONDS = 30.0
"""Age of its last heartbeat from which a broker counts as gone."""

MOST_NUMBERS = 900
"""Most trials that a statement names: each is a variable, of which an old SQLite takes 999."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """The row of a trial in the ledger.

    Args:
        study: the study's key, as in all records.
        tier: the tier that holds its state, None if there is none.
        host: the host that had it last.
        owner: the broker that it belongs to, None for no broker; see ``Ledger``.
        units: units trained, counting those that were trained twice.
        slices: number of leases it has had.
        suspensions: number of times it gave up a device before it was finished.
        device_seconds: device time it has had.
        energy_joules: energy of its devices in that time, None if it was not measured.
        losses: number of processes it has lost since its last new unit.
        submitted, updated: Unix time of its admission, and of the last change.
    """

    study: str
    number: int
    trial_id: int
    state: TrialStatus
    tier: TierName | None = None
    host: str | None = None
    owner: str | None = None
    units: int = 0
    slices: int = 0
    suspensions: int = 0
    device_seconds: float = 0.0
    energy_joules: float | None = None
    losses: int = 0
    submitted: float = 0.0
    updated: float = 0.0

    @property
    def watt_hours(self) -> float | None:
        """``energy_joules`` in watt-hours."""
        return None if self.energy_joules is None else self.energy_joules / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRecord:
    """One report: the value of a trial after ``unit`` units (counted from 1)."""

    study: str
    number: int
    unit: int
    step: int
    value: float
    device_seconds: float
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """One trial's right to some devices (``host/id``) for one slice.

    ``ended`` is None while the lease is live, ``number`` until the trial is created. ``owner`` is
    the broker that granted it, None where there is only one.
    """

    study: str
    epoch: int
    number: int | None
    devices: tuple[str, ...]
    host: str
    started: float
    ended: float | None = None
    owner: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint of a trial, saved at ``at`` (Unix time)."""

    study: str
    number: int
    checkpoint: Checkpoint
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """One entry of a study's event log: ``detail`` is JSON."""

    study: str
    number: int | None
    kind: str
    at: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """A broker that shares studies with others.

    Args:
        name: its host's name, unique among the hosts that share a ledger.
        instance: its own name, never used before by any broker: the ``owner`` of its trials.
        load: by a measure that all brokers share; less is better.
        wants: the keys of studies of which it could train more trials, if there were any.
        age_seconds: age of its last heartbeat, by the ledger's clock. ``beat`` ignores it.
    """

    name: str
    instance: str
    devices: tuple[str, ...] = ()
    load: float = 0.0
    wants: tuple[str, ...] = ()
    age_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeMark:
    """The state of a ledger's changes, by which a broker knows if there is more to read.

    Args:
        change: the newest change number of the ledger.
        forgotten: the change number at which rows of a study were last removed.
        hosts: all brokers, by name.
    """

    change: int
    forgotten: int
    hosts: tuple[HostRecord, ...]
