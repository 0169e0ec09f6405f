"""Trials whose checkpoints cannot be read on a host for a while: they wait, and others go on."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._retries import MOST_FAILED, RETRY_SECONDS
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger

REASON = "Trial 0: Checkpoint /c/0 of trial 0 cannot be read: Stale file handle."


def train(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker begins to train the trial of its lease; the lease's epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def store(broker: FakeBroker, worker: int, epoch: int, number: int) -> None:
    """A trial goes to disk, and its process ends."""
    saved = Checkpoint(path=f"/c/{number}", units=1, size_bytes=1, sha256="0")
    parked = wire.TierChanged(epoch=epoch, tier="disk", suspend_seconds=0.0, checkpoint=saved)
    broker.say(worker, parked)
    broker.hang_up(worker)


def stored(trials: int = 1, ledger: MemoryLedger | None = None) -> FakeBroker:
    """A broker with as many devices as trials, all of which are on disk."""
    broker = FakeBroker(devices=trials, ledger=ledger)
    broker.driver(policy="round-robin", unstarted=trials, max_alive=2 * trials)
    workers = [broker.worker() for _ in range(trials)]
    epochs = [train(broker, worker, number) for number, worker in enumerate(workers)]
    for number, (worker, epoch) in enumerate(zip(workers, epochs, strict=True)):
        store(broker, worker, epoch, number)
    return broker


def fail_to_read(broker: FakeBroker, *, leaves: bool = True) -> None:
    """A worker is granted a trial and gives it back, as its checkpoint cannot be read now."""
    worker = broker.worker()
    grant = broker.last(worker, "Grant")
    broker.say(worker, wire.Begin(epoch=grant.epoch, number=grant.number, trial_id=grant.trial_id))
    broker.say(worker, wire.Released(epoch=grant.epoch, reason=REASON, unreachable=True))
    if leaves:
        broker.hang_up(worker)


def shown(broker: FakeBroker) -> wire.StudyStatus:
    (study,) = broker.handler.status(broker.now).studies
    return study


def test_the_trial_waits_and_its_study_goes_on() -> None:
    """It stays stored with its checkpoint, and is granted again after a minute."""
    broker = stored()
    fail_to_read(broker)
    assert shown(broker).problem is None
    assert shown(broker).counts.stored == 1
    assert not shown(broker).finished
    kinds = [event.kind for event in broker.ledger.load_events("s")]
    assert kinds[-1] == "released"
    worker = broker.worker()
    broker.advance(RETRY_SECONDS - 1)
    assert broker.last(worker, "Grant") is None
    broker.advance(1)
    grant = broker.last(worker, "Grant")
    assert (grant.number, [each.path for each in grant.checkpoints]) == (0, ["/c/0"])
    broker.check()


def test_other_trials_have_its_device_meanwhile() -> None:
    """Only what could not be read is kept back."""
    broker = stored(trials=2)
    fail_to_read(broker)
    assert broker.last(broker.worker(), "Grant") is not None
    assert broker.last(broker.worker(), "Grant") is None


def test_another_host_may_take_it_at_once() -> None:
    """It has no owner while it waits here."""
    ledger = MemoryLedger(clock=lambda: 0.0, shared=True)
    here = stored(ledger=ledger)
    fail_to_read(here)
    assert [trial.owner for trial in ledger.load_trials("s")] == [None]
    there = FakeBroker(devices=1, ledger=ledger, host="there")
    there.driver(policy="round-robin", unstarted=0)
    assert there.last(there.worker(), "Grant").number == 0
    assert here.last(here.worker(), "Grant") is None


def test_a_host_that_can_read_nothing_ends_the_study_for_now() -> None:
    """After some tries in a row, with what to do; the command may be run again."""
    broker = stored()
    for _ in range(MOST_FAILED - 1):
        fail_to_read(broker)
        broker.advance(RETRY_SECONDS)
    assert shown(broker).problem is None
    fail_to_read(broker)
    problem = shown(broker).problem
    assert problem is not None
    assert problem.startswith("No checkpoint could be read on this host, 3 times in a row")
    assert problem.endswith(f"then run the same command again. {REASON}")
    assert shown(broker).problem_may_pass
    assert shown(broker).finished


def test_the_next_command_tries_at_once() -> None:
    """A broker that lives on forgets what could not be read for the driver before."""
    broker = stored()
    for _ in range(MOST_FAILED - 1):
        fail_to_read(broker)
        broker.advance(RETRY_SECONDS)
    fail_to_read(broker, leaves=False)  # a study that nobody has left is not forgotten
    assert shown(broker).problem_may_pass
    broker.hang_up(1)
    broker.driver(policy="round-robin", unstarted=0)
    assert shown(broker).problem is None
    assert not shown(broker).problem_may_pass
    assert broker.last(broker.worker(), "Grant").number == 0


def test_a_checkpoint_that_is_read_in_between_begins_the_count_anew() -> None:
    """A checkpoint that cannot be read only now and then ends nothing."""
    broker = stored()
    for _ in range(2 * MOST_FAILED):
        fail_to_read(broker)
        broker.advance(RETRY_SECONDS)
        worker = broker.worker()
        store(broker, worker, train(broker, worker, 0), 0)
    assert shown(broker).problem is None


@pytest.mark.parametrize("trials", [MOST_FAILED, 2 * MOST_FAILED])
def test_a_disk_that_is_away_for_a_moment_counts_once(trials: int) -> None:
    """However many devices wait for it."""
    broker = stored(trials)
    for _ in range(trials):
        fail_to_read(broker)
    assert shown(broker).problem is None
    assert shown(broker).counts.stored == trials
