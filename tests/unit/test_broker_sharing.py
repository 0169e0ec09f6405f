"""Two brokers and one ledger: of two hosts that share a study, or of two studies in a file."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._borrowing import soon
from optuna_hermes.broker._core._events import ClaimConflict, OutageBegan, OutageEnded, Refreshed
from optuna_hermes.broker._core._shared_studies import REFRESH_SECONDS
from optuna_hermes.broker._server._succession import holders
from optuna_hermes.ledger import DEAD_SECONDS, CheckpointRecord, TrialRecord
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger


class Hosts:
    """Brokers of hosts ``a`` and ``b`` on one ledger, whose clock is ``ahead`` of theirs."""

    def __init__(self, *, devices: int = 1) -> None:
        self.now = self.ahead = 0.0
        self.ledger = MemoryLedger(clock=lambda: self.now + self.ahead, shared=True)
        self.a = FakeBroker(devices=devices, ledger=self.ledger, host="a")
        self.b = FakeBroker(devices=devices, ledger=self.ledger, host="b")
        self.dead: set[str] = set()

    def advance(self, seconds: float) -> None:
        """Time passes for all that live, who look at each other now and then."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + REFRESH_SECONDS, end)
            for broker in (self.a, self.b):
                if broker.handler.state.host not in self.dead:
                    broker.advance(self.now - broker.now)
                    broker.refresh()

    def owners(self) -> list[str | None]:
        return [trial.owner for trial in self.ledger.load_trials("s")]


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker that was granted a new trial starts to train it; returns the epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def checkpoint(number: int, units: int = 1) -> Checkpoint:
    path = f"/c/{number}/{units}"
    return Checkpoint(path=path, units=units, size_bytes=1, sha256="0")


def report(epoch: int, unit: int, value: float = 0.5) -> wire.Report:
    return wire.Report(epoch=epoch, unit=unit, step=unit, value=value)


def store(broker: FakeBroker, worker: int, epoch: int, number: int, units: int = 1) -> None:
    """A trial is suspended to disk, and its process ends."""
    broker.say(
        worker,
        wire.TierChanged(
            epoch=epoch, tier="disk", suspend_seconds=0.1, checkpoint=checkpoint(number, units)
        ),
    )
    broker.hang_up(worker)


def training(hosts: Hosts, **driver: Any) -> tuple[int, int]:
    """Host ``a`` trains trial 0 and has reported a unit; its worker and its lease."""
    hosts.a.driver(policy="round-robin", **driver)
    worker = hosts.a.worker()
    epoch = begin(hosts.a, worker, 0)
    hosts.a.say(worker, report(epoch, 1))
    hosts.a.say(worker, wire.Saved(epoch=epoch, checkpoint=checkpoint(0)))
    return worker, epoch


def test_what_one_host_trains_the_other_leaves_alone() -> None:
    """A trial that is held elsewhere is known, with its curve, and never granted."""
    hosts = Hosts()
    training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    hosts.advance(2 * DEAD_SECONDS)
    assert hosts.b.last(worker, "Grant") is None
    seen = hosts.b.handler.state.studies["s"].trials[0]
    assert (seen.state, seen.curve.values) == ("running", (0.5,))
    assert hosts.owners() == ["a"]
    document = hosts.b.handler.status(hosts.now).studies[0]
    assert not document.finished


