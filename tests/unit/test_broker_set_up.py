"""Trials that are set up before there is a device for them."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Observed, OutageBegan, OutageEnded, WritesFailed
from optuna_hermes.broker._core._watchdog import GRACE_SECONDS, LOOK_SECONDS
from optuna_hermes.model import Checkpoint, Decision, Device, Snapshot
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import opened, place, unopened
from support.broker import FakeBroker


def begin(
    broker: FakeBroker, worker: int, number: int, *, can_store: bool = True, late: bool = False
) -> int:
    """A worker that was granted a new trial trains it; returns the epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store, late=late))
    return epoch


def served(
    *,
    devices: Any = 1,
    workers: int = 4,
    can_store: bool = True,
    late: bool = False,
    **study: Any,
) -> tuple[FakeBroker, list[int], int]:
    """A broker whose first worker trains trial 0, its workers, and the epoch of that lease."""
    broker = FakeBroker(devices=devices)
    broker.driver(**{"max_alive": 8, "sets_up": True, "policy": "round-robin", **study})
    waiting = [broker.worker() for _ in range(workers)]
    return broker, waiting, begin(broker, waiting[0], 0, can_store=can_store, late=late)


def told(broker: FakeBroker, workers: list[int]) -> list[int]:
    """The workers that were told to set a trial up."""
    broker.advance(0.1)
    broker.poll(next(iter(broker.handler.state.slots)))
    return [each for each in workers if broker.last(each, "SetUp") is not None]


