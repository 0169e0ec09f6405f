"""Transactional outbox: a message is sent once the record that it depends on is committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from optuna_hermes.broker._core._events import EndLease, Write
from optuna_hermes.broker._protocol import CheckpointAck, FromBroker, Grant, LeaseEndAck, Yield
from optuna_hermes.ledger._records import CheckpointRecord, LeaseRecord


@dataclass(frozen=True, slots=True)
class DatabaseProof:
    """Proof that the database answers, so that the holder of this lease may be asked to yield."""

    epoch: int


Proof = int | str | DatabaseProof
"""Proof that a message waits for: the record of a lease (its epoch) or of a checkpoint (its
path), the end of a lease, or a sign that a database is there."""


_IN_TURN = Grant | Yield
"""Messages that later ones to the same client must not overtake."""


def proof_of_end(epoch: int) -> str:
    return f"end of {epoch}"


def proofs_of(records: Iterable[Write]) -> set[int | str]:
    """Proofs by which messages wait for these records."""
    proofs = set[int | str]()
    for each in records:
        if isinstance(each, LeaseRecord):
            proofs.add(each.epoch)
        elif isinstance(each, EndLease):
            proofs.add(proof_of_end(each.epoch))
        elif isinstance(each, CheckpointRecord):
            proofs.add(each.checkpoint.path)
    return proofs


@dataclass(kw_only=True, slots=True)
class _Waiting:
    message: FromBroker
    proof: Proof | None


class Outbox:
    """Holds back grants, yields and acknowledgements until the ledger has what they depend on.

    A yield waits until the database has shown that it is there: the next trial could not be granted
    otherwise. Later messages to the same client wait behind a grant or a yield; acknowledgements
    hold up no other message, for they may come at any time.
    """

    def __init__(self, send: Callable[[int, FromBroker], None]) -> None:
        self._send = send
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._expected: set[Proof] = set()

    def expect(self, proofs: Collection[Proof]) -> None:
        """Hold back all messages that depend on these proofs, until they come or are dropped.

        Messages of later answers too: a client that repeats itself, or comes back on another
        connection, is not told of what is not written yet.
        """
        self._expected.update(proofs)

    def put(self, connection: int, message: FromBroker) -> None:
        """Send a message, now or as soon as it may go."""
        proof = _proof(message)
        waiting = _Waiting(message=message, proof=proof if proof in self._expected else None)
        self._waiting.setdefault(connection, deque()).append(waiting)
        self._advance(connection)

    def release(self, written: Collection[Proof]) -> None:
        """Release the messages that wait for these proofs."""
        self._expected.difference_update(written)
        for connection, queue in list(self._waiting.items()):
            for each in queue:
                if each.proof in written:
                    each.proof = None
            self._advance(connection)

    def drop(self, proofs: Collection[Proof]) -> None:
        """Drop the messages that wait for these proofs, which will not come, or do not count.

        Messages about the lease of a grant that is dropped are dropped too. The record of a
        checkpoint, or of a lease's end, is tried again: messages about it have still to wait.
        """
        self._expected.difference_update(each for each in proofs if not isinstance(each, str))
        for connection, queue in list(self._waiting.items()):
            dropped = {e.proof for e in queue if e.proof in proofs}
            if dropped:
                kept = (e for e in queue if e.proof not in dropped and _epoch(e) not in dropped)
                self._waiting[connection] = deque(kept)
                self._advance(connection)

    def forget(self, connection: int) -> None:
        self._waiting.pop(connection, None)

    @property
    def uncommitted(self) -> tuple[int, ...]:
        return tuple(proof for proof in self._proofs() if isinstance(proof, int))

    @property
    def unsent_yields(self) -> tuple[int, ...]:
        return tuple(proof.epoch for proof in self._proofs() if isinstance(proof, DatabaseProof))

    def _proofs(self) -> Iterator[Proof | None]:
        for queue in self._waiting.values():
            yield from (each.proof for each in queue)

    def _advance(self, connection: int) -> None:
        queue = self._waiting.pop(connection)
        left: deque[_Waiting] = deque()
        held_up = False
        for each in queue:
            if each.proof is None and not held_up:
                self._send(connection, each.message)
            else:
                left.append(each)
                held_up = held_up or isinstance(each.message, _IN_TURN)
        if left:
            self._waiting[connection] = left


def _proof(message: FromBroker) -> Proof | None:
    if isinstance(message, Grant):
        return message.epoch
    if isinstance(message, Yield):
        return DatabaseProof(message.epoch)
    if isinstance(message, LeaseEndAck):
        return proof_of_end(message.epoch)
    return message.path if isinstance(message, CheckpointAck) else None


def _epoch(waiting: _Waiting) -> int | None:
    return getattr(waiting.message, "epoch", None)
