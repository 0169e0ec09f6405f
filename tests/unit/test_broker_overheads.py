"""Device time outside of batches, by kind."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import Checkpoint, OverheadKind
from support.broker import FakeBroker


def counted(broker: FakeBroker) -> dict[OverheadKind, float]:
    """The kinds that have cost anything."""
    (study,) = broker.handler.status(broker.now).studies
    return {kind: seconds for kind, seconds in study.overhead_seconds.items() if seconds}


def opened(broker: FakeBroker, number: int = 0) -> tuple[int, int]:
    """A worker and the epoch of the lease under which it has begun a new trial."""
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    return worker, epoch


def test_a_device_is_idle_until_the_first_worker_comes() -> None:
    """Start-up counts: from the driver's coming, on each device that a trial could use."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2)
    broker.advance(3.0)
    opened(broker)
    assert counted(broker) == {"idle": 3.0}
    broker.advance(1.0)
    opened(broker, 1)
    assert counted(broker) == {"idle": 7.0}


def test_a_trial_is_opening_until_its_first_batch() -> None:
    """Time that its objective takes before it trains counts."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, epoch = opened(broker)
    broker.advance(2.0)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    broker.advance(5.0)
    assert counted(broker) == {"opening": 2.0}


def test_a_first_unit_is_no_opening() -> None:
    """Of an objective that only calls ``should_prune`` that is the first that is heard."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, epoch = opened(broker)
    broker.advance(2.0)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=False, late=True))
    assert counted(broker) == {}
    assert broker.handler.state.studies["s"].opening_seconds == 0.0


def test_a_device_that_no_trial_could_use_is_not_idle() -> None:
    """The wait for another driver, after the last trial's end, is nobody's cost."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, epoch = opened(broker)
    broker.advance(2.0)
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    broker.advance(100.0)
    again = broker.plain(1)
    assert broker.last(again, "Grant") is not None
    assert counted(broker) == {}


def test_a_trial_that_stands_still_to_be_saved_costs_its_device() -> None:
    """Time to copy its state off the device, and to wait for the checkpoint before, counts."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, epoch = opened(broker)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    broker.advance(8.0)
    for units, seconds in ((1, 0.5), (2, 0.25)):
        state = Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")
        broker.say(worker, wire.Saved(epoch=epoch, checkpoint=state, blocked_seconds=seconds))
    assert counted(broker) == {"saving": 0.75}


def test_the_share_is_of_all_device_time_idle_devices_included() -> None:
    """2 s idle and 1 s opening of 2 s + 8 s make 30 %."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    broker.advance(2.0)
    worker, epoch = opened(broker)
    broker.advance(1.0)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    assert broker.handler.state.studies["s"].opening_seconds == 1.0
    broker.advance(7.0)
    (study,) = broker.handler.status(broker.now).studies
    assert study.overhead_fraction == pytest.approx(0.3)
