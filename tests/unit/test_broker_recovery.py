"""A broker after one that died: who is waited for, who goes on, and who may not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker import _holders
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import EndLease, Tick
from optuna_hermes.broker._core._recovery import RECOVERY_SECONDS
from optuna_hermes.broker._holders import HOLDERS
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.broker._server._outbox import proof_of_end
from optuna_hermes.broker._server._succession import Succession, instance_in
from optuna_hermes.ledger._records import LeaseRecord, ReportRecord
from optuna_hermes.model import Checkpoint, Device
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger

SPEC = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")


def checkpoint(units: int = 1) -> Checkpoint:
    return Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker that was granted a new trial starts to train it; returns the epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def report(epoch: int, unit: int, value: float = 0.5, **fields: Any) -> wire.Report:
    return wire.Report(epoch=epoch, unit=unit, step=unit, value=value, **fields)


def parked(epoch: int, **fields: Any) -> wire.TierChanged:
    said: dict[str, Any] = {"tier": "resident", "suspend_seconds": 0.1, "can_store": True}
    return wire.TierChanged(epoch=epoch, **(said | fields))


def resume(
    epoch: int, number: int | None = 0, device: str = "cpu:0", **fields: Any
) -> wire.Reattach:
    said: dict[str, Any] = {"training": True, "can_store": True, "trial_id": number}
    return wire.Reattach(
        study=SPEC, epoch=epoch, number=number, devices=(device,), **(said | fields)
    )


def holding(devices: int | Sequence[Device] = 1, **driver: Any) -> tuple[FakeBroker, int, int]:
    """A broker whose first device is held by trial 0, its worker's pid, and the epoch."""
    broker = FakeBroker(devices=devices)
    broker.driver(policy="round-robin", **driver)
    worker = broker.worker()
    return broker, worker, begin(broker, worker, 0)


def taking_turns() -> tuple[FakeBroker, int, int, int, int]:
    """As ``holding``, but trial 0 is parked and trial 1 has the device: pids and epochs."""
    broker, first, epoch = holding(unstarted=2)
    second = broker.worker()
    broker.say(first, report(epoch, 1))
    broker.advance(1.5)
    broker.say(first, parked(epoch))
    return broker, first, epoch, second, begin(broker, second, 1)


def shown(broker: FakeBroker, number: int = 0) -> wire.TrialRow:
    trials = broker.handler.status(broker.now).studies[0].trials
    return next(trial for trial in trials if trial.number == number)


def unstarted(broker: FakeBroker) -> int | None:
    return broker.handler.status(broker.now).studies[0].unstarted


# -- going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("driver_first", [True, False])
def test_a_holder_goes_on_under_its_old_epoch(driver_first: bool) -> None:
    """Its driver may be back before it or after it: no lease is new, and reports count."""
    broker, pid, epoch = holding()
    after = broker.successor()
    if driver_first:
        after.driver(policy="round-robin")
    worker = after.resume(pid, resume(epoch))
    if not driver_first:
        after.driver(policy="round-robin")
    after.say(worker, report(epoch, 1))
    assert shown(after).state == "running"
    assert shown(after).units == 1
    assert after.leases() == []
    assert not after.handler.state.in_recovery
    after.check()


