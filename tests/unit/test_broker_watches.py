"""Drivers that are told of changes of their studies, and count up what grows by itself."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import WatchedStudy
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import _watched_study
from optuna_hermes.broker._core._events import OutageBegan, OutageEnded, Send
from support.broker import FakeBroker
from support.statuses import device_status, study_status


def watching(devices: int = 1) -> tuple[FakeBroker, int]:
    """A broker whose driver has asked for its study, and is to be told of the next change."""
    broker = FakeBroker(devices=devices)
    driver = broker.driver(unstarted=2, slice_seconds=100.0)
    broker.say(driver, wire.WatchStudy(study="s", now=True))
    return broker, driver


def told(broker: FakeBroker) -> list[wire.StudyChanged]:
    """Return the messages to drivers about changes at this moment."""
    found = []
    for command in broker.handler.changes(broker.now):
        assert isinstance(command, Send)
        assert isinstance(command.message, wire.StudyChanged)
        found.append(command.message)
    return found


def test_a_driver_that_asks_is_answered_at_once() -> None:
    """The answer is the present status, and says that it was asked for."""
    broker, driver = watching()
    answer = broker.last(driver, "StudyChanged")
    assert (answer.is_answer, answer.study.unstarted, answer.leased) == (True, 2, 0)
    assert [device.id for device in answer.devices] == ["cpu:0"]
    assert told(broker) == []


def test_a_change_is_told_once() -> None:
    """And the next one only when the driver has asked again: what it does not read is not sent."""
    broker, driver = watching()
    worker = broker.worker()
    (change,) = told(broker)
    assert not change.is_answer
    assert change.study.workers.alive == 1
    assert change.leased == 1
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    assert not broker.handler.has_watchers
    assert told(broker) == []
    broker.say(driver, wire.WatchStudy(study="s"))
    (change,) = told(broker)
    assert change.study.counts.running == 1
    broker.say(driver, wire.WatchStudy(study="s"))
    assert told(broker) == [], "nothing has changed since"
    assert broker.handler.has_watchers


def test_time_that_passes_is_no_change() -> None:
    """Device time grows by itself; the driver knows how fast, and counts it up."""
    broker, driver = watching()
    worker = broker.worker()
    told(broker)
    broker.say(driver, wire.WatchStudy(study="s"))
    broker.advance(1.0)
    broker.say(worker, wire.Beat(epoch=broker.last(worker, "Grant").epoch))
    assert told(broker) == []
    broker.poll("cpu:0", memory_free_bytes=7)
    assert told(broker) == []


def test_the_beginning_and_the_end_of_an_outage_are_changes() -> None:
    """Between them only time passes."""
    broker, driver = watching()
    broker.apply(OutageBegan(studies=("s",), reason="gone"))
    (change,) = told(broker)
    assert change.study.outage_seconds == 0.0
    broker.say(driver, wire.WatchStudy(study="s"))
    broker.now += 5.0
    assert told(broker) == []
    broker.apply(OutageEnded(studies=("s",)))
    (change,) = told(broker)
    assert change.study.outage_seconds is None


def test_who_has_left_is_told_nothing() -> None:
    """A study that goes on without its driver has nobody to tell."""
    broker, driver = watching()
    broker.worker()
    broker.hang_up(driver)
    assert told(broker) == []
    assert not broker.handler.has_watchers


def test_only_the_driver_of_a_study_may_watch_it() -> None:
    """Another client is told that it is out of place."""
    broker, driver = watching()
    broker.say(driver, wire.WatchStudy(study="other", now=True))
    assert "of its own study only" in broker.last(driver, "Refused").reason
    worker = broker.worker()
    broker.say(worker, wire.WatchStudy(study="s", now=True))
    assert "is said by a driver" in broker.last(worker, "Refused").reason


# -- the driver's side -------------------------------------------------------------------------


class Script:
    """A connection whose broker says what a test has written down."""

    def __init__(self, *answers: wire.FromBroker) -> None:
        self.answers = [*answers]
        self.sent: list[wire.FromClient] = []

    def send(self, message: wire.FromClient) -> None:
        self.sent.append(message)

    def receive_answer(self) -> wire.FromBroker:
        return self.answers.pop(0)


def change(*, is_answer: bool = False, leased: int = 0, **fields: Any) -> wire.StudyChanged:
    held = {"study": "s", "trial": 0, "since_seconds": 1.0, "left_seconds": 2.0}
    devices = (device_status(holder=held), device_status(id="cpu:1"))
    study = study_status(**fields)
    return wire.StudyChanged(study=study, devices=devices, leased=leased, is_answer=is_answer)


def watched(script: Script) -> WatchedStudy:
    connection: Any = script
    return WatchedStudy(connection, "s")


def test_what_was_said_before_is_in_the_answer() -> None:
    """A change that was told before the broker heard a message is not taken for its answer."""
    script = Script(
        change(is_answer=True, switches=1), change(switches=2), change(is_answer=True, switches=3)
    )
    study = watched(script)
    assert study.status()[0].switches == 1
    study.tell(wire.Drain(study="s"))
    assert study.status()[0].switches == 3
    now = wire.WatchStudy(study="s", now=True)
    assert script.sent == [now, wire.Drain(study="s"), now]


def test_what_is_heard_is_asked_for_again() -> None:
    """Each change that is read lets the broker tell of the next."""
    script = Script(change(is_answer=True), change(switches=2))
    study = watched(script)
    study.receive_change()
    assert study.status()[0].switches == 2
    assert script.sent[1:] == [wire.WatchStudy(study="s")]


def test_what_grows_by_itself_is_counted_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device time by the number of leased devices, an outage and a lease by the clock."""
    now = 100.0
    monkeypatch.setattr(_watched_study.time, "monotonic", lambda: now)
    seconds = {"device_seconds": 10.0, "held_seconds": 1.0, "spent_seconds": 5.0}
    study = watched(Script(change(is_answer=True, leased=2, outage_seconds=0.5, **seconds)))
    now = 101.5
    status, (first, second) = study.status()
    assert (status.device_seconds, status.held_seconds, status.spent_seconds) == (13.0, 4.0, 8.0)
    assert status.outage_seconds == 2.0
    assert first.holder is not None
    assert (first.holder.since_seconds, first.holder.left_seconds) == (2.5, 0.5)
    assert second.holder is None
