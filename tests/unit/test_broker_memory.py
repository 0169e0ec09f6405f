"""The memory of GPUs: who is moved where, and when a device is granted."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import CONTEXT_BYTES
from optuna_hermes.broker._core._events import Send
from optuna_hermes.broker._core._memory_manager import SETTLE_SECONDS
from optuna_hermes.ledger._records import EventRecord
from optuna_hermes.model import Assignment, Checkpoint, Decision, Device, Snapshot
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import free_devices
from support.broker import FakeBroker

GPU = "GPU-0"
BIG = 60
ALL = 100


def on_gpu(
    *, budget: int = 1000, n_gpus: int = 1, context: int = 0, exclusive: bool = False, **driver: Any
) -> FakeBroker:
    """A broker of GPUs with all their memory free, and a driver that shares them in turn."""
    gpus = [
        Device(id=f"GPU-{i}", kind="gpu", free=True, exclusive=exclusive) for i in range(n_gpus)
    ]
    broker = FakeBroker(devices=gpus, host_budget_bytes=budget)
    for gpu in gpus:
        broker.poll(gpu.id, memory_bytes=ALL, memory_free_bytes=ALL)
        broker.handler.state.slots[gpu.id].context_bytes = context  # as it was measured before
    broker.driver(**{"policy": "round-robin", "unstarted": 2, "max_alive": 4, **driver})
    return broker


def train(
    broker: FakeBroker, worker: int, *, need: int | None = BIG, can_store: bool = True
) -> int:
    """A worker trains what it was granted, and says what it needs; returns the epoch."""
    grant = broker.last(worker, "Grant")
    if grant.number is None:
        trials = len(broker.handler.state.studies["s"].trials)
        broker.say(worker, wire.Begin(epoch=grant.epoch, number=trials, trial_id=trials))
    broker.say(worker, wire.FirstBatch(epoch=grant.epoch, can_store=can_store))
    broker.say(worker, wire.Beat(epoch=grant.epoch, memory_bytes=need))
    return int(grant.epoch)


def park(broker: FakeBroker, worker: int, epoch: int, *, free: int | None, **said: Any) -> None:
    """A trial says where it is, after the device was read."""
    broker.poll(GPU, memory_free_bytes=free)
    known = {"tier": "resident", "held_bytes": BIG, "can_store": True, "can_offload": True} | said
    if known["tier"] == "disk":
        known |= {"held_bytes": 0, "checkpoint": checkpoint()}
    broker.say(worker, wire.TierChanged(epoch=epoch, suspend_seconds=0.1, **known))


def checkpoint() -> Checkpoint:
    return Checkpoint(path="/c", units=1, size_bytes=1, sha256="0")


def leaving(broker: FakeBroker) -> tuple[int, int]:
    """Of two workers the first was asked to leave a device that is too small for both."""
    first, second = broker.worker(), broker.worker()
    train(broker, first)
    broker.poll(GPU, memory_free_bytes=ALL - BIG)
    broker.advance(1.5)
    return first, second


def report(broker: FakeBroker, worker: int, epoch: int, value: float) -> None:
    trial = next(trial for trial in broker.handler.state.trials() if trial.epoch == epoch)
    unit = trial.curve.units + 1
    broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=value))


def shown(broker: FakeBroker, number: int) -> wire.TrialRow:
    return broker.handler.status(broker.now).studies[0].trials[number]


def events(broker: FakeBroker) -> list[EventRecord]:
    told = (command for command in broker.log if isinstance(command, EventRecord))
    return [event for event in told if event.kind in ("no room", "outgrew its memory", "released")]


# -- who leaves


def test_a_trial_stays_while_the_next_one_fits() -> None:
    """With memory for both, the leaving trial keeps its own."""
    broker = on_gpu()
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=20)
    broker.poll(GPU, memory_free_bytes=80)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "resident"
    park(broker, first, epoch, free=80, held_bytes=20)
    assert broker.last(second, "Grant") is not None


def test_a_trial_is_moved_when_the_next_one_does_not_fit() -> None:
    """The next trial is expected to need as much as the largest of its study."""
    broker = on_gpu()
    first, second = leaving(broker)
    assert broker.last(first, "Yield").tier == "host"
    park(broker, first, 1, free=99, tier="host", held_bytes=1, host_bytes=59)
    assert broker.last(second, "Grant") is not None
    assert shown(broker, 0).tier == "host"
    assert (shown(broker, 0).held_bytes, shown(broker, 0).host_bytes) == (1, 59)
    host = broker.handler.status(broker.now).host_memory
    assert (host.used_bytes, host.budget_bytes) == (59, 1000)


def test_without_host_memory_a_trial_goes_to_disk() -> None:
    """The budget is spent, so its process leaves, and the device waits until it has."""
    broker = on_gpu(budget=59)
    first, second = leaving(broker)
    assert broker.last(first, "Yield").tier == "disk"
    park(broker, first, 1, free=40, tier="disk")
    assert broker.last(second, "Grant") is None
    broker.poll(GPU, memory_free_bytes=ALL)
    assert broker.last(second, "Grant") is not None


def test_where_a_device_does_not_tell_the_trials_are_believed() -> None:
    """Its memory without what its trials say to hold is what is free."""
    broker = on_gpu()
    broker.poll(GPU, memory_free_bytes=None)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=40)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "resident"
    park(broker, first, epoch, free=None, held_bytes=40)
    assert broker.last(second, "Grant") is not None


def test_where_nothing_is_known_nobody_stays() -> None:
    """A device that tells nothing at all is cleared for the next trial."""
    broker = on_gpu()
    broker.poll(GPU, memory_bytes=None, memory_free_bytes=None)
    first, _ = broker.worker(), broker.worker()
    train(broker, first, need=1)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "host"


def test_a_parked_trial_that_is_wanted_later_makes_room() -> None:
    """The neighbour that ranks worse goes, and the trial that has just trained stays."""
    broker = on_gpu(policy="hermes", unstarted=3)
    first, second, third = (broker.worker() for _ in range(3))
    epoch = train(broker, first, need=40)
    report(broker, first, epoch, 0.9)
    broker.advance(1.5)
    park(broker, first, epoch, free=60, held_bytes=40)
    after = train(broker, second, need=40)
    for value in (0.1, 0.05):
        report(broker, second, after, value)
    broker.poll(GPU, memory_free_bytes=20)
    broker.advance(1.5)
    assert broker.last(first, "Move") == wire.Move(epoch=epoch, tier="host")
    assert broker.last(second, "Yield").tier == "resident"
    park(broker, second, after, free=20, held_bytes=40)
    assert broker.last(third, "Grant") is None
    park(broker, first, epoch, free=59, tier="host", held_bytes=1, host_bytes=40)
    assert broker.last(third, "Grant") is not None


def test_who_is_wanted_sooner_takes_the_place_in_host_memory() -> None:
    """With the budget spent the trial that is wanted later goes to disk, then the other moves."""
    broker = on_gpu(budget=60, policy="hermes", unstarted=3)
    first, second, third = (broker.worker() for _ in range(3))
    epoch = train(broker, first)
    report(broker, first, epoch, 0.9)
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(1.5)
    park(broker, first, epoch, free=99, tier="host", held_bytes=1, host_bytes=60)
    after = train(broker, second)
    for value in (0.1, 0.05):
        report(broker, second, after, value)
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(1.5)
    assert broker.last(first, "Move") == wire.Move(epoch=epoch, tier="disk")
    assert broker.last(second, "Yield").tier == "resident"
    park(broker, second, after, free=40)
    assert broker.last(second, "Move") is None
    park(broker, first, epoch, free=40, tier="disk")
    assert broker.last(second, "Move") == wire.Move(epoch=after, tier="host")
    park(broker, second, after, free=99, tier="host", held_bytes=1, host_bytes=60)
    assert broker.last(third, "Grant") is not None
    broker.check()


def test_host_memory_that_a_trial_keeps_while_it_trains_is_counted() -> None:
    """It is no other's, and the trial itself needs no more of it to wait there again."""
    broker = on_gpu(budget=90)
    first, second = leaving(broker)
    in_host = {"tier": "host", "held_bytes": 0, "host_bytes": 64}
    park(broker, first, 1, free=ALL, **in_host)
    epoch = train(broker, second)
    broker.poll(GPU, memory_free_bytes=ALL - BIG)
    broker.advance(1.5)
    assert broker.last(second, "Yield").tier == "disk", "26 of 90 are left"
    park(broker, second, epoch, free=ALL, tier="disk")
    broker.hang_up(second)
    third = broker.worker()
    epoch = train(broker, first)
    assert broker.handler.status(broker.now).host_memory.used_bytes == 64
    broker.poll(GPU, memory_free_bytes=ALL - BIG)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "host"
    park(broker, first, epoch, free=ALL, **in_host)
    assert broker.last(third, "Grant") is not None
    assert broker.handler.status(broker.now).host_memory.used_bytes == 64