def test_device_time_of_leases_that_did_not_reach_the_ledger_counts() -> None:
    """A process knows how much its trial has had; the rows that say so may be lost."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin")
    worker = after.resume(pid, resume(epoch, held_seconds=2.0, device_seconds=9.0))
    assert shown(after).device_seconds == pytest.approx(7.0)
    after.advance(1.0)
    after.say(worker, report(epoch, 1))
    (curve,) = (trial.curve for trial in after.handler.state.trials())
    assert curve.device_seconds == pytest.approx((10.0,))


def test_device_time_of_a_parked_trial_counts() -> None:
    """Its last lease is over, and the row that says so is lost."""
    broker, pid, epoch, _, _ = taking_turns()
    known = shown(broker).device_seconds
    after = broker.successor()
    after.driver(policy="round-robin")
    said = resume(epoch, parked=parked(epoch), held_seconds=7.0, device_seconds=known + 1)
    after.resume(pid, said)
    assert shown(after).device_seconds == pytest.approx(known + 1)


@pytest.mark.parametrize("end", ["power cut", "killed", "refused"])
def test_device_time_of_a_lease_that_dies_with_its_broker_counts(end: str) -> None:
    """Only its reports have it; the units that are trained again come after them."""
    broker, pid, epoch = holding()
    broker.say(pid, wire.Saved(epoch=epoch, checkpoint=checkpoint(1)))
    broker.now = 3600.0
    broker.say(pid, report(epoch, 1))
    assert broker.ledger.load_trials("s")[0].device_seconds == 0.0
    after = broker.successor(known=() if end == "power cut" else None)
    after.driver(policy="round-robin", unstarted=0)
    if end == "killed":
        after.advance(RECOVERY_SECONDS)
        after.end_of(pid)
    elif end == "refused":
        after.resume(pid, resume(epoch, device="cpu:9"))
    assert shown(after).device_seconds == 3600.0
    worker = after.worker()
    grant = after.last(worker, "Grant")
    assert (grant.number, grant.device_seconds) == (0, 3600.0)
    after.now += 30.0
    after.say(worker, report(grant.epoch, 2))
    assert after.ledger.load_curves("s")[0].device_seconds == (3600.0, 3630.0)
    assert after.handler.state.studies["s"].mean_unit_seconds == 30.0


@pytest.mark.parametrize("expected", [True, False])
def test_device_time_of_a_lease_that_goes_on_counts_once(expected: bool) -> None:
    """Its reports have it already; its process says how long it has lasted until now."""
    broker, pid, epoch = holding()
    broker.now = 3600.0
    broker.say(pid, report(epoch, 1))
    after = broker.successor(known=None if expected else ())
    after.now = 5000.0
    worker = after.resume(pid, resume(epoch, held_seconds=4000.0, device_seconds=4000.0))
    after.say(worker, parked(epoch))
    assert shown(after).device_seconds == 4000.0


def test_a_new_lease_is_above_all_old_ones() -> None:
    """A lease of the next broker has an epoch that the ledger has never seen."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin")
    worker = after.resume(pid, resume(epoch))
    other = after.worker()
    after.advance(1.5)
    after.say(worker, parked(epoch))
    assert after.last(other, "Grant").epoch == epoch + 1


def test_a_new_lease_is_above_those_of_a_ledger_that_is_not_read_yet() -> None:
    """A process may hold an epoch of another study, whose ledger nobody has opened so far."""
    broker, _, epoch = holding(devices=2)
    after = broker.successor()
    after.ledger = MemoryLedger()
    after.driver(key="t")
    other = after.worker(key="t")
    after.advance(RECOVERY_SECONDS)
    assert after.last(other, "Grant").devices == ("cpu:1",)
    assert after.last(other, "Grant").epoch == epoch + 1


def test_a_trial_that_no_ledger_knows_is_not_given_on_while_its_process_lives() -> None:
    """Its broker died while its database was away: only its driver and its process know it."""
    broker = FakeBroker(devices=2)
    broker.writes = False
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    after = broker.successor()
    after.driver(unstarted=0, adopted={0: 0})
    other = after.worker()
    after.advance(RECOVERY_SECONDS)
    assert after.killed() == [worker]
    assert after.last(other, "Grant") is None
    after.end_of(worker)
    assert after.last(other, "Grant").number == 0
    assert after.last(other, "Grant").epoch == epoch + 1


def test_a_parked_trial_stays_in_the_memory_of_its_process() -> None:
    """It is parked with the next broker too, and goes on in the same process."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    parking = after.resume(first, resume(epoch, parked=parked(epoch, held_bytes=7)))
    holder = after.resume(second, resume(held, 1))
    assert (shown(after).state, shown(after).tier) == ("parked", "resident")
    assert shown(after).held_bytes == 7
    after.advance(1.5)
    after.say(holder, parked(held))
    assert after.last(parking, "Grant").number == 0
    after.check()


def test_device_time_counts_through_the_outage() -> None:
    """The lease is as old as it was, and the time that nobody counted is counted."""
    broker, pid, epoch = holding()
    broker.advance(0.9)
    after = broker.successor()
    after.driver(policy="round-robin")
    worker = after.resume(pid, resume(epoch, held_seconds=5.0))
    after.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert shown(after).device_seconds == pytest.approx(5.0)


def test_what_a_driver_counts_is_counted_on() -> None:
    """Switches and seconds of the dead broker are added; a new driver starts at none."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.resume(pid, resume(epoch))
    counted = wire.Counted(switches=7, overhead_seconds={"opening": 2.0}, spent_seconds=30.0)
    after.driver(policy="round-robin", counted=counted)
    study = after.handler.status(after.now).studies[0]
    assert (study.switches, study.overhead_seconds["opening"]) == (7, 2.0)
    assert study.spent_seconds - study.held_seconds == 30.0
    anew, _, _ = holding()
    assert anew.handler.status(0.0).studies[0].switches == 0


