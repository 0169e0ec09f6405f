"""The cost of a message does not grow with the number of trials."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Received, StudyRead
from optuna_hermes.ledger._records import CheckpointRecord, TrialRecord
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker

CROWDS = (10, 300)


def calls_of(function: Callable[[], object]) -> int:
    """Count the entries into functions and generators of Python during a call."""
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def crowded(crowd: int) -> tuple[FakeBroker, int, int]:
    """A broker of one device with a trial that trains, and others that wait with workers."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=None, max_alive=crowd)
    first = broker.worker()
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.Begin(epoch=epoch, number=0, trial_id=1))
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=True))
    for _ in range(crowd):
        broker.worker()
        broker.connect("viewer")
    for number in range(1, crowd):
        broker.plain(number)
    return broker, first, epoch


def cost_of_one_more(kind: str, crowd: int) -> int:
    """Calls for a message of the trial that trains, with all that follows it."""
    broker, worker, epoch = crowded(crowd)
    message: wire.FromClient = {
        "beat": wire.Beat(epoch=epoch),
        "report": wire.Report(epoch=epoch, unit=1, step=1, value=1.0),
    }[kind]

    def handle() -> None:
        broker.handler.handle(Received(connection=worker, message=message), 0.1)
        assert not broker.handler.idle
        broker.handler.next_wakeup(0.1)

    broker.handler.next_wakeup(0.1)
    return calls_of(handle)


@pytest.mark.parametrize("kind", ["beat", "report"])
def test_a_message_costs_the_same_in_a_crowd(kind: str) -> None:
    """Reports and signs of life are most of what a broker hears."""
    few, many = (cost_of_one_more(kind, crowd) for crowd in CROWDS)
    assert few == many


class Counted(tuple[CheckpointRecord, ...]):
    """Checkpoints that count how often they are gone through."""

    looks = 0

    def __iter__(self) -> Iterator[CheckpointRecord]:
        Counted.looks += 1
        return super().__iter__()


def test_the_checkpoints_of_a_study_are_gone_through_once() -> None:
    """A study of ten thousand trials has twice as many: they are not compared with each trial."""
    trials = [TrialRecord(study="s", number=n, trial_id=n, state="stored") for n in range(20)]
    saved = {
        (n, units): Checkpoint(path=f"/{n}/{units}", units=units, size_bytes=1, sha256="0")
        for n in range(20)
        for units in (1, 2, 3)
    }
    records = Counted(
        CheckpointRecord(study="s", number=n, checkpoint=each, at=0.0)
        for (n, _), each in saved.items()
    )
    broker = FakeBroker(devices=1)
    spec = wire.StudySpec(key="s", name="s", ledger_url="memory:")
    message = wire.OpenStudy(study=spec, limit=0, max_alive=1)
    event = StudyRead(
        connection=broker.connect("driver"),
        message=message,
        trials=tuple(trials),
        checkpoints=records,
    )
    broker.apply(event)
    assert Counted.looks == 1
    kept = broker.handler.state.studies["s"].trials[7].checkpoints
    assert kept == [saved[7, 2], saved[7, 3]]