class Placing(Policy):
    """Gives trials the devices it is told to, where they are free; None is a new trial."""

    def __init__(self, places: dict[int | None, str]) -> None:
        self.places = places

    def decide(self, snapshot: Snapshot) -> Decision:
        free = {device.id for device in free_devices(snapshot)}
        given = {number: id_ for number, id_ in self.places.items() if id_ in free}
        # As its memory changes it may give none: a broker takes it that it will, later.
        return Decision(
            assignments=tuple(Assignment(trial=n, devices=(id_,)) for n, id_ in given.items()),
            memory=(snapshot.memory or 0) + 1,
        )


def test_a_device_is_granted_after_the_trial_that_moves_has_left_it() -> None:
    """A parked trial that is to have another GPU frees its own before the next one begins."""
    broker = on_gpu(n_gpus=2, unstarted=2)
    policy = Placing({None: GPU})
    broker.handler.state.studies["s"].policy = policy
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first)
    policy.places = {}
    broker.advance(1.5)
    park(broker, first, epoch, free=ALL - BIG)
    policy.places = {None: GPU, 0: "GPU-1"}
    broker.poll(GPU, memory_free_bytes=ALL - BIG)
    assert broker.last(first, "Move").tier == "disk"
    assert broker.last(second, "Grant") is None
    park(broker, first, epoch, free=ALL, tier="disk")
    assert broker.last(second, "Grant").devices == (GPU,)