# -- what was on its way -----------------------------------------------------------------------


def test_reports_that_were_not_written_arrive_once() -> None:
    """Those the ledger has are dropped, the others count, each at the time it was made."""
    broker, pid, epoch = holding()
    broker.say(pid, report(epoch, 1))
    broker.writes = False
    broker.say(pid, report(epoch, 2))
    after = broker.successor()
    after.now = 100.0
    said = [report(epoch, unit, age_seconds=10.0 - unit) for unit in (1, 2, 3)]
    after.resume(pid, resume(epoch, held_seconds=20.0, reports=tuple(said)))
    curve = after.ledger.load_curves("s")[0]
    assert curve.steps == (1, 2, 3)
    assert curve.device_seconds[1:] == (12.0, 13.0)
    assert shown(after).units_trained == 3


def test_a_value_that_is_no_number_is_not_told_twice() -> None:
    """NaN is never equal to itself, but it is the same report."""
    broker, pid, epoch = holding()
    nan = report(epoch, 1, float("nan"))
    broker.say(pid, nan)
    after = broker.successor()
    after.resume(pid, resume(epoch, reports=(nan,)))
    assert shown(after).units_trained == 1


def test_a_checkpoint_that_was_not_written_is_kept_now() -> None:
    """Only then is the trial told that older files may go; twice told, it is there once."""
    broker, pid, epoch = holding()
    broker.say(pid, wire.Saved(epoch=epoch, checkpoint=checkpoint(1)))
    broker.writes = False
    broker.say(pid, wire.Saved(epoch=epoch, checkpoint=checkpoint(2)))
    after = broker.successor()
    worker = after.resume(pid, resume(epoch, checkpoints=(checkpoint(1), checkpoint(2))))
    assert [each.checkpoint.path for each in after.ledger.load_checkpoints("s")] == ["/c/1", "/c/2"]
    assert [m.path for m in after.sent(worker) if isinstance(m, wire.CheckpointAck)] == [
        "/c/1",
        "/c/2",
    ]


def test_a_trial_that_has_parked_meanwhile_resumes_as_parked() -> None:
    """The dead broker never heard it: its lease ends now, and the device is given on."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin")
    other = after.worker()
    after.resume(pid, resume(epoch, reports=(report(epoch, 1),), parked=parked(epoch)))
    assert shown(after).state == "parked"
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in after.log)
    assert after.last(other, "Grant").number is None
    assert after.ledger.load_curves("s")[0].units == 1


@pytest.mark.parametrize("heard", [True, False])
def test_a_trial_that_went_to_disk_is_stored_with_its_checkpoint(heard: bool) -> None:
    """Heard by the dead broker or not, the file is in the ledger before the process ends."""
    broker, pid, epoch = holding()
    stored = parked(epoch, tier="disk", checkpoint=checkpoint(3))
    if heard:
        broker.say(pid, stored)
    after = broker.successor()
    after.driver(policy="round-robin")
    worker = after.resume(pid, resume(epoch, checkpoints=(checkpoint(3),), parked=stored))
    assert after.last(worker, "CheckpointAck").path == "/c/3"
    assert shown(after).state == "stored"
    assert [each.checkpoint.path for each in after.ledger.load_checkpoints("s")] == ["/c/3"]
    assert after.last(worker, "Refused") is None


def test_a_yield_in_flight_is_waited_for() -> None:
    """The dead broker asked for the device: it is given on once the trial has stopped."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin")
    other = after.worker()
    worker = after.resume(pid, resume(epoch, requested_tier="resident"))
    after.advance(5.0)
    assert after.last(worker, "Yield") is None
    assert after.last(other, "Grant") is None
    after.say(worker, parked(epoch))
    assert after.last(other, "Grant") is not None


