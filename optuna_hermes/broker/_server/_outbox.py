"""Messages to the clients: none before what it rests on, and none before what it is about."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from optuna_hermes.broker._protocol import FromBroker, Grant, Kept, Noted, Yield


@dataclass(frozen=True, slots=True)
class Asked:
    """The database answers, so that whoever has this lease may be asked to leave."""

    epoch: int


Proof = int | str | Asked
"""What is waited for: the record of a lease (its epoch) or of a checkpoint (its path), the end
of a lease, or a sign that a database is there."""


_IN_TURN = Grant | Yield
"""What follows these to the same client must not overtake them."""


def proof_of_end(epoch: int) -> str:
    """What a message that waits for the end of a lease waits for."""
    return f"end of {epoch}"


@dataclass(kw_only=True, slots=True)
class _Waiting:
    message: FromBroker
    proof: Proof | None


class Outbox:
    """Holds back grants, and what says that something is safe, until their record is written.

    Nobody is asked to leave a device before the database has shown that it is there: the next run
    could not be granted. What follows a grant or such a request to the same client waits behind
    it; what says that something is safe holds up nothing, for that may come at any time.

    Args:
        send: gives a client a message.
    """

    def __init__(self, send: Callable[[int, FromBroker], None]) -> None:
        self._send = send
        self._waiting: dict[int, deque[_Waiting]] = {}

    def put(
        self, connection: int, message: FromBroker, unwritten: Collection[Proof | None] = ()
    ) -> None:
        """Send a message, now or as soon as it may go.

        Args:
            connection: to whom.
            message: what.
            unwritten: what is waited for by some message of the answer that it belongs to.
        """
        proof = _proof(message)
        if proof not in unwritten:
            proof = None
        if proof is None and not self._is_held_up(connection):
            self._send(connection, message)
        else:
            waiting = _Waiting(message=message, proof=proof)
            self._waiting.setdefault(connection, deque()).append(waiting)

    def release(self, written: Collection[Proof]) -> None:
        """These are in the ledger: let go who waits for them."""
        if not self._waiting:
            return
        left = set(written)
        for connection, queue in list(self._waiting.items()):
            for each in queue:
                if each.proof in left:
                    left.discard(each.proof)
                    each.proof = None
            self._advance(connection)

    def drop(self, proofs: Collection[Proof]) -> None:
        """These will not be in the ledger, or not count: what waits for them is never sent.

        What was said of a grant that nobody has seen means nothing either.
        """
        for connection, queue in list(self._waiting.items()):
            dropped = {e.proof for e in queue if e.proof in proofs}
            if dropped:
                kept = (e for e in queue if e.proof not in dropped and _epoch(e) not in dropped)
                self._waiting[connection] = deque(kept)
                self._advance(connection)

    def forget(self, connection: int) -> None:
        """A client is gone."""
        self._waiting.pop(connection, None)

    @property
    def held(self) -> tuple[int, ...]:
        """The epochs of grants that wait."""
        return tuple(proof for proof in self._proofs() if isinstance(proof, int))

    @property
    def unasked(self) -> tuple[int, ...]:
        """The epochs of leases whose holders will hear that they are to leave."""
        return tuple(proof.epoch for proof in self._proofs() if isinstance(proof, Asked))

    def _proofs(self) -> Iterator[Proof | None]:
        for queue in self._waiting.values():
            yield from (each.proof for each in queue)

    def _is_held_up(self, connection: int) -> bool:
        return any(isinstance(each.message, _IN_TURN) for each in self._waiting.get(connection, ()))

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
        return Asked(message.epoch)
    if isinstance(message, Noted):
        return proof_of_end(message.epoch)
    return message.path if isinstance(message, Kept) else None


def _epoch(waiting: _Waiting) -> int | None:
    return getattr(waiting.message, "epoch", None)