def test_host_memory_is_promised_to_one_trial_only() -> None:
    """Of two trials that leave two devices at once the second finds the budget spent."""
    broker = on_gpu(n_gpus=2, unstarted=4, budget=100)
    workers = [broker.worker() for _ in range(4)]
    for worker in workers[:2]:
        train(broker, worker)
    for gpu in broker.handler.state.slots:
        broker.poll(gpu, memory_free_bytes=ALL - BIG)
    broker.advance(1.5)
    assert {broker.last(worker, "Yield").tier for worker in workers[:2]} == {"host", "disk"}
    assert broker.handler.status(broker.now).host_memory.used_bytes == BIG


# -- when a device is granted


def test_a_device_is_granted_only_when_its_memory_is_free() -> None:
    """The memory that a trial says is free is not granted before the device says so too."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40, tier="host", held_bytes=0, host_bytes=60)
    assert broker.last(second, "Grant") is None
    broker.poll(GPU, memory_free_bytes=99)
    assert broker.last(second, "Grant") is not None
    assert events(broker) == []


def test_a_device_is_not_waited_for_for_ever() -> None:
    """After some seconds of readings it is granted all the same, and the ledger says so."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40, tier="host", held_bytes=0, host_bytes=60)
    broker.advance(SETTLE_SECONDS - 0.1)
    assert broker.last(second, "Grant") is None
    broker.advance(0.2)
    assert broker.last(second, "Grant") is not None
    (event,) = events(broker)
    assert event.kind == "no room"
    assert "no other trial is left that could make room" in event.detail["reason"]


def test_memory_that_cannot_come_is_not_waited_for() -> None:
    """If what the others hold leaves too little anyhow, no time is lost."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40, can_store=False, can_offload=False)
    assert broker.last(second, "Grant") is not None


def test_a_trial_that_stays_where_it_was_is_not_asked_again() -> None:
    """A trial that says it could be moved and stored, and is not, is asked for each once."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40)
    assert broker.last(first, "Move") == wire.Move(epoch=1, tier="disk")
    park(broker, first, 1, free=40)
    assert broker.last(second, "Grant") is not None
    broker.advance(20.0)
    assert len([each for each in broker.sent(first) if isinstance(each, wire.Move)]) == 1


def test_a_drained_trial_that_cannot_be_stored_is_not_waited_for() -> None:
    """It is asked once at most, and the study counts as drained."""
    broker = on_gpu()
    first, _ = leaving(broker)
    park(broker, first, 1, free=40, tier="host", held_bytes=0, host_bytes=60)
    broker.say(1, wire.Drain(study="s"))
    assert broker.last(first, "Move") == wire.Move(epoch=1, tier="disk")
    park(broker, first, 1, free=40, tier="host", held_bytes=0, host_bytes=60)
    assert len([each for each in broker.sent(first) if isinstance(each, wire.Move)]) == 1
    assert broker.handler.status(broker.now).studies[0].finished