def test_a_trial_on_its_way_to_disk_gets_no_device() -> None:
    """The dead broker asked it to go, and it has not yet said where it is."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    moving = after.resume(first, resume(epoch, requested_tier="disk", parked=parked(epoch)))
    after.resume(second, resume(held, 1))
    after.hang_up(after.connection_of(second))
    assert after.last(moving, "Grant") is None
    after.say(moving, parked(epoch, tier="disk", checkpoint=checkpoint()))
    assert shown(after).state == "stored"


def test_a_grant_that_never_arrived_is_void() -> None:
    """A parked trial that was to go on is still parked, under the epoch that it knows."""
    broker, first, epoch, second, held = taking_turns()
    broker.say(second, report(held, 1))
    broker.advance(1.5)
    broker.say(second, parked(held))
    lost = broker.last(first, "Grant").epoch
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    worker = after.resume(first, resume(epoch, parked=parked(epoch)))
    after.resume(second, resume(held, 1, parked=parked(held)))
    assert any(isinstance(c, EndLease) and c.epoch == lost for c in after.log)
    assert after.last(worker, "Refused") is None
    granted = [each.number for each in after.leases()]
    assert granted == [0] or granted == [1]
    after.check()


def test_a_lease_that_was_never_written_takes_no_device_from_its_last_holder() -> None:
    """The dead broker wrote down whom it was about to grant the device to, and no more."""
    broker, first, epoch, second, held = taking_turns()
    broker.advance(1.5)
    broker.writes = False
    broker.say(second, parked(held))
    assert broker.leases()[-1].epoch == held + 1
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    holder = after.resume(second, resume(held, 1, parked=parked(held)))
    waiting = after.resume(first, resume(epoch, parked=parked(epoch)))
    assert after.last(holder, "Refused") is None
    assert after.last(waiting, "Refused") is None
    assert after.killed() == []
    assert len(after.leases()) == 1
    after.check()


def test_a_trial_that_has_stopped_needs_no_device_to_come_back() -> None:
    """Its lease is live in the ledger, and another trial has its device already: it is parked."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    lease = broker.leases()[-1]
    study = after.handler.state.studies["s"]
    study.unclaimed_leases[epoch] = replace(lease, epoch=epoch, number=0)
    after.resume(second, resume(held, 1))
    waiting = after.resume(first, resume(epoch, parked=parked(epoch)))
    assert after.last(waiting, "Refused") is None
    assert shown(after).state == "parked"
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in after.log)


@pytest.mark.parametrize("host", ["h", "renamed"])
def test_a_lease_that_a_crash_left_open_ends_at_the_last_report(host: str) -> None:
    """The outage was no training; a container has another name after each start."""
    broker, pid, epoch = holding()
    broker.advance(0.4)
    broker.say(pid, report(epoch, 1))
    ((_, last),) = broker.ledger.load_reports("s")
    after = FakeBroker(devices=1, ledger=broker.ledger, host=host)
    after.advance(1000.0)
    after.driver(policy="round-robin")
    (lease,) = after.ledger.load_leases("s")
    assert (lease.host, lease.ended) == ("h", last.at)