def test_what_is_stored_on_one_host_goes_on_on_the_other() -> None:
    """Whoever has a free device claims it; it is granted with its checkpoint, once."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=2)
    hosts.b.driver(policy="round-robin", limit=2)
    other = hosts.b.worker()
    begin(hosts.b, other, 1)
    store(hosts.a, worker, epoch, 0)
    hosts.a.hang_up(1)  # no driver there any more
    assert hosts.owners() == [None, "b"]
    third = hosts.b.worker()
    hosts.advance(REFRESH_SECONDS)
    store(hosts.b, other, hosts.b.last(other, "Grant").epoch, 1)
    grant = hosts.b.last(third, "Grant")
    assert (grant.number, [each.path for each in grant.checkpoints]) == (0, ["/c/0/1"])
    assert hosts.owners() == ["b", None]
    assert hosts.ledger.load_trials("s")[0].host == "b"


def test_nothing_is_reserved_for_a_trial_whose_row_is_removed() -> None:
    """Its study was deleted in Optuna while a device yielded for it: another trial gets that."""
    hosts = Hosts()
    for number in (0, 1):
        row = TrialRecord(study="s", number=number, trial_id=number, state="stored", tier="disk")
        hosts.ledger.save_trial(row)
        hosts.ledger.save_checkpoint(
            CheckpointRecord(study="s", number=number, checkpoint=checkpoint(number), at=0.0)
        )
    hosts.a.driver(policy="round-robin", unstarted=0)
    hosts.a.worker()
    hosts.a.worker()
    slot = hosts.a.handler.state.slots["cpu:0"]
    assert slot.lease is not None
    epoch, number, worker = slot.lease.epoch, slot.lease.number, slot.lease.connection
    assert number is not None
    hosts.a.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    hosts.a.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    hosts.a.advance(5.0)
    assert (slot.lease.yielding, slot.reservation.number) == ("resident", 1 - number)
    hosts.a.apply(Refreshed(study="s", last_epoch=epoch, gone=(1 - number,)))
    parked = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True)
    hosts.a.say(worker, parked)
    assert hosts.a.last(worker, "Grant").number == number
    assert slot.lease.epoch > epoch


def test_trials_of_a_host_that_is_gone_are_carried_on() -> None:
    """After some time of silence its lease is over, and its trial goes on at its checkpoint."""
    hosts = Hosts()
    first, epoch = training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    hosts.advance(REFRESH_SECONDS)
    hosts.a.say(first, report(epoch, 2))
    hosts.dead.add("a")
    hosts.advance(DEAD_SECONDS - REFRESH_SECONDS)
    assert hosts.b.last(worker, "Grant") is None
    hosts.advance(3 * REFRESH_SECONDS)
    grant = hosts.b.last(worker, "Grant")
    assert (grant.number, grant.checkpoints[0].path) == (0, "/c/0/1")
    assert grant.device_seconds == REFRESH_SECONDS, "that of a lease which died with its broker"
    assert hosts.b.handler.state.studies["s"].trials[0].curve.units == 2
    assert hosts.owners() == ["b"]
    assert [lease.owner for lease in hosts.ledger.load_leases(live=True)] == ["b"]
    assert [host.instance for host in hosts.ledger.load_hosts()] == ["b"]


def test_a_trial_that_a_dead_host_was_about_to_begin_is_looked_for() -> None:
    """Nobody knows if it was created: the next new trial is that one, if there is one."""
    hosts = Hosts()
    hosts.a.driver(policy="round-robin", limit=1)
    lost = hosts.a.last(hosts.a.worker(), "Grant").epoch
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    assert hosts.b.last(worker, "Grant") is None, "the bound counts what others are about to begin"
    hosts.dead.add("a")
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    grant = hosts.b.last(worker, "Grant")
    assert (grant.number, grant.lost) == (None, (str(lost),))


def test_a_study_is_not_done_before_the_lease_of_a_dead_host_has_ended() -> None:
    """A trial that was created under it is adopted at the end of the study, only then."""
    hosts = Hosts()
    hosts.a.driver(policy="round-robin", limit=1)
    hosts.a.worker()
    hosts.b.driver(policy="round-robin", limit=1, foreign=(0,))
    hosts.dead.add("a")
    hosts.b.writes = False  # they come late
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    assert not hosts.b.handler.status(hosts.now).studies[0].finished
    hosts.b.writes = True
    hosts.advance(2 * REFRESH_SECONDS)
    assert hosts.ledger.load_leases(live=True) == []
    assert hosts.b.handler.status(hosts.now).studies[0].finished


def test_a_host_that_was_thought_dead_gives_up_what_it_had() -> None:
    """The worker of a host that comes back is killed, and undoes nothing by what it writes."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    other = hosts.b.worker()
    hosts.dead.add("a")
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    resumed = hosts.b.last(other, "Grant").epoch
    hosts.dead.clear()
    hosts.a.say(worker, wire.Saved(epoch=epoch, checkpoint=checkpoint(0, 2)))
    assert hosts.a.killed() == [worker]
    hosts.a.hang_up(worker)
    hosts.a.worker()
    hosts.advance(2 * DEAD_SECONDS)
    assert hosts.owners() == ["b"]
    (trial,) = hosts.ledger.load_trials("s")
    assert (trial.state, trial.host) == ("running", "b")
    live = hosts.ledger.load_leases(live=True)
    assert [lease.epoch for lease in live] == [resumed]


