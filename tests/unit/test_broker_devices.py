"""Devices that break, hang, or have a stranger on them, and what the broker does then."""

from __future__ import annotations

from typing import Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import Device
from optuna_hermes.testing import FakeBroker


def on_gpus(n_gpus: int, **driver: Any) -> FakeBroker:
    """A broker of GPUs, and a driver that shares them in turn."""
    gpus = [Device(id=f"GPU-{i}", kind="gpu", free=True) for i in range(n_gpus)]
    broker = FakeBroker(devices=gpus)
    broker.driver(**{"policy": "round-robin", **driver})
    return broker


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker begins the new trial it was granted; returns the epoch."""
    epoch = int(broker.last(worker, "Grant").epoch)
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.Training(epoch=epoch, stores=True))
    return epoch


def test_a_gpu_with_a_stranger_is_granted_once_they_leave() -> None:
    """While another user's process computes there nobody gets it; afterwards the next run does."""
    broker = on_gpus(1)
    broker.poll("GPU-0", free=False, problem="process 7 of another user computes on it")
    worker = broker.worker()
    assert broker.last(worker, "Grant") is None
    shown = broker.state.status(0.0)["devices"][0]
    assert shown["problem"] == "process 7 of another user computes on it"
    broker.poll("GPU-0", free=True, problem="")
    assert broker.last(worker, "Grant").devices == ("GPU-0",)


def test_a_stranger_who_comes_before_the_grant_is_first() -> None:
    """A device that was promised while a run had still to leave it goes to nobody now."""
    broker = on_gpus(1)
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    broker.advance(10)
    assert broker.last(first, "Yield").epoch == epoch
    broker.poll("GPU-0", free=False)
    broker.say(first, wire.Parked(epoch=epoch, tier="resident", suspend_seconds=0.1))
    assert broker.last(second, "Grant") is None
    broker.poll("GPU-0", free=True)
    assert broker.last(second, "Grant") is not None