def test_a_trial_whose_checkpoint_could_not_be_written_is_asked_again_at_the_end() -> None:
    """Its folder may be writable by then; if it is not, nobody waits."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40)  # it was asked for host memory, and is asked for disk
    park(broker, first, 1, free=40)  # which is full
    broker.say(1, wire.Drain(study="s"))
    assert len([each for each in broker.sent(first) if isinstance(each, wire.Move)]) == 2
    broker.hang_up(second)
    assert not broker.handler.status(broker.now).studies[0].finished
    park(broker, first, 1, free=40)
    assert broker.handler.status(broker.now).studies[0].finished


def test_a_worker_that_does_not_answer_is_killed() -> None:
    """A parked trial that was asked to leave has its grace period too."""
    broker = on_gpu()
    first, second = leaving(broker)
    park(broker, first, 1, free=40)  # it was asked for host memory, and is asked for disk
    broker.advance(299.0)
    assert broker.killed() == []
    broker.advance(2.0)
    assert broker.killed() == [first]
    broker.poll(GPU, memory_free_bytes=ALL)
    broker.hang_up(first)
    assert broker.last(second, "Grant") is not None


def test_a_worker_that_does_not_end_is_killed() -> None:
    """A worker that said that it leaves and is still there keeps its place from others."""
    broker = on_gpu()
    first, _ = leaving(broker)
    broker.say(first, wire.Ended(epoch=1, state="done"))
    broker.advance(301.0)
    assert broker.killed() == [first]


def test_a_plain_trial_that_does_not_answer_is_let_be() -> None:
    """The process of ``study.optimize`` is not killed; the device goes on without its answer."""
    broker = on_gpu(unstarted=0)
    first, second = broker.plain(0), broker.plain(1)
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=True))
    broker.say(first, wire.Beat(epoch=epoch, memory_bytes=BIG))
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(1.5)
    park(broker, first, epoch, free=40)
    assert broker.last(second, "Grant") is None
    broker.advance(302.0)
    assert broker.killed() == []
    assert broker.last(second, "Grant") is not None


def test_a_device_is_not_kept_for_a_process_that_will_not_come() -> None:
    """If the trial that was to leave its process cannot be stored, those that are here go on."""
    broker = on_gpu(max_alive=1, budget=0)
    worker = broker.worker()
    epoch = train(broker, worker)
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(1.5)
    assert broker.last(worker, "Yield").tier == "disk"
    park(broker, worker, epoch, free=40, can_store=False, can_offload=False)
    assert broker.last(worker, "Grant").number == 0
    assert broker.handler.status(broker.now).studies[0].unstarted == 1


def test_a_study_is_not_finished_while_a_device_waits_for_its_next_trial() -> None:
    """The last trial is granted when the memory is free, and is not forgotten until then."""
    broker = on_gpu()
    first, second = leaving(broker)
    broker.poll(GPU, memory_free_bytes=40)
    broker.say(first, wire.Ended(epoch=1, state="done"))
    assert broker.last(second, "Grant") is None
    assert not broker.handler.status(broker.now).studies[0].finished


# -- what processes take


def test_a_process_takes_memory_beside_what_its_trial_needs() -> None:
    """The next trial fits only if its own process does, too."""
    for context, tier in ((0, "resident"), (10, "host")):
        broker = on_gpu(context=context)
        first, _ = broker.worker(), broker.worker()
        train(broker, first, need=40)
        broker.poll(GPU, memory_free_bytes=ALL - 40 - context)
        broker.advance(1.5)
        assert broker.last(first, "Yield").tier == tier


def test_processes_count_where_a_device_does_not_tell_what_is_free() -> None:
    """Its memory is also without what the processes of the trials there take."""
    for context, tier in ((0, "resident"), (10, "host")):
        broker = on_gpu(context=context)
        broker.poll(GPU, memory_free_bytes=None)
        first, _ = broker.worker(), broker.worker()
        train(broker, first, need=45)
        broker.advance(1.5)
        assert broker.last(first, "Yield").tier == tier


def test_a_process_ends_where_its_memory_is_what_is_missing() -> None:
    """With all trials off the device their processes are still there: who is wanted last goes."""
    broker = on_gpu(context=20, unstarted=3, max_alive=3)
    first, second, third = (broker.worker() for _ in range(3))
    in_host = {"tier": "host", "held_bytes": 0, "host_bytes": 50}
    epoch = train(broker, first, need=50)
    broker.poll(GPU, memory_free_bytes=30)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "host"
    park(broker, first, epoch, free=80, **in_host)
    assert broker.last(second, "Grant") is not None, "no process ends for the margin only"
    after = train(broker, second, need=50)
    broker.poll(GPU, memory_free_bytes=10)
    broker.advance(1.5)
    assert broker.last(second, "Yield").tier == "disk", "in host memory it would leave 60"
    park(broker, second, after, free=60, tier="disk")
    assert broker.last(third, "Grant") is None, "its process is still there"
    broker.poll(GPU, memory_free_bytes=80)
    broker.hang_up(second)
    assert broker.last(third, "Grant") is not None
    assert events(broker) == []


def test_trials_in_host_memory_go_to_disk_for_their_processes() -> None:
    """A device that is full of contexts is granted once enough of them are gone."""
    broker = on_gpu(context=30, unstarted=3, max_alive=3)
    first, second, third = (broker.worker() for _ in range(3))
    epoch = train(broker, first, need=10)
    broker.poll(GPU, memory_free_bytes=60)
    broker.advance(1.5)
    in_host = {"tier": "host", "held_bytes": 0, "host_bytes": 10}
    park(broker, first, epoch, free=70, **in_host)
    after = train(broker, second, need=45)
    broker.poll(GPU, memory_free_bytes=0)
    broker.advance(1.5)
    park(
        broker,
        second,
        after,
        free=40,
        can_store=False,
        can_offload=True,
        **{**in_host, "host_bytes": 45},
    )
    assert broker.last(third, "Grant") is None
    assert broker.last(first, "Move") == wire.Move(epoch=epoch, tier="disk")
    park(broker, first, epoch, free=40, tier="disk")
    broker.poll(GPU, memory_free_bytes=70)
    broker.hang_up(first)
    assert broker.last(third, "Grant") is not None


def test_what_a_process_takes_is_measured() -> None:
    """A parked trial's process takes what is listed for it, without what the trial holds."""
    broker = on_gpu(context=40, unstarted=3, max_alive=3)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=20)
    broker.poll(GPU, memory_free_bytes=75, processes=((first, 25),))
    broker.advance(1.5)
    park(broker, first, epoch, free=75, held_bytes=20)
    assert broker.handler.state.slots[GPU].context_bytes == 5
    after = train(broker, second, need=20)
    broker.poll(GPU, memory_free_bytes=50, processes=((first, 25), (second, 25)))
    running, parked = broker.handler.status(broker.now).devices[0].residents
    assert (parked.trial, parked.pid, parked.tier) == (0, first, "resident")
    assert (parked.held_bytes, parked.process_bytes, parked.measured) == (20, 5, True)
    assert (running.trial, running.tier, running.measured) == (1, None, False)
    assert running.process_bytes == 5, "it takes what another one was measured to take"
    third = broker.worker()
    broker.advance(1.5)
    assert broker.last(second, "Yield") == wire.Yield(epoch=after, tier="resident")
    park(broker, second, after, free=50, held_bytes=20)
    assert broker.last(third, "Grant") is not None