@pytest.mark.parametrize("restarted", [True, False])
def test_what_a_host_says_of_a_trial_that_another_has_taken_is_not_written(restarted: bool) -> None:
    """Neither by the worker that its next broker refuses, nor by one that is being killed."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=1)
    expected = holders(hosts.a.handler.state)
    hosts.b.driver(policy="round-robin", limit=1)
    other = hosts.b.worker()
    hosts.dead.add("a")
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    assert hosts.b.last(other, "Grant").number == 0
    late, saved = report(epoch, 2), checkpoint(0, 2)
    if restarted:
        after = hosts.a.successor(known=expected)
        spec = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")
        message = wire.Reattach(
            study=spec,
            epoch=epoch,
            number=0,
            devices=("cpu:0",),
            reports=(late,),
            checkpoints=(saved,),
        )
        again = after.resume(worker, message)
        assert "Another process has trial 0" in after.last(again, "Refused").reason
    else:
        hosts.dead.clear()
        hosts.advance(REFRESH_SECONDS)
        assert hosts.a.killed() == [worker]
        hosts.a.say(worker, late)
        hosts.a.say(worker, wire.Saved(epoch=epoch, checkpoint=saved))
    assert hosts.ledger.load_curves("s")[0].units == 1
    assert [each.checkpoint.path for each in hosts.ledger.load_checkpoints("s")] == ["/c/0/1"]
    assert hosts.owners() == ["b"]


def test_a_plain_trial_that_another_host_has_taken_over_is_left_to_it() -> None:
    """Its process is told so, now and when it asks again, so that it ends nothing in Optuna."""
    hosts = Hosts()
    plain = hosts.a.plain(0)
    assert hosts.a.last(plain, "Grant") is not None
    hosts.b.driver(policy="round-robin", unstarted=0)
    other = hosts.b.worker()
    hosts.dead.add("a")
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    assert hosts.b.last(other, "Grant").number == 0
    hosts.dead.clear()
    hosts.advance(REFRESH_SECONDS)
    refused = hosts.a.last(plain, "Refused")
    assert refused.taken
    assert "taken trial 0 over" in refused.reason
    hosts.a.hang_up(plain)
    hosts.advance(REFRESH_SECONDS)
    again = hosts.a.last(hosts.a.plain(0), "Refused")
    assert again.taken
    assert "on another host (b)" in again.reason
    assert hosts.a.killed() == []


@pytest.mark.parametrize("noticed", [True, False])
def test_a_database_that_was_away_makes_nobody_dead(noticed: bool) -> None:
    """Nobody could be heard of meanwhile: whoever comes back first does not judge by that.

    A broker that has nothing to write, but its heartbeat, notices no outage.
    """
    hosts = Hosts()
    training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    hosts.b.worker()
    hosts.advance(2 * DEAD_SECONDS)
    if noticed:
        hosts.b.apply(OutageBegan(studies=("s",), reason="gone"))
    hosts.now += 10 * DEAD_SECONDS
    hosts.b.now = hosts.now
    if noticed:
        hosts.b.apply(OutageEnded(studies=("s",)))
    hosts.b.refresh()
    assert hosts.owners() == ["a"]
    hosts.advance(2 * DEAD_SECONDS)
    assert hosts.owners() == ["a"]


def test_a_host_dies_though_the_database_is_slow_now_and_then() -> None:
    """Its trial goes on elsewhere: a write of a second says nothing of who lives."""
    hosts = Hosts()
    training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    hosts.dead.add("a")
    for _ in range(8):
        hosts.advance(2 * REFRESH_SECONDS)
        hosts.b.apply(OutageBegan(studies=("s",), reason="slow"))
        hosts.b.apply(OutageEnded(studies=("s",)))
    assert hosts.b.last(worker, "Grant").number == 0


@pytest.mark.parametrize("late", [(10.0, 10.0), (10.0, 0.0)])
def test_a_host_dies_though_the_ledger_is_read_slowly(late: tuple[float, float]) -> None:
    """Its trial goes on elsewhere: a busy database does not begin the watch anew at each look."""
    hosts = Hosts()
    training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    hosts.dead.add("a")
    for seconds in 4 * late:
        hosts.b.advance(REFRESH_SECONDS)
        hosts.now = hosts.b.now
        hosts.b.refresh(seconds)
    assert hosts.b.last(worker, "Grant").number == 0


def test_a_database_whose_clock_is_set_makes_nobody_dead() -> None:
    """All look silent at the next look; a host that is dead is missed later than otherwise."""
    hosts = Hosts()
    training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    worker = hosts.b.worker()
    hosts.advance(2 * DEAD_SECONDS)
    hosts.ahead = 3600.0
    hosts.b.advance(REFRESH_SECONDS)
    hosts.b.refresh()
    hosts.advance(2 * DEAD_SECONDS)
    assert hosts.owners() == ["a"]
    assert hosts.a.killed() == []
    assert sorted(host.instance for host in hosts.ledger.load_hosts()) == ["a", "b"]
    hosts.dead.add("a")
    hosts.ahead = 7200.0
    hosts.advance(DEAD_SECONDS + 3 * REFRESH_SECONDS)
    assert hosts.b.last(worker, "Grant").number == 0


def test_hosts_that_are_equally_fast_grant_in_turn() -> None:
    """An epoch that another host was faster with is no error: the next one is taken."""
    hosts = Hosts()
    hosts.a.driver(policy="round-robin", limit=2)
    hosts.b.driver(policy="round-robin", limit=2)
    first, second = hosts.a.worker(), hosts.b.worker()
    assert hosts.b.races == 1
    assert hosts.a.last(first, "Grant").epoch == 1
    assert hosts.b.last(second, "Grant").epoch == 2
    assert all(study.problem is None for study in hosts.b.handler.state.studies.values())


def test_a_worker_whose_lease_is_void_is_dismissed_while_its_study_drains() -> None:
    """Its driver would wait for it: the lease was made before Ctrl-C, and lost the race after."""
    hosts = Hosts()
    driver = hosts.b.driver(policy="round-robin", limit=2)
    hosts.b.writes = False
    worker = hosts.b.worker()
    epoch = hosts.b.last(worker, "Grant").epoch
    hosts.b.say(driver, wire.Drain(study="s"))
    hosts.b.apply(ClaimConflict(study="s", epochs=(epoch,), last_epoch=epoch))
    assert hosts.b.last(worker, "Dismiss") is not None


def test_brokers_of_two_studies_of_a_file_grant_in_turn() -> None:
    """Epochs are a ledger's: a broker that knows nothing of the other one's takes the next."""
    ledger = MemoryLedger()
    brokers = {key: FakeBroker(devices=1, ledger=ledger, host="h") for key in "ab"}
    for key, broker in brokers.items():
        broker.driver(key=key, policy="round-robin", unstarted=3)
    for number in range(3):
        for key, broker in brokers.items():
            worker = broker.worker(key=key)
            epoch = begin(broker, worker, number)
            broker.say(worker, report(epoch, 1))
            broker.say(worker, wire.Ended(epoch=epoch, state="done"))
            broker.hang_up(worker)
    assert [lease.study for lease in ledger.load_leases()] == ["a", "b"] * 3
    for key, broker in brokers.items():
        assert broker.handler.state.studies[key].problem is None
        assert [trial.state for trial in ledger.load_trials(key)] == ["done"] * 3
        assert [curve.units for curve in ledger.load_curves(key).values()] == [1] * 3


def test_all_hosts_together_open_no_trial_too_many() -> None:
    """The bound is on trials and leases of all hosts; who loses the race is not in error."""
    hosts = Hosts()
    hosts.a.driver(policy="round-robin", limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    first, second = hosts.a.worker(), hosts.b.worker()
    assert hosts.a.last(first, "Grant") is not None
    assert hosts.b.last(second, "Grant") is None
    assert hosts.b.unstarted() == 0
    (document,) = hosts.b.handler.status(hosts.b.now).studies
    assert not document.finished, "the other host is about to begin a trial"
    epoch = begin(hosts.a, first, 0)
    hosts.advance(2 * REFRESH_SECONDS)
    assert hosts.b.last(second, "Grant") is None
    assert hosts.b.handler.state.studies["s"].problem is None
    hosts.a.say(first, wire.Ended(epoch=epoch, state="done"))
    hosts.advance(2 * REFRESH_SECONDS)
    (document,) = hosts.b.handler.status(hosts.b.now).studies
    assert document.finished


def test_of_two_that_claim_a_trial_one_wins() -> None:
    """The other one's lease never was, and its worker waits for the next trial."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    store(hosts.a, worker, epoch, 0)
    hosts.advance(REFRESH_SECONDS)
    mine = hosts.a.worker()
    theirs = hosts.b.worker()  # its state says still that the trial is nobody's
    assert hosts.a.last(mine, "Grant").number == 0
    assert hosts.b.last(theirs, "Grant") is None
    assert theirs in hosts.b.handler.state.studies["s"].idle_workers
    assert hosts.owners() == ["a"]
    hosts.advance(REFRESH_SECONDS)
    assert hosts.b.handler.state.studies["s"].trials[0].owner == "a"
    told = [(each.kind, each.detail.get("device")) for each in hosts.ledger.load_events("s", 0)]
    assert told.count(("granted", "cpu:0")) == 1, "of the loser's grant nothing is told"


