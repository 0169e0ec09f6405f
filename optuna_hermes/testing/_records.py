"""Records for tests of ledgers, with defaults for fields that a test does not set."""

from __future__ import annotations

from typing import Any

from optuna_hermes.ledger import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    ReportRecord,
    RunRecord,
)

STUDY = "study"
OTHER = "another study"
UNICODE = "größe 学習 🌱 'quoted' \"%s\" \\"


def run(number: int = 0, **fields: Any) -> RunRecord:
    """A run, with defaults for fields that the test does not set."""
    defaults: dict[str, Any] = {"study": STUDY, "trial_id": number, "state": "pending"}
    return RunRecord(**{**defaults, **fields}, number=number)


def report(unit: int, value: float, *, number: int = 0, **fields: Any) -> ReportRecord:
    """A report of a run that takes a second and ten steps for each unit."""
    defaults = {"study": STUDY, "step": unit * 10, "device_seconds": float(unit), "at": 0.0}
    return ReportRecord(**{**defaults, **fields}, number=number, unit=unit, value=value)


def lease(epoch: int, *, number: int | None = 0, **fields: Any) -> LeaseRecord:
    """A live lease of one device."""
    defaults = {"study": STUDY, "devices": ("a/cpu:0",), "host": "a", "started": 1.5}
    return LeaseRecord(**{**defaults, **fields}, number=number, epoch=epoch)


def checkpoint(path: str, *, number: int = 0, **fields: Any) -> CheckpointRecord:
    """A checkpoint at a path."""
    defaults = {"study": STUDY, "units": 3, "size_bytes": 2**40, "sha256": "0" * 64, "at": 2.5}
    return CheckpointRecord(**{**defaults, **fields}, number=number, path=path)


def event(kind: str, *, number: int | None = 0, **fields: Any) -> EventRecord:
    """An event."""
    return EventRecord(**{"study": STUDY, "at": 3.5, **fields}, number=number, kind=kind)


def host(instance: str, *, name: str = "a", **fields: Any) -> HostRecord:
    """A broker with two devices."""
    return HostRecord(name=name, instance=instance, **{"devices": ("0", "1"), **fields})