def test_what_was_never_measured_is_estimated() -> None:
    """It is what contexts usually take, and no more than an eighth of a small device."""
    for total, expected in ((80 << 30, 600 << 20), (2 << 30, 256 << 20), (None, 600 << 20)):
        broker = on_gpu()
        broker.handler.state.context_bytes = CONTEXT_BYTES
        broker.handler.state.slots[GPU].context_bytes = None
        broker.poll(GPU, memory_bytes=total, memory_free_bytes=total)
        train(broker, broker.worker())
        (resident,) = broker.handler.status(broker.now).devices[0].residents
        assert (resident.process_bytes, resident.measured) == (expected, False)


def test_trials_of_one_process_have_one_context() -> None:
    """With ``n_jobs`` several trials share it, and what one of them holds says nothing of it."""
    broker = on_gpu(context=30, unstarted=0)
    first, second = (broker.plain(number, pid=7) for number in range(2))
    for here, need, listed in ((first, 20, 50), (second, 45, 95)):
        broker.poll(GPU, memory_free_bytes=None, processes=((7, listed),))
        epoch = broker.last(here, "Grant").epoch
        broker.say(here, wire.FirstBatch(epoch=epoch, can_store=False))
        broker.say(here, wire.Beat(epoch=epoch, memory_bytes=need))
        broker.advance(1.5)
        assert broker.last(here, "Yield").tier == "resident"
        park(broker, here, epoch, free=None, held_bytes=need, can_store=False, can_offload=False)
    residents = broker.handler.status(broker.now).devices[0].residents
    assert sorted((each.process_bytes, each.measured) for each in residents) == [
        (0, False),
        (30, False),
    ]
    assert events(broker) == []


