"""The ledger that lives in this process: for tests, the simulator and dry runs."""

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
    """A ledger that ends with its process; otherwise it keeps every rule of the contract.

    JSON is kept as text here too, so that a caller who changes what was saved changes nothing.

    Args:
        clock: seconds of Unix time.
        shared: whether several brokers of a test are at it.

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
        """Whether brokers of other hosts may be at it too."""
        return self._shared

    def lock_study(self, study: str) -> None:
        """Nothing: no other process reaches it."""

    def unlock_study(self, study: str) -> None:
        """Nothing."""

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
        """Take a run for a broker, if it is nobody's or its holder is gone."""
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
        """Every run of a study, by number."""
        with self._lock:
            runs = [run for run in self._runs.values() if run.study == study]
        return sorted(runs, key=lambda run: run.number)

    def save_wish(self, study: str, number: int, wish: Wish | None) -> None:
        """Say what people want of a run, None for nothing; an unknown one is no error.

        ``save_run`` leaves it as it is.
        """
        with self._lock:
            self._wishes.pop((study, number), None)
            if wish is not None and (study, number) in self._runs:
                self._wishes[study, number] = wish

    def load_wishes(self, study: str) -> dict[int, Wish]:
        """What people want of runs of a study, by their numbers; also of runs that are over."""
        with self._lock:
            found = {number: wish for (key, number), wish in self._wishes.items() if key == study}
        return dict(sorted(found.items()))

    def add_report(self, report: ReportRecord) -> None:
        """Add a report; earlier ones of the same unit stay."""
        with self._lock:
            self._reported += 1
            self._reports.append((self._reported, report))

    def load_curves(self, study: str, numbers: Collection[int] | None = None) -> dict[int, Curve]:
        """The curve of every run that has reported (or of these), each unit as last reported."""
        with self._lock:
            return curves_of(
                (each.number, each.unit, each.step, each.value, each.device_seconds)
                for _, each in self._reports
                if each.study == study and (numbers is None or each.number in numbers)
            )

    def load_reports(self, study: str, *, after: int = 0) -> list[tuple[int, ReportRecord]]:
        """Every report of a study after a position, each with its own, as they were written."""
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

    def load_leases(
        self, study: str | None = None, *, live: bool = False, since: int = 0
    ) -> list[LeaseRecord]:
        """Leases of a study (or of all), by epoch; on request only some of them."""
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

    def trim_events(self, study: str, before: float) -> int:
        """Remove the lines of a study's story that are older than a time; how many there were."""
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
        """Say that a broker lives, and how busy it is: add its row, or replace it."""
        with self._lock:
            self._hosts[host.instance] = (host, self._clock())

    def load_hosts(self) -> list[HostRecord]:
        """Every broker that was heard of and not forgotten, by name."""
        with self._lock:
            now, hosts = self._clock(), list(self._hosts.values())
        aged = [replace(host, age_seconds=max(0.0, now - seen)) for host, seen in hosts]
        return sorted(aged, key=lambda host: (host.name, host.instance))

    def forget_host(self, instance: str, *, dead_after_seconds: float) -> bool:
        """End the leases of a broker that is gone, and forget it; its runs can be claimed."""
        with self._lock:
            for host in self.load_hosts():
                if host.instance == instance and host.age_seconds < dead_after_seconds:
                    return False
            self._hosts.pop(instance, None)
            self._end_leases(lambda held: held.owner == instance)
        return True

    def load_studies(self) -> list[str]:
        """The keys of all studies that the ledger knows anything of, in order."""
        with self._lock:
            keys = {run.study for run in self._runs.values()} | self._memory.keys()
            keys |= {report.study for _, report in self._reports}
            keys |= {lease.study for lease in self._leases.values()}
            keys |= {checkpoint.study for checkpoint in self._checkpoints}
            keys |= {event.study for event, _ in self._events}
        return sorted(keys)

    def forget_study(self, study: str) -> None:
        """Remove all that is known of a study; epochs still grow above those of its leases."""
        with self._lock:
            self._runs = {key: run for key, run in self._runs.items() if run.study != study}
            self._wishes = {key: wish for key, wish in self._wishes.items() if key[0] != study}
            self._reports = [each for each in self._reports if each[1].study != study]
            self._leases = {n: each for n, each in self._leases.items() if each.study != study}
            self._checkpoints = [each for each in self._checkpoints if each.study != study]
            self._events = [pair for pair in self._events if pair[0].study != study]
            self._memory.pop(study, None)

    def close(self) -> None:
        """Nothing to give back."""

    def _check_owner(self, study: str, number: int, by: str | None) -> None:
        run = self._runs.get((study, number))
        if run is not None and run.owner != by:
            raise not_owner(study, number, run.owner, by)

    def _known(self, study: str) -> int:
        """Runs of a study, and live leases from which further ones will come."""
        runs = {run.number for run in self._runs.values() if run.study == study}
        return len(runs) + sum(
            1
            for lease in self._leases.values()
            if lease.study == study and lease.ended is None and lease.number not in runs
        )

    def _end_leases(self, which: Callable[[LeaseRecord], bool]) -> None:
        for epoch in [lease.epoch for lease in self._leases.values() if which(lease)]:
            self.end_lease(epoch, self._clock())