def test_a_trial_that_another_host_was_faster_with_is_not_told_as_carried_on() -> None:
    """The event log has the winner's grant alone; the loser tells of its own once it has one."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    store(hosts.a, worker, epoch, 0)
    hosts.advance(REFRESH_SECONDS)
    again = hosts.a.worker()
    hosts.b.worker()
    assert hosts.b.races == 1

    def carried_on() -> list[dict[str, Any]]:
        events = hosts.ledger.load_events("s", 0)
        return [each.detail for each in events if each.kind == "carried on"]

    assert carried_on() == []
    granted = hosts.a.last(again, "Grant").epoch
    begin(hosts.a, again, 0)
    store(hosts.a, again, granted, 0, units=2)
    hosts.a.hang_up(1)  # no driver there any more
    hosts.advance(2 * REFRESH_SECONDS)
    assert carried_on() == [{"host": "b", "from": "a"}]


def test_a_trial_that_another_host_has_taken_over_meanwhile_has_one_lease() -> None:
    """A worker finds the trial of one that died, but the other host's driver has adopted it."""
    hosts = Hosts()
    hosts.a.driver(policy="round-robin", limit=1)
    hosts.a.hang_up(hosts.a.worker())  # it has created trial 0, and said nothing
    finder = hosts.a.worker()
    hosts.b.driver(policy="round-robin", limit=1, adopted={0: 0})
    assert hosts.b.last(hosts.b.worker(), "Grant").number == 0
    epoch = hosts.a.last(finder, "Grant").epoch
    hosts.a.say(finder, wire.Begin(epoch=epoch, number=0, trial_id=0))
    assert hosts.a.killed() == [finder]
    assert hosts.owners() == ["b"]
    live = hosts.ledger.load_leases("s", live=True)
    assert [(lease.owner, lease.number) for lease in live] == [("a", None), ("b", 0)]


