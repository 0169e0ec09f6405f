"""The broker's rules, without a process, a socket or a clock."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import (
    EndLease,
    NameLease,
    Send,
    StudyRead,
    Tick,
    WritesFailed,
)
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.ledger._records import CheckpointRecord, LeaseRecord, TrialRecord
from optuna_hermes.model import Assignment, Checkpoint, Curve, Decision
from support.broker import FakeBroker


def checkpoint(units: int = 1) -> Checkpoint:
    return Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")


def begin(broker: FakeBroker, worker: int, number: int, *, can_store: bool = True) -> int:
    """A worker that was granted a new trial starts to train it; returns the epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
    return epoch


def park(broker: FakeBroker, worker: int, epoch: int, **fields: Any) -> None:
    """A trial says that it is suspended; by default it stays where it is and could be stored."""
    said = {"tier": "resident", "suspend_seconds": 0.1, "can_store": True} | fields
    broker.say(worker, wire.TierChanged(epoch=epoch, **said))


def report(broker: FakeBroker, worker: int, epoch: int, unit: int, value: float) -> None:
    broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=value))


def train_slice(broker: FakeBroker, worker: int, number: int) -> int:
    """A new trial reports a unit, and its slice ends; returns the epoch."""
    epoch = begin(broker, worker, number)
    report(broker, worker, epoch, 1, 0.5)
    broker.advance(1.5)
    return epoch


def test_a_lease_is_written_before_its_grant_is_sent() -> None:
    """The ledger's record stands before the grant in the answer to the event."""
    broker = FakeBroker(devices=1)
    broker.driver()
    worker = broker.worker()
    kinds = [type(command).__name__ for command in broker.log[-2:]]
    assert kinds == ["LeaseRecord", "Send"]
    assert broker.last(worker, "Grant").number is None


def test_a_new_trial_names_its_lease() -> None:
    """A lease that was granted to a new trial gets the trial's number in the ledger."""
    broker = FakeBroker(devices=1)
    broker.driver()
    epoch = begin(broker, broker.worker(), 7)
    assert NameLease(study="s", epoch=epoch, number=7) in broker.log


def test_the_device_goes_on_when_its_slice_is_over() -> None:
    """At a slice's end the holder yields, and only its answer lets the next one begin."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin")
    first, second = broker.worker(), broker.worker()
    epoch = train_slice(broker, first, 0)
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="resident")
    assert broker.last(second, "Grant") is None
    park(broker, first, epoch)
    assert broker.last(second, "Grant").epoch == epoch + 1
    broker.check()


def two_that_take_turns(**driver: Any) -> tuple[FakeBroker, int, int, int]:
    """A broker with one device, the worker that trains, its epoch, and the worker that waits."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2, **driver)
    first, second = broker.worker(), broker.worker()
    return broker, first, begin(broker, first, 0), second


def test_a_slice_ends_at_the_report_that_is_nearest_to_its_end() -> None:
    """With units of 0.4 s and slices of 1 s that is the second report, at 0.8 s."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.advance(0.4)
    report(broker, first, epoch, 1, 0.5)
    assert broker.last(first, "Yield") is None
    broker.advance(0.4)
    report(broker, first, epoch, 2, 0.4)
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="resident")


def test_a_unit_that_ends_soon_is_not_cut_in_two() -> None:
    """With units of 0.7 s the second one ends 0.4 s after the slice would."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.advance(0.7)
    report(broker, first, epoch, 1, 0.5)
    lease = broker.handler.state.leases()[0]
    assert (lease.epoch, lease.yielding) == (epoch, "resident")


