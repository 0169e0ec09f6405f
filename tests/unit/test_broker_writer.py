"""The thread that writes a ledger: order, what is kept, and what becomes of a broken connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from optuna_hermes.broker._core._events import (
    ClaimConflict,
    EndLease,
    OutageBegan,
    SaveMemory,
    WritesFailed,
)
from optuna_hermes.broker._server._writer import WriteOutcome, Writer, Written
from optuna_hermes.errors import LedgerError, LedgerOutageError
from optuna_hermes.ledger import CheckpointRecord, LeaseRecord, ReportRecord
from optuna_hermes.model import Checkpoint
from support.memory_ledger import MemoryLedger

DEADLINE = 20.0


def report(unit: int) -> ReportRecord:
    return ReportRecord(
        study="s", number=0, unit=unit, step=unit, value=0.5, device_seconds=float(unit), at=0.0
    )


def lease(epoch: int) -> LeaseRecord:
    return LeaseRecord(
        study="s", epoch=epoch, number=0, devices=("h/cpu:0",), host="h", started=0.0
    )


def checkpoint(units: int) -> CheckpointRecord:
    return CheckpointRecord(
        study="s",
        number=0,
        checkpoint=Checkpoint(path=f"/{units}", units=units, size_bytes=1, sha256="0"),
        at=0.0,
    )


class Faulty:
    """A ledger in memory whose next transactions fail before, or after, they are committed."""

    def __init__(self) -> None:
        self.inner = MemoryLedger()
        self.before: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.after: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.refused: list[type] = []
        self.transactions = 0
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def batch(self) -> Iterator[None]:
        self.gate.wait(DEADLINE)
        _raise_next(self.before)
        with self.inner.batch():
            yield
        self.transactions += 1
        _raise_next(self.after)

    def add_report(self, record: ReportRecord) -> None:
        if ReportRecord in self.refused:
            raise LedgerError("no reports here")
        self.inner.add_report(record)

    def commit_lease(self, record: LeaseRecord, *, limit: int | None) -> None:
        if LeaseRecord in self.refused:
            raise LedgerError("no leases here")
        self.inner.commit_lease(record, limit=limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _raise_next(errors: queue.SimpleQueue[Exception]) -> None:
    if not errors.empty():
        raise errors.get()


class Bench:
    """A writer of a faulty ledger, with what it tells."""

    def __init__(self) -> None:
        self.ledger = Faulty()
        self.news: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
        self.writer = Writer("any", self.news.put, opener=lambda url: self.ledger)  # type: ignore[arg-type,return-value]

    def wait_for(self, kind: type[Any]) -> Any:
        """The next news of a kind; others before it are dropped."""
        while True:
            news = self.news.get(timeout=DEADLINE)
            if isinstance(news, kind):
                return news

    def flushed(self, ask: Callable[[Any], Any]) -> Any:
        return self.writer.read(ask).result(DEADLINE)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.ledger.gate.set()
    made.writer.close(DEADLINE)


def test_what_is_given_is_written_in_order_and_told(bench: Bench) -> None:
    """Batches come into the ledger as they were given, and the news names their records."""
    bench.ledger.gate.clear()
    bench.writer.write("s", [report(1), lease(1)])
    bench.writer.write("s", [lease(2)])
    assert bench.writer.stuck_since is not None
    bench.ledger.gate.set()
    told = [*bench.wait_for(Written).items]
    while len(told) < 3:
        told += bench.wait_for(Written).items
    assert told == [report(1), lease(1), lease(2)]
    assert [each.epoch for each in bench.ledger.inner.load_leases()] == [1, 2]
    assert bench.writer.pending == 0
    assert bench.writer.stuck_since is None


def test_what_queues_up_is_one_transaction(bench: Bench) -> None:
    """While one transaction is under way the next ones gather, and cost one."""
    bench.ledger.gate.clear()
    for epoch in range(1, 11):
        bench.writer.write("s", [lease(epoch)])
    bench.ledger.gate.set()
    assert bench.flushed(lambda ledger: ledger.last_epoch()) == 10
    assert bench.ledger.transactions <= 2


def test_a_question_sees_all_that_was_given_before(bench: Bench) -> None:
    """Reading waits for what is to be written first."""
    bench.writer.write("s", [report(1), report(2)])
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 2


def test_a_database_that_is_away_gets_everything_later(bench: Bench) -> None:
    """Nothing is lost or moved while it does not answer, and each try that fails is told."""
    for _ in range(2):
        bench.ledger.before.put(LedgerOutageError("no route to host"))
    bench.writer.write("s", [report(1), lease(1)])
    bench.writer.write("s", [report(2)])
    assert bench.wait_for(OutageBegan).reason == "no route to host"
    bench.wait_for(OutageBegan)
    bench.wait_for(Written)
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 2
    assert bench.ledger.inner.last_epoch() == 1


@pytest.mark.parametrize(
    "record", [lease(1), report(1), checkpoint(1)], ids=["lease", "report", "checkpoint"]
)
def test_a_commit_whose_answer_was_lost_is_not_repeated(bench: Bench, record: Any) -> None:
    """The connection breaks after the commit: the batch is looked for, and is there."""
    bench.ledger.after.put(LedgerOutageError("connection reset"))
    bench.writer.write("s", [record])
    bench.wait_for(OutageBegan)
    assert bench.wait_for(Written).items == (record,)
    assert bench.flushed(lambda ledger: ledger.last_epoch()) in (0, 1)
    assert bench.ledger.transactions == 1


def test_what_came_after_a_doubtful_commit_is_written(bench: Bench) -> None:
    """Only what was in the transaction counts as written by it."""
    bench.ledger.after.put(LedgerOutageError("connection reset"))
    bench.writer.write("s", [lease(1)])
    bench.wait_for(OutageBegan)
    bench.writer.write("s", [lease(2)])
    assert bench.flushed(lambda ledger: ledger.last_epoch()) == 2
    assert [each.epoch for each in bench.ledger.inner.load_leases()] == [1, 2]


def test_a_refused_lease_takes_nothing_else_with_it(bench: Bench) -> None:
    """Records of what has happened are written although the lease of the same answer is refused."""
    bench.ledger.refused.append(LeaseRecord)
    bench.writer.write("s", [report(1), checkpoint(1), lease(5)])
    refused = bench.wait_for(WritesFailed)
    assert refused == WritesFailed(study="s", epochs=(5,), reason="no leases here")
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 1
    assert [each.checkpoint.path for each in bench.ledger.inner.load_checkpoints("s")] == ["/1"]
    assert bench.ledger.inner.load_leases() == []


def test_a_stale_lease_is_to_be_granted_again(bench: Bench) -> None:
    """Another broker of the file has taken its epoch; what came with the lease is written."""
    bench.writer.write("s", [lease(5)])
    bench.wait_for(Written)
    bench.writer.write("s", [report(1), checkpoint(1), lease(5)])
    bench.writer.write("s", [lease(6)])
    assert bench.wait_for(ClaimConflict) == ClaimConflict(study="s", epochs=(5,), last_epoch=5)
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 1
    assert [each.checkpoint.path for each in bench.ledger.inner.load_checkpoints("s")] == ["/1"]
    assert [each.epoch for each in bench.ledger.inner.load_leases()] == [5, 6]


def test_the_end_of_a_stale_lease_leaves_that_of_another_broker_alone(bench: Bench) -> None:
    """It was given up before the database was back, where another broker has its epoch by now."""
    ended = EndLease(study="s", epoch=5, ended=1.0)
    others = replace(lease(5), study="t", host="other")
    bench.ledger.inner.commit_lease(others)
    bench.ledger.gate.clear()
    bench.writer.write("s", [lease(5)])
    bench.writer.write("s", [ended, report(1)])
    bench.ledger.gate.set()
    assert bench.wait_for(ClaimConflict).epochs == (5,)
    assert bench.wait_for(Written).items == (ended, report(1))
    assert bench.ledger.inner.load_leases() == [others]
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 1


def test_what_is_refused_is_told_and_tried_again(bench: Bench) -> None:
    """A report that the ledger will not have is kept, and nothing else waits for it."""
    bench.ledger.refused.append(ReportRecord)
    bench.writer.write("s", [report(1), checkpoint(1)])
    assert bench.wait_for(WritesFailed) == WritesFailed(study="s", reason="no reports here")
    assert len(bench.flushed(lambda ledger: ledger.load_checkpoints("s"))) == 1
    assert bench.writer.pending == 1
    bench.ledger.refused.clear()
    bench.writer.retry()
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 1
    assert bench.writer.pending == 0


def test_a_memory_that_is_not_json_is_refused_alone(bench: Bench) -> None:
    """A policy is the user's code: what it remembers may be impossible, and is not kept."""
    bench.writer.write("s", [report(1), SaveMemory(study="s", memory={1, 2})])
    assert bench.wait_for(WritesFailed).reason == (
        "The ledger cannot hold what it was given (Object of type set is not JSON serializable): a "
        "policy's memory must be JSON."
    )
    assert bench.flushed(lambda ledger: ledger.load_curves("s"))[0].units == 1
    assert bench.writer.pending == 0


