"""A broker's writes in one transaction, and its messages about outages of databases."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from optuna_hermes.broker._core._event_log import is_of_grant
from optuna_hermes.broker._core._events import OutageBegan, OutageEnded, Write, WritesFailed
from optuna_hermes.broker._server import _ledgers, _writer
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.broker._server._writer import Written
from optuna_hermes.errors import LedgerError, LedgerOutageError
from optuna_hermes.ledger import EventRecord, LeaseRecord, Ledger, ReportRecord
from support.memory_ledger import MemoryLedger

DEADLINE = 20.0


def report(unit: int, study: str = "s") -> ReportRecord:
    return ReportRecord(
        study=study, number=0, unit=unit, step=unit, value=0.5, device_seconds=1.0, at=0.0
    )


def lease(epoch: int, study: str = "s") -> LeaseRecord:
    return LeaseRecord(
        study=study, epoch=epoch, number=0, devices=("h/cpu:0",), host="h", started=0.0
    )


class Desk:
    """Ledgers with a loop that trials when the test lets it."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.outcomes: list[Any] = []
        self.made: dict[str, MemoryLedger] = {}
        self.here = threading.Event()
        self.here.set()
        self.ledgers = Ledgers(self.outcomes.append, self.calls.put, self._open)

    def _open(self, url: str) -> Ledger:
        if url == "away":
            raise LedgerOutageError("no route to host")
        if url == "hangs":
            self.here.wait(DEADLINE)
        return self.made.setdefault(url, MemoryLedger())

    def heard_of_grants(self) -> list[str]:
        """The kinds of the events of grants that are to be logged."""
        told = (each.items for each in self.outcomes if isinstance(each, Written))
        return [record.kind for items in told for record in items if is_of_grant(record)]

    def serve(self, study: str = "s", url: str = "one") -> None:
        self.ledgers.read(study, url, lambda ledger: None)

    def units(self, study: str = "s", url: str = "one") -> int:
        ask = self.ledgers._by_url[url].read(lambda ledger: ledger.load_curves(study))
        curves = ask.result(DEADLINE)
        return curves[0].units if curves else 0

    def wait_for(self, kind: type[Any]) -> Any:
        while not any(isinstance(news, kind) for news in self.outcomes):
            self.calls.get(timeout=DEADLINE)()
        return next(news for news in self.outcomes if isinstance(news, kind))


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.here.set()
    made.ledgers.close(DEADLINE)


def test_reports_wait_for_what_may_not(desk: Desk) -> None:
    """A report alone is not written; a lease takes it along, and ``flush`` writes the rest."""
    desk.serve()
    desk.ledgers.write([report(1)])
    assert desk.units() == 0
    desk.ledgers.write([report(2), lease(1)])
    assert desk.units() == 2
    desk.ledgers.write([report(3)])
    assert desk.ledgers.pending == 1
    desk.ledgers.flush()
    assert desk.units() == 3


def test_reading_comes_after_what_waits(desk: Desk) -> None:
    """A process that reads a study sees its last report."""
    desk.serve()
    desk.ledgers.write([report(1)])
    read = desk.ledgers.read("s", "one", lambda ledger: ledger.load_curves("s"))
    assert read.result(DEADLINE)[0].units == 1
    assert desk.ledgers.n_written("s") == 1