@pytest.mark.parametrize("wants", [True, False])
def test_an_idle_host_gets_what_waits_in_memory_elsewhere(wants: bool) -> None:
    """A trial that is parked on a busy host is stored for one that could train it, or stays."""
    hosts = Hosts()
    first, epoch = training(hosts, limit=2)
    second = hosts.a.worker()
    hosts.advance(1.5)
    assert hosts.a.last(first, "Yield").tier == "resident"
    hosts.a.say(
        first, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1, can_store=True)
    )
    begin(hosts.a, second, 1)
    if wants:
        hosts.b.driver(policy="round-robin", limit=2)
        hosts.b.worker()
    hosts.b.refresh()
    hosts.a.refresh()
    evicted = hosts.a.last(first, "Move")
    assert (evicted is not None) == wants


def wants_of_b(hosts: Hosts) -> tuple[str, ...]:
    (presence,) = [host for host in hosts.ledger.load_hosts() if host.name == "b"]
    return presence.wants


def parked_best(hosts: Hosts, *, can_store: bool = True, trains: bool = True) -> tuple[int, int]:
    """Host ``a`` trains the best trial and has parked the second best, ``b`` trains the worst.

    Args:
        can_store: whether the second best can be stored.
        trains: whether the worst has come to its first batch.

    Returns:
        The workers of the trial that is parked, and of the one that ``b`` trains.
    """
    hosts.a.driver(policy="hermes", limit=3)
    parked = hosts.a.worker()
    epoch = begin(hosts.a, parked, 0)
    best = hosts.a.worker()
    hosts.a.say(parked, report(epoch, 1, 0.5))
    hosts.a.advance(60.0)
    away = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1, can_store=can_store)
    hosts.a.say(parked, away)
    hosts.now = hosts.a.now
    epoch = begin(hosts.a, best, 1)
    hosts.b.advance(hosts.a.now)
    hosts.b.driver(policy="hermes", limit=3)
    worst = hosts.b.worker()
    hosts.a.say(best, report(epoch, 1, 0.1))
    if trains:
        other = begin(hosts.b, worst, 2)
        hosts.b.say(worst, report(other, 1, 0.9))
    return parked, worst


