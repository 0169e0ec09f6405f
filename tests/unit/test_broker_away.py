"""Outage of a study's database: trials on devices go on, and no other one begins."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import (
    Activity,
    EndLease,
    Observed,
    OutageBegan,
    OutageEnded,
    Send,
    Withdraw,
    WritesFailed,
)
from optuna_hermes.broker._core._outage import OUTAGE_SECONDS
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker

SLICE = 1.0


def away(*held: int, studies: tuple[str, ...] = ("s",)) -> OutageBegan:
    return OutageBegan(studies=studies, reason="No route to host.", uncommitted=held)


BACK = OutageEnded(studies=("s",))


def training(broker: FakeBroker, number: int = 0) -> tuple[int, int]:
    """A worker whose new trial trains; its connection and epoch."""
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return worker, epoch


def be_idle(broker: FakeBroker, worker: int, seconds: float, activity: Activity = "idle") -> None:
    """A worker says nothing, and is seen to do nothing."""
    for _ in range(round(seconds)):
        broker.advance(1.0)
        broker.apply(Observed(activities={worker: activity}))


def asked_first(broker: FakeBroker) -> list[str | None]:
    """The studies whose databases must answer before each yield, None where none must."""
    sent = (each for each in broker.log if isinstance(each, Send))
    return [each.database for each in sent if isinstance(each.message, wire.Yield)]


def shown(broker: FakeBroker, key: str = "s") -> wire.StudyStatus:
    studies = broker.handler.status(broker.now).studies
    return next(study for study in studies if study.key == key)


def test_a_slice_that_ends_meanwhile_goes_on() -> None:
    """Nobody yields for what could not be granted; when the database is back, they do."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin")
    first, _ = training(broker)
    waiting = broker.worker()
    broker.apply(away())
    broker.advance(10 * SLICE)
    assert broker.last(first, "Yield") is None
    assert shown(broker).outage_seconds == 10 * SLICE
    broker.apply(BACK)
    assert broker.last(first, "Yield") is not None
    assert broker.last(waiting, "Grant") is None
    assert shown(broker).outage_seconds is None


