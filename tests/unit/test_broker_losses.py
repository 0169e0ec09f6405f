"""Trials that lose processes, studies of which nothing succeeds, and workers that are silent."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Activity, Observed, Tick
from optuna_hermes.broker._core._failures import MOST_ALIKE
from optuna_hermes.broker._core._live_trial import MOST_LOSSES
from optuna_hermes.model import Device
from support.broker import FakeBroker


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker finds the trial of its lease and trains; the lease's epoch."""
    epoch = int(broker.last(worker, "Grant").epoch)
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def report(broker: FakeBroker, worker: int, epoch: int, unit: int) -> None:
    broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=1.0))


def lose(broker: FakeBroker, times: int, units: int = 0) -> None:
    """Trial 0 loses so many processes, each after it has reported so many units."""
    for _ in range(times):
        worker = broker.worker()
        epoch = begin(broker, worker, 0)
        for unit in range(1, units + 1):
            report(broker, worker, epoch, unit)
        broker.hang_up(worker)


def lost(broker: FakeBroker) -> list[tuple[int, bool]]:
    """The losses of the trials without a process, and whether they are given up."""
    (study,) = broker.handler.status(broker.now).studies
    return [(each.losses, each.given_up) for each in study.lost]


def test_a_trial_that_only_loses_processes_gets_no_further_one() -> None:
    """Its driver tells Optuna, then it has failed, in the ledger too."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(unstarted=1)
    lose(broker, MOST_LOSSES)
    assert lost(broker) == [(MOST_LOSSES, True)]
    assert broker.last(broker.worker(), "Grant") is None
    broker.say(driver, wire.GiveUp(study="s", number=0, reason="SIGSEGV"))
    (trial,) = broker.ledger.load_trials("s")
    assert trial.state == "failed"
    failed = [event for event in broker.ledger.load_events("s") if event.kind == "failed"]
    assert [event.detail for event in failed] == [{"error": "SIGSEGV"}]


def test_processes_that_end_before_they_begin_are_not_the_trials_fault() -> None:
    """Workers that end together are each given the trial of the one before: one loss counts."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    workers = [broker.worker() for _ in range(2 * MOST_LOSSES)]
    begin(broker, workers[0], 0)
    for worker in workers:
        assert broker.last(worker, "Grant") is not None
        broker.hang_up(worker)
    assert lost(broker) == [(1, False)]
    assert broker.last(broker.worker(), "Grant").number == 0


def test_a_new_unit_counts_anew_and_an_old_one_does_not() -> None:
    """Units that were reported before the process was lost are trained again."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    lose(broker, 2, units=1)
    assert lost(broker) == [(2, False)]
    lose(broker, 1, units=2)
    assert lost(broker) == [(1, False)]


def test_losses_outlive_a_broker() -> None:
    """The same driver comes to the next one, and a trial has no more chances for that."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    lose(broker, MOST_LOSSES - 1)
    after = broker.successor()
    after.driver(unstarted=0, counted=wire.Counted())
    lose(after, 1)
    assert lost(after) == [(MOST_LOSSES, True)]


def test_a_new_call_gives_new_chances() -> None:
    """Nobody knows why the one before it ended: a host may have been restarted."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    lose(broker, MOST_LOSSES)
    after = broker.successor()
    after.driver(unstarted=0)
    assert lost(after) == []
    assert after.last(after.worker(), "Grant").number == 0


@pytest.mark.parametrize("driver_first", [True, False])
def test_who_ends_with_the_driver_is_not_counted(driver_first: bool) -> None:
    """A user who ends everything has not made a trial lose its process."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(unstarted=1)
    worker = broker.worker()
    begin(broker, worker, 0)
    for connection in (driver, worker) if driver_first else (worker, driver):
        broker.hang_up(connection)
    (trial,) = broker.ledger.load_trials("s")
    assert trial.losses == 0


def test_a_loss_that_a_new_unit_has_made_up_for_is_not_taken_back() -> None:
    """Also if the driver ends right after it: there is none to take back."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(unstarted=1)
    lose(broker, 1)
    worker = broker.worker()
    report(broker, worker, begin(broker, worker, 0), 1)
    broker.hang_up(driver)
    assert lost(broker) == []


def test_a_device_that_fails_is_not_its_trials_fault() -> None:
    """The trial that was on it goes on elsewhere."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    begin(broker, worker, 0)
    broker.poll("cpu:0", healthy=False)
    broker.hang_up(worker)
    assert lost(broker) == []


