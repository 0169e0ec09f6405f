"""Suspended trials whose objective raises before they go on: they wait, and others go on."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import Reservation
from optuna_hermes.broker._core._retries import MOST_FAILED, RETRY_SECONDS, end_study
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger

REASON = "Trial {} was suspended, and now its objective raises OSError('503') before it goes on."


def begin(broker: FakeBroker, worker: int) -> tuple[int, int]:
    """A worker begins a trial, a new one with the next number; its number and epoch."""
    grant = broker.last(worker, "Grant")
    number = grant.number
    if number is None:
        number = len(broker.handler.state.studies["s"].trials)
    broker.say(worker, wire.Begin(epoch=grant.epoch, number=number, trial_id=number))
    return number, grant.epoch


def train(broker: FakeBroker) -> tuple[int, int, int]:
    """A worker trains what it is granted; its connection, the trial and the epoch."""
    worker = broker.worker()
    number, epoch = begin(broker, worker)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return worker, number, epoch


def store(broker: FakeBroker, worker: int, number: int, epoch: int) -> None:
    """A trial goes to disk, and its process ends."""
    saved = Checkpoint(path=f"/c/{number}", units=1, size_bytes=1, sha256="0")
    parked = wire.TierChanged(epoch=epoch, tier="disk", suspend_seconds=0.0, checkpoint=saved)
    broker.say(worker, parked)
    broker.hang_up(worker)


def stored(
    trials: int,
    *,
    unstarted: int = 0,
    again: bool = True,
    ledger: MemoryLedger | None = None,
    policy: str = "round-robin",
) -> FakeBroker:
    """A broker with a device and so many trials on disk; with a driver that comes ``again``."""
    broker = FakeBroker(devices=trials, ledger=ledger)
    driver = broker.driver(policy=policy, unstarted=trials + unstarted, max_alive=9)
    for train_ in [train(broker) for _ in range(trials)]:
        store(broker, *train_)
    if again:
        broker.hang_up(driver)
        broker.driver(policy=policy, unstarted=unstarted, max_alive=9)
    return broker


def fail(broker: FakeBroker, *, final: bool = False) -> int:
    """A worker is granted a trial, whose objective raises before it goes on; its number."""
    worker = broker.worker()
    number, epoch = begin(broker, worker)
    broker.say(worker, wire.Released(epoch=epoch, reason=REASON.format(number), final=final))
    broker.hang_up(worker)
    return number


def shown(broker: FakeBroker) -> wire.StudyStatus:
    (study,) = broker.handler.status(broker.now).studies
    return study


def test_others_train_while_one_waits() -> None:
    """It stays on disk, and begins again after a minute; once it trains its failure is forgotten.

    So another one may fail later.
    """
    broker = stored(2)
    failed = fail(broker)
    assert shown(broker).problem is None
    other = train(broker)
    assert other[1] != failed
    broker.advance(RETRY_SECONDS)
    worker, number, epoch = train(broker)
    assert number == failed
    store(broker, worker, number, epoch)
    store(broker, *other)
    assert broker.handler.state.studies["s"].failed_returns == {}
    assert shown(broker).problem is None
    broker.check()


def test_a_script_that_fails_two_before_any_has_trained_ends_the_study() -> None:
    """At once, with all trials as they were; the command is not to be run again as it is."""
    broker = stored(3)
    fail(broker)
    assert shown(broker).problem is None
    number = fail(broker)
    assert shown(broker).problem == REASON.format(number)
    assert not shown(broker).problem_may_pass
    assert shown(broker).counts.stored == 3
    broker.check()


def test_two_that_fail_where_others_train_end_nothing() -> None:
    """A service that is away for a moment is so for all that come back then."""
    broker = stored(3)
    train(broker)
    assert fail(broker) != fail(broker)
    assert shown(broker).problem is None


@pytest.mark.parametrize("again", [True, False])
def test_nothing_is_tried_for_ever(again: bool) -> None:
    """The only trial is tried once where nothing has trained, else some times, a minute apart."""
    broker = stored(1, again=again)
    tries = 1 if again else MOST_FAILED
    for _ in range(tries - 1):
        fail(broker)
        assert shown(broker).problem is None
        broker.advance(RETRY_SECONDS)
    fail(broker)
    assert shown(broker).problem == REASON.format(0)
    assert shown(broker).finished


def test_one_that_is_tried_no_more_ends_the_study_with_the_last_other_trial() -> None:
    """Not before, however often it has failed."""
    broker = stored(2)
    worker, number, epoch = train(broker)
    for _ in range(MOST_FAILED):
        fail(broker)
        broker.advance(RETRY_SECONDS)
    assert broker.last(broker.worker(), "Grant") is None
    assert broker.handler.next_wakeup(broker.now) != float("inf")
    assert shown(broker).problem is None
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert shown(broker).problem == REASON.format(1 - number)
    broker.check()


def test_one_whose_reason_is_final_is_not_tried_again() -> None:
    """Others train meanwhile, and new ones are opened; it is said at the end, without a wait."""
    broker = stored(2, unstarted=1)
    worker, _, epoch = train(broker)
    failed = fail(broker, final=True)
    other = train(broker)
    broker.advance(RETRY_SECONDS)
    assert broker.last(broker.worker(), "Grant") is None
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert shown(broker).problem is None
    broker.say(other[0], wire.Ended(epoch=other[2], state="done"))
    assert shown(broker).problem == REASON.format(failed)
    broker.check()


def test_trials_whose_checkpoints_are_lost_keep_no_others_from_going_on() -> None:
    """Two of ten come first, before any has trained; it is said once the others have ended."""
    broker = stored(10)
    failed = [fail(broker, final=True) for _ in range(2)]
    for _ in range(8):
        assert shown(broker).problem is None
        worker, number, epoch = train(broker)
        assert number not in failed
        broker.say(worker, wire.Ended(epoch=epoch, state="done"))
        broker.hang_up(worker)
    assert shown(broker).problem == REASON.format(failed[-1])
    broker.check()


def test_no_new_trial_is_opened_where_no_suspended_one_finds_a_checkpoint() -> None:
    """Another checkpoint_dir was given: the new ones would be trained beside what is there."""
    broker = stored(3, unstarted=5, policy="fifo")
    for _ in range(3):
        assert shown(broker).problem is None
        number = fail(broker, final=True)
    assert shown(broker).problem == REASON.format(number)
    assert shown(broker).unstarted == 5


def test_a_study_that_may_open_trials_goes_on() -> None:
    """Though every trial that it has by now fails."""
    broker = stored(1, unstarted=1)
    study = broker.handler.state.studies["s"]
    study.failed_returns[0] = ["so"]
    end_study(broker.handler.state, study)
    assert study.problem is None
    study.limit = 1
    end_study(broker.handler.state, study)
    assert study.problem == "so"


def test_a_study_whose_driver_has_gone_is_not_ended_again() -> None:
    """Plain trials of it may begin: its problem was that driver's."""
    broker = stored(2)
    fail(broker)
    fail(broker)
    assert shown(broker).problem is not None
    broker.plain(2)
    broker.hang_up(4)
    assert shown(broker).driver_pid is None
    assert shown(broker).problem is None