@pytest.mark.parametrize("n_parked", [1, 2, 3])
def test_with_so_many_residents_the_next_one_must_fit(n_parked: int) -> None:
    """Contexts, reserved memory and the peak of the next trial are added up."""
    broker = on_gpu(context=5, unstarted=n_parked + 1, max_alive=n_parked + 1)
    broker.poll(GPU, memory_free_bytes=None)
    workers = [broker.worker() for _ in range(n_parked + 1)]
    for place, worker in enumerate(workers[:-1]):
        epoch = train(broker, worker, need=20)
        broker.advance(1.5)
        # 25 for each that is there; the next one needs 25, and a fifth of that to spare.
        fits = ALL - 25 * (place + 1) >= 1.2 * 25
        assert broker.last(worker, "Yield").tier == ("resident" if fits else "host")
        if not fits:
            return
        park(broker, worker, epoch, free=None, held_bytes=20)
        assert broker.last(workers[place + 1], "Grant") is not None
    assert n_parked < 3, "three residents leave no room for a fourth"


# -- one process at most


def test_a_trial_leaves_its_process_where_only_one_may_use_the_device() -> None:
    """Parked it would keep all others from the device: it goes to disk, though there is room."""
    broker = on_gpu(exclusive=True)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=1)
    broker.poll(GPU, memory_free_bytes=ALL - 1)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "disk"
    park(broker, first, epoch, free=ALL - 1, tier="disk")
    assert broker.last(second, "Grant") is None, "its process lives"
    broker.hang_up(first)
    assert broker.last(second, "Grant").number is None


def test_who_cannot_be_stored_keeps_a_device_that_only_one_may_use() -> None:
    """It is not asked to yield, and no other process is sent where it could not compute."""
    broker = on_gpu(exclusive=True)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=1, can_store=False)
    broker.poll(GPU, memory_free_bytes=ALL - 1)
    broker.advance(60)
    assert broker.last(first, "Yield") is None
    assert broker.last(second, "Grant") is None
    broker.say(first, wire.Ended(epoch=epoch, state="done"))
    broker.hang_up(first)
    assert broker.last(second, "Grant") is not None


def test_a_trial_that_could_not_be_stored_after_all_goes_on_alone() -> None:
    """Its disk was full, say: the device that its process keeps is granted to it again."""
    broker = on_gpu(exclusive=True)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=1)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "disk"
    park(broker, first, epoch, free=ALL - 1, held_bytes=1, can_store=False, can_offload=False)
    assert broker.last(second, "Grant") is None
    assert broker.last(first, "Grant").epoch > epoch


def test_trials_of_one_process_share_a_device_for_one_process() -> None:
    """With ``n_jobs`` they take turns as elsewhere: there is one context."""
    broker = on_gpu(exclusive=True, unstarted=0)
    first, second = (broker.plain(number, pid=7) for number in range(2))
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=False))
    broker.advance(1.5)
    park(broker, first, epoch, free=ALL, held_bytes=1, can_store=False, can_offload=False)
    assert broker.last(second, "Grant") is not None


# -- outgrown


def test_a_trial_that_outgrew_its_memory_is_tried_again_alone() -> None:
    """Its study goes on; it is granted the device when everybody else has left its memory."""
    broker = on_gpu()
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=30)
    broker.advance(1.5)
    park(broker, first, epoch, free=70, held_bytes=30)
    grant = broker.last(second, "Grant")
    assert grant.alone is False
    after = train(broker, second, need=70)
    broker.advance(0.5)  # so that the first one has waited longer
    broker.say(second, wire.Saved(epoch=after, checkpoint=checkpoint()))
    broker.poll(GPU, memory_free_bytes=0)
    broker.say(second, wire.Released(epoch=after, reason="out of memory", outgrown=True))
    (event,) = events(broker)
    assert (event.kind, event.number) == ("outgrew its memory", 1)
    assert "Trial 1 outgrew its memory on GPU-0" in event.detail["reason"]
    broker.poll(GPU, memory_free_bytes=70)
    broker.hang_up(second)
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=True))
    third = broker.worker()
    broker.advance(1.5)
    assert broker.last(first, "Yield") == wire.Yield(epoch=epoch, tier="disk")
    park(broker, first, epoch, free=70, tier="disk")
    assert broker.last(third, "Grant") is None
    broker.poll(GPU, memory_free_bytes=ALL)
    broker.hang_up(first)
    grant = broker.last(third, "Grant")
    assert (grant.number, grant.alone, grant.checkpoints) == (1, True, (checkpoint(),))
    assert broker.handler.status(broker.now).studies[0].problem is None