def test_who_makes_room_leaves_once_the_database_has_answered() -> None:
    """The next trial could not be granted otherwise; whose study ends waits for no database."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin")
    first, epoch = training(broker)
    broker.worker()
    broker.advance(SLICE)
    assert broker.last(first, "Yield") is not None
    assert asked_first(broker) == ["s"]
    broker.say(1, wire.Drain(study="s"))
    broker.apply(OutageBegan(studies=("s",), reason="Locked.", unsent_yields=(epoch,)))
    assert asked_first(broker) == ["s", None]
    other = FakeBroker(devices=1)
    other.driver()
    training(other)
    other.say(1, wire.Drain(study="s"))
    assert asked_first(other) == [None]


def test_a_device_that_breaks_meanwhile_is_left_without_the_database() -> None:
    """Its trial goes to disk at once: the device is not granted, so nothing has to be written."""
    broker = FakeBroker(devices=1)
    broker.driver()
    first, _ = training(broker)
    broker.apply(away())
    broker.poll("cpu:0", healthy=False)
    assert broker.last(first, "Yield").tier == "disk"
    assert asked_first(broker) == [None]


def test_who_has_not_heard_that_it_is_to_leave_stays() -> None:
    """It trains on as if it had not been asked, and is asked again when the database is back."""
    broker = FakeBroker(devices=1, grace_seconds=5.0)
    broker.driver(policy="round-robin")
    worker, epoch = training(broker)
    broker.worker()
    broker.advance(SLICE)
    assert broker.last(worker, "Yield") is not None
    broker.apply(OutageBegan(studies=("s",), reason="Locked.", unsent_yields=(epoch,)))
    broker.advance(100.0)
    assert broker.killed() == []
    assert broker.handler.status(broker.now).devices[0].holder.state == "running"
    before = len(broker.log)
    broker.apply(BACK)
    asked = [c for c in broker.log[before:] if isinstance(c, Send)]
    assert [c.connection for c in asked] == [worker]


def test_another_study_does_not_wait_for_who_has_not_heard_to_leave() -> None:
    """Its claim to the device goes with the request; it gets the device in another slice."""
    broker = FakeBroker(devices=1)
    broker.driver(key="s")
    broker.driver(key="t")
    worker = broker.worker(key="s")
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    other = broker.worker(key="t")
    broker.advance(10 * SLICE)
    assert broker.last(worker, "Yield") is not None
    assert broker.handler.state.reservations()
    broker.apply(OutageBegan(studies=("s",), reason="Locked.", unsent_yields=(epoch,)))
    assert broker.handler.state.reservations() == []
    broker.check()
    broker.apply(BACK)
    broker.advance(10 * SLICE)
    broker.say(worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    assert broker.last(other, "Grant") is not None


def test_a_device_that_becomes_free_stays_free() -> None:
    """No lease is made that could not be written; the first one comes with the database."""
    broker = FakeBroker(devices=1)
    broker.driver()
    first, epoch = training(broker)
    second = broker.worker()
    broker.apply(away())
    broker.say(first, wire.Ended(epoch=epoch, state="done"))
    broker.advance(SLICE)
    assert broker.last(second, "Grant") is None
    broker.apply(BACK)
    assert broker.last(second, "Grant") is not None
    broker.check()


def test_other_studies_get_devices_all_the_same() -> None:
    """A study whose own database answers is served."""
    broker = FakeBroker(devices=2)
    broker.driver(key="s")
    broker.driver(key="t")
    broker.apply(away())
    served = broker.worker(key="t")
    assert broker.last(broker.worker(key="s"), "Grant") is None
    assert broker.last(served, "Grant") is not None


def test_a_lease_that_was_held_begins_when_it_is_granted() -> None:
    """Its trial has had no time yet, is not asked to leave, and is not killed for its silence."""
    broker = FakeBroker(devices=1, grace_seconds=5.0)
    broker.driver()
    broker.advance(3.0)
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.advance(0.5)
    broker.apply(away(epoch))
    broker.advance(100.0)
    assert broker.last(worker, "Yield") is None
    assert broker.killed() == []
    broker.apply(BACK)
    holder = broker.handler.status(broker.now).devices[0].holder
    assert (holder.since_seconds, holder.left_seconds) == (0.0, SLICE)


def test_a_trial_that_waits_for_the_database_does_not_hang() -> None:
    """It may tell Optuna of its end: how long the database is away does not count as silence."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, hang_seconds=60.0)
    worker, _ = training(broker)
    be_idle(broker, worker, 30.0)
    broker.apply(away())
    be_idle(broker, worker, 120.0)
    broker.apply(BACK)
    be_idle(broker, worker, 25.0)
    assert broker.killed() == []
    be_idle(broker, worker, 10.0)
    assert broker.killed() == [worker]


@pytest.mark.parametrize("others", [True, False])
def test_a_database_that_is_slow_now_and_then_hides_no_hang(others: bool) -> None:
    """Silences do not begin anew with each write that takes over a second."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2 if others else 1, hang_seconds=60.0)
    worker, _ = training(broker)
    broker.worker()
    for _ in range(5):
        be_idle(broker, worker, 11.0)
        broker.apply(away())
        be_idle(broker, worker, 2.0)
        broker.apply(BACK)
    assert broker.killed() == []
    be_idle(broker, worker, 8.0)
    assert broker.killed() == [worker]


def test_a_worker_that_is_stopped_in_an_outage_is_in_the_way_for_half_a_minute() -> None:
    """It was heard in that outage, too: both are left out of its silence."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    worker, epoch = training(broker)
    broker.worker()
    broker.apply(away())
    broker.advance(1.0)
    broker.say(worker, wire.Beat(epoch=epoch))
    be_idle(broker, worker, 10.0, "stopped")
    broker.apply(BACK)
    be_idle(broker, worker, 25.0, "stopped")
    assert broker.killed() == []
    be_idle(broker, worker, 10.0, "stopped")
    assert broker.killed() == [worker]


