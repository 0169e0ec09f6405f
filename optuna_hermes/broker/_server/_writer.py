"""Writer of one ledger, on a thread of its own: a database that hangs blocks no other work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from optuna_hermes.broker._core._event_log import is_of_grant
from optuna_hermes.broker._core._events import (
    ClaimConflict,
    EndLease,
    OutageBegan,
    SaveMemory,
    Write,
    WritesFailed,
)
from optuna_hermes.broker._server._apply_writes import WriterTerms, is_race, write
from optuna_hermes.broker._server._outbox import proofs_of
from optuna_hermes.errors import LedgerError, LedgerOutageError, StaleEpochError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.ledger._records import (
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)
from optuna_hermes.model import OUTAGE_SECONDS

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
REFUSED_SECONDS = 60.0
"""Time after which no broker stays for records that were refused."""

T = TypeVar("T")

_REPLACED = (LeaseRecord, TrialRecord, SaveMemory)
"""Records that are not tried again once refused: the next one of its kind replaces them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Records of one study that are written together.

    ``since`` is when they were handed over; ``again`` says that they were refused before.
    """

    study: str
    items: tuple[Write, ...]
    since: float = field(default_factory=time.monotonic, compare=False)
    again: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The database answers, and these are in the ledger; the transaction took ``seconds``."""

    items: tuple[Write, ...] = ()
    seconds: float = field(default=0.0, compare=False)