def test_a_host_gets_the_trial_that_its_policy_would_rather_train() -> None:
    """It asks for one that waits in memory elsewhere by its number; its owner stores it."""
    hosts = Hosts()
    parked, _ = parked_best(hosts)
    for broker in (hosts.b, hosts.b, hosts.a):  # what it wants it knows when it has looked
        broker.refresh()
    assert wants_of_b(hosts) == ("s:0",)
    assert hosts.a.last(parked, "Move").tier == "disk"
    hosts.a.check()


def test_a_host_stops_asking_for_a_trial_that_cannot_be_stored() -> None:
    """Its owner does not try to store it either."""
    hosts = Hosts()
    parked, _ = parked_best(hosts, can_store=False)
    for broker in (hosts.b, hosts.b, hosts.a):
        broker.refresh()
    assert wants_of_b(hosts) == ("s:0",)
    hosts.advance(100.0)
    assert wants_of_b(hosts) == ()
    assert hosts.a.last(parked, "Move") is None


def test_a_host_whose_new_trial_takes_long_to_begin_asks_for_none() -> None:
    """The trial would wait for it, stored, while devices of its owner are idle."""
    hosts = Hosts()
    parked_best(hosts, trains=False)
    hosts.advance(20.0)
    assert wants_of_b(hosts) == ()


def test_a_host_asks_for_no_trial_that_is_worse_than_its_own() -> None:
    """The best one's host leaves the others where they are."""
    hosts = Hosts()
    hosts.a.driver(policy="hermes", limit=3, slice_seconds=60.0)
    best = hosts.a.worker()
    epoch = begin(hosts.a, best, 0)
    hosts.a.say(best, report(epoch, 1, 0.1))
    hosts.b.driver(policy="hermes", limit=3, slice_seconds=5.0)
    worst, worker = hosts.b.worker(), hosts.b.worker()
    epoch = begin(hosts.b, worst, 1)
    hosts.b.say(worst, report(epoch, 1, 0.9))
    hosts.advance(56.0)
    assert hosts.b.last(worst, "Yield") is not None
    away = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1, can_store=True)
    hosts.b.say(worst, away)
    begin(hosts.b, worker, 2)
    for broker in (hosts.b, hosts.a, hosts.a):
        broker.refresh()
    study = hosts.a.handler.state.studies["s"]
    assert study.trials[1].state == "parked"
    assert soon(hosts.a.handler.state.slots.values(), "s", hosts.now + 3 * REFRESH_SECONDS)
    assert study.asked_for == ()


