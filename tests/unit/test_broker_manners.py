"""Messages, actions and reversals that a broker refuses to its clients."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import Reservation
from optuna_hermes.broker._core._events import Kill, OutageBegan, StudyRead, WritesFailed
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker

SPEC = wire.StudySpec(key="s", name="s", ledger_url="memory:")
OPENING = wire.OpenStudy(study=SPEC, limit=1, max_alive=1)
CHECKPOINT = Checkpoint(path="/c", units=1, size_bytes=1, sha256="0")


def register(broker: FakeBroker, connection: int, number: int, **known: object) -> None:
    message = wire.Register(study=SPEC, number=number, trial_id=number)
    broker.apply(StudyRead(connection=connection, message=message, **known))  # type: ignore[arg-type]


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def states(broker: FakeBroker) -> list[str]:
    return [trial.state for trial in broker.handler.status(broker.now).studies[0].trials]


def test_a_worker_waits_for_one_trial() -> None:
    """A worker that says twice that it is ready gets one device, and is told why not two."""
    broker = FakeBroker(devices=2)
    broker.driver()
    worker = broker.worker()
    broker.say(worker, wire.Ready(study="s"))
    assert "says Ready once" in broker.last(worker, "Refused").reason
    assert sum(isinstance(message, wire.Grant) for message in broker.sent(worker)) == 1


@pytest.mark.parametrize("role", ["driver", "plain", "viewer"])
def test_only_workers_wait_for_any_trial(role: str) -> None:
    """A process of the user's is given no trial of somebody else's."""
    broker = FakeBroker(devices=1)
    broker.driver()
    other = broker.connect(role)
    broker.say(other, wire.Ready(study="s"))
    assert "Ready is said by a worker" in broker.last(other, "Refused").reason


def test_a_driver_serves_one_study() -> None:
    """A second study on one connection would be without a driver, and not know it, at its end."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(key="a")
    broker.apply(StudyRead(connection=driver, message=OPENING))
    assert "open another" in broker.last(driver, "Refused").reason
    broker.hang_up(driver)
    assert broker.handler.status(0.0).studies == ()


def test_who_is_gone_gets_nothing() -> None:
    """A study that is read for a client that is gone by then is not opened."""
    broker = FakeBroker(devices=1)
    driver = broker.connect("driver")
    broker.hang_up(driver)
    assert broker.apply(StudyRead(connection=driver, message=OPENING)) == []
    assert broker.handler.status(0.0).studies == ()


def test_a_trial_that_is_trained_is_not_registered_again() -> None:
    """The second process is refused, and the first goes on."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0), broker.connect("plain")
    register(broker, second, 0)
    assert f"process {first}" in broker.last(second, "Refused").reason
    assert states(broker) == ["running"]


def test_a_trial_that_has_ended_is_not_registered_again() -> None:
    """A trial that is done stays done, and the study that was read for it is left alone."""
    broker = FakeBroker(devices=1)
    trial = broker.connect("plain")
    register(broker, trial, 0, trials=(TrialRecord(study="s", number=0, trial_id=0, state="done"),))
    assert "create another" in broker.last(trial, "Refused").reason
    assert broker.handler.status(0.0).studies == ()


def test_a_trial_that_has_ended_is_not_begun_again() -> None:
    """The worker that found it is killed, and the trial that was to come may still be created."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    first = broker.worker()
    broker.say(first, wire.Ended(epoch=begin(broker, first, 0), state="done"))
    second = broker.worker()
    begin(broker, second, 0)
    assert [(each.pid, each.reason) for each in broker.log if isinstance(each, Kill)] == [
        (second, "trial 0 is over")
    ]
    broker.hang_up(second)
    assert states(broker) == ["done"]
    assert broker.handler.status(0.0).studies[0].unstarted == 1