WriteOutcome = Written | WritesFailed | OutageBegan | ClaimConflict
"""With ``OutageBegan``, whose studies are not known here, records are kept and tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    query: Callable[[Ledger], Any]
    answer: Future[Any]
    since: float = field(default_factory=time.monotonic)


class Writer:
    """Only user of a ledger in this process: it does all it is given, in order.

    Args:
        url: of the ledger, which is opened on the thread, when it is needed first.
        tell: called on the thread with the outcome of a batch.
        opener: opens the ledger.
        terms: see ``WriterTerms``.
    """

    def __init__(
        self,
        url: str,
        tell: Callable[[WriteOutcome], None],
        *,
        opener: Callable[[str], Ledger] = open_ledger,
        terms: WriterTerms | None = None,
    ) -> None:
        self._terms = terms or WriterTerms()
        self._url = url
        self._tell = tell
        self._opener = opener
        self._ledger: Ledger | None = None
        self._queue: deque[Batch | _Question] = deque()
        self._kept: list[Batch] = []
        self._doubtful = 0
        self._never_written: set[int] = set()
        self._seconds = 0.0
        self._moved_at = 0.0
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hermes-ledger", daemon=True)
        self._thread.start()

    def write(self, study: str, items: Iterable[Write]) -> None:
        """Write these records together, after all that was given before."""
        self._put(Batch(study=study, items=tuple(items)))

    def read(self, query: Callable[[Ledger], T], answer: Future[T] | None = None) -> Future[T]:
        """Ask the ledger something, after all that was given before is written."""
        answer = answer or Future()
        self._put(_Question(query=query, answer=answer))
        if self._given_up.is_set():
            self._cancel_questions()
        return answer

    def retry(self) -> None:
        """Try refused records again that could be right later."""
        with self._changed:
            self._queue += self._kept
            self._kept.clear()
            self._changed.notify_all()

    @property
    def stuck_since(self) -> float | None:
        """Time since which no work gets done; None if there is none."""
        with self._changed:
            return max(self._queue[0].since, self._moved_at) if self._queue else None

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be written."""
        with self._changed:
            return not self._queue and not self._kept

    @property
    def pending(self) -> int:
        return sum(len(batch.items) for batch in self._batches())

    @property
    def n_promising(self) -> int:
        """Number of records that may still be written: none that was refused for long."""
        late = time.monotonic() - REFUSED_SECONDS
        return sum(len(b.items) for b in self._batches() if b.since > late or not b.again)

    def close(self, seconds: float) -> int:
        """Write for so many seconds at most, and close the ledger; return how many are lost."""
        self.retry()
        self._ending.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(seconds)
        # The time is over: the thread leaves what is still queued.
        self._given_up.set()
        self._cancel_questions()
        return self.pending

    # -- the thread ----------------------------------------------------------------------------

    def _batches(self) -> list[Batch]:
        with self._changed:
            return [each for each in (*self._queue, *self._kept) if isinstance(each, Batch)]

    def _put(self, work: Batch | _Question) -> None:
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def _work(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._given_up.is_set() and (work := self._next()):
            try:
                if isinstance(work, _Question):
                    self._answer(work)
                else:
                    self._write(work)
                pause = FIRST_PAUSE_SECONDS
                continue
            except Exception as error:
                # Not of outages alone: without this thread nothing would be written any more, and
                # who asks would wait for ever.
                reason = str(error) if isinstance(error, LedgerError) else repr(error)
            self._tell(OutageBegan(studies=(), reason=reason))
            # A broker that ends has little time: it is tried often.
            if self._ending.wait(pause):
                self._given_up.wait(FIRST_PAUSE_SECONDS)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        if self._ledger is not None:
            self._ledger.close()

    def _next(self) -> list[Batch] | _Question | None:
        """Wait for the next work, a question or batches; it stays in the queue until it is done."""
        with self._changed:
            while not self._queue:
                if self._ending.is_set():
                    return None
                self._changed.wait()
            first = self._queue[0]
            if isinstance(first, _Question):
                return first
            batches: list[Batch] = []
            for each in self._queue:
                # A question sees all that was given before it, and nothing after it.
                if isinstance(each, _Question):
                    break
                batches.append(each)
            return batches

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._opener(self._url)
        return self._ledger

    def _replace_first(self, count: int, by: Sequence[Batch] = ()) -> None:
        with self._changed:
            for _ in range(count):
                self._queue.popleft()
            self._queue.extendleft(reversed(by))
            self._moved_at = time.monotonic()

    # -- questions -----------------------------------------------------------------------------

    def _cancel_questions(self) -> None:
        """Cancel what nobody will answer any more: whoever asked would wait for ever."""
        with self._changed:
            left = [each for each in self._queue if isinstance(each, _Question)]
        for each in left:
            each.answer.cancel()

    def _answer(self, question: _Question) -> None:
        try:
            answer = question.query(self._opened())
        except Exception as error:
            outage = isinstance(error, LedgerOutageError)
            if outage and time.monotonic() < question.since + OUTAGE_SECONDS:
                raise
            self._replace_first(1)
            # Any other error is an answer: the database is there.
            if not outage:
                self._tell(Written())
            if question.answer.set_running_or_notify_cancel():
                question.answer.set_exception(error)  # the caller deals with it
        else:
            self._replace_first(1)
            self._tell(Written())
            if question.answer.set_running_or_notify_cancel():  # else nobody waits for it any more
                question.answer.set_result(answer)

    # -- batches -------------------------------------------------------------------------------

    def _write(self, batches: list[Batch]) -> None:
        """Write batches, together if the ledger takes them so; what is settled leaves the list."""
        # The connection broke at a commit: these may be in the ledger although none was confirmed.
        if self._doubtful and _is_in(self._opened(), _items(batches[: self._doubtful])):
            self._settle(batches, self._doubtful)
        self._doubtful = 0
        if len(batches) > 1 and self._transact(batches) is None:
            self._settle(batches, len(batches))
        while batches:
            refusal = self._transact(batches[:1])
            if refusal is None:
                self._settle(batches, 1)
            else:
                self._refuse(batches, refusal)

    def _transact(self, batches: Sequence[Batch]) -> Exception | None:
        """Write all or nothing; the reason if the ledger refuses.

        Raises:
            LedgerOutageError: all or nothing is written, but which is not known.
        """
        items, begin = _items(batches), time.monotonic()
        try:
            ledger = self._opened()
            with ledger.batch():
                for item in items:
                    if not self._is_of_another(item):
                        write(ledger, item, self._terms)
        except LedgerOutageError:
            self._doubtful = len(batches)
            raise
        except StaleEpochError as error:
            # Ours, if it was committed after a lost connection and our look for it.
            return None if _is_in(self._opened(), items) else error
        except Exception as error:  # a policy's memory may be what JSON cannot say
            return error
        self._seconds = time.monotonic() - begin
        return None

    def _is_of_another(self, item: Write) -> bool:
        """True for the end of a refused lease: another broker's may have its epoch."""
        return isinstance(item, EndLease) and item.epoch in self._never_written

    def _settle(self, batches: list[Batch], count: int) -> None:
        items = _items(batches[:count])
        del batches[:count]
        self._replace_first(count)
        self._tell(Written(items=tuple(items), seconds=self._seconds))

    def _refuse(self, batches: list[Batch], error: Exception) -> None:
        """Drop leases that are refused, and write each of the other records by itself."""
        ledger = self._opened()
        if is_race(ledger, error):
            self._drop_conflicting(batches, error, ledger.last_epoch())
            return
        batch = batches.pop(0)
        refused = batch.items
        if len(batch.items) > 1:
            refused = tuple(item for item in batch.items if isinstance(item, LeaseRecord))
            rest = (item for item in batch.items if item not in refused and not is_of_grant(item))
            parts = [replace(batch, items=(item,)) for item in rest]
            batches[:0] = parts
            self._replace_first(1, parts)
        else:
            self._replace_first(1)
            # What has happened is tried again later; of other kinds the next record says all.
            lasting = (item for item in batch.items if not isinstance(item, _REPLACED))
            with self._changed:
                self._kept += [replace(batch, items=(each,), again=True) for each in lasting]
        proofs = proofs_of(refused)
        epochs = tuple(each for each in proofs if isinstance(each, int))
        paths = tuple(each for each in proofs if isinstance(each, str))
        self._never_written.update(epochs)
        if refused and not batch.again:
            reason = _reason(error)
            self._tell(WritesFailed(study=batch.study, epochs=epochs, paths=paths, reason=reason))

    def _drop_conflicting(self, batches: list[Batch], error: Exception, last_epoch: int) -> None:
        """Drop what a claim conflict has voided; try the rest again."""
        # Few brokers share a ledger with others.
        from optuna_hermes.broker._server._peer_sync import split_conflict

        batch = batches.pop(0)
        event, rest = split_conflict(batch.study, batch.items, error, last_epoch)
        parts = [replace(batch, items=rest)] if 0 < len(rest) < len(batch.items) else []
        batches[:0] = parts
        self._replace_first(1, parts)
        self._never_written.update(event.epochs)
        self._tell(event)


def _reason(error: Exception) -> str:
    """Text of a ledger's refusal; any other error is of a record that cannot be written."""
    if isinstance(error, LedgerError):
        return str(error)
    return f"The ledger cannot hold what it was given ({error}): a policy's memory must be JSON."


def _items(batches: Iterable[Batch]) -> list[Write]:
    return [item for batch in batches for item in batch.items]


def _is_in(ledger: Ledger, items: Sequence[Write]) -> bool:
    """True if a transaction has reached the ledger although its answer did not come back.

    It is there as a whole or not at all, so one record tells of all. Without a record that can
    tell, it is safe to write it again.
    """
    for item in items:
        if isinstance(item, LeaseRecord):
            leases = ledger.load_leases(item.study, since=item.epoch)
            same = (item.epoch, item.host, item.started)
            return any((x.epoch, x.host, x.started) == same for x in leases)
        if isinstance(item, CheckpointRecord):
            known = ledger.load_checkpoints(item.study, [item.number])
            return any((x.checkpoint.path, x.at) == (item.checkpoint.path, item.at) for x in known)
        if isinstance(item, EventRecord):
            return item in ledger.load_events(item.study, item.number)
        if isinstance(item, ReportRecord):
            curve = ledger.load_curves(item.study).get(item.number)
            return curve is not None and item.device_seconds in curve.device_seconds
    return False