def test_what_free_of_owner_is_left_to_the_host_that_is_least_busy() -> None:
    """A host that is at work claims nothing while another one has a device and no trial for it."""
    hosts = Hosts(devices=2)
    worker, epoch = training(hosts, limit=2)
    hosts.b.driver(policy="round-robin", limit=2)
    second = hosts.a.worker()
    begin(hosts.a, second, 1)
    for broker in (hosts.b, hosts.b, hosts.a):  # what it wants it knows when it has looked
        broker.refresh()
    study = hosts.a.handler.state.studies["s"]
    assert study.defers
    store(hosts.a, worker, epoch, 0)
    hosts.a.worker()
    assert hosts.owners() == [None, "a"]
    theirs = hosts.b.worker()
    hosts.b.refresh()
    assert hosts.b.last(theirs, "Grant").number == 0
    hosts.advance(2 * REFRESH_SECONDS)
    assert not study.defers, "both are equally busy"


class CountingLedger(MemoryLedger):
    """A shared ledger that counts the rows of trials that were read."""

    rows = 0

    def load_changed(self, *arguments: Any) -> list[Any]:
        found = super().load_changed(*arguments)
        self.rows += len(found)
        return found


def stored(number: int, **fields: Any) -> TrialRecord:
    """The row of a trial that any host may carry on."""
    return TrialRecord(
        study="s", number=number, trial_id=number, state="stored", tier="disk", **fields
    )


def crowded(count: int = 50) -> tuple[CountingLedger, FakeBroker]:
    """A ledger of many stored trials, and a broker without workers that has looked at it once."""
    ledger = CountingLedger(shared=True)
    for number in range(count):
        ledger.save_trial(stored(number))
    broker = FakeBroker(devices=1, ledger=ledger, host="a")
    broker.driver(policy="round-robin", limit=count)
    broker.refresh()
    ledger.rows = 0
    return ledger, broker


def test_a_look_reads_what_has_changed_and_nothing_else() -> None:
    """Rows of trials, their overrides and curves are read once after each change."""
    ledger, broker = crowded()
    study = broker.handler.state.studies["s"]
    broker.refresh()
    assert ledger.rows == 0
    ledger.save_trial(stored(7, units=2, slices=3))
    ledger.save_override("s", 8, "held")
    broker.refresh()
    assert ledger.rows == 2
    assert (study.trials[7].slices, study.overrides) == (3, {8: "held"})
    ledger.save_override("s", 8, None)
    broker.refresh()
    broker.refresh()
    assert ledger.rows == 3
    assert study.overrides == {}


def test_a_row_that_was_not_taken_in_is_read_again() -> None:
    """A trial that another host was faster with is looked at until its new owner is known."""
    hosts = Hosts()
    worker, epoch = training(hosts, limit=1)
    hosts.b.driver(policy="round-robin", limit=1)
    store(hosts.a, worker, epoch, 0)
    hosts.advance(2 * REFRESH_SECONDS)
    hosts.a.worker()
    hosts.b.refresh()  # the change is read before the race is lost
    study = hosts.b.handler.state.studies["s"]
    hosts.b.apply(ClaimConflict(study="s", epochs=(), numbers=(0,), last_epoch=2))
    assert study.trials[0].owner == "another broker"
    hosts.b.refresh()
    assert study.trials[0].owner == "a"


def test_trials_whose_rows_were_removed_are_forgotten() -> None:
    """A study that is deleted elsewhere leaves no trials that could be granted."""
    ledger, broker = crowded(3)
    ledger.forget_study("s")
    ledger.save_trial(stored(1))
    broker.refresh()
    assert list(broker.handler.state.studies["s"].trials) == [1]
    ledger.rows = 0
    broker.refresh()
    assert ledger.rows == 0


def test_a_broker_that_follows_has_what_the_one_before_had() -> None:
    """Its host's name is its own too: processes go on, and what has none is anybody's."""
    hosts = Hosts(devices=2)
    worker, epoch = training(hosts, limit=2)
    gone = hosts.a.worker()
    begin(hosts.a, gone, 1)
    after = hosts.a.successor(known=[h for h in holders(hosts.a.handler.state) if h.pid == worker])
    spec = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")
    after.resume(
        worker,
        wire.Reattach(
            study=spec,
            epoch=epoch,
            number=0,
            trial_id=0,
            devices=("cpu:0",),
            training=True,
            can_store=True,
        ),
    )
    assert hosts.owners() == ["a", None]
    live = hosts.ledger.load_leases(live=True)
    assert [lease.epoch for lease in live] == [epoch]