def test_what_is_committed_and_what_is_refused_is_heard(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is named when it is in the ledger, and when it will never be; so are its events."""

    def refuse(lease: LeaseRecord, *, limit: int | None) -> None:
        raise LedgerError("no leases here")

    desk.serve()
    carried_on = EventRecord(study="s", number=0, kind="carried on", at=0.0)
    desk.ledgers.write([lease(3), carried_on])
    while not any(isinstance(n, Written) and n.items for n in desk.outcomes):
        desk.calls.get(timeout=DEADLINE)()
    assert desk.heard_of_grants() == ["carried on"]
    monkeypatch.setattr(desk.made["one"], "commit_lease", refuse)
    desk.ledgers.write([lease(4), carried_on, report(1)])
    failed = desk.wait_for(WritesFailed)
    assert (failed.study, failed.epochs) == ("s", (4,))
    assert desk.units() == 1
    asked = desk.ledgers.read("s", "one", lambda ledger: ledger.load_events("s"))
    assert len(asked.result(DEADLINE)) == 1
    assert desk.heard_of_grants() == ["carried on"]


def test_a_database_that_is_away_is_heard_of_once(desk: Desk) -> None:
    """All studies in it are named, those elsewhere are not, and what can wait waits."""
    desk.serve("other", "one")
    desk.serve("s", "away")
    desk.ledgers.read("t", "away", lambda ledger: None)
    writes: list[Write] = [report(1), lease(1)]
    desk.ledgers.write(writes)
    assert desk.wait_for(OutageBegan).studies == ("s", "t")
    desk.calls.get(timeout=DEADLINE)()
    assert sum(isinstance(news, OutageBegan) for news in desk.outcomes) == 1
    desk.ledgers.write([report(2)])
    desk.ledgers.flush()
    assert len(desk.ledgers._waiting["s"]) == 1
    assert desk.ledgers.close(0.05) == 3


def test_a_database_that_hangs_counts_as_away(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises nothing: that nothing gets done is noticed, and that it is done at last too."""
    monkeypatch.setattr(_ledgers, "SLOW_SECONDS", 0.0)
    desk.here.clear()
    desk.serve("s", "hangs")
    desk.ledgers.flush()
    assert desk.wait_for(OutageBegan).studies == ("s",)
    desk.here.set()
    assert desk.wait_for(OutageEnded).studies == ("s",)


def test_a_ledger_that_nobody_needs_is_closed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A while after its last study has ended; what it is given then opens it again."""
    monkeypatch.setattr(_ledgers, "UNUSED_SECONDS", 0.0)
    desk.serve("s", "one")
    desk.serve("t", "two")
    desk.ledgers.write([lease(1)])
    assert desk.units() == 0  # all that was asked is done
    assert desk.units("t", "two") == 0
    writer = desk.ledgers._by_url["one"]
    desk.ledgers.close_idle({"t"})
    assert list(desk.ledgers._by_url) == ["two"]
    writer._thread.join(DEADLINE)
    assert not writer._thread.is_alive()
    desk.serve("s", "one")
    desk.ledgers.write([report(1), lease(2)])
    assert desk.units() == 1


def test_a_study_that_took_long_to_read_is_written_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger may be closed between the answer and its admission: it is opened again."""
    monkeypatch.setattr(_ledgers, "UNUSED_SECONDS", 0.0)
    desk.serve("s", "one")
    assert desk.units() == 0
    desk.ledgers.close_idle(())
    assert not desk.ledgers._by_url
    desk.ledgers.set_ledger("s", "one")
    desk.ledgers.write([report(1), lease(1)])
    assert desk.units() == 1


def test_a_study_that_has_ended_is_forgotten_where_others_go_on(desk: Desk) -> None:
    """A database that is always in use keeps no list of all studies that were ever in it."""
    desk.serve("s", "one")
    desk.serve("t", "one")
    desk.ledgers._terms.limits["s"] = 3
    desk.ledgers.write([report(1)])
    desk.ledgers.close_idle({"t"})
    assert desk.ledgers.n_written("s") == 1  # it has still to be written
    desk.ledgers.flush()
    assert desk.units() == 1
    assert desk.units("t", "one") == 0
    desk.ledgers.close_idle({"t"})
    assert list(desk.ledgers._url_of) == ["t"]
    assert desk.ledgers.n_written("s") == 0
    assert not desk.ledgers._terms.limits


def test_a_ledger_with_something_to_write_stays(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that wait for a database are not thrown away with its ledger."""
    monkeypatch.setattr(_ledgers, "UNUSED_SECONDS", 0.0)
    desk.here.clear()
    desk.serve("s", "hangs")
    desk.ledgers.write([report(1)])
    desk.ledgers.close_idle(())
    desk.ledgers.flush()
    desk.ledgers.close_idle(())
    assert list(desk.ledgers._by_url) == ["hangs"]
    desk.here.set()
    assert desk.units("s", "hangs") == 1


def test_records_that_were_refused_for_long_are_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker stays for what may still be written, but not for ever; it counts what is lost."""

    def refuse(record: ReportRecord) -> None:
        raise LedgerError("no such table: hermes_reports")

    desk.serve()
    assert desk.units() == 0
    monkeypatch.setattr(desk.made["one"], "add_report", refuse)
    desk.ledgers.write([report(1), lease(1)])
    desk.wait_for(WritesFailed)
    assert desk.ledgers.pending == 1
    monkeypatch.setattr(_writer, "REFUSED_SECONDS", 0.0)
    deadline = time.monotonic() + DEADLINE
    while desk.ledgers.pending and time.monotonic() < deadline:
        time.sleep(0.01)  # its thread has told of the refusal, and keeps the records next
    assert desk.ledgers.pending == 0
    desk.ledgers.write([report(2)])
    assert desk.ledgers.pending == 1
    assert desk.ledgers.close(DEADLINE) == 2


def test_a_ledger_just_asked_for_stays(desk: Desk) -> None:
    """Between the question about a study and its admission nobody serves it yet."""
    desk.serve()
    assert desk.units() == 0
    desk.ledgers.close_idle(())
    assert list(desk.ledgers._by_url) == ["one"]


def test_a_database_is_asked_after_all_that_was_given(desk: Desk) -> None:
    """The answer means that what was given before is written, and that more would be."""
    desk.serve()
    desk.ledgers.write([lease(1)])
    said: list[int] = []
    desk.ledgers.when_writable("s", lambda: said.append(desk.made["one"].last_epoch()))
    while not said:
        desk.calls.get(timeout=DEADLINE)()
    assert said == [1]


def test_studies_of_one_database_write_their_leases_by_epoch(desk: Desk) -> None:
    """One answer may grant devices to two studies in turn, and the ledger takes no epoch late."""
    desk.serve("a")
    desk.serve("b")
    desk.ledgers.write([lease(1, "a"), lease(2, "b"), lease(3, "a")])
    leases = desk.ledgers.read("a", "one", lambda ledger: ledger.load_leases()).result(DEADLINE)
    assert [each.epoch for each in leases] == [1, 2, 3]


def test_a_study_is_written_where_it_was_read(desk: Desk) -> None:
    """Whoever asks for a served study of another database does not lead its records there."""
    desk.serve("s", "one")
    desk.ledgers.set_ledger("s", "one")
    desk.serve("s", "two")
    desk.ledgers.write([report(1), lease(1)])
    assert desk.units("s", "one") == 1
    assert desk.units("s", "two") == 0