def test_a_database_that_stays_away_sends_all_to_disk() -> None:
    """After long enough everything is suspended, and people read why and what to do."""
    broker = FakeBroker(devices=2)
    broker.driver()
    first, epoch = training(broker)
    held = broker.worker()
    grant = broker.last(held, "Grant")
    unstarted = shown(broker).unstarted
    broker.apply(away(grant.epoch))
    broker.advance(OUTAGE_SECONDS - 1)
    assert shown(broker).problem is None
    broker.advance(1)
    problem = shown(broker).problem
    assert "did not answer for 300 s" in problem
    assert "run the same command again. No route to host." in problem
    assert broker.last(first, "Yield").tier == "disk"
    # Nobody has heard of the lease that was not written, and nobody will.
    assert Withdraw(epoch=grant.epoch) in broker.log
    assert any(isinstance(c, EndLease) and c.epoch == grant.epoch for c in broker.log)
    assert broker.last(held, "Dismiss") is not None
    assert shown(broker).unstarted == unstarted + 1
    assert not shown(broker).finished
    saved = Checkpoint(path="/c", units=1, size_bytes=1, sha256="0")
    parked = wire.TierChanged(epoch=epoch, tier="disk", suspend_seconds=0.0, checkpoint=saved)
    broker.say(first, parked)
    assert shown(broker).finished


def test_a_lease_that_never_was_leaves_its_trial_as_it_was() -> None:
    """A parked trial knows its last lease only: by that it is asked to go to disk."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    first, epoch = training(broker)
    broker.worker()
    broker.advance(SLICE)
    parked = wire.TierChanged(
        epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True, can_offload=True
    )
    broker.say(first, parked)
    second = broker.last(3, "Grant").epoch
    broker.say(3, wire.Begin(epoch=second, number=1, trial_id=1))
    broker.say(3, wire.FirstBatch(epoch=second, can_store=True))
    broker.say(3, wire.Ended(epoch=second, state="done"))
    again = broker.last(first, "Grant")
    assert again.number == 0
    broker.apply(WritesFailed(study="s", epochs=(again.epoch,), reason="stale"))
    evict = broker.last(first, "Move")
    assert (evict.epoch, evict.tier) == (epoch, "disk")
    assert shown(broker).counts.parked == 1
    broker.check()


def test_a_drain_right_before_an_outage_sends_to_disk_who_waits_for_its_grant() -> None:
    """It cannot hear of a lease that is not written; killed for that, it would lose its work."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    first, epoch = training(broker)
    second = broker.worker()
    broker.advance(SLICE)
    parked = wire.TierChanged(
        epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True, can_offload=True
    )
    broker.say(first, parked)
    other = broker.last(second, "Grant").epoch
    broker.say(second, wire.Begin(epoch=other, number=1, trial_id=1))
    broker.say(second, wire.Ended(epoch=other, state="done"))
    again = broker.last(first, "Grant").epoch
    broker.say(1, wire.Drain(study="s"))
    broker.apply(away(again))
    assert Withdraw(epoch=again) in broker.log
    assert broker.last(first, "Move") == wire.Move(epoch=epoch, tier="disk")
    broker.check()


def test_what_is_refused_without_a_lease_ends_its_study() -> None:
    """A checkpoint that the ledger will not have is a reason to stop, and to say so."""
    broker = FakeBroker(devices=1)
    broker.driver()
    worker, _ = training(broker)
    broker.apply(WritesFailed(study="s", reason="no such table", paths=("/c",)))
    assert shown(broker).problem == "no such table"
    assert broker.last(worker, "Yield").tier == "disk"


def test_trials_of_plain_optuna_wait_for_their_database() -> None:
    """Nothing of them could be suspended to disk: they go on when it is back, however late."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0, policy="round-robin"), broker.plain(1, policy="round-robin")
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=False))
    broker.apply(away())
    broker.advance(2 * OUTAGE_SECONDS)
    assert shown(broker).problem is None
    assert broker.last(first, "Yield") is None
    broker.apply(BACK)
    broker.say(first, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    assert broker.last(second, "Grant") is not None
