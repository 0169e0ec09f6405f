"""The energy of trials on their devices: counted, estimated, or unknown."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import Device
from support.broker import FakeBroker


def _gpu(**fields: Any) -> Device:
    return Device(id="GPU-a", kind="gpu", free=True, **fields)


def _training(device: Device) -> tuple[FakeBroker, int, int]:
    """A broker with one device, and the worker and epoch of the trial that trains on it."""
    broker = FakeBroker(devices=[device])
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    return broker, worker, epoch


def _joules(broker: FakeBroker) -> float | None:
    (trial,) = broker.ledger.load_trials("s")
    return trial.energy_joules


def test_a_counter_says_what_a_lease_took() -> None:
    """The difference of its two readings is the trial's, and reaches the ledger with its end."""
    broker, worker, epoch = _training(_gpu(energy_joules=1000.0, power_watts=700.0))
    broker.now = 10.0
    broker.poll("GPU-a", energy_joules=4600.0)
    (entry,) = broker.handler.status(broker.now).studies
    assert entry.watt_hours == pytest.approx(1.0)
    broker.say(worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    assert _joules(broker) == pytest.approx(3600.0)


def test_without_a_counter_the_rated_power_is_taken() -> None:
    """A device that counts nothing took no more than it may, for as long as the lease lasted."""
    broker, worker, epoch = _training(_gpu(power_watts=200.0))
    broker.now = 10.0
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert _joules(broker) == pytest.approx(2000.0)


def test_a_counter_that_begins_anew_is_not_believed() -> None:
    """After a reset of the driver the difference means nothing: the rated power does."""
    broker, worker, epoch = _training(_gpu(energy_joules=1000.0, power_watts=200.0))
    broker.now = 10.0
    broker.poll("GPU-a", energy_joules=5.0)
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert _joules(broker) == pytest.approx(2000.0)


def test_where_nothing_is_known_nothing_is_said() -> None:
    """A CPU slot has neither a counter nor a rated power, so there is no figure."""
    broker, worker, epoch = _training(Device(id="cpu:0", free=True))
    broker.now = 10.0
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert _joules(broker) is None
    (entry,) = broker.handler.status(broker.now).studies
    assert entry.watt_hours is None
    assert entry.trials[0].watt_hours is None


def test_slices_add_up() -> None:
    """A trial's energy is that of all its leases, from whatever broker."""
    broker, worker, epoch = _training(_gpu(energy_joules=0.0))
    for counted in (100.0, 250.0):
        broker.poll("GPU-a", energy_joules=counted)
        broker.say(worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
        broker.advance(1.0)
        epoch = broker.last(worker, "Grant").epoch
    assert _joules(broker) == pytest.approx(250.0)


def test_a_lease_that_outlives_its_broker_is_counted_from_its_grant() -> None:
    """The next broker learns from the holders what the counter said, and loses nothing."""
    first, worker, epoch = _training(_gpu(energy_joules=1000.0))
    second = first.successor()
    study = wire.StudySpec(key="s", name="s", ledger_url="memory:")
    said = wire.Reattach(study=study, epoch=epoch, number=0, devices=("GPU-a",), training=True)
    again = second.resume(worker, said)
    second.poll("GPU-a", energy_joules=4000.0)
    second.say(again, wire.Ended(epoch=epoch, state="done"))
    assert _joules(second) == pytest.approx(3000.0)