@pytest.mark.parametrize("what", ["finished", "held"])
def test_one_that_is_no_longer_to_be_trained_ends_nothing(what: str) -> None:
    """It failed once, and all others have ended well since."""
    broker = stored(2)
    worker, _, epoch = train(broker)
    failed = fail(broker)
    viewer = broker.connect("viewer")
    if what == "held":
        broker.say(viewer, wire.SetOverrides(study="s", numbers=(failed,), override="held"))
    else:
        broker.say(viewer, wire.Finish(study="s", numbers=(failed,)))
        broker.say(viewer, wire.Finished(study="s", numbers=(failed,)))
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert shown(broker).problem is None
    broker.check()


def test_no_new_trial_is_opened_while_the_surroundings_may_be_at_fault() -> None:
    """It would fail for good: one that has failed is tried before, and must train."""
    broker = stored(2, unstarted=5)
    train(broker)
    failed = {fail(broker), fail(broker)}
    assert failed == {0, 1}
    idle = broker.worker()
    broker.advance(RETRY_SECONDS / 2)
    assert broker.last(idle, "Grant") is None
    broker.advance(RETRY_SECONDS / 2)
    number, epoch = begin(broker, idle)
    assert number in failed
    broker.say(idle, wire.FirstBatch(epoch=epoch, can_store=True))
    store(broker, idle, number, epoch)
    assert broker.last(broker.worker(), "Grant").number is None
    broker.check()