def test_a_trial_that_fails_while_it_is_parked_has_failed() -> None:
    """Its state could not be taken to disk, say: it has lost no process, and its reason is kept."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, policy="round-robin")
    worker, _ = broker.worker(), broker.worker()
    epoch = begin(broker, worker, 0)
    report(broker, worker, epoch, 1)
    broker.say(worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))
    assert broker.handler.state.studies["s"].trials[0].state == "parked"
    broker.say(worker, wire.Ended(epoch=epoch, state="failed", error="KeyError: no state"))
    broker.say(worker, wire.Ended(epoch=epoch, state="failed", error="KeyError: no state"))
    broker.hang_up(worker)
    (study,) = broker.handler.status(broker.now).studies
    assert lost(broker) == []
    assert (study.failures.first, study.failures.error) == (0, "KeyError: no state")
    (trial,) = broker.ledger.load_trials("s")
    assert (trial.state, trial.losses) == ("failed", 0)
    broker.check()


# -- failures ----------------------------------------------------------------------------------


def fail(broker: FakeBroker, number: int, error: str, units: int = 0) -> None:
    worker = broker.worker()
    epoch = begin(broker, worker, number)
    for unit in range(1, units + 1):
        report(broker, worker, epoch, unit)
    broker.say(worker, wire.Ended(epoch=epoch, state="failed", error=error))
    broker.hang_up(worker)


def hopeless(broker: FakeBroker) -> bool:
    (study,) = broker.handler.status(broker.now).studies
    return study.failures.hopeless


def test_equal_failures_and_nothing_else_are_hopeless() -> None:
    """Reasons that differ in numbers are equal; others begin a new row."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=40, max_alive=40)
    fail(broker, 0, "KeyError: x")
    for number in range(1, MOST_ALIKE):
        fail(broker, number, f"ValueError: lr={number}")
    assert not hopeless(broker)
    fail(broker, MOST_ALIKE, "ValueError: lr=0.1")
    assert hopeless(broker)
    (study,) = broker.handler.status(broker.now).studies
    assert (study.failures.first, study.failures.error) == (0, "KeyError: x")


@pytest.mark.parametrize("by", ["success", "unit", "time"])
def test_one_trial_that_does_better_is_hope(by: str) -> None:
    """One that has ended well, or has come further than those that failed, or trains longer."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=40, max_alive=40)
    worker = broker.worker()
    epoch = begin(broker, worker, 100)
    if by == "success":
        broker.say(worker, wire.Ended(epoch=epoch, state="done"))
        broker.hang_up(worker)
    elif by == "unit":
        report(broker, worker, epoch, 1)
        report(broker, worker, epoch, 2)
    else:
        broker.advance(0.5)
    for number in range(MOST_ALIKE + 1):
        fail(broker, number, "no", units=1 if by == "unit" else 0)
    assert not hopeless(broker)


# -- silence -----------------------------------------------------------------------------------


def silent(
    seconds: float, activity: Activity, *, unit: bool = False, others: bool = True
) -> FakeBroker:
    """A worker does one thing for a time, and says nothing."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2 if others else 1)
    worker = broker.worker()
    if others:
        broker.worker()
    epoch = begin(broker, worker, 0)
    if unit:
        report(broker, worker, epoch, 1)
    end = broker.now + seconds
    while broker.now < end:
        broker.advance(1.0)
        if worker in broker.handler.silent(broker.now):
            broker.apply(Observed(activities={worker: activity}))
    return broker


def test_who_works_is_waited_for_before_its_first_unit() -> None:
    """Nobody knows how long a unit of it takes: a validation may take hours."""
    assert silent(20_000.0, "works").killed() == []


def test_who_works_is_not_waited_for_without_end_after_a_unit() -> None:
    """It may be silent ten times as long as one that is idle."""
    assert silent(2_900.0, "works", unit=True).killed() == []
    assert len(silent(3_100.0, "works", unit=True).killed()) == 1