@pytest.mark.parametrize("overruns", [False, True])
def test_a_slice_is_extended_to_the_end_of_its_unit(overruns: bool) -> None:
    """Units of the study last 2 s: one that has begun is finished, if it does not take longer."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.handler.state.studies["s"].mean_unit_seconds = 2.0
    broker.advance(2.0)
    assert broker.last(first, "Yield") is None
    if overruns:
        broker.advance(0.6)
    else:
        report(broker, first, epoch, 1, 0.5)
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="resident")


def test_a_slice_is_extended_when_it_is_over_and_not_before() -> None:
    """Whatever wakes the broker earlier, and also if it is woken late."""
    broker, *_ = two_that_take_turns()
    broker.handler.state.studies["s"].mean_unit_seconds = 2.0
    (lease,) = broker.handler.state.leases()
    for now, deadline in ((0.6, 1.0), (1.2, 1.2 + 1.5 * 0.8)):
        broker.now = now
        broker.apply(Tick())
        assert lease.deadline == pytest.approx(deadline)


def test_a_long_unit_is_cut_by_slices() -> None:
    """A unit of a minute is not waited for where slices last a second."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.handler.state.studies["s"].mean_unit_seconds = 60.0
    broker.advance(1.1)
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="resident")


def test_nothing_is_decided_at_the_last_report_of_a_trial() -> None:
    """It ends in a moment, and its device is free then."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.advance(0.9)
    said = wire.Report(epoch=epoch, unit=1, step=1, value=0.5, units_left=0)
    broker.say(first, said)
    assert broker.last(first, "Yield") is None


def test_a_trial_that_stays_the_best_keeps_its_device() -> None:
    """A slice that ends with the same choice is renewed without a word."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    begin(broker, worker, 0)
    broker.advance(10.0)
    assert broker.last(worker, "Yield") is None


@pytest.mark.parametrize("first", [[], [math.nan, -math.inf]])
def test_the_best_value_never_gets_worse(first: list[float]) -> None:
    """It is the best that was ever reported, not the best of the last ones; NaN is none."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    best = []
    for unit, value in enumerate([*first, 0.5, 0.2, 0.9, math.nan], start=1):
        report(broker, worker, epoch, unit, value)
        best.append(broker.handler.status(broker.now).studies[0].best)
    assert [None if each is None else each.value for each in best] == [
        *[None] * len(first),
        *(0.5, 0.2, 0.2, 0.2),
    ]


def test_messages_of_an_old_lease_are_dropped() -> None:
    """A report under an epoch that is over changes nothing."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    report(broker, worker, epoch - 1, 1, 0.5)
    assert broker.handler.status(0.0).studies[0].trials[0].units == 0


def test_nobody_reports_for_someone_else() -> None:
    """A lease answers only to the connection it was granted to."""
    broker = FakeBroker(devices=2)
    broker.driver()
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    report(broker, second, epoch, 1, 0.5)
    assert broker.handler.status(0.0).studies[0].trials[0].units == 0


def test_a_dead_worker_frees_its_device_and_its_trial_is_stored() -> None:
    """The last checkpoint is what is left of a trial, and the next worker gets that one."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    report(broker, worker, epoch, 1, 0.5)
    broker.say(worker, wire.Saved(epoch=epoch, checkpoint=checkpoint()))
    broker.hang_up(worker)
    assert any(isinstance(c, EndLease) and c.epoch == epoch for c in broker.log)
    grant = broker.last(broker.worker(), "Grant")
    assert grant.number == 0
    assert grant.checkpoints == (checkpoint(),)


def test_a_checkpoint_is_acknowledged_once_it_is_in_the_ledger() -> None:
    """Only then may the trial remove the one before it."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    commands = broker.say(worker, wire.Saved(epoch=epoch, checkpoint=checkpoint()))
    assert [type(command).__name__ for command in commands] == [
        *("CheckpointRecord", "TrialRecord", "Send"),
    ]
    assert broker.last(worker, "CheckpointAck").path == checkpoint().path


def test_a_trial_that_goes_to_disk_hears_that_its_checkpoint_is_kept() -> None:
    """Its process may end then; in the status it is on no device any more."""
    broker, first, epoch, second = two_that_take_turns()
    broker.advance(1.5)
    park(broker, first, epoch, tier="disk", checkpoint=checkpoint())
    assert broker.last(first, "CheckpointAck").path == checkpoint().path
    begin(broker, second, 1)
    rows = broker.handler.status(broker.now).studies[0].trials
    assert [(row.state, row.device) for row in rows] == [("stored", None), ("running", "cpu:0")]