def test_the_next_trial_is_set_up_while_another_trains() -> None:
    """A worker that waits creates it; its lease begins when the device is free."""
    broker, workers, epoch = served()
    (setter,) = told(broker, workers)
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    assert broker.handler.state.studies["s"].trials[1].state == "pending"
    broker.advance(1.5)
    assert broker.last(setter, "Grant") is None
    broker.say(workers[0], wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    grant = broker.last(setter, "Grant")
    assert (grant.number, grant.devices) == (1, ("cpu:0",))
    broker.check()


def test_a_worker_that_hangs_in_its_creation_is_killed() -> None:
    """Nobody else could create a trial, and the study would never end."""
    broker, workers, _ = served(unstarted=2)
    (setter,) = told(broker, workers)
    broker.advance(LOOK_SECONDS)
    assert setter in broker.handler.silent(broker.now)
    broker.apply(Observed(activities={setter: "idle"}))
    broker.advance(GRACE_SECONDS - LOOK_SECONDS - 1.0)
    assert setter not in broker.killed()
    broker.advance(2.0)
    assert setter in broker.killed()
    broker.hang_up(setter)
    assert len(told(broker, workers)) == 2  # another one creates it
    broker.check()


def test_a_worker_has_all_its_time_for_a_creation_once_the_database_is_back() -> None:
    """It could create no trial before."""
    broker, workers, _ = served(unstarted=2)
    (setter,) = told(broker, workers)
    broker.apply(OutageBegan(studies=("s",), reason="No route to host."))
    broker.advance(GRACE_SECONDS - 1.0)
    broker.apply(OutageEnded(studies=("s",)))
    broker.advance(GRACE_SECONDS - 1.0)
    assert setter not in broker.killed()
    broker.advance(2.0)
    assert setter in broker.killed()


def test_as_many_are_set_up_as_there_are_devices() -> None:
    """More would be proposed earlier than they can be trained."""
    broker, workers, _ = served(devices=2, workers=8, unstarted=None)
    begin(broker, workers[1], 1)
    assert len(told(broker, workers)) == 2
    broker.advance(0.1)
    assert len(told(broker, workers)) == 2


def test_a_device_that_stays_empty_keeps_none_from_being_set_up() -> None:
    """A broken one, say: the next trial is for the one that works."""
    broker = FakeBroker(devices=2)
    broker.poll("cpu:1", healthy=False)
    broker.driver(max_alive=8, sets_up=True, policy="round-robin")
    workers = [broker.worker() for _ in range(4)]
    begin(broker, workers[0], 0)
    assert len(told(broker, workers)) == 1


def test_none_is_set_up_that_is_not_to_be_created() -> None:
    """One that is set up counts as created, and counts again if its process dies before."""
    broker, workers, _ = served(unstarted=2)
    (setter,) = told(broker, workers)
    assert broker.unstarted() == 0
    name = broker.last(setter, "SetUp").name
    broker.hang_up(setter)
    (other,) = set(told(broker, workers)) - {setter}
    assert broker.last(other, "SetUp").lost == (name,)
    assert broker.last(other, "SetUp").name != name


@pytest.mark.parametrize("said", [{"can_store": False}, {"late": True}])
def test_an_objective_that_does_not_wait_at_its_first_batch_is_not_called_early(said: Any) -> None:
    """It would train without a device: this shows once it trains with one.

    So does one whose epochs have no batches, which has no clean point before its second one.
    """
    broker, workers, _ = served(**said)
    assert told(broker, workers) == []


def test_none_is_set_up_where_a_process_sees_only_the_gpu_of_its_lease() -> None:
    """The GPU of a lease is not known before."""
    gpu = Device(id="GPU-1", kind="gpu", free=True, memory_bytes=8, memory_free_bytes=8)
    broker, workers, _ = served(devices=[gpu])
    assert told(broker, workers) == []


def test_none_is_set_up_if_the_study_does_not_allow_it() -> None:
    """A study of plain trials has no worker that could."""
    broker, workers, _ = served(sets_up=False)
    assert told(broker, workers) == []


def test_a_drained_study_sends_those_away_that_have_not_begun() -> None:
    """They have trained nothing, and no loss is counted."""
    broker, workers, _ = served()
    (setter,) = told(broker, workers)
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    broker.say(broker.handler.state.studies["s"].driver or 0, wire.Drain(study="s"))
    assert broker.last(setter, "Dismiss") is not None
    broker.hang_up(setter)
    trial = broker.handler.state.studies["s"].trials[1]
    assert (trial.state, trial.connection, trial.losses) == ("pending", None, 0)


def test_one_that_is_created_after_that_is_sent_away_too() -> None:
    """The request to leave and the message of its creation may cross."""
    broker, workers, _ = served()
    (setter,) = told(broker, workers)
    broker.say(broker.handler.state.studies["s"].driver or 0, wire.Drain(study="s"))
    assert broker.last(setter, "Dismiss") is not None
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    trial = broker.handler.state.studies["s"].trials[1]
    assert (trial.state, trial.connection) == ("pending", None)


@pytest.mark.parametrize("created", ["before", "after", "late"])
def test_one_that_was_sent_away_gets_no_lease_of_the_next_driver(created: str) -> None:
    """It leaves although the study goes on before it has left."""
    broker, workers, epoch = served()
    (setter,) = told(broker, workers)
    name = wire.Begin(epoch=0, number=1, trial_id=1)
    if created == "before":
        broker.say(setter, name)
    driver = broker.handler.state.studies["s"].driver or 0
    broker.say(driver, wire.Drain(study="s"))
    if created == "after":
        broker.say(setter, name)
    broker.say(workers[0], wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    broker.hang_up(driver)
    broker.driver(max_alive=8, sets_up=True, policy="round-robin")
    if created == "late":
        broker.say(setter, name)
    for _ in range(4):
        broker.advance(1.0)
    assert broker.last(setter, "Grant") is None
    broker.hang_up(setter)
    assert broker.handler.state.studies["s"].trials[1].losses == 0
    broker.check()


def test_a_trial_of_another_process_is_not_set_up() -> None:
    """On SQLite two workers may take one trial from the queue: the second one ends."""
    broker, workers, _ = served()
    (setter,) = told(broker, workers)
    commands = broker.say(setter, wire.Begin(epoch=0, number=0, trial_id=0))
    assert [type(each).__name__ for each in commands if "Kill" in type(each).__name__] == ["Kill"]
    broker.hang_up(setter)
    assert broker.handler.state.studies["s"].lost_creations == []
    (other,) = set(told(broker, workers)) - {setter}
    assert broker.last(other, "SetUp").lost == ()
    assert broker.unstarted() == 2


def test_a_trial_that_loses_its_process_before_its_first_batch_begins_again() -> None:
    """Three times, as any other; the next worker gets it."""
    broker, workers, epoch = served()
    (setter,) = told(broker, workers)
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    broker.hang_up(setter)
    trial = broker.handler.state.studies["s"].trials[1]
    assert (trial.state, trial.losses) == ("pending", 1)
    broker.advance(1.5)
    broker.say(workers[0], wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    grants = [broker.last(each, "Grant") for each in workers[1:] if each != setter]
    assert [grant.number for grant in grants if grant] == [1]


@pytest.mark.parametrize("granted", [False, True])
def test_a_trial_that_ends_in_its_set_up_is_over(granted: bool) -> None:
    """It needs no lease for that; one that is on its way ends with it."""
    broker, workers, epoch = served()
    (setter,) = told(broker, workers)
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    if granted:
        freed(broker, workers[0], epoch)
    assert (broker.last(setter, "Grant") is not None) == granted
    broker.say(setter, wire.Ended(epoch=0, state="failed", error="broken"))
    assert broker.last(setter, "LeaseEndAck") is not None
    study = broker.handler.state.studies["s"]
    assert (study.trials[1].state, study.trials[1].connection) == ("failed", None)
    assert study.failures.first == 1
    broker.hang_up(setter)
    assert study.trials[1].losses == 0
    assert setter not in [lease.connection for lease in broker.handler.state.leases()]
    broker.check()


def test_it_comes_back_to_a_new_broker() -> None:
    """A worker says which trial it has set up, and waits on."""
    broker, workers, _ = served()
    (setter,) = told(broker, workers)
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    after = broker.successor(known=())
    after.driver(max_alive=8, policy="round-robin", sets_up=True, unstarted=2)
    connection = after.connect("worker", pid=setter)
    study = wire.StudySpec(key="s", name="s", ledger_url="memory:")
    after.read(connection, wire.Register(study=study, number=1, trial_id=1))
    served_again = after.handler.state.studies["s"]
    assert served_again.trials[1].connection == connection
    assert connection in served_again.workers
    assert after.last(connection, "Grant").number == 1


def test_a_proposal_is_one_unit_old_at_most() -> None:
    """Under `fifo` the next trial begins when this one ends: it is set up in its last unit."""
    broker, workers, epoch = served(policy="fifo")
    assert told(broker, workers) == []
    for unit, left in ((1, 2), (2, 1)):
        assert told(broker, workers) == []
        message = wire.Report(epoch=epoch, unit=unit, step=unit, value=1.0, units_left=left)
        broker.say(workers[0], message)
    assert len(told(broker, workers)) == 1


class WhileItImproves(Policy):
    """Goes on with trials whose last unit was no worse than the one before; then opens new ones."""

    def decide(self, snapshot: Snapshot) -> Decision:
        values = [(trial, trial.curve.values[-2:]) for trial in opened(snapshot)]
        going_on = [trial for trial, last in values if not last or last[-1] <= last[0]]
        return Decision(assignments=place(snapshot, [*going_on, *unopened(snapshot)]))


def improving(**study: Any) -> tuple[FakeBroker, list[int]]:
    """A broker whose first worker trains a trial that improves, and its workers."""
    broker, workers, epoch = served(policy="fifo", **study)
    for unit, value in ((1, 1.0), (2, 0.5)):
        broker.say(workers[0], wire.Report(epoch=epoch, unit=unit, step=unit, value=value))
    assert told(broker, workers) == []
    broker.handler.state.studies["s"].policy = WhileItImproves()
    return broker, workers


def test_one_is_set_up_for_when_the_trial_that_trains_falls_behind() -> None:
    """Its next value is not known: the policy goes on with it only if that is no worse."""
    broker, workers = improving()
    assert len(told(broker, workers)) == 1


def test_a_process_in_reserve_sets_one_up() -> None:
    """Else none would be set up where there are as many processes as there may be."""
    broker, workers = improving(workers=2, max_alive=2)
    assert told(broker, workers) == [workers[1]]


class Counting(Policy):
    """Goes on with every trial, and counts how often it is asked."""

    count = 0

    def decide(self, snapshot: Snapshot) -> Decision:
        self.count += 1
        return Decision(assignments=place(snapshot, opened(snapshot)))


def test_of_many_trials_not_every_report_has_the_policy_asked() -> None:
    """A policy is asked for set-ups at so few reports that a broker has time for others."""
    many = {"max_alive": 66, "unstarted": None, "slice_seconds": 100.0}
    broker, workers, _ = served(devices=64, workers=66, **many)
    for number in range(1, 64):
        begin(broker, workers[number], number)
    policy = broker.handler.state.studies["s"].policy = Counting()
    for _ in range(80):
        told(broker, [])
    assert 0 < policy.count < 80


def freed(broker: FakeBroker, worker: int, epoch: int) -> None:
    """The trial of a worker waits on disk, so that its device is free, and its worker too."""
    checkpoint = Checkpoint(path="/s/0", units=1, size_bytes=1, sha256="0")
    parked = wire.TierChanged(
        epoch=epoch, tier="disk", suspend_seconds=0.0, checkpoint=checkpoint, can_store=True
    )
    broker.say(worker, parked)


@pytest.mark.parametrize("crosses", [True, False])
def test_a_trial_that_is_being_created_gets_the_device_that_is_free_first(crosses: bool) -> None:
    """No other worker creates one more; its creation may cross the grant."""
    broker, workers, epoch = served(unstarted=3)
    (setter,) = told(broker, workers)
    name = broker.last(setter, "SetUp").name
    freed(broker, workers[0], epoch)
    grant = broker.last(setter, "Grant")
    assert (grant.number, grant.lost) == (None, (name,))
    assert broker.unstarted() == 0
    said = 0 if crosses else grant.epoch
    broker.say(setter, wire.Begin(epoch=said, number=1, trial_id=1))
    trial = broker.handler.state.studies["s"].trials[1]
    assert (trial.state, trial.connection, trial.epoch) == ("running", setter, grant.epoch)
    assert broker.unstarted() == 0
    broker.check()


def test_a_study_is_not_finished_while_its_last_trial_is_being_created() -> None:
    """All others have ended, no other one may be created, and this one has no row yet."""
    broker, workers, epoch = served(unstarted=2)
    (setter,) = told(broker, workers)
    broker.say(workers[0], wire.Ended(epoch=epoch, state="done"))
    assert not broker.handler.status(broker.now).studies[0].finished
    broker.say(setter, wire.Begin(epoch=0, number=1, trial_id=1))
    epoch = broker.last(setter, "Grant").epoch
    broker.say(setter, wire.Ended(epoch=epoch, state="done"))
    assert broker.handler.status(broker.now).studies[0].finished


def test_it_is_looked_for_if_its_process_dies_before_it_says_so() -> None:
    """By the names of the opening and of the lease: a trial is created once."""
    broker, workers, epoch = served(unstarted=3)
    (setter,) = told(broker, workers)
    name = broker.last(setter, "SetUp").name
    freed(broker, workers[0], epoch)
    lease = str(broker.last(setter, "Grant").epoch)
    broker.hang_up(setter)
    others = [each for each in workers if each != setter]
    told_of = [broker.last(each, kind) for each in others for kind in ("SetUp", "Grant")]
    assert (lease, name) in [message.lost for message in told_of if message]


def test_a_lease_that_the_ledger_refuses_is_not_the_end_of_what_is_set_up() -> None:
    """Its worker goes on to create its trial, or waits with it, and takes no other."""
    broker, workers, epoch = served(unstarted=3)
    (setter,) = told(broker, workers)
    freed(broker, workers[0], epoch)
    epochs = (broker.last(setter, "Grant").epoch,)
    broker.apply(WritesFailed(study="s", epochs=epochs, reason="refused"))
    study = broker.handler.state.studies["s"]
    assert (setter in study.idle_workers, broker.unstarted()) == (False, 0)
    assert broker.handler.state.clients[setter].creation_names is not None
