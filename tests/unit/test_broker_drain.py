"""Suspension of a whole study: which trials are saved first, and how many at a time."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _drain
from optuna_hermes.broker._core._drain import at_once, most_to_lose_first
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.model import Checkpoint, Curve, Decision, Snapshot
from optuna_hermes.policies import Policy
from support.broker import FakeBroker


def trial(number: int, seconds: float, *, saved_units: int = 0, units: int = 0) -> LiveTrial:
    """A trial with units of 10 s, and a checkpoint after some of them."""
    made = LiveTrial(
        study="s", number=number, trial_id=number, state="parked", submitted=0.0, units=units
    )
    steps = tuple(range(1, units + 1))
    made.curve = Curve(
        steps=steps,
        values=tuple(1.0 / step for step in steps),
        device_seconds=tuple(10.0 * step for step in steps),
    )
    made.device_seconds = seconds
    if saved_units:
        made.keep([_checkpoint(saved_units)])
    return made


def _checkpoint(units: int, number: int = 0) -> Checkpoint:
    return Checkpoint(path=f"/c/{number}/{units}", units=units, size_bytes=1, sha256="0")


def test_what_is_most_expensive_to_repeat_is_first() -> None:
    """It is device time since the last checkpoint that counts, not all of it; then the number."""
    old = trial(0, 95.0, units=9, saved_units=9)
    unsaved = trial(1, 60.0, units=6)
    behind = trial(2, 80.0, units=8, saved_units=5)
    same = trial(3, 95.0, units=9, saved_units=9)
    assert [each.unsaved_seconds for each in (old, unsaved, behind)] == [5.0, 60.0, 30.0]
    assert most_to_lose_first([same, old, behind, unsaved]) == [unsaved, behind, old, same]


def test_a_checkpoint_of_a_unit_that_is_not_known_saves_what_is() -> None:
    """A trial that another process has carried on may be behind its checkpoint."""
    ahead = trial(0, 25.0, units=2)
    ahead.keep([_checkpoint(5)])
    assert ahead.unsaved_seconds == 5.0
    ahead.keep([_checkpoint(1)])  # an older one does not undo it
    assert ahead.unsaved_seconds == 5.0


def test_more_devices_save_more_at_a_time() -> None:
    """A few go at once even on one device."""
    assert [at_once(n) for n in (1, 2, 8)] == [4, 4, 16]


def _with_parked(seconds: list[float]) -> tuple[FakeBroker, int, list[int]]:
    """A broker with trials that are held after so long; its driver, and the trials' workers."""
    broker = FakeBroker(devices=len(seconds))
    driver, viewer = broker.driver(unstarted=len(seconds), max_alive=99), broker.connect("viewer")
    workers = [broker.worker() for _ in seconds]
    for number, worker in enumerate(workers):
        epoch = broker.last(worker, "Grant").epoch
        broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
        broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    for number in sorted(range(len(seconds)), key=seconds.__getitem__):
        broker.advance(seconds[number] - broker.now)
        epoch = broker.last(workers[number], "Grant").epoch
        broker.say(workers[number], wire.Report(epoch=epoch, unit=1, step=1, value=0.5))
        broker.say(viewer, wire.SetOverrides(study="s", numbers=(number,), override="held"))
        park = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1, can_store=True)
        broker.say(workers[number], park)
    return broker, driver, workers


def _evicted(broker: FakeBroker, workers: list[int]) -> list[int]:
    return [
        number
        for number, worker in enumerate(workers)
        if any(isinstance(each, wire.Move) for each in broker.sent(worker))
    ]


def _to_disk(broker: FakeBroker, workers: list[int], number: int) -> None:
    broker.say(
        workers[number],
        wire.TierChanged(
            epoch=broker.last(workers[number], "Grant").epoch,
            tier="disk",
            suspend_seconds=0.1,
            checkpoint=_checkpoint(1, number),
        ),
    )