def test_device_time_is_spent_on_leases_that_are_over_and_those_that_are_held() -> None:
    """A budget of device time is compared with the sum of both."""
    broker, first, epoch, _ = two_that_take_turns()
    broker.advance(1.5)
    park(broker, first, epoch)
    broker.advance(0.5)
    shown = broker.handler.status(broker.now).studies[0]
    assert (shown.held_seconds, shown.spent_seconds) == (0.5, 2.0)


def test_a_trial_was_submitted_when_it_was_first_written() -> None:
    """Though the clock of the host was set since then."""
    broker, first, epoch, _ = two_that_take_turns()
    (before,) = broker.ledger.load_trials("s")
    broker.handler.state.wall_offset += 3600.0
    report(broker, first, epoch, 1, 0.5)
    broker.advance(1.5)
    park(broker, first, epoch)
    (after,) = broker.ledger.load_trials("s")
    assert (after.state, after.submitted) == ("parked", before.submitted)


def test_a_checkpoint_counts_that_was_safe_only_after_its_trial_was_parked() -> None:
    """It is written beside the training, and what dies then goes on from it."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", max_alive=2)
    first = broker.worker()
    broker.worker()
    epoch = train_slice(broker, first, 0)
    park(broker, first, epoch)
    broker.say(first, wire.Saved(epoch=epoch, checkpoint=checkpoint()))
    assert broker.last(first, "CheckpointAck").path == checkpoint().path
    assert any(isinstance(c, CheckpointRecord) and c.number == 0 for c in broker.log)


def test_a_trial_that_was_created_by_a_worker_that_died_is_looked_for() -> None:
    """A new trial's lease names those that were lost before it, until somebody has begun."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=4)
    first, second = broker.worker(), broker.worker()
    lost = [broker.last(worker, "Grant").epoch for worker in (first, second)]
    for worker in (first, second):
        assert broker.last(worker, "Grant").lost == ()
        broker.hang_up(worker)
    third, fourth = broker.worker(), broker.worker()
    grants = [broker.last(worker, "Grant") for worker in (third, fourth)]
    assert {grant.lost for grant in grants} == {(str(epoch),) for epoch in lost}
    begin(broker, third, 0)
    broker.hang_up(fourth)
    fifth = broker.worker()
    assert broker.last(fifth, "Grant").lost == (str(grants[1].epoch), *grants[1].lost)
    broker.hang_up(third)  # it had begun: its trial is in the state
    epoch = begin(broker, fifth, 1)
    sixth = broker.worker()
    assert broker.last(sixth, "Grant").number == 0
    assert broker.last(sixth, "Grant").lost == ()
    broker.say(fifth, wire.Ended(epoch=epoch, state="done"))
    seventh = broker.worker()
    assert broker.last(seventh, "Grant").lost == ()


def adopted_while_it_is_looked_for() -> tuple[FakeBroker, int]:
    """A worker has died that had created trial 0; the next driver adopts what another looks for."""
    broker = FakeBroker(devices=2)
    driver = broker.driver(unstarted=2, max_alive=4)
    broker.hang_up(broker.worker())
    finder = broker.worker()
    assert broker.last(finder, "Grant").lost
    broker.hang_up(driver)
    broker.driver(unstarted=1, max_alive=4, adopted={0: 0})
    return broker, finder


def test_a_trial_that_is_found_though_it_was_adopted_is_counted_once() -> None:
    """Its driver has counted it already: as many may be created as before."""
    broker, finder = adopted_while_it_is_looked_for()
    epoch = begin(broker, finder, 0)
    broker.say(finder, wire.Ended(epoch=epoch, state="done"))
    grant = broker.last(broker.worker(), "Grant")
    assert (grant.number, grant.lost) == (None, ())


