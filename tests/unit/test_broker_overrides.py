"""Overrides of single trials, as the broker's state applies them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _admission
from optuna_hermes.broker._core._boosts import boosted_first
from optuna_hermes.broker._core._events import OutageBegan, OutageEnded
from optuna_hermes.model import Checkpoint, Decision, Device, Snapshot, TrialView
from optuna_hermes.policies import Policy, make_policy, place, unopened
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger


def training(broker: FakeBroker, number: int, *, can_store: bool = True) -> tuple[int, int]:
    """A worker that trains a new trial and has reported; its connection and its epoch."""
    worker = broker.worker()
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
    broker.say(worker, wire.Report(epoch=epoch, unit=1, step=1, value=1.0))
    return worker, epoch


def park(broker: FakeBroker, worker: int, epoch: int, **fields: Any) -> None:
    said = {"tier": "resident", "suspend_seconds": 0.1, "can_store": True} | fields
    broker.say(worker, wire.TierChanged(epoch=epoch, **said))


def want(broker: FakeBroker, message: Any) -> wire.FromBroker:
    """Somebody who watches says something; the answer."""
    viewer = broker.connect("viewer")
    broker.say(viewer, message)
    answer = broker.sent(viewer)[-1]
    broker.hang_up(viewer)
    broker.check()
    return answer


def asking(broker: FakeBroker) -> Callable[[Any], wire.FromBroker]:
    """Somebody who watches, and stays."""
    viewer = broker.connect("viewer")

    def ask(message: Any) -> wire.FromBroker:
        broker.say(viewer, message)
        broker.check()
        return broker.sent(viewer)[-1]

    return ask


def override(broker: FakeBroker, number: int, wanted: Any) -> wire.FromBroker:
    return want(broker, wire.SetOverrides(study="s", numbers=(number,), override=wanted))


def refused(answer: wire.FromBroker) -> str:
    assert isinstance(answer, wire.Refused)
    return answer.reason


def state_of(broker: FakeBroker, number: int) -> str:
    return broker.handler.state.studies["s"].trials[number].state


def kinds(broker: FakeBroker, number: int | None = None) -> list[str]:
    return [event.kind for event in broker.ledger.load_events("s") if event.number == number]


# -- hold --------------------------------------------------------------------------------------


def test_who_is_held_leaves_at_once_and_gets_no_device() -> None:
    """A slice is cut short, the device is another's, and the held trial waits on until released."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, slice_seconds=100.0)
    first, epoch = training(broker, 0)
    assert override(broker, 0, "held") == wire.Accepted()
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="resident")
    park(broker, first, epoch)
    second, epoch = training(broker, 1)
    broker.say(second, wire.Ended(epoch=epoch, state="done"))
    broker.advance(500.0)
    assert state_of(broker, 0) == "parked"
    assert override(broker, 0, None) == wire.Accepted()
    assert broker.last(first, "Grant").number == 0
    assert {"held", "no longer held"} <= set(kinds(broker, 0))


def test_a_held_trial_keeps_no_other_from_its_end() -> None:
    """It is not the one to be finished before the budget is spent, however low its value."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=3, policy="hermes")
    study = broker.handler.state.studies["s"]
    for number, value in ((0, 0.1), (1, 0.5)):
        worker, epoch = training(broker, number)
        said = wire.Report(epoch=epoch, unit=1, step=1, value=value, units_left=5)
        broker.say(worker, said)
        broker.advance(2.0)
        park(broker, worker, epoch)
    override(broker, 0, "held")
    runner = broker.handler._policy_runner
    views = {each.number: each for each in runner.snapshot(study, [], broker.now).trials}
    assert (views[0].units_left, views[1].units_left) == (None, 5)


def test_what_was_on_its_way_to_a_held_trial_is_not() -> None:
    """A device that was kept for a trial goes to another when that one is held."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, slice_seconds=1.0, policy="round-robin")
    first, epoch = training(broker, 0)
    broker.advance(1.5)
    park(broker, first, epoch)
    second, epoch = training(broker, 1)
    broker.advance(2.0)
    assert broker.handler.state.slots["cpu:0"].reservation is not None
    override(broker, 0, "held")
    assert broker.handler.state.slots["cpu:0"].reservation is None
    park(broker, second, epoch)
    assert broker.last(second, "Grant").number == 1