def test_a_first_grant_that_never_arrived_is_void() -> None:
    """The worker waits as before, and the trial may still be created."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    pid = broker.worker()
    lost = broker.last(pid, "Grant").epoch
    after = broker.successor()
    after.driver(unstarted=1)
    assert after.handler.state.in_recovery
    worker = after.worker(pid=pid)
    assert any(isinstance(c, EndLease) and c.epoch == lost for c in after.log)
    assert after.last(worker, "Grant").epoch == lost + 1


def test_a_plain_trial_whose_first_grant_never_arrived_registers_again() -> None:
    """Nobody waits for a lease of it any more."""
    broker = FakeBroker(devices=1)
    pid = broker.plain(0)
    lost = broker.last(pid, "Grant").epoch
    after = broker.successor()
    trial = after.plain(0, pid=pid)
    assert after.last(trial, "Grant").epoch == lost + 1


# -- trials that are being created -------------------------------------------------------------


@pytest.mark.parametrize("driver_first", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_no_trial_is_created_twice_or_never(driver_first: bool, counted: bool, begun: bool) -> None:
    """A worker between grant and trial: whatever its driver saw of it, one is left of two."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    pid = broker.worker()
    epoch = broker.last(pid, "Grant").epoch
    after = broker.successor()
    opening: dict[str, Any] = {"limit": 7, "foreign": range(5)}
    if counted:  # the trial was in the storage when the driver looked
        opening = {"limit": 7, "foreign": range(5), "adopted": {5: 5}}
    if driver_first:
        after.driver(**opening)
    worker = after.resume(pid, resume(epoch, 5 if begun else None, training=False))
    if not driver_first:
        after.driver(**opening)
    if not begun:
        after.say(worker, wire.Begin(epoch=epoch, number=5, trial_id=5))
    assert unstarted(after) == 1
    assert shown(after, 5).state == "running"


def test_a_trial_of_the_queue_is_counted_by_its_number() -> None:
    """It was there when its driver looked, and nobody had begun it."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    pid = broker.worker()
    epoch = broker.last(pid, "Grant").epoch
    after = broker.successor()
    after.driver(limit=2, waiting=(0, 1))
    after.resume(pid, resume(epoch, 0))
    assert unstarted(after) == 1


# -- waiting -----------------------------------------------------------------------------------


def test_nothing_is_granted_while_somebody_may_come_back() -> None:
    """Not even a device that nobody had; then all at once."""
    broker, pid, epoch = holding(devices=2, unstarted=4)
    after = broker.successor()
    after.driver(policy="round-robin")
    idle = after.worker()
    after.advance(RECOVERY_SECONDS / 2)
    assert after.last(idle, "Grant") is None
    after.resume(pid, resume(epoch))
    assert after.last(idle, "Grant").devices == ("cpu:1",)
    after.check()


def test_nothing_is_revoked_while_somebody_may_come_back() -> None:
    """A slice that ends meanwhile ends when all are there."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    after.driver(policy="round-robin")
    after.worker()
    holder = after.resume(second, resume(held, 1))
    after.advance(RECOVERY_SECONDS - 1.0)
    assert after.last(holder, "Yield") is None
    after.resume(first, resume(epoch, parked=parked(epoch)))
    assert after.last(holder, "Yield") is not None


def test_whoever_has_died_is_not_waited_for() -> None:
    """Its lease ends, its trial is at its last checkpoint, and its device is given on at once."""
    broker, pid, epoch = holding()
    broker.say(pid, wire.Saved(epoch=epoch, checkpoint=checkpoint()))
    after = broker.successor()
    after.driver(policy="round-robin", unstarted=0)
    idle = after.worker()
    after.end_of(pid)
    grant = after.last(idle, "Grant")
    assert (grant.number, grant.checkpoints) == (0, (checkpoint(),))
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in after.log)


def test_a_worker_that_does_not_come_back_is_killed_before_its_device_is_given_on() -> None:
    """Others go on when the time is over; this device only when its process is gone."""
    broker, pid, _ = holding(devices=2)
    after = broker.successor()
    after.driver(policy="round-robin")
    first, second = after.worker(), after.worker()
    after.advance(RECOVERY_SECONDS)
    assert after.killed() == [pid]
    granted = [after.last(each, "Grant") for each in (first, second)]
    assert [grant.devices for grant in granted if grant] == [("cpu:1",)]
    after.end_of(pid)
    assert {after.last(each, "Grant").devices for each in (first, second)} == {
        ("cpu:0",),
        ("cpu:1",),
    }


def test_a_users_own_process_is_never_killed() -> None:
    """Its device stays its own until it comes back, and its trial too."""
    broker = FakeBroker(devices=1)
    pid = broker.plain(0)
    epoch = broker.last(pid, "Grant").epoch
    after = broker.successor()
    after.driver()
    idle = after.worker()
    after.advance(100 * RECOVERY_SECONDS)
    assert after.killed() == []
    assert after.last(idle, "Grant") is None
    back = after.resume(pid, resume(epoch), role="plain")
    assert after.last(back, "Refused") is None
    assert shown(after).state == "running"