def test_a_trial_is_not_alone_while_memory_of_a_dead_process_may_be_in_use() -> None:
    """Its device has room for what it is known to need, and maybe for no more: it has two tries."""
    broker = on_gpu(unstarted=2)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=30)
    broker.poll(GPU, memory_free_bytes=10)
    broker.say(first, wire.Ended(epoch=epoch, state="done"))
    broker.hang_up(first)
    assert broker.last(second, "Grant") is None
    broker.poll(GPU, memory_free_bytes=40)
    assert broker.last(second, "Grant").alone is False


def test_a_trial_is_alone_when_nobody_can_leave() -> None:
    """A trial that cannot go stays; the grant says that there is no second chance."""
    broker = on_gpu(unstarted=2)
    first, second = broker.worker(), broker.worker()
    epoch = train(broker, first, need=30, can_store=False)
    broker.advance(1.5)
    park(broker, first, epoch, free=70, held_bytes=30, can_store=False, can_offload=False)
    after = train(broker, second, need=70)
    broker.say(second, wire.Released(epoch=after, reason="out of memory", outgrown=True))
    broker.hang_up(second)
    epoch = broker.last(first, "Grant").epoch
    broker.say(first, wire.FirstBatch(epoch=epoch, can_store=False))
    third = broker.worker()
    broker.advance(1.5)
    park(broker, first, epoch, free=70, held_bytes=30, can_store=False, can_offload=False)
    assert broker.last(third, "Grant").alone is True


def test_a_trial_that_cannot_come_back_is_tried_again_alone_and_then_ends_its_study() -> None:
    """With the device to itself and no room all the same, a stranger must be there."""
    broker = on_gpu(unstarted=1)
    worker = broker.worker()
    epoch = train(broker, worker)
    trial = broker.handler.state.studies["s"].trials[0]
    broker.poll(GPU, memory_free_bytes=40)
    broker.handler.state.slots[GPU].reservation = None
    park(broker, worker, epoch, free=ALL, tier="host", held_bytes=0, host_bytes=60, can_store=False)
    for alone in (True, True):
        epoch = broker.last(worker, "Grant").epoch
        park(
            broker, worker, epoch, free=9, tier="host", held_bytes=0, host_bytes=60, can_store=False
        )
        assert trial.alone is alone
        broker.poll(GPU, memory_free_bytes=ALL)
    problem = broker.handler.status(0.0).studies[0].problem
    assert problem.startswith(f"Trial 0 could not come back to {GPU}: it needs ")
    assert problem.endswith("It had the device to itself: end what else takes its memory.")


def test_a_trial_that_finds_no_room_waits_for_who_cannot_leave() -> None:
    """It is not granted again and again: the other goes on, and then it is its turn."""
    broker = on_gpu(unstarted=2)
    first, second = leaving(broker)
    in_host = {"tier": "host", "held_bytes": 0, "host_bytes": BIG, "can_store": False}
    park(broker, first, 1, free=ALL, **in_host)
    epoch = train(broker, second, can_store=False)
    broker.poll(GPU, memory_free_bytes=ALL - BIG)
    broker.advance(1.5)
    park(broker, second, epoch, free=ALL - BIG, can_store=False, can_offload=False)
    for _ in range(2):  # the second time with all the room that could be made
        epoch = broker.last(first, "Grant").epoch
        park(broker, first, epoch, free=ALL - BIG, **in_host)
    epoch = train(broker, second, can_store=False)
    broker.advance(20.0)
    assert broker.last(second, "Yield").epoch < epoch
    assert broker.handler.status(broker.now).studies[0].no_room == (0,)
    broker.say(second, wire.Ended(epoch=epoch, state="done"))
    broker.poll(GPU, memory_free_bytes=ALL)
    broker.hang_up(second)
    assert broker.last(first, "Grant").epoch > epoch
    assert broker.handler.status(broker.now).studies[0].no_room == ()
    assert broker.handler.status(broker.now).studies[0].problem is None


def test_on_cpu_slots_a_trial_is_alone_as_soon_as_the_last_process_has_ended() -> None:
    """There the kernel has its memory back by then."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    first, second = broker.worker(), broker.worker()
    train(broker, first)
    broker.hang_up(first)
    assert broker.last(second, "Grant").alone is True


def test_on_cpu_slots_a_trial_is_alone_without_parked_trials_of_its_study() -> None:
    """Trials of other studies are not counted, and everybody fits on a CPU slot."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    first, second = broker.worker(), broker.worker()
    assert broker.last(first, "Grant").alone is True
    epoch = train(broker, first)
    broker.advance(1.5)
    assert broker.last(first, "Yield").tier == "resident"
    parked = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True)
    broker.say(first, parked)
    assert broker.last(second, "Grant").alone is False


