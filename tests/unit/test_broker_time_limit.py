"""The end of a driver's time: what is begun before it, and what is not."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker

SECONDS, UNIT = 100.0, 30.0


def limited(*, can_store: bool, unstarted: int = 1) -> tuple[FakeBroker, int, int]:
    """A broker whose driver suspends all after 100 s, a worker that trains trial 0, its epoch."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=unstarted, seconds_left=SECONDS, slice_seconds=1.0)
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
    return broker, worker, epoch


def train(broker: FakeBroker, worker: int, epoch: int, unit: int) -> None:
    broker.advance(UNIT)
    broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=1.0 / unit))


def leave(broker: FakeBroker, worker: int, epoch: int, *, can_store: bool) -> None:
    broker.say(
        worker,
        wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0, can_store=can_store),
    )


def go_on(broker: FakeBroker, *, can_store: bool) -> tuple[int, int]:
    """A new worker trains trial 0, whose process was lost; the worker and its epoch."""
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
    return worker, epoch


def grants(broker: FakeBroker, worker: int) -> int:
    return sum(isinstance(each, wire.Grant) for each in broker.sent(worker))


def test_a_unit_that_cannot_end_and_would_be_lost_is_not_begun() -> None:
    """A trial that can only wait in memory stops after the last unit that it can end."""
    broker, worker, epoch = limited(can_store=False)
    for unit in (1, 2):
        train(broker, worker, epoch, unit)
        assert broker.last(worker, "Yield") is None
    train(broker, worker, epoch, 3)  # 10 s are left
    assert broker.last(worker, "Yield").epoch == epoch
    leave(broker, worker, epoch, can_store=False)
    broker.advance(9.0)
    assert grants(broker, worker) == 1


def test_what_was_lost_with_a_process_is_no_part_of_a_unit() -> None:
    """A trial that begins anew still has the time for its second unit."""
    broker, worker, epoch = limited(can_store=False)
    train(broker, worker, epoch, 1)
    broker.hang_up(worker)
    worker, epoch = go_on(broker, can_store=False)
    train(broker, worker, epoch, 1)  # 40 s are left
    assert broker.last(worker, "Yield") is None
    assert broker.handler.state.studies["s"].mean_unit_seconds == UNIT


def test_what_was_lost_within_a_unit_is_no_part_of_it() -> None:
    """A trial that goes on from its checkpoint ends its next unit, once it has trained it."""
    broker, worker, epoch = limited(can_store=True)
    train(broker, worker, epoch, 1)
    saved = Checkpoint(path="/c/1", units=1, size_bytes=1, sha256="0" * 64)
    broker.say(worker, wire.Saved(epoch=epoch, checkpoint=saved))
    broker.advance(0.9 * UNIT)
    broker.hang_up(worker)
    train(broker, *go_on(broker, can_store=True), 2)
    study = broker.handler.state.studies["s"]
    assert study.trials[0].curve.last_unit_seconds == 1.9 * UNIT
    assert study.mean_unit_seconds == UNIT


def test_a_repeated_unit_tells_how_long_units_are_where_nothing_else_does() -> None:
    """As to a broker that has just started: no unit would seem to take any time."""
    broker, worker, epoch = limited(can_store=False)
    train(broker, worker, epoch, 1)
    broker.hang_up(worker)
    study = broker.handler.state.studies["s"]
    study.mean_unit_seconds = 0.0
    train(broker, *go_on(broker, can_store=False), 1)
    assert study.mean_unit_seconds >= UNIT


def test_a_unit_that_is_kept_between_its_ends_is_begun() -> None:
    """A trial that can be suspended at any clean point trains until the end of the time."""
    broker, worker, epoch = limited(can_store=True)
    for unit in (1, 2, 3):
        train(broker, worker, epoch, unit)
    broker.advance(9.0)
    assert broker.last(worker, "Yield") is None


@pytest.mark.parametrize(("units", "opened"), [(1, 1), (3, 0)])
def test_no_trial_is_opened_that_would_not_end_its_first_unit(units: int, opened: int) -> None:
    """The device goes on with a trial that has begun, also if that was decided otherwise before."""
    broker, worker, epoch = limited(can_store=True, unstarted=2)
    for unit in range(1, units + 1):
        train(broker, worker, epoch, unit)
    spare = broker.worker()
    broker.say(broker.connect("viewer"), wire.ChangePolicy(study="s", policy="round-robin"))
    broker.advance(2.0)
    if broker.last(worker, "Yield") is not None:
        leave(broker, worker, epoch, can_store=True)
    assert grants(broker, spare) == opened
    assert (grants(broker, worker) == 2) == (not opened)


def test_a_trial_that_would_be_back_too_late_stays_where_it_is() -> None:
    """Bringing it back costs device time, and nothing would come of it."""
    broker, _, _ = limited(can_store=True)
    study = broker.handler.state.studies["s"]
    stored = LiveTrial(study="s", number=7, trial_id=7, state="stored", submitted=0.0, tier="disk")
    stored.keep([Checkpoint(path="/c/7/1", units=1, size_bytes=1, sha256="0")])
    study.costs["disk"] = 5.0
    assert study.has_time_for(stored, SECONDS - 6.0)
    assert not study.has_time_for(stored, SECONDS - 4.0)


@pytest.mark.parametrize(("kept", "expected"), [(True, True), (False, False)])
def test_where_nothing_else_can_train_a_trial_is_opened_if_it_can_be_kept(
    kept: bool, expected: bool
) -> None:
    """A unit that is longer than any job still gets on, from job to job."""
    broker, worker, epoch = limited(can_store=kept, unstarted=2)
    study = broker.handler.state.studies["s"]
    study.mean_unit_seconds, study.opening_seconds = 1000.0, 4.0
    assert study.has_time_to_open(50.0) is expected
    assert not study.has_time_to_open(97.0)
    leave(broker, worker, epoch, can_store=kept)
    study.ends_at = None
    assert study.has_time_to_open(1e9)


def test_no_such_trial_is_opened_while_any_other_can_train() -> None:
    """However many would be back on the device too late, or can only wait in memory."""
    broker, _, _ = limited(can_store=True, unstarted=2)
    study = broker.handler.state.studies["s"]
    study.mean_unit_seconds = study.costs["disk"] = 1000.0
    late = LiveTrial(study="s", number=7, trial_id=7, state="parked", submitted=0.0, tier="disk")
    study.trials[7] = late
    assert study.has_time_to_open(50.0)
    assert not study.has_time_to_open(50.0, up=[0, 7])