def test_a_trial_that_went_on_meanwhile_is_not_begun_again() -> None:
    """A worker that finds it and knows no checkpoint of it is ended, and nobody looks any more."""
    broker, finder = adopted_while_it_is_looked_for()
    other = broker.worker()
    epoch = broker.last(other, "Grant").epoch
    assert broker.last(other, "Grant").number == 0
    begin(broker, other, 0)
    broker.say(other, wire.Saved(epoch=epoch, checkpoint=checkpoint()))
    broker.hang_up(other)
    broker.say(finder, wire.Begin(epoch=broker.last(finder, "Grant").epoch, number=0, trial_id=0))
    assert broker.killed() == [finder]
    broker.hang_up(finder)
    grants = [broker.last(broker.worker(), "Grant") for _ in range(2)]
    assert {(grant.number, grant.lost) for grant in grants} == {(0, ()), (None, ())}
    assert all(grant.checkpoints for grant in grants if grant.number == 0)


def test_a_worker_that_dies_before_its_trial_exists_loses_no_trial() -> None:
    """The trial that was to be created may still be created."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    broker.hang_up(broker.worker())
    assert broker.handler.status(0.0).studies[0].unstarted == 1
    assert broker.last(broker.worker(), "Grant") is not None


def test_a_trial_has_one_process() -> None:
    """A worker whose new trial turns out to be another's is killed, and no trial is lost by it."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2)
    first, second = broker.worker(), broker.worker()
    begin(broker, first, 0)
    begin(broker, second, 0)
    assert broker.killed() == [second]
    broker.hang_up(second)
    broker.check()
    begin(broker, broker.worker(), 1)
    assert broker.handler.status(0.0).studies[0].counts.running == 2


def test_parked_trials_make_room_for_new_trials() -> None:
    """With every process taken, the trial that has not trained for longest goes to disk."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", max_alive=2)
    first, second = broker.worker(), broker.worker()
    epoch = train_slice(broker, first, 0)
    park(broker, first, epoch)
    after = train_slice(broker, second, 1)
    assert broker.last(first, "Move") == wire.Move(epoch=epoch, tier="disk")
    park(broker, first, epoch, tier="disk", checkpoint=checkpoint())
    broker.hang_up(first)
    states = [trial.state for trial in broker.handler.status(broker.now).studies[0].trials]
    assert states == ["stored", "running"]
    park(broker, second, after)
    assert broker.last(broker.worker(), "Grant").number is None


def test_parked_trials_make_room_where_no_further_process_can_be_started() -> None:
    """Its driver tells: a trial that waits for a process would wait for good."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(policy="round-robin", max_alive=8)
    workers = broker.worker(), broker.worker()
    for number, worker in enumerate(workers):
        epoch = begin(broker, worker, number)
        report(broker, worker, epoch, 1, 0.5)
        broker.advance(1.5)
        park(broker, worker, epoch)
    assert not any(broker.last(worker, "Move") for worker in workers)
    broker.say(driver, wire.KeepWorkers(study="s", max_alive=2))
    assert any(broker.last(worker, "Move") for worker in workers)


def test_trials_that_cannot_leave_take_turns_among_themselves() -> None:
    """Without a free process no device is kept for a trial that could not get one."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", max_alive=2)
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0, can_store=False)
    report(broker, first, epoch, 1, 0.5)
    broker.advance(1.5)
    park(broker, first, epoch, can_store=False)
    after = begin(broker, second, 1, can_store=False)
    report(broker, second, after, 1, 0.5)
    broker.advance(1.5)
    park(broker, second, after, can_store=False)
    assert broker.last(first, "Grant").number == 0


def test_draining_suspends_everything() -> None:
    """After ``Drain`` holders go to disk, parked trials too, and idle workers are sent home."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(policy="round-robin")
    first, second = broker.worker(), broker.worker()
    epoch = train_slice(broker, first, 0)
    park(broker, first, epoch)
    after = begin(broker, second, 1)
    idle = broker.worker()
    broker.say(driver, wire.Drain(study="s"))
    assert broker.last(first, "Move") is not None
    assert broker.last(second, "Yield") == wire.Yield(epoch=after, tier="disk")
    assert broker.last(idle, "Dismiss") is not None
    assert not broker.handler.status(broker.now).studies[0].finished
    park(broker, first, epoch, tier="disk", checkpoint=checkpoint())
    park(broker, second, after, tier="disk", checkpoint=checkpoint())
    assert broker.handler.status(broker.now).studies[0].finished