def test_a_unit_that_only_its_end_tells_of_is_no_hang() -> None:
    """As under ``should_prune()`` alone: its next unit may last as long, though others wait."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    worker, _ = broker.worker(), broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    for unit in (1, 2):
        for _ in range(720):
            broker.advance(10.0)
            broker.apply(Observed(activities={worker: "works"}))
        assert broker.killed() == []
        if unit == 1:
            broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=False, late=True))
        report(broker, worker, epoch, unit)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_who_does_nothing_hangs(unit: bool, others: bool) -> None:
    """After 300 s, whether others wait for the device or not."""
    assert silent(290.0, "idle", unit=unit, others=others).killed() == []
    assert len(silent(320.0, "idle", unit=unit, others=others).killed()) == 1


@pytest.mark.parametrize("says", ["Beat", "Report"])
def test_who_says_anything_is_not_silent(says: str) -> None:
    """However little it computes: its 300 s begin anew."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    for second in range(10, 800, 10):
        broker.advance(10.0)
        if worker in broker.handler.silent(broker.now):
            broker.apply(Observed(activities={worker: "idle"}))
        if second % 250 == 0 and says == "Beat":
            broker.say(worker, wire.Beat(epoch=epoch))
        elif second % 250 == 0:
            report(broker, worker, epoch, second // 250)
    assert broker.killed() == []


def test_who_is_stopped_is_in_the_way_for_half_a_minute() -> None:
    """A stopped process cannot be at work; where nobody waits it is left alone for longer."""
    assert len(silent(45.0, "stopped").killed()) == 1
    assert silent(290.0, "stopped", others=False).killed() == []


@pytest.mark.parametrize(("stopped", "others"), [(15.0, True), (280.0, False)])
def test_who_was_stopped_and_goes_on_has_all_its_time_again(stopped: float, others: bool) -> None:
    """Though it does nothing at first: as if it had just been heard."""
    broker = silent(stopped, "stopped", others=others)
    (worker,) = {lease.connection for lease in broker.handler.state.leases()}
    end = broker.now + 290.0
    while broker.now < end:
        broker.advance(1.0)
        if worker in broker.handler.silent(broker.now):
            broker.apply(Observed(activities={worker: "idle"}))
    assert broker.killed() == []
    for _ in range(30):
        broker.advance(1.0)
        broker.apply(Observed(activities={worker: "idle"}))
    assert broker.killed() == [worker]


@pytest.mark.parametrize("others", [True, False])
def test_a_driver_that_answers_late_hides_no_hang(others: bool) -> None:
    """The broker is not stopped while it waits for a reading, which it does before each tick."""
    broker = FakeBroker(devices=[Device(id="GPU-a", kind="gpu", free=True)])
    broker.driver(policy="round-robin", unstarted=2 if others else 1)
    worker = broker.worker()
    begin(broker, worker, 0)
    broker.worker()
    broker.advance_with_driver(290.0, 1.01)
    assert broker.killed() == []
    broker.advance_with_driver(20.0, 1.01)
    assert broker.killed() == [worker]


def test_a_broker_that_is_stopped_again_and_again_sees_a_hang() -> None:
    """The time of each stop is left out of the silence, which does not begin anew."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin")
    worker, _ = broker.worker(), broker.worker()
    begin(broker, worker, 0)
    for _ in range(29):
        broker.advance_with_driver(10.0, 0.0)
        broker.now += 1000.0
        broker.apply(Tick())
    assert broker.killed() == []
    broker.advance_with_driver(20.0, 0.0)
    assert broker.killed() == [worker]


def test_a_study_says_how_long_its_trials_may_be_silent() -> None:
    """``hang_seconds`` is the study's, whatever the broker was started with."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", hang_seconds=7.0)
    first, _ = broker.worker(), broker.worker()
    begin(broker, first, 0)
    broker.advance(7.9)  # it was asked to leave after a second
    assert broker.killed() == []
    broker.advance(0.2)
    assert broker.killed() == [first]


def test_a_trial_that_hangs_again_and_again_is_given_up() -> None:
    """Each kill is a loss, and the driver hears why."""
    broker = FakeBroker(devices=1, grace_seconds=10.0)
    broker.driver(policy="round-robin", unstarted=2)
    worker, _ = broker.worker(), broker.worker()
    begin(broker, worker, 0)
    broker.advance(20.0)
    assert broker.killed() == [worker]
    broker.hang_up(worker)
    (study,) = broker.handler.status(broker.now).studies
    assert [(each.losses, each.hung) for each in study.lost] == [(1, True)]