def test_overrides_outlive_the_broker() -> None:
    """The next broker gives a held trial no device, and a boosted one the first."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=3, policy="round-robin")
    for number in range(3):
        worker, epoch = training(broker, number)
        override(broker, number, {0: "held", 2: "boosted"}.get(number))
        broker.advance(1.5)
        saved = Checkpoint(path=f"/c/{number}", units=1, size_bytes=1, sha256="0")
        park(broker, worker, epoch, tier="disk", checkpoint=saved)
    assert broker.ledger.load_overrides("s") == {0: "held", 2: "boosted"}
    after = broker.successor(known=())
    after.driver(unstarted=0, policy="round-robin")
    worker = after.worker()
    assert after.last(worker, "Grant").number == 2


def test_a_process_that_comes_back_with_a_held_trial_is_asked_to_leave() -> None:
    """A request made while the broker was dead counts once the next one hears of the trial."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    worker, epoch = training(broker, 0)
    after = broker.successor()
    broker.ledger.save_override("s", 0, "held")
    spec = wire.StudySpec(key="s", name="s", ledger_url="memory:", slice_seconds=100.0)
    resume = wire.Reattach(
        study=spec,
        epoch=epoch,
        devices=("cpu:0",),
        number=0,
        trial_id=0,
        training=True,
        can_store=True,
    )
    again = after.resume(worker, resume)
    assert after.last(again, "Yield") is not None


def test_an_override_reaches_the_broker_of_another_host() -> None:
    """A shared ledger tells each broker what was said to another."""
    ledger = MemoryLedger(shared=True)
    here, there = FakeBroker(devices=1, ledger=ledger, host="a"), None
    here.driver(unstarted=1, slice_seconds=100.0)
    worker, _ = training(here, 0)
    there = FakeBroker(devices=1, ledger=ledger, host="b")
    there.driver(unstarted=0)
    assert override(there, 0, "held") == wire.Accepted()
    here.refresh()
    assert here.last(worker, "Yield") is not None


def test_nothing_is_left_but_what_is_held() -> None:
    """The status says so, for the driver to end; not while anything else can be trained."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, epoch = training(broker, 0)
    shown = broker.handler.status(broker.now).studies[0]
    assert not shown.all_held
    override(broker, 0, "held")
    park(broker, worker, epoch)
    shown = broker.handler.status(broker.now).studies[0]
    assert (shown.all_held, shown.held, shown.trials[0].override) == (True, (0,), "held")


def test_the_status_names_live_trials_only_as_held_or_boosted() -> None:
    """One of two on hold leaves the other to be trained; one that has ended is no longer named."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2)
    (_, _), (second, epoch) = training(broker, 0), training(broker, 1)
    override(broker, 0, "held")
    override(broker, 1, "boosted")
    shown = broker.handler.status(broker.now).studies[0]
    assert (shown.all_held, shown.held, shown.boosted) == (False, (0,), (1,))
    broker.say(second, wire.Ended(epoch=epoch, state="done"))
    shown = broker.handler.status(broker.now).studies[0]
    assert (shown.all_held, shown.held, shown.boosted) == (True, (0,), ())


def test_a_new_trial_that_is_about_to_begin_is_left_to_be_trained() -> None:
    """It has a lease, but no number yet; a driver that ended now would suspend it at once."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    worker, epoch = training(broker, 0)
    override(broker, 0, "held")
    park(broker, worker, epoch)
    assert not broker.handler.status(broker.now).studies[0].all_held
    begins = broker.worker()
    assert broker.last(begins, "Grant").number is None
    assert not broker.handler.status(broker.now).studies[0].all_held


# -- boost -------------------------------------------------------------------------------------


def test_who_is_boosted_gets_the_next_device_and_keeps_it() -> None:
    """Others train their slices to the end; the boosted one then has the device until released."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=3, policy="round-robin", slice_seconds=1.0)
    workers = []
    for number in range(3):
        workers.append(training(broker, number))
        if number < 2:
            broker.advance(1.5)
            park(broker, *workers[number])
    override(broker, 1, "boosted")  # round-robin would take 0
    assert broker.last(workers[2][0], "Yield") is None
    broker.advance(1.5)
    park(broker, *workers[2])
    grant = broker.last(workers[1][0], "Grant")
    assert grant.epoch > workers[2][1]
    broker.say(workers[1][0], wire.FirstBatch(epoch=grant.epoch, can_store=True))
    broker.say(workers[1][0], wire.Beat(epoch=grant.epoch))
    before = len(broker.leases())
    broker.advance(5.0)
    assert len(broker.leases()) == before
    override(broker, 1, None)
    broker.advance(1.5)
    assert broker.last(workers[1][0], "Yield").epoch == grant.epoch