# -- ahead of time


def stored(broker: FakeBroker, worker: int, epoch: int) -> None:
    """A trial is stored and its process gone."""
    broker.say(
        worker,
        wire.TierChanged(epoch=epoch, tier="disk", suspend_seconds=0.1, checkpoint=checkpoint()),
    )
    broker.hang_up(worker)


def test_a_waiting_worker_reads_the_next_checkpoint_ahead() -> None:
    """One worker is told which is next, as long before a slice's end as a return takes."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", unstarted=2)
    for _ in range(2):
        worker = broker.worker()
        epoch = train(broker, worker)
        broker.advance(1.5)
        stored(broker, worker, epoch)
    worker = broker.worker()
    broker.advance(0.5)  # what it takes to come back, so a slice is 25 seconds now
    train(broker, worker)
    spare, other = broker.worker(), broker.worker()
    lease = broker.handler.state.slots["cpu:0"].lease
    assert lease is not None
    memory = broker.handler.state.studies["s"].memory
    broker.advance(lease.deadline - broker.now - 0.6)
    assert broker.last(spare, "Prepare") is None
    broker.advance(0.2)
    assert broker.last(spare, "Prepare") == wire.Prepare(number=1, checkpoints=(checkpoint(),))
    assert broker.last(other, "Prepare") is None
    assert broker.last(worker, "Yield") is None
    assert broker.handler.state.studies["s"].memory == memory
    broker.advance(0.5)
    broker.handler.state.studies["s"].idle_workers.reverse()
    stored(broker, worker, lease.epoch)
    assert broker.last(spare, "Grant").number == 1
    assert len([each for each in broker.sent(spare) if isinstance(each, wire.Prepare)]) == 1


def back_from_host(broker: FakeBroker) -> tuple[int, int]:
    """The first of two trials trains again, the second is in host memory; 0.5 s a switch."""
    first, second = leaving(broker)
    park(broker, first, 1, free=ALL, tier="host", held_bytes=0, host_bytes=60)
    epoch = train(broker, second)
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(1.5)
    park(broker, second, epoch, free=ALL, tier="host", held_bytes=0, host_bytes=60)
    broker.advance(0.5)
    train(broker, first)
    return first, second


def test_the_next_trial_comes_back_beside_the_one_that_trains() -> None:
    """A trial in host memory is recalled before the slice ends, if it fits there."""
    broker = on_gpu()
    first, second = back_from_host(broker)
    broker.poll(GPU, memory_free_bytes=75)
    broker.advance(0.3)
    assert broker.last(second, "Move") == wire.Move(epoch=2, tier="resident")
    assert broker.last(first, "Yield").epoch == 1
    park(broker, second, 2, free=15)
    broker.advance(0.3)
    assert broker.last(first, "Yield") == wire.Yield(epoch=3, tier="resident")
    assert shown(broker, 1).tier == "resident"
    park(broker, first, 3, free=15)
    assert broker.last(second, "Grant").epoch == 4


def test_the_next_trial_stays_in_host_memory_if_it_does_not_fit_beside() -> None:
    """Nobody is recalled into memory that is not there."""
    broker = on_gpu()
    _, second = back_from_host(broker)
    broker.poll(GPU, memory_free_bytes=40)
    broker.advance(0.3)
    assert broker.last(second, "Move") is None


def test_a_device_waits_for_a_trial_that_is_on_its_way_back() -> None:
    """The memory that it takes does not show yet, so nobody is granted beside it."""
    broker = on_gpu()
    first, second = back_from_host(broker)
    broker.poll(GPU, memory_free_bytes=75)
    broker.advance(0.6)
    park(broker, first, 3, free=75)
    assert broker.last(second, "Grant").epoch == 2
    park(broker, second, 2, free=15)
    assert broker.last(second, "Grant").epoch == 4


# A policy that looks at memory itself


def granted(broker: FakeBroker, worker: int) -> bool:
    return any(
        isinstance(command, Send)
        and command.connection == worker
        and isinstance(command.message, wire.Grant)
        for command in broker.log
    )


def test_smd_grants_no_trial_whose_state_would_find_no_room() -> None:
    """A device stays empty while the host could not take what trains and a trial like it."""
    for budget, expected in ((2 * BIG - 1, False), (2 * BIG, True)):
        broker = on_gpu(policy="smd", budget=budget, n_gpus=2)
        first = broker.worker()
        train(broker, first)
        second = broker.worker()
        broker.advance(0.1)
        assert granted(broker, first)
        assert granted(broker, second) == expected