def test_a_few_go_to_disk_at_a_time_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that has arrived, or whose process is gone, makes room for the next."""
    monkeypatch.setattr(_drain, "AT_ONCE_PER_DEVICE", 0)
    broker, driver, workers = _with_parked([2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 8.0])
    broker.say(driver, wire.Drain(study="s"))
    assert _evicted(broker, workers) == [1, 3, 5, 6]
    _to_disk(broker, workers, 6)
    assert _evicted(broker, workers) == [1, 3, 4, 5, 6]
    broker.hang_up(workers[1])
    assert _evicted(broker, workers) == [1, 2, 3, 4, 5, 6]
    assert not broker.handler.status(broker.now).studies[0].finished
    for number in (3, 4, 5):
        _to_disk(broker, workers, number)
    assert _evicted(broker, workers) == [0, 1, 2, 3, 4, 5, 6]
    for number in (0, 2):
        _to_disk(broker, workers, number)
    assert broker.handler.status(broker.now).studies[0].finished


def test_what_is_saved_already_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was written while a trial trained is counted."""
    monkeypatch.setattr(_drain, "AT_ONCE_PER_DEVICE", 0)
    broker, driver, workers = _with_parked([9.0, 2.0, 3.0, 4.0, 5.0])
    epoch = broker.last(workers[0], "Grant").epoch
    broker.say(workers[0], wire.Saved(epoch=epoch, checkpoint=_checkpoint(1)))
    broker.say(driver, wire.Drain(study="s"))
    assert _evicted(broker, workers) == [1, 2, 3, 4]


def test_a_trial_that_trains_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at its next clean point, however many are parked."""
    monkeypatch.setattr(_drain, "LEAST_AT_ONCE", 0)
    monkeypatch.setattr(_drain, "AT_ONCE_PER_DEVICE", 0)
    broker, driver, workers = _with_parked([2.0, 3.0])
    viewer = broker.connect("viewer")
    broker.say(viewer, wire.SetOverrides(study="s", numbers=(1,), override=None))
    epoch = broker.last(workers[1], "Grant").epoch
    broker.say(driver, wire.Drain(study="s"))
    assert broker.last(workers[1], "Yield") == wire.Yield(epoch=epoch, tier="disk")
    assert _evicted(broker, workers) == []


# -- trials of plain Optuna ------------------------------------------------------------------------


def _train(broker: FakeBroker, connection: int) -> int:
    """A plain trial begins to train under its last grant; returns the epoch."""
    epoch = int(broker.last(connection, "Grant").epoch)
    broker.say(connection, wire.FirstBatch(epoch=epoch, can_store=False))
    return epoch


def _park(broker: FakeBroker, connection: int, epoch: int) -> None:
    broker.say(connection, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1))


def test_a_plain_trial_goes_on_once_the_drivers_processes_are_gone() -> None:
    """It makes room with them; then nobody is left for whom its study would be suspended."""
    broker = FakeBroker(devices=2)
    driver = broker.driver(unstarted=1)
    worker, plain = broker.worker(), broker.plain(7)
    theirs = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=theirs, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=theirs, can_store=True))
    epoch = _train(broker, plain)
    broker.say(driver, wire.Drain(study="s"))
    _park(broker, plain, epoch)
    broker.hang_up(driver)
    assert broker.last(plain, "Grant").epoch == epoch, "a worker of the driver is still there"
    broker.hang_up(worker)
    assert broker.last(plain, "Grant").epoch > epoch


def test_the_time_limit_of_a_driver_that_died_is_none_for_plain_trials() -> None:
    """They have no limit of their own."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(unstarted=0, seconds_left=5.0)
    plain = broker.plain(7)
    epoch = _train(broker, plain)
    broker.hang_up(driver)
    broker.advance(20.0)
    broker.say(plain, wire.Report(epoch=epoch, unit=1, step=1, value=0.5))
    assert broker.last(plain, "Yield") is None


class _Raising(Policy):
    def decide(self, snapshot: Snapshot) -> Decision:
        raise RuntimeError("no idea")


def test_a_problem_is_told_to_plain_trials_where_there_is_no_driver() -> None:
    """Each is refused once it waits, when it asks again, and when it comes anew meanwhile."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0), broker.plain(1)
    epoch = _train(broker, first)
    broker.handler.state.studies["s"].policy = _Raising()
    broker.advance(1.5)
    problem = broker.last(second, "Refused").reason
    assert "no idea" in problem
    assert broker.last(first, "Refused") is None
    _park(broker, first, epoch)
    assert broker.last(first, "Refused").reason == problem
    broker.register(first, 0)  # as a client does that has lost its lease
    third = broker.plain(2)
    told = [message for each in (first, second, third) for message in broker.sent(each)]
    assert [message for message in told if isinstance(message, wire.Refused)] == [
        wire.Refused(reason=problem)
    ] * 4
    for connection in (first, second, third):
        broker.hang_up(connection)
    assert broker.last(broker.plain(3), "Grant") is not None, "it begins anew"