def trial(number: int, **fields: Any) -> TrialView:
    return TrialView(number=number, **({"state": "parked", "waiting_since": 1.0} | fields))


def snapshot(*trials: TrialView, free: tuple[str, ...]) -> Snapshot:
    devices = tuple(Device(id=id_, free=id_ in free) for id_ in ("cpu:0", "cpu:1"))
    return Snapshot(now=9.0, devices=devices, trials=trials)


def devices_of(decision: Decision) -> dict[int | None, tuple[str, ...]]:
    return {each.trial: each.devices for each in decision.assignments}


def test_boost_moves_nobody_without_need() -> None:
    """A boosted trial keeps its device, or takes one where nobody is parked, or else another's."""
    fifo = make_policy("fifo").decide
    parked, other = trial(0, device="cpu:0", waiting_since=9.0), trial(7, waiting_since=2.0)
    both = snapshot(parked, other, free=("cpu:0", "cpu:1"))
    assert devices_of(boosted_first(fifo, both, {7})) == {7: ("cpu:1",), 0: ("cpu:0",)}
    assert devices_of(boosted_first(fifo, both, {0, 7})) == {7: ("cpu:1",), 0: ("cpu:0",)}
    one = snapshot(parked, other, free=("cpu:0",))
    assert devices_of(boosted_first(fifo, one, {7})) == {7: ("cpu:0",)}
    assert devices_of(boosted_first(fifo, one, set())) == {0: ("cpu:0",)}
    bound = trial(7, bound_to=("cpu:1",))
    alone = snapshot(parked, bound, free=("cpu:0",))
    assert devices_of(boosted_first(fifo, alone, {7})) == {0: ("cpu:0",)}


def test_of_boosted_trials_the_one_that_has_waited_longest_goes_first() -> None:
    """Whatever their numbers; that decides only where they have waited for as long."""
    fifo = make_policy("fifo").decide
    for since, expected in ((2.0, 7), (9.0, 0), (11.0, 0)):
        both = snapshot(trial(0, waiting_since=9.0), trial(7, waiting_since=since), free=("cpu:0",))
        assert devices_of(boosted_first(fifo, both, {0, 7})) == {expected: ("cpu:0",)}


# -- finish ------------------------------------------------------------------------------------

FINISH = wire.Finish(study="s", numbers=(0,))
FINISHED = wire.Finished(study="s", numbers=(0,))


def test_a_trial_that_trains_is_stored_and_then_done() -> None:
    """It goes to disk, so that its process ends; once Optuna has been told it is over."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    worker, epoch = training(broker, 0)
    ask = asking(broker)
    assert ask(FINISH) == wire.Accepted(waits=True)
    assert broker.last(worker, "Yield").tier == "disk"
    assert "has not stopped yet" in refused(ask(FINISHED))
    saved = Checkpoint(path="/c/0", units=1, size_bytes=1, sha256="0")
    park(broker, worker, epoch, tier="disk", checkpoint=saved)
    spare = broker.worker()
    assert broker.last(spare, "Grant") is None
    assert ask(FINISH) == wire.Accepted()
    assert "about to be finished" in refused(override(broker, 0, "held"))
    assert ask(FINISHED) == wire.Accepted()
    assert [record.state for record in broker.ledger.load_trials("s")] == ["done"]
    assert kinds(broker, 0)[-3:] == ["finishing", "suspended", "finished"]
    assert broker.handler.status(broker.now).studies[0].finished


def test_who_waits_for_a_trial_to_stop_causes_no_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks many times a second, and nothing has changed."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    training(broker, 0)
    ask, decided = asking(broker), list[object]()
    monkeypatch.setattr(broker.handler._scheduler, "schedule", decided.append)
    for _ in range(10):
        assert ask(FINISH) == wire.Accepted(waits=True)
    assert len(decided) == 1


def test_who_has_ordered_a_trial_to_finish_may_take_it_back() -> None:
    """It cannot be finished after all, and goes on; nobody else may do so."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    worker, epoch = training(broker, 0)
    ask = asking(broker)
    ask(FINISH)
    park(broker, worker, epoch, tier="disk")
    assert "about to be finished" in refused(override(broker, 0, None))
    assert ask(wire.SetOverrides(study="s", numbers=(0,))) == wire.Accepted()
    assert broker.ledger.load_overrides("s") == {}
    assert broker.last(broker.worker(), "Grant").number == 0


