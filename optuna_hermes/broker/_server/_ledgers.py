"""Ledgers of a broker's studies; what can wait is written together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from optuna_hermes.broker._core import _events as events
from optuna_hermes.broker._server._apply_writes import WriterTerms
from optuna_hermes.broker._server._writer import (
    LONGEST_PAUSE_SECONDS,
    WriteOutcome,
    Writer,
    Written,
)
from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.ledger._records import (
    MOST_NUMBERS,
    EventRecord,
    HostRecord,
    ReportRecord,
    TrialRecord,
)

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger

SLOW_SECONDS = 1.0
"""Time without progress after which a ledger counts as away: devices would wait for it."""

UNUSED_SECONDS = 10.0
"""Time after which a ledger whose studies have ended is closed, connections and thread too."""

MOST_LEDGERS = 100
"""Most ledgers of a broker: each has a thread of its own."""

PART_UNITS = 10_000
"""Units whose reports are read at once: a second's worth would count as a ledger that is away."""

_SILENT = "It is there but does not answer: look whether it hangs, or who has locked it."

_CAN_WAIT = (ReportRecord, EventRecord, events.SaveMemory)

T = TypeVar("T")

LedgerOutcome = WriteOutcome | events.OutageEnded


class Ledgers:
    """Writers of ledgers by study. Only ``close`` waits for a database.

    Reports, events and policy memory may wait for the next write that may not (a lease, a trial, a
    checkpoint) or for ``flush``: one transaction costs the same for one row and for ten.

    Args:
        notify: called with the outcome of writes, in the thread that ``post`` calls in.
        post: calls a function soon, in the thread that uses this object.
        opener: opens a ledger.
        observe_seconds: called with the duration of each transaction, if they are measured.
        terms: see ``WriterTerms``.
    """

    def __init__(
        self,
        notify: Callable[[LedgerOutcome], None],
        post: Callable[[Callable[[], None]], None],
        opener: Callable[[str], Ledger] = open_ledger,
        observe_seconds: Callable[[float], None] | None = None,
        terms: WriterTerms | None = None,
    ) -> None:
        self._terms = terms or WriterTerms()
        self._observe_seconds = observe_seconds
        self._notify = notify
        self._post = post
        self._opener = opener
        self._by_url: dict[str, Writer] = {}
        self._readers: dict[str, Writer] = {}
        self._used: dict[str, float] = {}
        self._url_of: dict[str, str] = {}
        self._in_outage: set[str] = set()
        self._waiting: dict[str, list[events.Write]] = {}
        self._written: Counter[str] = Counter()
        self._retried_at = 0.0

    def read(self, study: str, url: str, query: Callable[[Ledger], T]) -> Future[T]:
        """Ask the ledger of a study something, after all that was written to it until now.

        Raises:
            LedgerError: it would be one ledger too many.
        """
        if url not in self._by_url and len(self._by_url) >= MOST_LEDGERS:
            # Studies in memory may follow each other fast.
            self._close_unused(0.0, {each for each, w in self._by_url.items() if w.is_idle})
            if len(self._by_url) >= MOST_LEDGERS:
                raise LedgerError(
                    f"A broker serves {MOST_LEDGERS} databases at most: start it again when "
                    "its studies have ended."
                )
        self._open(url)
        self._url_of.setdefault(study, url)
        self._hand_over([study])
        return self._by_url[url].read(query)

    def read_aside(self, study: str, url: str, query: Callable[[Ledger], T]) -> Future[T]:
        """Ask as ``read`` does, on a thread and connection that no record waits for."""
        if url not in self._readers:
            # That a database is away its writer says.
            self._readers[url] = Writer(url, lambda outcome: None, opener=self._opener)
        reader, answer = self._readers[url], Future[T]()
        written = self.read(study, url, lambda ledger: None)
        written.add_done_callback(lambda _: reader.read(query, answer))
        return answer

    def when_writable(self, study: str, then: Callable[[], None]) -> None:
        """Call ``then`` when the database of a study has shown that it takes what is written."""
        answer = self._by_url[self._url_of[study]].read(_touch)
        answer.add_done_callback(lambda _: self._post(then))

    def set_ledger(self, study: str, url: str) -> None:
        """Write a study to this ledger from now on; it has been read there."""
        self._hand_over([study])
        self._open(url)  # closed as unused if reading took long, and the study was in another one
        self._url_of[study] = url

    def n_written(self, study: str) -> int:
        return self._written[study]

    def write(self, writes: Sequence[events.Write]) -> None:
        """Write records that may not wait, after those that waited; keep the others for later.

        Studies of one database take turns as their records do: it takes leases by epoch.
        """
        urgent: str | None = None
        for item in writes:
            self._waiting.setdefault(item.study, []).append(item)
            self._written[item.study] += 1
            if isinstance(item, _CAN_WAIT):
                continue
            if urgent is not None and urgent != item.study:
                self._hand_over([urgent])
            urgent = item.study
        if urgent is not None:
            self._hand_over([urgent])

    def flush(self) -> None:
        """Write all that waits, where the database answers; note where it does not."""
        now = time.monotonic()
        for url, writer in self._by_url.items():
            stuck = writer.stuck_since
            if stuck is not None and now - stuck > SLOW_SECONDS:
                self._on_outcome(url, events.OutageBegan(studies=(), reason=_SILENT))
            if now - self._retried_at > LONGEST_PAUSE_SECONDS:
                writer.retry()
        if now - self._retried_at > LONGEST_PAUSE_SECONDS:
            self._retried_at = now
        # In an outage what can wait stays here, and is one batch when the database is back.
        self._hand_over([s for s, url in self._url_of.items() if url not in self._in_outage])

    def close_idle(self, served: Collection[str]) -> None:
        """Close ledgers that were not used for a while, and forget studies that have ended.

        Those that are ``served`` are at work, or are being read.
        """
        now = time.monotonic()
        self._used.update({self._url_of[study]: now for study in served if study in self._url_of})
        idle = {url for url, writer in self._by_url.items() if writer.is_idle}
        for study in [each for each in self._url_of if each not in served]:
            if not self._waiting.get(study) and self._url_of[study] in idle:
                self._by_url[self._url_of[study]].read(methodcaller("unlock_study", study))
                del self._url_of[study], self._written[study]
                self._terms.limits.pop(study, None)
        self._close_unused(UNUSED_SECONDS, idle)

    def _close_unused(self, seconds: float, idle: Collection[str]) -> None:
        """Close ledgers that have no work, and that no study has had for so long."""
        now = time.monotonic()
        for url in [url for url, at in self._used.items() if now - at > seconds]:
            if not self._studies(url) and url in idle:
                # It has no work, so that its end waits for nothing.
                self._by_url.pop(url).close(0.0)
                if url in self._readers:
                    self._readers.pop(url).close(0.0)
                del self._used[url]

    def forget_this_broker(self) -> None:
        """Have the other brokers know that this one has ended."""
        for reader in self._readers.values():
            reader.close(SLOW_SECONDS)  # a heartbeat after that would deny it
        for writer in self._by_url.values():
            writer.read(partial(_leave, self._terms.instance))

    @property
    def pending(self) -> int:
        """Number of records that may still be written."""
        waiting = sum(len(items) for items in self._waiting.values())
        return waiting + sum(writer.n_promising for writer in self._by_url.values())

    def close(self, seconds: float) -> int:
        """Write for so many seconds at most, and close every ledger; return how many are lost."""
        self._hand_over(list(self._waiting))
        end = time.monotonic() + seconds
        for reader in self._readers.values():
            reader.close(0.0)
        return sum(w.close(max(0.0, end - time.monotonic())) for w in self._by_url.values())

    def _open(self, url: str) -> None:
        def tell(outcome: WriteOutcome) -> None:
            self._post(partial(self._on_outcome, url, outcome))

        if url not in self._by_url:
            self._by_url[url] = Writer(url, tell, opener=self._opener, terms=self._terms)
        self._used[url] = time.monotonic()

    def _hand_over(self, studies: Iterable[str]) -> None:
        for study in studies:
            items = self._waiting.pop(study, [])
            if items:
                self._by_url[self._url_of[study]].write(study, items)

    # -- outcomes of writes --------------------------------------------------------------------

    def _on_outcome(self, url: str, outcome: WriteOutcome) -> None:
        if isinstance(outcome, events.OutageBegan):
            if url not in self._in_outage:
                self._in_outage.add(url)
                self._notify(replace(outcome, studies=self._studies(url)))
            return
        if isinstance(outcome, Written) and outcome.items and self._observe_seconds is not None:
            self._observe_seconds(outcome.seconds)
        self._notify(outcome)
        if url in self._in_outage:
            self._in_outage.remove(url)
            self._notify(events.OutageEnded(studies=self._studies(url)))

    def _studies(self, url: str) -> tuple[str, ...]:
        return tuple(study for study, its in self._url_of.items() if its == url)