def test_a_lease_keeps_its_trial() -> None:
    """A process that holds one trial's lease cannot take another trial with it."""
    broker = FakeBroker(devices=1)
    broker.driver()
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    broker.say(worker, wire.Begin(epoch=epoch, number=1, trial_id=1))
    assert states(broker) == ["running"]


def test_a_trial_that_stores_itself_while_its_study_is_drained() -> None:
    """It had not been asked yet; there is nobody left to ask."""
    broker = FakeBroker(devices=1)
    driver = broker.driver()
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(driver, wire.Drain(study="s"))
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    parked = wire.TierChanged(
        epoch=epoch, tier="disk", suspend_seconds=0.0, checkpoint=CHECKPOINT, can_store=True
    )
    broker.say(worker, parked)
    assert states(broker) == ["stored"]


def test_nobody_gives_signs_of_life_for_another() -> None:
    """A worker that hangs is killed although someone else talks about its lease."""
    broker = FakeBroker(devices=1, grace_seconds=10.0)
    broker.driver(policy="round-robin")
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    broker.say(first, wire.Report(epoch=epoch, unit=1, step=1, value=0.5))
    broker.advance(9.0)
    broker.say(second, wire.Saved(epoch=epoch, checkpoint=CHECKPOINT))
    broker.advance(5.0)
    assert broker.killed() == [first]


def test_a_trial_whose_lease_was_refused_may_still_be_created() -> None:
    """The worker that was to open it is sent home, for its study ends."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    broker.apply(
        WritesFailed(study="s", epochs=(broker.last(worker, "Grant").epoch,), reason="disk full")
    )
    study = broker.handler.status(0.0).studies[0]
    assert (study.unstarted, study.workers.idle) == (1, 0)
    assert broker.last(worker, "Dismiss") is not None


def test_a_trial_whose_lease_was_refused_is_what_it_was() -> None:
    """One that began again for want of a checkpoint is pending, and not parked in its worker."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    first = broker.worker()
    epoch = begin(broker, first, 0)
    broker.say(first, wire.Report(epoch=epoch, unit=1, step=1, value=0.5))
    broker.hang_up(first)
    second = broker.worker()
    broker.apply(
        WritesFailed(study="s", epochs=(broker.last(second, "Grant").epoch,), reason="disk full")
    )
    assert states(broker) == ["pending"]
    assert broker.last(second, "Dismiss") is not None


def test_what_is_said_of_a_study_goes_with_who_said_it() -> None:
    """Descriptions for a study that is never opened are not kept for ever."""
    broker = FakeBroker(devices=1)
    driver = broker.connect("driver")
    broker.say(driver, wire.Describe(study="s", params={0: {"lr": 0.1}}))
    broker.hang_up(driver)
    register(broker, broker.connect("plain"), 0)
    other = broker.connect("driver")
    broker.apply(StudyRead(connection=other, message=OPENING))
    assert broker.handler.state.studies["s"].trials[0].params == {}


def test_a_lease_is_held_by_its_own_database_only() -> None:
    """One that is on its way to a database that answers is not taken for one that is stuck."""
    broker = FakeBroker(devices=1)
    broker.driver(key="a")
    epoch = broker.last(broker.worker(key="a"), "Grant").epoch
    broker.driver(key="b")
    broker.apply(OutageBegan(studies=("b",), reason="cut", uncommitted=(epoch,)))
    lease = broker.handler.state.slots["cpu:0"].lease
    assert lease is not None
    assert not lease.uncommitted


def test_no_device_is_kept_for_a_trial_that_is_over() -> None:
    """A stored trial that was to go on elsewhere is ended by a worker that found it by itself."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=1, max_alive=2)
    first = broker.worker()
    epoch = begin(broker, first, 0)
    slot = broker.handler.state.slots["cpu:1"]
    slot.reservation = Reservation(study="s", number=0, slice_seconds=None)
    broker.say(first, wire.Ended(epoch=epoch, state="done"))
    assert slot.reservation is None
    broker.worker()
    assert states(broker) == ["done"]