def test_who_has_ordered_a_trial_to_finish_goes_on_while_the_database_is_away() -> None:
    """A few seconds of that are no reason to give up: refused, the trial would stay on hold."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    worker, _ = training(broker, 0)
    override(broker, 0, "boosted")
    ask = asking(broker)
    ask(FINISH)
    broker.apply(OutageBegan(studies=("s",), reason="Locked."))
    assert ask(FINISH) == wire.Accepted(waits=True)
    assert "is away" in refused(want(broker, FINISH))
    back = wire.SetOverrides(study="s", numbers=(0,), override="boosted")
    assert ask(back) == wire.Accepted()
    broker.apply(OutageEnded(studies=("s",)))
    broker.hang_up(worker)
    assert broker.ledger.load_overrides("s") == {0: "boosted"}


def test_a_parked_trial_leaves_by_way_of_the_disk() -> None:
    """A trial that waits in memory is stored, and given to nobody."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, policy="round-robin")
    worker, epoch = training(broker, 0)
    broker.advance(1.5)
    park(broker, worker, epoch)
    assert want(broker, FINISH) == wire.Accepted(waits=True)
    assert broker.last(worker, "Move") == wire.Move(epoch=epoch, tier="disk")


def test_a_worker_whose_trial_cannot_be_stored_is_ended() -> None:
    """Its values are with Optuna already; a process of the user's own is let be."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    worker, epoch = training(broker, 0, can_store=False)
    ask = asking(broker)
    ask(FINISH)
    park(broker, worker, epoch, can_store=False)
    assert ask(FINISH) == wire.Accepted(waits=True)
    assert broker.killed() == [worker]
    broker.hang_up(worker)
    assert ask(FINISH) == wire.Accepted()
    # It has not lost its process, which was to end.
    assert broker.handler.status(broker.now).studies[0].lost == ()
    assert "process lost" not in kinds(broker, 0)
    plain = FakeBroker(devices=1)
    process = plain.plain(0)
    assert f"trained by process {process}" in refused(want(plain, FINISH))
    assert plain.killed() == []


def test_who_leaves_before_it_is_finished_leaves_it_held() -> None:
    """Nobody has told Optuna: the trial waits for another word, also with the next broker."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1, slice_seconds=100.0)
    training(broker, 0)
    assert want(broker, FINISH) == wire.Accepted(waits=True)
    assert broker.ledger.load_overrides("s") == {0: "held"}
    assert "was not ordered to finish" in refused(want(broker, FINISHED))
    broker.ledger.save_override("s", 0, "finishing")
    after = broker.successor(known=())
    after.driver(unstarted=0)
    assert after.handler.status(after.now).studies[0].held == (0,)
    assert after.ledger.load_overrides("s") == {0: "held"}


# -- policy ------------------------------------------------------------------------------------