def test_a_question_that_fails_says_why(bench: Bench) -> None:
    """A process that asks gets the error; the next question is answered."""

    def ask(ledger: Any) -> None:
        raise LedgerError("of a later version")

    with pytest.raises(LedgerError, match="later version"):
        bench.flushed(ask)
    assert bench.flushed(lambda ledger: ledger.last_epoch()) == 0


def test_a_ledger_that_cannot_be_opened_is_opened_later() -> None:
    """The first question to a database that is away is answered when it is there."""
    failures = [LedgerOutageError("starting up"), LedgerOutageError("starting up")]

    def opener(url: str) -> MemoryLedger:
        if failures:
            raise failures.pop()
        return MemoryLedger()

    writer = Writer("any", lambda news: None, opener=opener)
    assert writer.read(lambda ledger: ledger.last_epoch()).result(DEADLINE) == 0
    assert writer.close(DEADLINE) == 0


@pytest.mark.parametrize("error", [LedgerError("password refused"), ValueError("a bug")])
def test_an_error_in_looking_for_a_doubtful_commit_ends_no_writer(
    bench: Bench, error: Exception
) -> None:
    """The database came back and refuses for a while: what waits is written after it."""
    failures = [error]

    def load_leases(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return bench.ledger.inner.load_leases(*arguments, **named)

    bench.ledger.load_leases = load_leases  # type: ignore[attr-defined]
    bench.ledger.after.put(LedgerOutageError("the connection broke"))
    bench.writer.write("s", [lease(1)])
    assert bench.wait_for(OutageBegan).reason == "the connection broke"
    assert str(error) in bench.wait_for(OutageBegan).reason
    assert bench.flushed(lambda ledger: ledger.last_epoch()) == 1
    assert bench.ledger.transactions == 1


def test_close_writes_what_there_is(bench: Bench) -> None:
    """A writer that is closed has written everything."""
    bench.ledger.before.put(LedgerOutageError("busy"))
    bench.writer.write("s", [EndLease(study="s", epoch=1, ended=0.0), report(1)])
    assert bench.writer.close(DEADLINE) == 0
    assert bench.ledger.inner.load_curves("s")[0].units == 1


def test_close_counts_what_is_lost() -> None:
    """A database that stays away costs no more time than is given, and the loss has a number."""

    def opener(url: str) -> MemoryLedger:
        raise LedgerOutageError("gone")

    told: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
    writer = Writer("any", told.put, opener=opener)
    writer.write("s", [report(1), report(2)])
    assert isinstance(told.get(timeout=DEADLINE), OutageBegan)
    assert writer.close(0.05) == 2


def test_close_does_not_wait_for_a_database_that_hangs(bench: Bench) -> None:
    """A transaction that never ends is given up."""
    bench.ledger.gate.clear()
    bench.writer.write("s", [report(1)])
    assert bench.writer.close(0.05) == 1


def test_questions_that_nobody_will_answer_are_cancelled(bench: Bench) -> None:
    """Whoever has asked would wait for ever where the database hangs, and ask nothing more."""
    bench.ledger.gate.clear()
    hangs = bench.writer.read(lambda ledger: bench.ledger.gate.wait(DEADLINE))
    waits = bench.writer.read(lambda ledger: None)
    bench.writer.close(0.0)
    late = bench.writer.read(lambda ledger: None)
    assert [answer.cancelled() for answer in (hangs, waits, late)] == [True, True, True]


def test_a_question_whose_answer_nobody_waits_for_ends_no_writer(bench: Bench) -> None:
    """A client may leave while its study is read; what is written after that is written."""
    bench.ledger.gate.clear()
    answer = bench.writer.read(lambda ledger: bench.ledger.gate.wait(DEADLINE))
    assert answer.cancel()
    bench.ledger.gate.set()
    bench.writer.write("s", [report(1)])
    while not bench.wait_for(Written).items:
        pass
