"""What the ledger keeps: one record for each kind of row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.model import RunState, TierName


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run as the ledger keeps it.

    Args:
        study: the study's key.
        number: the trial's number.
        trial_id: Optuna's id of the trial.
        state: as in ``model.RunState``.
        tier: where its state is, None if nowhere.
        host: the host that had it last.
        owner: the broker that it belongs to, None if to nobody; see ``Ledger``.
        units: units trained, counting those that were trained twice.
        slices: leases it has had.
        suspensions: how often it gave up a device and was not finished.
        device_seconds: device time it has had.
        energy_joules: what its devices took in that time, None if nobody could tell.
        losses: processes it has lost since its last new unit.
        submitted: wall clock seconds (Unix time) of its admission.
        updated: wall clock seconds of the last change.
    """

    study: str
    number: int
    trial_id: int
    state: RunState
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
        """``energy_joules`` for people."""
        return None if self.energy_joules is None else self.energy_joules / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRecord:
    """One report: the value of a run after ``unit`` units (counted from 1)."""

    study: str
    number: int
    unit: int
    step: int
    value: float
    device_seconds: float
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """One run's right to some devices for one slice.

    ``started`` and ``ended`` are wall clock seconds; ``ended`` is None while the lease is live.
    ``number`` is None until a new trial's lease knows its trial. Device ids are ``host/id``.
    ``owner`` is the broker that granted it, None where there is only one.
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
    """A checkpoint whose bytes are safe on disk.

    Args:
        path: absolute path of the file.
        units: units the run had reported when it was written.
        size_bytes: length of the file.
        sha256: hex digest of the file.
    """

    study: str
    number: int
    path: str
    units: int
    size_bytes: int
    sha256: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """One line of the story of a study: ``detail`` is JSON."""

    study: str
    number: int | None
    kind: str
    at: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """A broker that shares studies with others.

    Args:
        name: its host's name; no two hosts that share a ledger have the same.
        instance: its own name, which no broker ever had before: the ``owner`` of what it holds.
        devices: ids of its devices.
        load: how busy it is, by a measure that all brokers share; less is better.
        wants: the keys of studies of which it could train more, if there were anything for it.
        age_seconds: how long ago it was last heard of, by the ledger's clock. ``beat`` ignores it.
    """

    name: str
    instance: str
    devices: tuple[str, ...] = ()
    load: float = 0.0
    wants: tuple[str, ...] = ()
    age_seconds: float = 0.0