is_shared: Callable[[Ledger], bool] = attrgetter("shared")
"""True if brokers of other hosts may use a ledger too."""


def study_facts(study: str, presence: HostRecord | None, ledger: Ledger) -> dict[str, Any]:
    """Return what a ledger knows of a study, without its curves, as fields of ``StudyRead``.

    ``presence`` is that of the broker that asks, if others may share the ledger: hosts that share a
    study must know of each other first.
    """
    ledger.reopen()
    ledger.lock_study(study)
    if presence is not None:
        ledger.beat(presence)
    return {
        "shared": ledger.shared,
        "hosts": tuple(ledger.load_hosts()),
        "last_epoch": ledger.last_epoch(),
        "leases": tuple(ledger.load_leases(study, live=True)),
        "trials": tuple(ledger.load_trials(study)),
        "checkpoints": tuple(ledger.load_checkpoints(study)),
        "overrides": ledger.load_overrides(study),
        "memory": ledger.load_memory(study, "" if presence is None else presence.name),
    }


def in_parts(trials: Iterable[TrialRecord]) -> Iterator[list[int]]:
    """Numbers of trials whose curves are read together: between them other records are written."""
    part, units = list[int](), 0
    for trial in trials:
        part.append(trial.number)
        units += 1 + trial.units
        if units >= PART_UNITS or len(part) >= MOST_NUMBERS:
            yield part
            part, units = [], 0
    if part:
        yield part


def _leave(instance: str, ledger: Ledger) -> None:
    if ledger.shared:
        ledger.forget_host(instance, dead_after_seconds=0.0)


def _touch(ledger: Ledger) -> None:
    """Commit a transaction that writes nothing: it waits for the database, and for its locks."""
    with ledger.batch():
        pass
