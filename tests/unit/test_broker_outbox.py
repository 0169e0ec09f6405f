"""The outbox: conditions and order in which messages leave for each client."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._server._outbox import DatabaseProof, Outbox, Proof


class Sent(list[Any]):
    """An outbox, and what has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(lambda connection, message: self.append((connection, message)))

    def put(self, connection: int, message: Any, unwritten: Collection[Proof] = ()) -> None:
        """Put a message of an answer whose records give these proofs."""
        self.outbox.expect(unwritten)
        self.outbox.put(connection, message)


@pytest.fixture
def sent() -> Sent:
    return Sent()


def grant(epoch: int) -> wire.Grant:
    return wire.Grant(epoch=epoch, devices=("cpu:0",))


KEPT = wire.CheckpointAck(path="/c")


def test_a_grant_waits_for_its_lease_and_others_do_not(sent: Sent) -> None:
    """Whoever is sent something else hears it at once."""
    sent.put(1, grant(5), {5})
    sent.put(2, wire.Dismiss(), {5})
    assert sent == [(2, wire.Dismiss())]
    assert sent.outbox.uncommitted == (5,)
    sent.outbox.release({4})
    assert len(sent) == 1
    sent.outbox.release({5})
    assert sent[1:] == [(1, grant(5))]
    assert sent.outbox.uncommitted == ()


def test_messages_to_one_client_keep_their_order(sent: Sent) -> None:
    """A message that follows one that waits, waits with it."""
    leave = wire.Yield(epoch=5, tier="disk")
    sent.put(1, grant(5), {5})
    sent.put(1, leave, ())
    sent.put(1, KEPT, {"/c"})
    sent.outbox.release({"/c"})
    assert sent == []
    sent.outbox.release({5})
    assert sent == [(1, grant(5)), (1, leave), (1, KEPT)]


def test_who_waits_to_hear_that_a_checkpoint_is_safe_can_be_told_to_leave(sent: Sent) -> None:
    """While a database is away nothing is safe, and everything shall go to disk in the end."""
    leave, evict = wire.Yield(epoch=5, tier="disk"), wire.Move(epoch=5, tier="disk")
    sent.put(1, KEPT, {"/c"})
    sent.put(1, wire.LeaseEndAck(epoch=4), {"end of 4"})
    sent.put(1, leave, ())
    sent.put(1, evict, ())
    assert sent == [(1, leave), (1, evict)]
    sent.put(1, leave, {DatabaseProof(5)})
    sent.outbox.release({DatabaseProof(5)})
    assert sent[2:] == [(1, leave)]
    sent.outbox.release({"end of 4"})
    sent.outbox.release({"/c"})
    assert sent[3:] == [(1, wire.LeaseEndAck(epoch=4)), (1, KEPT)]


def test_a_grant_that_is_dropped_takes_along_what_was_said_of_it(sent: Sent) -> None:
    """The client hears nothing of a lease that never was, and the rest in order."""
    sent.put(1, grant(5), {5})
    sent.put(1, wire.Yield(epoch=5, tier="disk"), ())
    sent.put(1, KEPT, {"/c"})
    sent.put(1, wire.Dismiss(), ())
    sent.outbox.drop({5})
    assert sent == [(1, wire.Dismiss())]
    sent.outbox.release({"/c"})
    assert sent == [(1, wire.Dismiss()), (1, KEPT)]


def test_what_is_written_already_waits_for_nothing(sent: Sent) -> None:
    """Only the records of the same answer are waited for."""
    sent.put(1, KEPT, {7})
    assert sent == [(1, KEPT)]


def test_a_second_acknowledgement_waits_as_the_first_does(sent: Sent) -> None:
    """A client that says it again hears of its checkpoint, and its end, once they are written."""
    noted = wire.LeaseEndAck(epoch=4)
    sent.put(1, KEPT, {"/c"})
    sent.put(1, KEPT)
    sent.put(2, noted, {"end of 4"})
    sent.put(2, noted)
    assert sent == []
    sent.outbox.release({"/c"})
    assert sent == [(1, KEPT), (1, KEPT)]
    sent.outbox.release({"end of 4"})
    assert sent[2:] == [(2, noted), (2, noted)]
    sent.put(1, KEPT)
    assert sent[4:] == [(1, KEPT)]


def test_a_client_that_comes_back_waits_for_the_record_of_its_first_connection(sent: Sent) -> None:
    """The record is on its way although nobody waits for it any more, or was refused before."""
    sent.put(1, KEPT, {"/c"})
    sent.outbox.forget(1)
    sent.put(2, KEPT)
    sent.outbox.drop({"/c"})
    sent.put(2, KEPT)
    assert sent == []
    sent.outbox.release({"/c"})
    assert sent == [(2, KEPT)]


def test_a_client_that_is_gone_is_forgotten(sent: Sent) -> None:
    """Nothing is kept for it."""
    sent.put(1, grant(5), {5})
    sent.outbox.forget(1)
    sent.outbox.release({5})
    assert sent == []
    assert sent.outbox.uncommitted == ()


def test_nobody_is_asked_to_leave_before_the_database_answers(sent: Sent) -> None:
    """A device that nobody could be granted stays with whoever has it."""
    leave = wire.Yield(epoch=5, tier="resident")
    sent.put(1, leave, {DatabaseProof(5)})
    sent.put(2, wire.Yield(epoch=6, tier="resident"), {DatabaseProof(6)})
    assert sent == []
    assert sent.outbox.unsent_yields == (5, 6)
    sent.outbox.release({DatabaseProof(5)})
    assert sent == [(1, leave)]
    sent.outbox.drop({DatabaseProof(6)})
    assert sent == [(1, leave)]
    assert sent.outbox.unsent_yields == ()
