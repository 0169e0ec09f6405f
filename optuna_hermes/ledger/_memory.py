"""The in-memory ledger of one process: for tests and dry runs."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any, final

from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    RunRecord,
)
from optuna_hermes.ledger._claims import (
    claimable,
    claimed,
    not_owner,
    stale_epoch,
    study_full,
)
from optuna_hermes.ledger._curves import curves_of
from optuna_hermes.model import Curve, Wish


@final
class MemoryLedger(Ledger):
    """A ledger that ends with its process and keeps all other rules of the contract.

    JSON is kept as text, so that a caller that changes a saved object does not change the ledger.

    Args:
        clock: seconds of Unix time.
        shared: whether several brokers of a test use it.

    Example:
        >>> ledger = MemoryLedger()
        >>> ledger.last_epoch()
        0
    """

    def __init__(self, clock: Callable[[], float] = time.time, *, shared: bool = False) -> None:
        self._clock = clock
        self._shared = shared
        self._lock = RLock()
        self._last_epoch = 0
        self._runs: dict[tuple[str, int], RunRecord] = {}
        self._wishes: dict[tuple[str, int], Wish] = {}
        self._reports: list[tuple[int, ReportRecord]] = []
        self._reported = 0
        self._leases: dict[int, LeaseRecord] = {}
        self._checkpoints: list[CheckpointRecord] = []
        self._memory: dict[str, str] = {}
        self._events: list[tuple[EventRecord, str]] = []
        self._hosts: dict[str, tuple[HostRecord, float]] = {}

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""
        return self._shared

    def lock_study(self, study: str) -> None:
        """Do nothing: no other process reaches this ledger."""

    def unlock_study(self, study: str) -> None:
        """Do nothing, as ``lock_study``."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Keep all writes of this thread inside of the block, or none if it raises."""
        with self._lock:
            lock = self._lock
            # Shallow copies are enough, since all records are immutable.
            before = {n: copy.copy(v) for n, v in vars(self).items() if v is not lock}
            try:
                yield
            except BaseException:
                vars(self).update(before)
                raise

    def save_run(self, run: RunRecord, *, by: str | None = None) -> None:
        """Add the row of this study and number, or replace it.

        Raises:
            NotOwnerError: its row has another owner than ``by``.
        """
        with self._lock:
            self._check_owner(run.study, run.number, by)
            self._runs[run.study, run.number] = run

    def claim_run(
        self, study: str, number: int, *, host: str, instance: str, dead_after_seconds: float
    ) -> RunRecord | None:
        """Claim a run for a broker, if it has no owner or its holder is gone."""
        with self._lock:
            run = self._runs.get((study, number))
            if run is None or not claimable(
                run,
                self.load_hosts(),
                host=host,
                instance=instance,
                dead_after_seconds=dead_after_seconds,
            ):
                return None
            if run.owner != instance:
                stored = bool(self.load_checkpoints(study, number))
                run = claimed(run, host=host, instance=instance, stored=stored)
                self._runs[study, number] = run
                self._end_leases(lambda held: (held.study, held.number) == (study, number))
            return run

    def load_runs(self, study: str) -> list[RunRecord]:
        """All runs of a study, by number."""
        with self._lock:
            runs = [run for run in self._runs.values() if run.study == study]
        return sorted(runs, key=lambda run: run.number)

    def save_wish(self, study: str, number: int, wish: Wish | None) -> None:
        """Save a user's override of a run, None to remove it; an unknown run is no error.

        ``save_run`` leaves it as it is.
        """
        with self._lock:
            self._wishes.pop((study, number), None)
            if wish is not None and (study, number) in self._runs:
                self._wishes[study, number] = wish

    def load_wishes(self, study: str) -> dict[int, Wish]:
        """The users' overrides of a study's runs, by number; also of runs that are over."""
        with self._lock:
            found = {number: wish for (key, number), wish in self._wishes.items() if key == study}
        return dict(sorted(found.items()))

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        with self._lock:
            self._reported += 1
            self._reports.append((self._reported, report))

    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curves of all runs that have reported (or of these), each unit as last reported."""
        with self._lock:
            return curves_of(
                (each.number, each.unit, each.step, each.value, each.device_seconds)
                for _, each in self._reports
                if each.study == study and (numbers is None or each.number in numbers)
            )

    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """All reports of a study after a position, each with its position, in order of writing."""
        with self._lock:
            return [each for each in self._reports if each[1].study == study and each[0] > after]

    def last_values(self, study: str) -> dict[int, float]:
        """The last value of every curve of ``load_curves``."""
        return {number: curve.values[-1] for number, curve in self.load_curves(study).items()}

    def last_epoch(self) -> int:
        """The highest epoch this ledger holds, 0 for an empty one."""
        with self._lock:
            return self._last_epoch

    def commit_lease(self, lease: LeaseRecord, *, limit: int | None = None) -> None:
        """Write a new lease.

        Raises:
            StaleEpochError: its epoch is not above every earlier one.
            NotOwnerError: its run has another owner.
            StudyFullError: the study has reached its limit.
        """
        with self._lock:
            if lease.epoch <= self._last_epoch:
                raise stale_epoch(lease.epoch, self._last_epoch)
            if lease.number is not None:
                self._check_owner(lease.study, lease.number, lease.owner)
            elif limit is not None and (known := self._known(lease.study)) >= limit:
                raise study_full(lease, limit, known)
            self._leases[lease.epoch] = lease
            self._last_epoch = lease.epoch

    def name_lease(self, epoch: int, number: int) -> None:
        """Set the trial of a lease granted before it existed; an unknown epoch is no error."""
        with self._lock:
            if epoch in self._leases:
                self._leases[epoch] = replace(self._leases[epoch], number=number)

    def end_lease(self, epoch: int, ended: float) -> None:
        """End a lease; one that has ended already, or is unknown, stays as it is."""
        with self._lock:
            lease = self._leases.get(epoch)
            if lease is not None and lease.ended is None:
                self._leases[epoch] = replace(lease, ended=ended)

    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch; optionally only live or recent ones."""
        with self._lock:
            leases = list(self._leases.values())
        return [
            lease
            for lease in leases
            if study in (None, lease.study)
            and lease.epoch >= since
            and not (live and lease.ended is not None)
        ]

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
        """Remove the record of a checkpoint whose file is gone; an unknown one is no error."""
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
        """Add an event to the event log.

        Raises:
            TypeError: the detail is not JSON.
        """
        detail = json.dumps(event.detail)
        with self._lock:
            self._events.append((event, detail))

    def load_events(self, study: str, number: int | None = None) -> list[EventRecord]:
        """The events of a study, or of one run, in the order of writing."""
        with self._lock:
            events = list(self._events)
        return [
            replace(event, detail=json.loads(detail))
            for event, detail in events
            if event.study == study and number in (None, event.number)
        ]

    def trim_events(self, study: str, before: float) -> int:
        """Remove a study's events that are older than a time; return their number."""
        with self._lock:
            kept = [
                (event, detail)
                for event, detail in self._events
                if event.study != study or event.at >= before
            ]
            trimmed = len(self._events) - len(kept)
            self._events = kept
        return trimmed

    def beat(self, host: HostRecord) -> None:
        """Write a broker's heartbeat and load: add its row, or replace it."""
        with self._lock:
            self._hosts[host.instance] = (host, self._clock())

    def load_hosts(self) -> list[HostRecord]:
        """All brokers that have sent a heartbeat and are not forgotten, by name."""
        with self._lock:
            now, hosts = self._clock(), list(self._hosts.values())
        aged = [replace(host, age_seconds=max(0.0, now - seen)) for host, seen in hosts]
        return sorted(aged, key=lambda host: (host.name, host.instance))

    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and remove it; its runs can be claimed."""
        with self._lock:
            for host in self.load_hosts():
                if host.instance == instance and host.age_seconds < dead_after_seconds:
                    return False
            self._hosts.pop(instance, None)
            self._end_leases(lambda held: held.owner == instance)
        return True

    def load_studies(self) -> list[str]:
        """The keys of all studies with any record in the ledger, in order."""
        with self._lock:
            keys = {run.study for run in self._runs.values()} | self._memory.keys()
            keys |= {report.study for _, report in self._reports}
            keys |= {lease.study for lease in self._leases.values()}
            keys |= {checkpoint.study for checkpoint in self._checkpoints}
            keys |= {event.study for event, _ in self._events}
        return sorted(keys)

    def forget_study(self, study: str) -> None:
        """Remove all records of a study; epochs still grow above those of its leases."""
        with self._lock:
            self._runs = {key: run for key, run in self._runs.items() if run.study != study}
            self._wishes = {key: wish for key, wish in self._wishes.items() if key[0] != study}
            self._reports = [each for each in self._reports if each[1].study != study]
            self._leases = {n: each for n, each in self._leases.items() if each.study != study}
            self._checkpoints = [each for each in self._checkpoints if each.study != study]
            self._events = [pair for pair in self._events if pair[0].study != study]
            self._memory.pop(study, None)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _check_owner(self, study: str, number: int, by: str | None) -> None:
        run = self._runs.get((study, number))
        if run is not None and run.owner != by:
            raise not_owner(study, number, run.owner, by)

    def _known(self, study: str) -> int:
        """Number of a study's runs, plus its live leases of trials not created yet."""
        runs = {run.number for run in self._runs.values() if run.study == study}
        return len(runs) + sum(
            1
            for lease in self._leases.values()
            if lease.study == study and lease.ended is None and lease.number not in runs
        )

    def _end_leases(self, which: Callable[[LeaseRecord], bool]) -> None:
        for epoch in [lease.epoch for lease in self._leases.values() if which(lease)]:
            self.end_lease(epoch, self._clock())
