"""A trial's session with brokers that are lists of messages, and its messages to the next one."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest

from optuna_hermes.broker import TrialSession, sessions
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import _journal, _reconnecting, _session
from optuna_hermes.broker._client._reconnecting import PendingEndings
from optuna_hermes.errors import BrokerError, Suspended
from optuna_hermes.model import BatchSizes, Checkpoint
from optuna_hermes.pytorch import PyTorchLoop

SPEC = wire.StudySpec(key="s", name="s", ledger_url="memory:")
READY = wire.Ready(study="s")
REGISTER = wire.Register(study=SPEC, number=3, trial_id=3)


class Wire:
    """A connection to a broker that says what a test says."""

    def __init__(self) -> None:
        self.sent: list[wire.FromClient] = []
        self._inbox: queue.SimpleQueue[wire.FromBroker | None] = queue.SimpleQueue()
        self._dead = False

    def send(self, message: wire.FromClient) -> None:
        if self._dead:
            raise BrokerError("The broker is gone.")
        self.sent.append(message)

    def receive(self) -> wire.FromBroker:
        message = self._inbox.get()
        if message is None:
            raise BrokerError("The broker is gone.")
        return message

    def say(self, message: wire.FromBroker) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        self._dead = True
        self._inbox.put(None)

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kinds)]


class Brokers:
    """Brokers that follow each other; ``ready`` says whether the next one is there.

    ``missing`` is raised while it is not; ``die_at_once`` is what the next ones do.
    """

    def __init__(self) -> None:
        self.wires = [Wire()]
        self.missing: Exception = BrokerError("No broker runs on this host.")
        self.ready = threading.Event()
        self.ready.set()
        self.die_at_once = False

    @property
    def last(self) -> Wire:
        return self.wires[-1]

    def next(self) -> Any:
        if not self.ready.is_set():
            raise self.missing
        self.wires.append(Wire())
        if self.die_at_once:
            self.last.close()
        return self.last


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def connect(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``connect(ask)`` makes a session with the first broker."""
    monkeypatch.setattr(_session, "_ACK_SECONDS", 0.05)
    made: list[TrialSession] = []

    def make(ask: wire.Ready | wire.Register = READY) -> TrialSession:
        first: Any = brokers.last
        made.append(TrialSession(first, SPEC, ask, reconnect=brokers.next))
        return made[-1]

    yield make
    brokers.ready.set()
    for session in made:
        session.close()


def grant(epoch: int = 7, number: int | None = None) -> wire.Grant:
    return wire.Grant(epoch=epoch, devices=("cpu:0",), number=number, trial_id=number)


def training(brokers: Brokers, session: TrialSession, epoch: int = 7) -> None:
    """The session trains a new trial, number 3."""
    brokers.last.say(grant(epoch))
    session.wait_for_grant()
    session.begin(3, 3)
    session.started(can_store=True)


def lose(brokers: Brokers, wait_for: Callable[..., Any]) -> Wire:
    """The broker dies; the next one, once it has been told something."""
    count = len(brokers.wires)
    brokers.last.close()
    wait_for(lambda: len(brokers.wires) > count and brokers.last.sent, 10)
    return brokers.last


def stored(units: int) -> Checkpoint:
    return Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")