def test_another_policy_decides_and_begins_with_nothing() -> None:
    """The memory of the one before is forgotten, also in the ledger, and the event log has it."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, slice_seconds=1.0, policy="fifo")
    worker, _ = training(broker, 0)
    broker.handler.state.studies["s"].memory = {"of": "fifo"}
    broker.advance(5.0)
    assert broker.last(worker, "Yield") is None
    answer = want(broker, wire.ChangePolicy(study="s", policy="round-robin"))
    assert answer == wire.Accepted()
    assert broker.handler.status(broker.now).studies[0].policy == "round-robin"
    assert broker.handler.state.studies["s"].memory is None
    broker.advance(1.5)
    assert broker.last(worker, "Yield") is not None
    assert kinds(broker) == ["policy"]


class Counts(Policy):
    """Counts in its memory how often it was asked, in place; keeps what it was first given."""

    given: Any = "nothing yet"

    def decide(self, snapshot: Snapshot) -> Decision:
        memory = snapshot.memory or {"asked": 0}
        if self.given == "nothing yet":
            self.given = copy.copy(snapshot.memory)
        memory["asked"] += 1
        return Decision(assignments=place(snapshot, unopened(snapshot)), memory=memory)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    """A broker of a study that trains, whose policy counts, as do all, whatever their names."""
    monkeypatch.setattr(_admission, "make_policy", lambda name: Counts())
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2, policy="fifo")
    training(broker, 0)
    broker.advance(5.0)
    return broker


def given(broker: FakeBroker, policy: str) -> Any:
    """The memory that a policy is given when its driver comes."""
    broker.driver(unstarted=2, policy=policy)
    broker.worker()
    counts = broker.handler.state.studies["s"].policy
    assert isinstance(counts, Counts)
    return counts.given


def test_what_a_policy_changes_in_its_memory_is_kept(counted: FakeBroker) -> None:
    """The next broker gives it what it had last, not what it had first."""
    memory = counted.handler.state.studies["s"].memory
    assert memory["asked"] > 1
    assert given(counted.successor(known=()), "fifo") == memory


def test_a_policy_gets_no_memory_of_another_one(counted: FakeBroker) -> None:
    """Neither from the ledger nor where its study goes on under another driver."""
    assert given(counted.successor(known=()), "round-robin") is None
    counted.hang_up(counted.handler.state.studies["s"].driver or 0)
    counted.driver(unstarted=2, policy="round-robin")
    assert counted.handler.state.studies["s"].memory is None


def test_a_changed_policy_keeps_its_memory_if_workers_come_back_before_their_driver(
    counted: FakeBroker,
) -> None:
    """They know the policy that their study began with; the memory is of the one that is asked."""
    memory = counted.handler.state.studies["s"].memory
    (lease,) = counted.handler.state.leases()
    after = counted.successor()
    first = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")
    back = wire.Reattach(
        study=first, epoch=lease.epoch, number=0, devices=("cpu:0",), training=True
    )
    after.resume(lease.connection, back)
    after.advance(5.0)
    after.driver(unstarted=2, policy="fifo")
    assert after.handler.state.studies["s"].memory["asked"] >= memory["asked"]


# -- who may want what -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (wire.SetOverrides(study="s", numbers=(0, 9), override="held"), "no trial 9"),
        (wire.SetOverrides(study="x", numbers=(0,), override="held"), "served by this broker"),
        (wire.SetOverrides(study="s", numbers=(1, 0), override="held"), "Trial 1 has ended"),
        (wire.Finished(study="s", numbers=(0,)), "was not ordered to finish"),
    ],
)
def test_an_override_that_cannot_be_is_refused_and_changes_nothing(message: Any, why: str) -> None:
    """Of several trials all are meant, or none."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2)
    training(broker, 0)
    worker, epoch = training(broker, 1)
    broker.say(worker, wire.Ended(epoch=epoch, state="done"))
    assert why in refused(want(broker, message))
    assert broker.ledger.load_overrides("s") == {}


def test_only_who_watches_wants() -> None:
    """A worker that was led astray can hold nobody."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker, _ = training(broker, 0)
    broker.say(worker, wire.SetOverrides(study="s", numbers=(0,), override="held"))
    assert "said by a viewer" in broker.last(worker, "Refused").reason
    assert broker.ledger.load_overrides("s") == {}


def test_who_watches_keeps_no_broker_alive() -> None:
    """A broker that nobody needs may end while somebody looks on."""
    broker = FakeBroker(devices=1)
    broker.connect("viewer")
    assert broker.handler.idle
    broker.driver()
    assert not broker.handler.idle