def test_one_that_fails_for_itself_does_not_keep_others_from_beginning() -> None:
    """Some minutes later new trials are opened again."""
    broker = stored(1, unstarted=5, again=False, policy="fifo")
    for _ in range(MOST_FAILED):
        assert fail(broker) == 0
        broker.advance(RETRY_SECONDS)
    assert broker.last(broker.worker(), "Grant").number is None


def test_trials_that_all_fail_for_minutes_end_the_study() -> None:
    """With trials left to open: each of those would fail for good."""
    broker = stored(2, unstarted=5, again=False, policy="fifo")
    for _ in range(MOST_FAILED):
        assert shown(broker).problem is None
        assert fail(broker) != fail(broker)
        broker.advance(RETRY_SECONDS)
    assert shown(broker).problem is not None
    assert shown(broker).unstarted == 5


def test_a_boosted_one_is_tried_again() -> None:
    """Its own fault was mended."""
    broker = stored(2)
    train(broker)
    for _ in range(MOST_FAILED):
        failed = fail(broker)
        broker.advance(RETRY_SECONDS)
    idle = broker.worker()
    assert broker.last(idle, "Grant") is None
    boost = wire.SetOverrides(study="s", numbers=(failed,), override="boosted")
    broker.say(broker.connect("viewer"), boost)
    assert broker.last(idle, "Grant").number == failed


def test_after_the_death_of_a_broker_nothing_has_trained_either() -> None:
    """The driver brings counters along, of which none has counted."""
    broker = stored(3, again=False)
    broker.hang_up(1)
    counted = wire.Counted(overhead_seconds={"opening": 0.0, "resuming": 0.0})
    broker.driver(policy="round-robin", unstarted=0, max_alive=9, counted=counted)
    fail(broker)
    fail(broker)
    assert shown(broker).problem is not None


def test_another_host_tries_at_once() -> None:
    """A trial that fails here goes on there, and this host waits for it."""
    ledger = MemoryLedger(clock=lambda: 0.0, shared=True)
    here = stored(2, ledger=ledger)
    train(here)
    failed = fail(here)
    assert here.handler.presence(here.now).wants == ()  # else another host would leave it
    there = FakeBroker(devices=1, ledger=ledger, host="there")
    there.driver(policy="round-robin", unstarted=0)
    assert there.last(there.worker(), "Grant").number == failed


def test_the_next_command_tries_at_once() -> None:
    """A driver that comes anew forgets what has failed before."""
    broker = stored(2)
    train(broker)
    failed = fail(broker)
    idle = broker.worker()
    assert broker.last(idle, "Grant") is None
    broker.hang_up(4)
    broker.driver(policy="round-robin", unstarted=0)
    assert broker.last(idle, "Grant").number == failed


def test_a_new_trial_that_has_a_reservation_keeps_the_study_going() -> None:
    """It is no longer among those to be opened, and has no lease yet."""
    broker = stored(1, unstarted=1)
    state = broker.handler.state
    study = state.studies["s"]
    study.failed_returns[0], study.limit = ["so"], 1
    (slot,) = state.slots.values()
    slot.reservation = Reservation(study="s", number=None, slice_seconds=None)
    end_study(state, study)
    assert study.problem is None
    slot.reservation = None
    end_study(state, study)
    assert study.problem == "so"