def test_a_worker_that_waits_says_so_to_the_next_broker(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """It has nothing to resume; the lease that follows is as good as any."""
    session = connect()
    after = lose(brokers, wait_for)
    assert after.sent == [READY]
    after.say(grant())
    assert session.wait_for_grant() == grant()


class AtFirstBatch:
    """A training at its first batch, which can be neither stored nor moved."""

    name, units, can_store, can_offload = "trial 3", 0, False, False

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        return {}

    def roots(self) -> list[object]:
        return []

    def ended(self) -> bool:
        return False


def set_up(brokers: Brokers, session: TrialSession) -> None:
    """A worker creates trial 3, which is to be set up."""
    brokers.last.say(wire.SetUp(name="o"))
    assert session.wait_for_grant() == wire.SetUp(name="o")
    session.begin(3, 3)
    assert brokers.last.of(wire.Begin) == [wire.Begin(epoch=0, number=3, trial_id=3)]


def test_a_trial_that_is_set_up_waits_at_its_first_batch(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """It has had no device time, and has nothing to give back."""
    session = connect()
    set_up(brokers, session)
    session.training(can_store=True)
    assert session.must_yield
    waiting = threading.Thread(target=session.park, args=(AtFirstBatch(),))
    waiting.start()
    wait_for(lambda: not session.must_yield)
    brokers.last.say(grant(7, 3))
    waiting.join(10)
    assert (waiting.is_alive(), session.devices) == (False, ("cpu:0",))
    session.training(can_store=True)
    (first,) = brokers.last.of(wire.FirstBatch)
    assert first.epoch == 7
    assert brokers.last.of(wire.TierChanged) == []


def test_a_trial_that_has_trained_without_a_clean_point_waits_as_soon_as_it_says_so(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """It trains under the lease that it then gets, and its errors from then on are its own."""
    session = connect()
    set_up(brokers, session)
    waiting = threading.Thread(target=partial(session.training, can_store=True, late=True))
    waiting.start()
    wait_for(lambda: not session.must_yield)
    brokers.last.say(grant(7, 3))
    waiting.join(10)
    assert (waiting.is_alive(), session.trains) == (False, True)
    (first,) = brokers.last.of(wire.FirstBatch)
    assert (first.epoch, first.late) == (7, True)


def test_a_lease_may_come_before_the_first_batch(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """The objective does not wait there, and can be asked to yield from then on."""
    session = connect()
    set_up(brokers, session)
    brokers.last.say(grant(7, 3))
    wait_for(lambda: not session.must_yield)
    session.park(AtFirstBatch())  # it has read that it is to wait a moment before
    assert session.holds
    brokers.last.say(wire.Yield(epoch=7, tier="resident"))
    wait_for(lambda: session.must_yield)
    waiting = threading.Thread(target=session.park, args=(AtFirstBatch(),))
    waiting.start()
    wait_for(lambda: brokers.last.of(wire.TierChanged))
    brokers.last.say(grant(8, 3))
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("what", ["report", "release"])
def test_what_is_said_of_a_lease_waits_for_it(what: str, brokers: Brokers, connect: Any) -> None:
    """An objective that does not wait at its first batch waits when it has something to say."""
    session = connect()
    set_up(brokers, session)
    calls: dict[str, Callable[[], None]] = {
        "report": lambda: session.report(unit=1, step=1, value=0.5),
        "release": lambda: session.release("broken"),
    }
    saying = threading.Thread(target=calls[what])
    saying.start()
    saying.join(0.5)
    assert saying.is_alive()
    assert not brokers.last.of(wire.Report, wire.Ended, wire.Released)
    brokers.last.say(grant(7, 3))
    saying.join(10)
    (said,) = brokers.last.of(wire.Report, wire.Ended, wire.Released)
    assert said.epoch == 7


def test_a_trial_that_ends_before_its_first_batch_needs_no_lease(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Its end is told to the next broker too, until one has acknowledged it."""
    session = connect()
    set_up(brokers, session)
    session.end("failed", "broken")
    ended = wire.Ended(epoch=0, state="failed", error="broken")
    assert brokers.last.of(wire.Ended) == [ended]
    after = lose(brokers, wait_for)
    wait_for(lambda: len(after.sent) == 2)
    assert after.sent == [wire.Register(study=SPEC, number=3, trial_id=3), ended]
    after.say(wire.Refused(reason="Trial 3 has ended: create another one."))
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(3)
    assert not closing.is_alive()


def test_a_trial_that_has_not_begun_can_be_sent_away(brokers: Brokers, connect: Any) -> None:
    """It unwinds as one that is stored, and has stored nothing."""
    session = connect()
    set_up(brokers, session)
    brokers.last.say(wire.Dismiss())
    with pytest.raises(Suspended):
        session.park(AtFirstBatch())
    assert not brokers.last.of(wire.TierChanged)
    with pytest.raises(Suspended):
        session.wait_for_device()  # its objective has caught it


def test_an_alarm_stands_still_until_a_trial_may_begin(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objective has set it to limit its training, and others may train before."""
    session = connect()
    monkeypatch.setattr(sessions, "worker", session)
    set_up(brokers, session)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        waiting = threading.Thread(target=session.wait_for_device)
        waiting.start()
        wait_for(lambda: signal.getitimer(signal.ITIMER_REAL)[0] == 0.0)
        brokers.last.say(grant(7, 3))
        waiting.join(5)
        assert not waiting.is_alive()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def test_an_objective_that_catches_all(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any], tmp_path: Path
) -> None:
    """Once its trial is on disk it trains no batch more, and reports nothing half trained."""
    session = connect()
    session.checkpoint_dir = tmp_path
    training(brokers, session)
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    trained: list[tuple[int, int]] = []
    for epoch in run.epochs(3):
        with contextlib.suppress(BaseException):
            for number in run.batches(range(4)):
                trained.append((epoch, number))
                if len(trained) == 2:
                    brokers.last.say(wire.Yield(epoch=7, tier="disk"))
                    wait_for(lambda: session.must_yield)
        with pytest.raises(Suspended):
            run.report(0.5)
    assert trained == [(0, 0), (0, 1)]
    assert session.left
    assert [each.tier for each in brokers.last.of(wire.TierChanged)] == ["disk"]
    assert not brokers.last.of(wire.Report)


def test_a_trial_that_is_set_up_says_so_to_the_next_broker(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """It has no lease that could be resumed."""
    session = connect()
    set_up(brokers, session)
    after = lose(brokers, wait_for)
    assert after.sent == [wire.Register(study=SPEC, number=3, trial_id=3)]
    after.say(grant(9, 3))
    wait_for(lambda: not session.must_yield)
    assert session.holds


def lose_in_creation(brokers: Brokers, session: TrialSession, wait_for: Callable[..., Any]) -> Wire:
    """The broker dies while a worker creates the trial that it was told to set up."""
    brokers.last.say(wire.SetUp(name="o"))
    session.wait_for_grant()
    brokers.last.close()
    wait_for(lambda: len(brokers.wires) == 2 and session._connection._up, 10)
    return brokers.last


def test_a_trial_that_was_created_while_there_was_no_broker_is_registered(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Its worker does not say that it waits: it would be given another trial's lease."""
    session = connect()
    after = lose_in_creation(brokers, session, wait_for)
    assert after.sent == []
    session.begin(3, 3)
    assert after.sent == [wire.Register(study=SPEC, number=3, trial_id=3)]
    after.say(grant(9, 3))
    wait_for(lambda: session.holds)


def test_a_lease_for_another_trial_is_not_taken_for_one_that_was_created(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """The next broker has taken the worker for one that waits."""
    session = connect()
    after = lose_in_creation(brokers, session, wait_for)
    after.say(grant(9, 5))
    wait_for(lambda: session.holds)
    with pytest.raises(BrokerError, match="another one"):
        session.begin(3, 3)


def test_a_trial_that_trains_says_all_that_may_not_have_been_written(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Its lease, its reports and its checkpoints; what it says after that goes to the new one."""
    session = connect()
    training(brokers, session)
    session.report(unit=1, step=1, value=0.5, units_left=4)
    session.saved(stored(1))
    after = lose(brokers, wait_for)
    (resume,) = after.of(wire.Reattach)
    assert (resume.epoch, resume.number, resume.devices) == (7, 3, ("cpu:0",))
    assert resume.training
    assert resume.can_store
    assert resume.units_left == 4
    assert [report.unit for report in resume.reports] == [1]
    assert resume.reports[0].age_seconds > 0
    assert [each.path for each in resume.checkpoints] == ["/c/1"]
    assert resume.parked is None
    session.report(unit=2, step=2, value=0.4)
    assert [report.unit for report in after.of(wire.Report)] == [2]
    assert not session.must_yield


def test_what_is_said_to_nobody_is_said_to_the_next_broker(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Training goes on while there is no broker, and nothing of it is lost."""
    session = connect()
    training(brokers, session)
    brokers.ready.clear()
    brokers.last.close()
    session.report(unit=1, step=1, value=0.5)
    session.saved(stored(1))
    session.end("done")
    brokers.ready.set()
    wait_for(lambda: len(brokers.wires) == 2 and brokers.last.of(wire.Ended))
    resume, ended = brokers.last.sent
    assert [report.unit for report in resume.reports] == [1]
    assert [each.path for each in resume.checkpoints] == ["/c/1"]
    assert ended == wire.Ended(epoch=7, state="done")


def test_what_the_ledger_has_is_not_said_again(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Reports of an older lease were written before the next one; a kept checkpoint is there."""
    session = connect()
    training(brokers, session)
    session.report(unit=1, step=1, value=0.5)
    session.saved(stored(1))
    brokers.last.say(wire.CheckpointAck(path="/c/1"))
    wait_for(lambda: session.checkpoints)
    brokers.last.say(grant(8, 3))
    session.wait_for_grant()
    after = lose(brokers, wait_for)
    (resume,) = after.of(wire.Reattach)
    assert (resume.epoch, resume.number, resume.training) == (8, 3, False)
    assert resume.reports == ()
    assert resume.checkpoints == ()


def test_a_yield_of_the_dead_broker_is_still_obeyed(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """The next one is told that it was asked for, and by which tier."""
    session = connect()
    training(brokers, session)
    brokers.last.say(wire.Yield(epoch=7, tier="host"))
    wait_for(lambda: session.must_yield)
    after = lose(brokers, wait_for)
    assert after.of(wire.Reattach)[0].requested_tier == "host"
    assert session.must_yield


def test_a_report_is_decided_about_while_its_trial_does_other_things(
    brokers: Brokers, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits before it trains on, once for each report, and not for the last one."""
    session = connect()
    training(brokers, session)
    monkeypatch.setattr(_session, "_DECIDED_SECONDS", 30.0)
    session.wait_for_decision()  # about nothing
    session.report(unit=1, step=1, value=0.5, units_left=2)
    waiter = threading.Thread(target=session.wait_for_decision)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    brokers.last.say(wire.ReportAck(epoch=7))
    waiter.join(10.0)
    assert not waiter.is_alive()
    session.wait_for_decision()
    session.report(unit=2, step=2, value=0.5, units_left=1)
    brokers.last.say(wire.Yield(epoch=7, tier="resident"))
    brokers.last.say(wire.ReportAck(epoch=7))
    session.wait_for_decision()
    assert session.must_yield
    session.report(unit=3, step=3, value=0.5, units_left=0)
    session.wait_for_decision()


def test_a_batch_size_comes_with_a_lease_or_in_the_midst_of_one(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """One for another lease does not count; the next broker hears which one the trial has."""
    session = connect()
    assert session.batch_size is None
    training(brokers, session)
    brokers.last.say(wire.Resize(epoch=6, batch_size=5))
    brokers.last.say(wire.Resize(epoch=7, batch_size=16))
    wait_for(lambda: session.batch_size)
    assert session.batch_size == 16
    seconds = {size: 0.1 for size in range(1, 100)}
    session.report_sizes(BatchSizes(now=16, least=4, most=32, seconds=seconds, unit_samples=90))
    (told,) = brokers.last.of(wire.Beat)
    assert (told.epoch, told.sizes.now, told.sizes.unit_samples) == (7, 16, 90)
    assert set(told.sizes.seconds) == set(range(36, 100)), "those that were measured last"
    first = brokers.last
    thread = threading.Thread(target=session.park, args=(None,))
    thread.start()
    wait_for(lambda: first.of(wire.TierChanged))
    after = lose(brokers, wait_for)
    assert after.of(wire.Reattach)[0].sizes == told.sizes
    after.say(msgspec.structs.replace(grant(9, 3), batch_size=8))
    thread.join(10)
    assert not thread.is_alive()
    assert session.batch_size == 8


def test_a_parked_trial_waits_on_and_goes_on_by_a_lease_of_the_next_broker(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """It never leaves its process."""
    session = connect()
    training(brokers, session)
    first = brokers.last
    thread = threading.Thread(target=session.park, args=(None,))
    thread.start()
    wait_for(lambda: first.of(wire.TierChanged))
    after = lose(brokers, wait_for)
    (resume,) = after.of(wire.Reattach)
    assert resume.parked == first.of(wire.TierChanged)[0]
    after.say(grant(9, 3))
    thread.join(10)
    assert not thread.is_alive()
    assert after.of(wire.FirstBatch)[0].epoch == 9


def test_a_worker_that_is_refused_lets_go(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """At its next clean point it learns why, and says nothing more of the trial."""
    session = connect()
    training(brokers, session)
    after = lose(brokers, wait_for)
    after.say(wire.Refused(reason="Its lease (epoch 7) is over."))
    wait_for(lambda: session.must_yield)
    with pytest.raises(BrokerError, match=r"epoch 7\) is over"):
        session.park(None)
    assert after.of(wire.TierChanged) == []


def test_a_plain_trial_that_is_refused_asks_for_a_new_turn(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Its state is in the memory of its process: it stops, and goes on when it is its turn."""
    session = connect(REGISTER)
    brokers.last.say(grant(7, 3))
    session.wait_for_grant()
    session.started(can_store=False)
    after = lose(brokers, wait_for)
    after.say(wire.Refused(reason="Its lease (epoch 7) is over."))
    wait_for(lambda: after.of(wire.Register))
    assert session.must_yield
    session.report(unit=1, step=1, value=0.5)  # under no lease, so no broker takes it
    thread = threading.Thread(target=session.park, args=(None,))
    thread.start()
    after.say(grant(11, 3))
    thread.join(10)
    assert not thread.is_alive()
    assert after.of(wire.TierChanged) == []
    assert after.of(wire.FirstBatch)[-1].epoch == 11
    assert [(each.epoch, each.unit) for each in after.of(wire.Report)] == [(0, 1), (11, 1)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_plain_trial_that_another_host_has_taken_over_ends_by_no_error(
    waits: bool, brokers: Brokers, connect: Any, wait_for: Callable[..., Any]
) -> None:
    """Optuna would set it to FAIL while that host trains it; nothing is asked or said of it."""
    session = connect(REGISTER)
    first = brokers.last
    first.say(grant(7, 3))
    session.wait_for_grant()
    session.started(can_store=False)
    left: list[BaseException] = []

    def park() -> None:
        try:
            session.park(None)
        except BaseException as error:
            left.append(error)

    thread = threading.Thread(target=park, daemon=True)
    if waits:
        first.say(wire.Yield(epoch=7, tier="resident"))
        wait_for(lambda: session.must_yield)
        thread.start()
        wait_for(lambda: first.of(wire.TierChanged))
    first.say(wire.Refused(reason="Another host has trial 3.", taken=True))
    if not waits:
        wait_for(lambda: session.must_yield)
        thread.start()
    thread.join(10)
    assert [type(each) for each in left] == [Suspended]
    assert str(left[0]) == "Another host has trial 3."
    assert len(first.of(wire.Register)) == 1
    assert len(first.of(wire.TierChanged)) == waits
    with pytest.raises(Suspended):
        session.park(None)


def test_the_text_of_an_error_is_cut_to_what_a_message_may_hold(
    brokers: Brokers, connect: Any
) -> None:
    """An error may hold a whole data set, whose text no frame takes: it would never be sent."""
    session, text = connect(), "x" * wire.MAX_FRAME_BYTES
    training(brokers, session)
    session.release(text)
    session.end("failed", text)
    released, ended = brokers.last.of(wire.Released, wire.Ended)
    assert wire.frame(released)
    assert wire.frame(ended)
    assert text.startswith(ended.error)


def test_a_checkpoint_that_is_away_is_told_as_such(brokers: Brokers, connect: Any) -> None:
    """Else a broker would end the study for what another host can read."""
    session = connect()
    training(brokers, session)
    session.release("It cannot be read.", unreachable=True)
    (released,) = brokers.last.of(wire.Released)
    assert (released.reason, released.unreachable) == ("It cannot be read.", True)


@pytest.mark.parametrize(
    "missing", [BrokerError("No broker runs on this host."), OSError(24, "Too many open files")]
)
def test_without_any_broker_a_trial_stops_in_the_end(
    missing: Exception,
    brokers: Brokers,
    connect: Any,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains on for a while; then it parks, and one that cannot be stored says why it ends."""
    monkeypatch.setattr(_reconnecting, "BROKER_SEARCH_SECONDS", 0.1)
    brokers.missing = missing
    session = connect()
    training(brokers, session)
    brokers.ready.clear()
    brokers.last.close()
    assert not session.must_yield
    wait_for(lambda: session.must_yield)
    with pytest.raises(BrokerError, match="No broker was there"):
        session.park(None)


def test_a_process_leaves_when_the_end_of_its_trial_is_known(
    brokers: Brokers, connect: Any, wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker dies before it has said so, the next one is told too."""
    monkeypatch.setattr(_session, "_ACK_SECONDS", 60.0)
    session = connect()
    training(brokers, session)
    session.end("done")
    thread = threading.Thread(target=session.close)
    thread.start()
    after = lose(brokers, wait_for)
    wait_for(lambda: after.of(wire.Ended))
    assert thread.is_alive()
    after.say(wire.LeaseEndAck(epoch=7))
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_leaves_brokers_that_cannot_bear_what_it_says(
    brokers: Brokers, connect: Any
) -> None:
    """All of those that die at once have as much time as one that is silent, not for ever more."""
    session = connect()
    training(brokers, session)
    session.end("done")
    brokers.die_at_once = True
    brokers.last.close()
    thread = threading.Thread(target=session.close, daemon=True)
    thread.start()
    thread.join(10)
    brokers.die_at_once = False
    assert not thread.is_alive()
    assert len(brokers.wires) > 1


def test_an_ending_is_told_to_the_first_broker_that_can_be_started(brokers: Brokers) -> None:
    """Those that cannot be started, or that end before they have heard it, leave it to the next."""
    endings, ended = PendingEndings(), wire.Ended(epoch=7, state="done")
    endings.keep(lambda: [ended])
    brokers.ready.clear()
    with pytest.raises(BrokerError, match="No broker runs"):
        endings.tell(brokers.next)
    brokers.ready.set()
    dies, hears, last = Wire(), Wire(), Wire()
    dies.close()
    for broker in (hears, last):
        broker.say(wire.LeaseEndAck(epoch=7))
    endings.tell(lambda: dies)  # type: ignore[arg-type,return-value]
    assert dies.sent == []
    endings.tell(lambda: hears)  # type: ignore[arg-type,return-value]
    assert hears.sent == [ended]
    endings.tell(lambda: last)  # type: ignore[arg-type,return-value]
    assert last.sent == []


# -- what an earlier process has left ----------------------------------------------------------


def left_behind(folder: Path, *units: int, value: float = 0.5) -> None:
    """Write the journal of a process that stored its trial while nobody could write that down."""
    _journal.change(
        folder,
        at=time.time(),
        reports=tuple(
            wire.Report(epoch=7, unit=unit, step=unit, value=value, age_seconds=1.0)
            for unit in units
        ),
        checkpoints=tuple(
            Checkpoint(path=f"/c/{unit}", units=unit, size_bytes=1, sha256="0") for unit in units
        ),
    )


def went_on(brokers: Brokers, session: TrialSession, folder: Path, units: int) -> None:
    """The next process of the trial is granted what the ledger knows, and looks into its folder."""
    known = Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")
    brokers.last.say(
        wire.Grant(epoch=9, devices=("cpu:0",), number=3, trial_id=3, checkpoints=(known,))
    )
    session.wait_for_grant()
    session.checkpoint_dir = folder
    session.find_journal()


def test_a_trial_goes_on_from_what_its_process_could_tell_nobody(
    brokers: Brokers, connect: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """Checkpoint and reports are told under the new lease, and forgotten when they are kept."""
    left_behind(tmp_path, 1, 2, 3)
    session = connect()
    went_on(brokers, session, tmp_path, units=1)
    assert session.checkpoints == (stored(3), stored(2), stored(1))
    told = brokers.last.of(wire.Report)
    assert [(each.epoch, each.unit) for each in told] == [(9, 2), (9, 3)]
    assert all(each.age_seconds > 1.0 for each in told)
    (saved,) = brokers.last.of(wire.Saved)
    assert (saved.epoch, saved.checkpoint.path) == (9, "/c/3")
    assert list(tmp_path.iterdir()) != []
    brokers.last.say(wire.CheckpointAck(path="/c/3"))
    wait_for(lambda: not list(tmp_path.iterdir()))
    assert session.checkpoints == (stored(3), stored(2), stored(1))


def test_the_age_of_a_report_is_bounded_by_what_a_message_holds(
    brokers: Brokers,
    connect: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
) -> None:
    """The clock began in 1970 and was set later: the reports reach this broker and the next one."""
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 100.0)
        left_behind(tmp_path, 1, 2)
    session = connect()
    went_on(brokers, session, tmp_path, units=1)
    (told,) = brokers.last.of(wire.Report)
    assert [each.unit for each in _journal.find(tmp_path).reports] == [2]
    resumed = lose(brokers, wait_for).sent[0]
    for message in (told, resumed):
        assert wire.decode_from_client(wire.frame(message)[wire.HEADER_BYTES :]) == message


def test_what_is_stored_is_left_behind_until_the_ledger_has_it(
    brokers: Brokers, connect: Any, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """A process that is killed while no broker listens leaves its newest checkpoint's digest."""
    session = connect()
    went_on(brokers, session, tmp_path, units=1)
    for units in (2, 3):
        session.saved(stored(units))
    left = _journal.find(tmp_path)
    assert [each.path for each in left.newest_first] == ["/c/3", "/c/2"]
    brokers.last.say(wire.CheckpointAck(path="/c/2"))
    brokers.last.say(wire.CheckpointAck(path="/c/3"))
    wait_for(lambda: not list(tmp_path.iterdir()))


def test_what_the_ledger_knows_is_not_told_again(
    brokers: Brokers, connect: Any, tmp_path: Path
) -> None:
    """The broker wrote it after the process had left."""
    left_behind(tmp_path, 1, 2)
    session = connect()
    went_on(brokers, session, tmp_path, units=2)
    assert session.checkpoints == (stored(2),)
    assert brokers.last.of(wire.Saved) == brokers.last.of(wire.Report) == []
    assert list(tmp_path.iterdir()) == []


def test_the_parts_of_a_journal_change_apart(tmp_path: Path) -> None:
    """Parts that one database has go, those another lacks stay; the file goes with the last."""
    left_behind(tmp_path, 1, 2)
    _journal.change(tmp_path, unwritten=((1, 0.5),))
    _journal.change(tmp_path, reports=(), checkpoints=())
    assert _journal.find(tmp_path).unwritten == ((1, 0.5),)
    left_behind(tmp_path, 3)
    _journal.change(tmp_path, unwritten=())
    assert _journal.find(tmp_path).newest_first == [stored(3)]
    _journal.change(tmp_path, reports=(), checkpoints=())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_costs_no_checkpoint(value: float, tmp_path: Path) -> None:
    """A trial that has diverged goes on from its newest checkpoint like others."""
    left_behind(tmp_path, 1, 2, value=value)
    journal = _journal.find(tmp_path)
    assert [each.units for each in journal.newest_first] == [2, 1]
    assert all(struct.pack("d", each.value) == struct.pack("d", value) for each in journal.reports)


def test_what_cannot_be_kept_or_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, and a file that is damaged: the trial goes on with what the ledger knows."""
    left_behind(tmp_path / "missing", 1)
    file = tmp_path / _journal.NAME
    file.write_bytes(msgspec.msgpack.encode({"at": "noon"}))
    assert _journal.find(tmp_path) == _journal.Journal()
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith(
        f"{tmp_path}/missing/unconfirmed.msgpack cannot be written, so make room there: [Errno 2]"
    )
    assert caplog.messages[1].startswith(
        f"{file} cannot be read, so units may be trained again, and `status` has values that "
        "Optuna misses: Expected `float`, got `str`"
    )


def test_several_devices_are_named_and_their_time_is_counted(
    brokers: Brokers,
    connect: Any,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next broker is told of all of them; a second on two devices is two seconds."""
    session = connect()
    brokers.last.say(wire.Grant(epoch=7, devices=("cpu:0", "cpu:2"), number=3, trial_id=3))
    session.wait_for_grant()
    assert session.devices == ("cpu:0", "cpu:2")
    session.started(can_store=True)
    session.report_sizes(BatchSizes(now=8, least=8, most=8, most_devices=4))
    assert brokers.last.of(wire.Beat)[-1].sizes.most_devices == 4
    at = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: at)
    before = session.device_seconds
    monkeypatch.setattr(time, "monotonic", lambda: at + 5)
    assert session.device_seconds == pytest.approx(before + 10)
    monkeypatch.undo()
    (resume,) = lose(brokers, wait_for).of(wire.Reattach)
    assert (resume.devices, resume.sizes.most_devices) == (("cpu:0", "cpu:2"), 4)