def test_a_worker_that_has_said_hello_is_not_killed() -> None:
    """It may wait for its ledger to be read; if it hangs up in silence it is."""
    broker, pid, _ = holding()
    after = broker.successor()
    worker = after.connect("worker", pid=pid)
    after.advance(2 * RECOVERY_SECONDS)
    assert after.killed() == []
    after.hang_up(worker)
    assert after.killed() == [pid]


def test_a_worker_that_is_ready_before_its_study_is_not_sent_home() -> None:
    """Its driver comes back too, perhaps later."""
    after = FakeBroker(devices=1)
    worker = after.worker()
    gone = after.worker()
    after.hang_up(gone)
    assert after.sent(worker) == []
    after.driver()
    assert after.last(worker, "Grant") is not None


def test_a_broker_that_dies_again_leaves_word_of_all() -> None:
    """Those that had come back, and those that had not, come back to the third one."""
    broker, first, epoch, second, held = taking_turns()
    middle = broker.successor()
    middle.driver(policy="round-robin")
    middle.resume(first, resume(epoch, parked=parked(epoch)))
    after = middle.successor()
    after.driver(policy="round-robin")
    assert len(after.handler.state.recovering) == 2
    after.resume(first, resume(epoch, parked=parked(epoch)))
    after.resume(second, resume(held, 1))
    assert shown(after, 0).state == "parked"
    assert shown(after, 1).state == "running"
    assert after.killed() == []
    after.check()


def test_without_word_of_holders_nobody_is_waited_for() -> None:
    """A host that has started anew has no process of before."""
    broker, _, epoch = holding()
    after = broker.successor(known=())
    after.driver(policy="round-robin")
    idle = after.worker()
    assert after.last(idle, "Grant") is not None
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in after.log)


def test_leases_of_other_hosts_are_not_ours_to_end() -> None:
    """Another broker may serve the same study."""
    broker = FakeBroker(devices=1, ledger=MemoryLedger(shared=True))
    theirs = LeaseRecord(
        study="s", epoch=8, number=3, devices=("z/cpu:0",), host="z", started=0.0, owner="z1"
    )
    broker.ledger.commit_lease(theirs)
    broker.ledger.commit_lease(replace(theirs, epoch=9, owner=None))
    broker.driver()
    assert not any(isinstance(c, EndLease) for c in broker.log)
    assert broker.last(broker.worker(), "Grant").epoch == 10


def test_draining_reaches_those_that_come_back() -> None:
    """A driver that was told to stop stops them too."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    driver = after.driver(policy="round-robin")
    after.say(driver, wire.Drain(study="s"))
    parking = after.resume(first, resume(epoch, parked=parked(epoch)))
    holder = after.resume(second, resume(held, 1))
    assert after.last(parking, "Move") is not None
    assert after.last(holder, "Yield") == wire.Yield(epoch=held, tier="disk")


# -- who may not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"epoch": 99}, "epoch 99"),
        ({"device": "cpu:1"}, "not for device cpu:1"),
        ({"device": "cpu:9"}, "not for device cpu:9"),
        ({"number": 4}, "of trial 0"),
    ],
)
def test_what_the_ledger_does_not_say_is_refused(said: dict[str, Any], why: str) -> None:
    """Epoch, trial and device have to agree; a worker that is refused is ended."""
    broker, pid, epoch = holding(devices=2)
    after = broker.successor()
    after.driver(policy="round-robin")
    fields: dict[str, Any] = {"epoch": epoch} | said
    worker = after.resume(pid, resume(**fields))
    assert why in after.last(worker, "Refused").reason
    assert after.killed() == [pid]
    assert shown(after).state == "pending"
    after.check()


def test_a_plain_trial_that_is_refused_may_ask_again() -> None:
    """Its process is its user's: it registers on the same connection, and waits for its turn."""
    broker = FakeBroker(devices=1)
    pid = broker.plain(0)
    epoch = broker.last(pid, "Grant").epoch
    after = broker.successor(known=())
    other = after.plain(1)
    assert after.last(other, "Grant") is not None
    back = after.resume(pid, resume(epoch), role="plain")
    assert after.last(back, "Refused") is not None
    assert after.killed() == []
    after.register(back, 0)
    after.hang_up(other)
    assert after.last(back, "Grant").number == 0