def test_a_silent_worker_is_killed_after_the_grace_period() -> None:
    """A worker that was asked to yield and makes no progress is killed, once per period."""
    broker = FakeBroker(devices=1, grace_seconds=10.0)
    broker.driver(policy="round-robin")
    first, _ = broker.worker(), broker.worker()
    report(broker, first, begin(broker, first, 0), 1, 0.5)
    broker.advance(9.0)
    assert broker.killed() == []
    broker.advance(5.0)
    assert broker.killed() == [first]


def test_progress_puts_the_grace_period_off() -> None:
    """A long validation that goes on is not a hang."""
    broker = FakeBroker(devices=1, grace_seconds=10.0)
    broker.driver(policy="round-robin")
    first, _ = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    report(broker, first, epoch, 1, 0.5)
    for _ in range(5):
        broker.advance(9.0)
        broker.say(first, wire.Beat(epoch=epoch))
    assert broker.killed() == []


def test_a_trial_whose_silences_are_long_is_waited_for_longer() -> None:
    """A worker that was heard from every fifty seconds is killed after 500, not after 300."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", slice_seconds=20.0)
    first, _ = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    for _ in range(3):
        broker.advance(50.0)
        broker.say(first, wire.Beat(epoch=epoch))
    broker.advance(499.9)
    assert broker.killed() == []
    broker.advance(0.2)
    assert broker.killed() == [first]


def test_the_time_for_which_all_were_stopped_is_no_silence() -> None:
    """Whatever comes first after it, as with GPUs: a worker that hangs later is seen to hang."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin")
    first, _ = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    report(broker, first, epoch, 1, 0.5)
    assert broker.handler.next_wakeup(broker.now) is not None
    broker.now += 3600.0
    broker.say(first, wire.Beat(epoch=epoch))
    broker.advance(299.0)
    assert broker.killed() == []
    broker.advance(15.0)
    assert broker.killed() == [first]


def test_a_silent_plain_trial_is_waited_for() -> None:
    """The process of ``study.optimize`` is its user's: it is not killed, and nobody spins on it."""
    broker = FakeBroker(devices=1, grace_seconds=10.0)
    first = broker.plain(0, policy="round-robin")
    broker.plain(1, policy="round-robin")
    report(broker, first, broker.last(first, "Grant").epoch, 1, 0.5)
    broker.advance(25.0)
    assert broker.killed() == []
    due = broker.handler.next_wakeup(broker.now)
    assert due is not None
    assert due > broker.now


def test_a_second_driver_is_refused() -> None:
    """Two calls of optimize on one study at one time would count its trials twice."""
    broker = FakeBroker(devices=1)
    broker.driver()
    second = broker.driver()
    refused = broker.last(second, "Refused")
    assert "already being optimized" in refused.reason
    assert refused.driver_pid is not None


def test_a_trial_of_others_takes_the_place_of_one_that_was_to_begin() -> None:
    """A plain trial beside the driver counts, also where a device waits for a new trial."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    first, second = broker.worker(), broker.worker()
    epoch = train_slice(broker, first, 0)
    slot = broker.handler.state.slots["cpu:0"]
    assert slot.reservation is not None
    assert slot.reservation.number is None
    broker.plain(1, policy="round-robin")
    park(broker, first, epoch)
    broker.advance(1.0)
    assert broker.last(second, "Grant") is None
    assert slot.lease is not None
    assert slot.lease.number in (0, 1)
    broker.check()


def test_plain_trials_take_turns() -> None:
    """Trials of ``study.optimize`` wait for their first lease and then take turns on a device."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0, policy="round-robin"), broker.plain(1, policy="round-robin")
    epoch = broker.last(first, "Grant").epoch
    assert broker.last(second, "Grant") is None
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=False))
    report(broker, first, epoch, 1, 0.5)
    broker.advance(1.5)
    park(broker, first, epoch, can_store=False)
    after = broker.last(second, "Grant").epoch
    assert after > epoch
    broker.say(second, wire.FirstBatch(epoch=after, can_store=False))
    broker.advance(1.5)
    park(broker, second, after, can_store=False)
    assert broker.last(first, "Grant").epoch > after


