"""The ledger that lives in this process: for tests, the simulator and dry runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any, final

from optuna_hermes.errors import StaleEpochError
from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.model import Curve


def curves_of(reports: Iterable[ReportRecord]) -> dict[int, Curve]:
    """The curve of every run in ``reports``, which come in the order they were written.

    A unit that was reported twice shows its later report.
    """
    units: dict[int, dict[int, ReportRecord]] = {}
    for report in reports:
        units.setdefault(report.number, {})[report.unit] = report
    return {number: _curve(units[number]) for number in sorted(units)}


def _curve(reports: dict[int, ReportRecord]) -> Curve:
    ordered = [reports[unit] for unit in sorted(reports)]
    return Curve(
        steps=tuple(report.step for report in ordered),
        values=tuple(report.value for report in ordered),
        device_seconds=tuple(report.device_seconds for report in ordered),
    )


def stale_epoch(epoch: int, last: int) -> StaleEpochError:
    """The error of a lease that came too late."""
    return StaleEpochError(
        f"A lease's epoch must be above every earlier one, which is {last}, but got {epoch}. "
        "Another broker was faster: read last_epoch() again and decide anew."
    )


@final
class MemoryLedger(Ledger):
    """A ledger that ends with its process; otherwise it keeps every rule of the contract.

    JSON is kept as text here too, so that a caller who changes what was saved changes nothing.

    Example:
        >>> ledger = MemoryLedger()
        >>> ledger.last_epoch()
        0
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._last_epoch = 0
        self._runs: dict[tuple[str, int], RunRecord] = {}
        self._reports: list[ReportRecord] = []
        self._leases: dict[int, LeaseRecord] = {}
        self._checkpoints: list[CheckpointRecord] = []
        self._memory: dict[str, str] = {}
        self._events: list[tuple[EventRecord, str]] = []

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write all that this thread writes inside of the block together, or nothing."""
        with self._lock:
            lock = self._lock
            before = {n: copy.copy(v) for n, v in vars(self).items() if v is not lock}
            try:
                yield
            except BaseException:
                vars(self).update(before)
                raise

    def save_run(self, run: RunRecord) -> None:
        """Add or replace the row of this study and number."""
        with self._lock:
            self._runs[run.study, run.number] = run

    def load_runs(self, study: str) -> list[RunRecord]:
        """Every run of a study, by number."""
        with self._lock:
            runs = [run for run in self._runs.values() if run.study == study]
        return sorted(runs, key=lambda run: run.number)

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        with self._lock:
            self._reports.append(report)

    def load_curves(self, study: str) -> dict[int, Curve]:
        """The curve of every run that has reported, each unit as it was last reported."""
        with self._lock:
            return curves_of(report for report in self._reports if report.study == study)

    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""
        return {number: curve.values[-1] for number, curve in self.load_curves(study).items()}

    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""
        with self._lock:
            return self._last_epoch

    def commit_lease(self, lease: LeaseRecord) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
        """
        with self._lock:
            if lease.epoch <= self._last_epoch:
                raise stale_epoch(lease.epoch, self._last_epoch)
            self._leases[lease.epoch] = lease
            self._last_epoch = lease.epoch

    def name_lease(self, epoch: int, number: int) -> None:
        """Say which trial the lease of a new trial went to; an unknown epoch is no error."""
        with self._lock:
            if epoch in self._leases:
                self._leases[epoch] = replace(self._leases[epoch], number=number)

    def end_lease(self, epoch: int, ended: float) -> None:
        """Close a lease; one that is closed already, or unknown, stays as it is."""
        with self._lock:
            lease = self._leases.get(epoch)
            if lease is not None and lease.ended is None:
                self._leases[epoch] = replace(lease, ended=ended)

    def load_leases(self, study: str | None = None) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch."""
        with self._lock:
            leases = list(self._leases.values())
        return [lease for lease in leases if study in (None, lease.study)]

    def save_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Add a checkpoint; the run's older ones stay until ``drop_checkpoint``."""
        with self._lock:
            self._checkpoints.append(checkpoint)

    def load_checkpoints(self, study: str, number: int | None = None) -> list[CheckpointRecord]:
        """Checkpoints of a study, or of one run, in the order they were saved."""
        with self._lock:
            checkpoints = list(self._checkpoints)
        return [
            checkpoint
            for checkpoint in checkpoints
            if checkpoint.study == study and number in (None, checkpoint.number)
        ]

    def drop_checkpoint(self, study: str, path: str) -> None:
        """Forget a checkpoint whose file is gone; one that is unknown is no error."""
        with self._lock:
            self._checkpoints = [
                checkpoint
                for checkpoint in self._checkpoints
                if (checkpoint.study, checkpoint.path) != (study, path)
            ]

    def load_memory(self, study: str) -> Any:
        """The policy's memory (JSON), None if there is none."""
        with self._lock:
            text = self._memory.get(study, "null")
        return json.loads(text)

    def save_memory(self, study: str, memory: Any) -> None:
        """Replace the policy's memory.

        Raises:
            TypeError: the memory is not JSON.
        """
        text = json.dumps(memory)
        with self._lock:
            self._memory[study] = text

    def add_event(self, event: EventRecord) -> None:
        """Add a line to the story.

        Raises:
            TypeError: the detail is not JSON.
        """
        detail = json.dumps(event.detail)
        with self._lock:
            self._events.append((event, detail))

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The story of a study, or of one run, in the order it was written."""
        with self._lock:
            events = list(self._events)
        return [
            replace(event, detail=json.loads(detail))
            for event, detail in events
            if event.study == study and number in (None, event.number)
        ]

    def close(self) -> None:
        """Nothing to give back."""