def test_a_parked_trial_without_a_number_is_refused() -> None:
    """Whoever was never told of a trial has nothing to park."""
    broker = FakeBroker(devices=1)
    broker.driver()
    pid = broker.worker()
    epoch = broker.last(pid, "Grant").epoch
    after = broker.successor()
    worker = after.resume(pid, resume(epoch, None, parked=parked(epoch)))
    assert "has a number" in after.last(worker, "Refused").reason
    after.check()


def test_a_parked_trial_whose_gpu_is_in_use_no_more_blocks_no_other() -> None:
    """Its process could go on nowhere else, nor leave: the trial goes back to its checkpoint."""
    gpus = [Device(id=id_, kind="gpu", free=True) for id_ in ("GPU-a", "GPU-b")]
    broker = FakeBroker(devices=gpus[1:])
    broker.driver(policy="round-robin", unstarted=2)
    pid = broker.worker()
    epoch = begin(broker, pid, 0)
    said = parked(epoch, can_store=False)
    broker.say(pid, said)
    after = broker.successor(devices=gpus[:1])
    after.driver(policy="round-robin", unstarted=0)
    back = after.resume(pid, resume(epoch, device="GPU-b", parked=said))
    assert "only on GPU-b" in after.last(back, "Refused").reason
    assert after.killed() == [pid]
    grant = after.last(after.worker(), "Grant")
    assert (grant.number, grant.devices) == (0, ("GPU-a",))
    after.check()


def test_two_processes_cannot_go_on_with_one_trial() -> None:
    """The second is refused, whatever it says."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin")
    after.resume(pid, resume(epoch))
    second = after.resume(77, resume(epoch))
    assert "Another process" in after.last(second, "Refused").reason
    assert shown(after).state == "running"


def test_a_trial_that_has_ended_is_not_begun_again_but_what_it_has_done_counts() -> None:
    """It told Optuna, its driver told the broker, and then it came back to say so itself."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin", ended={0: "done"})
    last = resume(epoch, reports=(report(epoch, 1),), device_seconds=2.5, held_seconds=2.5)
    worker = after.resume(pid, last)
    assert "has ended" in after.last(worker, "Refused").reason
    assert shown(after).state == "done"
    assert after.ledger.load_curves("s")[0].units == 1
    (trial,) = after.ledger.load_trials("s")
    assert (trial.state, trial.units, trial.device_seconds) == ("done", 1, 2.5)
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in after.log)


def test_a_process_whose_trial_is_over_is_answered_once_its_last_units_are_written() -> None:
    """Its driver was faster; a broker that dies before the ledger has the units hears them too."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.driver(policy="round-robin", ended={0: "done"})
    last = resume(epoch, reports=(report(epoch, 1),), ended=True)
    worker = after.resume(pid, last)
    after.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert after.last(worker, "Refused") is None
    assert after.killed() == []
    assert after.last(worker, "LeaseEndAck").epoch == epoch
    assert after.ledger.load_curves("s")[0].units == 1
    # The answer waits for the end of the lease, and that is written with the units.
    kinds = [type(command) for command in after.log]
    assert kinds.index(EndLease) < kinds.index(ReportRecord)
    after.hang_up(worker)
    after.check()


def test_a_process_is_waited_for_until_the_end_of_its_lease_is_written(tmp_path: Path) -> None:
    """Its trial has ended and its device is another's by then, but the broker may die before."""
    broker, first, epoch = holding(unstarted=2)
    second = broker.worker()
    succession = Succession(tmp_path, broker.handler.state, broker.apply)
    succession.remember()
    broker.say(first, wire.Ended(epoch=epoch, state="done"))
    succession.lease_ends([epoch])
    succession.remember()
    held = begin(broker, second, 1)
    assert remembered(tmp_path) == [(first, epoch), (second, held)]
    succession.written([proof_of_end(epoch)])
    assert remembered(tmp_path) == [(second, held)]