def test_two_studies_share_the_devices() -> None:
    """A study that comes later gets its share when slices end."""
    broker = FakeBroker(devices=2)
    broker.driver(key="a")
    for number in range(2):
        begin(broker, broker.worker(key="a"), number)
    broker.driver(key="b")
    other = broker.worker(key="b")
    broker.advance(1.5)
    yields = [c for c in (2, 3) if broker.last(c, "Yield")]
    assert len(yields) == 1
    park(broker, yields[0], yields[0] - 1)
    assert broker.last(other, "Grant") is not None


class Turns:
    """A broker whose studies always have trials to train, which leave as soon as they are asked."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self._heard = len(broker.log)
        self._begun = 0

    def open(self, key: str, trials: int, slice_seconds: float = 1.0) -> None:
        """Let a driver come, with a worker for each of its trials."""
        self.broker.driver(
            key=key,
            unstarted=trials,
            max_alive=trials,
            policy="round-robin",
            slice_seconds=slice_seconds,
        )
        for _ in range(trials):
            self.broker.worker(key=key)
        self._obey()

    def advance(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.broker.advance(0.5)
            self._obey()

    def had(self, key: str) -> float:
        """Device time that a study has had."""
        studies = self.broker.handler.status(self.broker.now).studies
        return next(study.device_seconds for study in studies if study.key == key)

    def _obey(self) -> None:
        broker = self.broker
        while self._heard < len(broker.log):
            command = broker.log[self._heard]
            self._heard += 1
            if not isinstance(command, Send):
                continue
            message, connection = command.message, command.connection
            if isinstance(message, wire.Grant) and message.number is None:
                begin(broker, connection, self._begun)
                self._begun += 1
            elif isinstance(message, wire.Grant):
                broker.say(connection, wire.FirstBatch(epoch=message.epoch, can_store=True))
            elif isinstance(message, wire.Yield):
                park(broker, connection, message.epoch)


@pytest.mark.parametrize("trials", [1, 3])
def test_a_study_that_comes_late_gets_half_from_then_on(trials: int) -> None:
    """It does not wait until a trial has ended, nor have the others to wait until it caught up."""
    turns = Turns(FakeBroker(devices=1))
    turns.open("a", trials)
    turns.advance(100.0)
    turns.open("b", 2)
    turns.advance(20.0)
    assert turns.had("b") == pytest.approx(10.0, abs=1.5)
    assert turns.had("a") == pytest.approx(110.0, abs=1.5)


def test_a_study_that_was_held_does_not_wait_until_others_have_had_as_much() -> None:
    """The time it had before is not made up for, though nothing ran when the other one came."""
    turns = Turns(FakeBroker(devices=1))
    turns.open("a", 1)
    turns.advance(100.0)
    user = turns.broker.connect("viewer")
    hold = wire.SetOverrides(study="a", numbers=(0,), override="held")
    turns.broker.say(user, hold)
    turns.advance(2.0)
    turns.open("b", 1)
    turns.advance(4.0)
    turns.broker.say(user, msgspec.structs.replace(hold, override=None))
    before = turns.had("a")
    turns.advance(20.0)
    assert turns.had("a") - before == pytest.approx(10.0, abs=1.5)


@settings(deadline=None, max_examples=20)
@given(
    devices=st.integers(1, 3),
    studies=st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([0.0, 0.5, 20.0])),
        min_size=2,
        max_size=4,
    ),
)
def test_studies_have_equal_times(devices: int, studies: list[tuple[float, float]]) -> None:
    """However long their slices are, how many devices there are, and who came first."""
    turns = Turns(FakeBroker(devices=devices))
    for number, (slice_seconds, before) in enumerate(studies):
        turns.advance(before)
        turns.open(str(number), devices, slice_seconds)
    keys = [str(number) for number in range(len(studies))]
    at_first = {key: turns.had(key) for key in keys}
    turns.advance(40.0)
    had = [turns.had(key) - at_first[key] for key in keys]
    assert max(had) - min(had) <= 2 * devices * max(seconds for seconds, _ in studies), had


def test_turns_under_an_earlier_broker_are_over() -> None:
    """A trial that trains on under the next one has had no longer a turn than who waits."""
    broker = FakeBroker(devices=1)
    turns = Turns(broker)
    turns.open("a", 1)
    turns.open("b", 1)
    turns.advance(1.5)
    lease = broker.handler.state.leases()[0]
    parked = next(trial for trial in broker.handler.state.trials() if trial.state == "parked")
    after = broker.successor()
    for key, number, epoch, connection, held in (
        (parked.study, parked.number, parked.epoch, parked.connection, 0.0),
        (lease.study, lease.number, lease.epoch, lease.connection, 100.0),
    ):
        waits = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1, can_store=True)
        after.resume(
            connection or 0,
            wire.Reattach(
                study=wire.StudySpec(key=key, name=key, ledger_url="memory:", policy="fifo"),
                epoch=epoch,
                devices=("cpu:0",),
                number=number,
                trial_id=number,
                training=held > 0,
                held_seconds=held,
                parked=None if held else waits,
            ),
        )
    turns = Turns(after)
    turns.advance(20.0)
    assert turns.had(parked.study) == pytest.approx(10.0, abs=2.5)


def test_a_study_comes_back_from_its_ledger() -> None:
    """Runs with a checkpoint are stored, those without begin again, finished ones stay so."""
    broker = FakeBroker(devices=1)
    broker.driver()
    connection = broker.connect("driver")
    study = wire.StudySpec(key="t", name="t", ledger_url="memory:")
    trials = [
        TrialRecord(study="t", number=n, trial_id=n, state=state)
        for n, state in enumerate(["done", "running", "parked", "running"])
    ]
    saved = checkpoint_record("t", 1)
    curve = Curve(steps=(1,), values=(0.5,), device_seconds=(1.0,))
    message = wire.OpenStudy(study=study, limit=0, max_alive=2, ended={3: "done"})
    broker.apply(
        StudyRead(
            connection=connection,
            message=message,
            last_epoch=90,
            trials=tuple(trials),
            curves={1: curve},
            checkpoints=(saved,),
        )
    )
    shown = next(s for s in broker.handler.status(0.0).studies if s.key == "t")
    assert [trial.state for trial in shown.trials] == ["done", "stored", "pending", "done"]
    broker.worker(key="t")
    assert max(c.epoch for c in broker.log if isinstance(c, LeaseRecord)) == 91


def checkpoint_record(study: str, number: int):  # type: ignore[no-untyped-def]
    from optuna_hermes.ledger._records import CheckpointRecord

    return CheckpointRecord(
        study=study,
        number=number,
        checkpoint=Checkpoint(path="/c", units=1, size_bytes=1, sha256="0"),
        at=0.0,
    )


def test_a_lease_that_was_not_written_is_not_held() -> None:
    """The device is empty and the study stops with the reason when the ledger refuses."""
    broker = FakeBroker(devices=1)
    broker.driver()
    epoch = broker.last(broker.worker(), "Grant").epoch
    broker.apply(WritesFailed(study="s", epochs=(epoch,), reason="disk full"))
    shown = broker.handler.status(0.0)
    assert shown.devices[0].holder is None
    assert shown.studies[0].problem == "disk full"


def test_a_policy_that_raises_ends_its_study_only() -> None:
    """The broker goes on, and says whose fault it is."""
    broker = FakeBroker(devices=1)
    broker.driver()
    study = broker.handler.state.studies["s"]

    class Broken(type(study.policy)):  # type: ignore[misc]
        def decide(self, snapshot):  # type: ignore[no-untyped-def]
            raise RuntimeError("no idea")

    study.policy = Broken()
    worker = broker.worker()
    shown = broker.handler.status(0.0).studies[0]
    assert "no idea" in shown.problem
    assert shown.finished
    assert broker.last(worker, "Dismiss") is not None


@pytest.mark.parametrize(
    "assignments",
    [
        [Assignment(trial=99, devices=("cpu:0",))],
        [Assignment(trial=None, devices=("cpu:7",))],
        [Assignment(trial=None, devices=("cpu:0",)), Assignment(trial=None, devices=("cpu:0",))],
    ],
    ids=["unknown trial", "unknown device", "device twice"],
)
def test_a_policy_that_breaks_its_contract_is_stopped(assignments: list[Assignment]) -> None:
    """An impossible decision is not carried out, and ends the study with a reason."""
    broker = FakeBroker(devices=2)
    broker.driver()
    study = broker.handler.state.studies["s"]

    class Broken(type(study.policy)):  # type: ignore[misc]
        def decide(self, snapshot):  # type: ignore[no-untyped-def]
            return Decision(assignments=tuple(assignments))

    study.policy = Broken()
    worker = broker.worker()
    assert broker.last(worker, "Grant") is None
    assert "at most" in broker.handler.status(0.0).studies[0].problem


def test_the_trials_of_all_studies_fit_into_one_frame() -> None:
    """Of the largest studies those that have a process are listed: a longer frame is none."""
    broker = FakeBroker(devices=1)
    curve = Curve(
        steps=tuple(range(40)),
        values=tuple(1 / (unit + 3) for unit in range(40)),
        device_seconds=tuple(float(unit) for unit in range(40)),
    )
    for key, count in (("a", 4500), ("b", 400), ("c", 4400)):
        broker.driver(key=key, unstarted=None)
        trials = broker.handler.state.studies[key].trials
        for number in range(count):
            trials[number] = LiveTrial(
                study=key, number=number, trial_id=0, state="done", submitted=0.0, curve=curve
            )
    begin(broker, broker.worker(key="a"), 4500)
    status = broker.handler.status(broker.now, curves=True)
    wire.frame(wire.Status(status=status))
    assert [len(study.trials) for study in status.studies] == [1, 400, 4400]


def test_the_json_of_a_status_keeps_its_names() -> None:
    """Scripts read ``optuna-hermes status --json``: what it names stays, in every part."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=1)
    begin(broker, broker.worker(), 0)
    status = msgspec.to_builtins(broker.handler.status(broker.now, curves=True))
    assert [*status] == ["host", "host_memory", "recovering", "devices", "studies"]
    assert [*status["host_memory"]] == ["used_bytes", "budget_bytes"]
    named = "id kind healthy memory_bytes memory_free_bytes power power_watts energy_joules"
    more = ("holder", "problem", "residents", "exclusive", "part")
    assert [*status["devices"][0]] == [*named.split(), *more]
    named = "key study trial state pid epoch since_seconds left_seconds slice_seconds"
    assert [*status["devices"][0]["holder"]] == named.split()
    (study,) = status["studies"]
    named = (
        "key name policy maximize policy_folders driver_pid draining problem problem_may_pass "
        "outage_seconds outage_reason held boosted finishing all_held no_room finished unstarted "
        "workers counts lost failures device_seconds watt_hours held_seconds spent_seconds "
        "overhead_seconds switches best trials ledger_url"
    )
    assert [*study] == named.split()
    assert [*study["workers"]] == ["alive", "idle"]
    assert [*study["counts"]] == ["pending", "running", "parked", "stored", "done", "failed"]
    assert [*study["failures"]] == ["first", "error", "alike", "hopeless"]
    named = (
        "trial state override tier held_bytes host_bytes device units units_trained value slices "
        "suspensions device_seconds watt_hours curve slope"
    )
    assert [*study["trials"][0]] == named.split()


def test_a_loop_has_time_to_train_however_long_it_took_to_come_back() -> None:
    """It is not asked to leave before its first batch, and then has half a slice at least."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", slice_seconds=1.0, unstarted=2)
    workers = broker.worker(), broker.worker()
    for number, worker in enumerate(workers):
        epoch = begin(broker, worker, number)
        broker.advance(1.1)
        park(broker, worker, epoch)
    worker = workers[0]
    epoch = broker.last(worker, "Grant").epoch

    def asked() -> bool:
        return bool(broker.last(worker, "Yield").epoch == epoch)

    broker.advance(5.0)
    assert not asked()
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    broker.advance(0.4)
    assert not asked()
    broker.advance(0.2)
    assert asked()
