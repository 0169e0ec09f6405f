"""The cost of a message does not grow with the number of trials."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Received
from support.broker import FakeBroker

CROWDS = (10, 300)


def calls_of(function: Callable[[], object]) -> int:
    """How often functions and generators of Python were entered meanwhile."""
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
    """A broker of one device with a run that trains, and as many others that wait with workers."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=None, max_alive=crowd)
    first = broker.worker()
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.Begin(epoch=epoch, number=0, trial_id=1))
    broker.say(first, wire.FirstBatch(epoch=epoch, stores=True))
    for _ in range(crowd):
        broker.worker()
        broker.connect("viewer")
    for number in range(1, crowd):
        broker.plain(number)
    return broker, first, epoch


def cost_of_one_more(kind: str, crowd: int) -> int:
    """Calls for a message of the run that trains, with all that follows it."""
    broker, worker, epoch = crowded(crowd)
    message: wire.FromClient = {
        "beat": wire.Beat(epoch=epoch, batches=1),
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