def test_a_parked_trial_is_waited_for_once(tmp_path: Path) -> None:
    """Its process is served still, whether the end of its lease is written or not."""
    broker, first, epoch, second, held = taking_turns()
    succession = Succession(tmp_path, broker.handler.state, broker.apply)
    succession.remember()
    succession.lease_ends([epoch, held])
    broker.say(second, parked(held))
    succession.remember()
    assert [pid for pid, _ in remembered(tmp_path)] == [first, second]


def remembered(directory: Path) -> list[tuple[int, int]]:
    """Processes and epochs in the file of holders."""
    _, held = json.loads((directory / HOLDERS).read_text())
    return [(each["pid"], each["epoch"]) for each in held]


def test_a_process_that_cannot_be_seen_is_not_waited_for(tmp_path: Path) -> None:
    """One of another container has the process id 0, and no start time."""
    unseen = ServedProcess(
        pid=0, started=0, role="worker", study="s", number=0, epoch=1, devices=("cpu:0",)
    )
    pid = os.getpid()
    seen = replace(unseen, pid=pid, started=_holders.started(pid), epoch=2)
    _holders.save(tmp_path, [unseen, seen])
    assert _holders.living(tmp_path) == (seen,)


def test_the_name_of_a_broker_is_of_one_host_and_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays with the directory, but not with a copy of it: two hosts would be one broker."""
    built = instance_in(tmp_path, "build")
    assert built.startswith("build-")
    assert instance_in(tmp_path, "build") == built
    copied = instance_in(tmp_path, "pod-0")
    assert copied.startswith("pod-0-")
    monkeypatch.setattr(_holders, "boot", lambda: "the next one")
    cloned = instance_in(tmp_path, "pod-0")
    assert cloned not in (built, copied)
    assert instance_in(tmp_path, "pod-0") == cloned
    (tmp_path / "instance").write_text("pod-0-of-an-earlier-release")
    assert len(instance_in(tmp_path, "pod-0")) == len(cloned)


def test_a_trial_is_read_again_only_when_nobody_has_it() -> None:
    """A second process that comes back does not undo what the first one said."""
    broker, first, epoch, second, held = taking_turns()
    after = broker.successor()
    holder = after.resume(second, resume(held, 1))
    after.say(holder, report(held, 1))
    after.resume(first, resume(epoch, parked=parked(epoch)))
    after.driver(policy="round-robin")
    assert shown(after, 1).state == "running"
    assert shown(after, 1).units == 1


def test_time_alone_ends_the_wait() -> None:
    """The state asks to be woken for it."""
    broker, _, _ = holding()
    after = broker.successor()
    assert after.handler.next_wakeup(3.0) == RECOVERY_SECONDS


def test_a_driver_that_answers_late_does_not_prolong_the_wait() -> None:
    """The devices are read before each tick, which then comes later than it was due."""
    broker, _, _ = holding(devices=[Device(id="GPU-a", kind="gpu", free=True)])
    after = broker.successor()
    after.advance_with_driver(RECOVERY_SECONDS + 4.0, 1.01)
    assert len(after.killed()) == 1


def test_a_broker_that_was_stopped_waits_for_longer() -> None:
    """Whoever came back, or stopped, while it could hear nobody is not killed for it."""
    broker, pid, epoch = holding()
    after = broker.successor()
    after.advance(1.0)
    after.now = 3 * RECOVERY_SECONDS
    after.apply(Tick())
    assert after.killed() == []
    after.driver(policy="round-robin")
    after.worker()
    worker = after.resume(pid, resume(epoch))
    after.advance(1.5)
    assert after.last(worker, "Yield") is not None
    after.now += 10_000.0
    after.apply(Tick())
    assert after.killed() == []
    after.advance(10_000.0)
    assert pid in after.killed()


def test_what_is_told_late_counts_once() -> None:
    """A trial that was stored while nobody could write it down tells what the ledger may know."""
    broker, worker, epoch = holding()
    for unit in (1, 2):
        broker.say(worker, report(epoch, unit))
    for unit in (1, 2, 3):
        broker.say(worker, report(epoch, unit, age_seconds=5.0))
    assert (shown(broker).units, shown(broker).units_trained) == (3, 3)
    broker.say(worker, report(epoch, 3))  # trained again
    assert (shown(broker).units, shown(broker).units_trained) == (3, 4)
