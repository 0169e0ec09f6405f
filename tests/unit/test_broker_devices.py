"""Devices that break, hang, or have a stranger on them, and what the broker does then."""

from __future__ import annotations

from typing import Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import DevicesPolled
from optuna_hermes.broker._devices._xid import Xid
from optuna_hermes.ledger._records import EventRecord
from optuna_hermes.model import Checkpoint, Device, TierName
from support.broker import FakeBroker


def on_gpus(n_gpus: int, **driver: Any) -> FakeBroker:
    """A broker of GPUs, and a driver that shares them in turn."""
    gpus = [Device(id=f"GPU-{i}", kind="gpu", free=True) for i in range(n_gpus)]
    broker = FakeBroker(devices=gpus, host_budget_bytes=100)
    broker.driver(**{"policy": "round-robin", **driver})
    return broker


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    """A worker begins the new trial it was granted; returns the epoch."""
    epoch = int(broker.last(worker, "Grant").epoch)
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def test_a_gpu_with_a_stranger_is_granted_once_they_leave() -> None:
    """While another user's process computes there it is not granted; then the next trial has it."""
    broker = on_gpus(1)
    broker.poll("GPU-0", free=False, problem="process 7 of another user computes on it")
    worker = broker.worker()
    assert broker.last(worker, "Grant") is None
    shown = broker.handler.status(0.0).devices[0]
    assert shown.problem == "process 7 of another user computes on it"
    broker.poll("GPU-0", free=True, problem="")
    assert broker.last(worker, "Grant").devices == ("GPU-0",)


def test_a_stranger_who_comes_before_the_grant_is_first() -> None:
    """A device that was promised while a trial had still to leave it goes to nobody now."""
    broker = on_gpus(1)
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    broker.advance(10)
    assert broker.last(first, "Yield").epoch == epoch
    broker.poll("GPU-0", free=False)
    broker.say(first, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.1))
    assert broker.last(second, "Grant") is None
    broker.poll("GPU-0", free=True)
    assert broker.last(second, "Grant") is not None


LOST = {"healthy": False, "lost": True, "free": False, "problem": "it cannot be read"}
FAULTY = {"healthy": False, "free": False, "problem": "it reported XID 48"}
WELL = {"healthy": True, "lost": False, "free": True, "problem": ""}


def told(broker: FakeBroker, kind: str) -> list[tuple[int | None, dict[str, Any]]]:
    """The events of a kind: of which trial, and their details."""
    events = [c for c in broker.log if isinstance(c, EventRecord) and c.kind == kind]
    return [(event.number, event.detail) for event in events]


def park(broker: FakeBroker, worker: int, epoch: int, tier: TierName, *, held: int = 5) -> None:
    """A trial says in which tier it is."""
    saved = Checkpoint(path="/c", units=1, size_bytes=1, sha256="0" * 64)
    message = wire.TierChanged(
        epoch=epoch,
        tier=tier,
        suspend_seconds=0.1,
        held_bytes=0 if tier == "disk" else held,
        host_bytes=held if tier == "host" else 0,
        can_store=True,
        can_offload=True,
        checkpoint=saved if tier == "disk" else None,
    )
    broker.say(worker, message)


def test_a_gpu_that_is_lost_is_left_at_once() -> None:
    """The worker's memory is gone with it: it is ended, and its trial goes on on another GPU."""
    broker = on_gpus(2, unstarted=1)
    first, second = broker.worker(), broker.worker()
    begin(broker, first, 0)
    assert broker.last(first, "Grant").devices == ("GPU-0",)
    broker.poll("GPU-0", **LOST)
    assert broker.killed() == [first]
    assert told(broker, "device lost") == [(0, {"device": "GPU-0", "reason": LOST["problem"]})]
    broker.hang_up(first)
    grant = broker.last(second, "Grant")
    assert (grant.number, grant.devices) == (0, ("GPU-1",))
    broker.check()


def test_a_lost_gpu_is_used_again_when_it_is_back() -> None:
    """Until then nobody gets it; then the next trial does, and the study's events say so."""
    broker = on_gpus(1)
    worker = broker.worker()
    begin(broker, worker, 0)
    broker.poll("GPU-0", **LOST)
    broker.hang_up(worker)
    other = broker.worker()
    broker.advance(60)
    assert broker.last(other, "Grant") is None
    assert not broker.handler.status(broker.now).devices[0].healthy
    broker.poll("GPU-0", **WELL)
    assert told(broker, "device back") == [(None, {"device": "GPU-0"})]
    assert broker.last(other, "Grant").number == 0


def test_a_gpu_with_a_fault_is_left_in_order() -> None:
    """One that still answers has its trials stored: they go on elsewhere and lose nothing."""
    broker = on_gpus(2, unstarted=2)
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    broker.poll("GPU-0", **FAULTY)
    broker.poll("GPU-0", **FAULTY)
    assert broker.killed() == []
    assert [m.tier for m in broker.sent(first) if isinstance(m, wire.Yield)] == ["disk"]
    park(broker, first, epoch, "disk")
    broker.hang_up(first)
    begin(broker, second, 1)
    broker.hang_up(second)
    third = broker.worker()
    assert broker.last(third, "Grant").devices == ("GPU-1",)


def test_a_trial_that_cannot_be_stored_does_not_stay_on_a_faulty_gpu() -> None:
    """Its worker is ended, for it could go on nowhere else."""
    broker = on_gpus(1)
    worker = broker.worker()
    epoch = int(broker.last(worker, "Grant").epoch)
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=False))
    broker.poll("GPU-0", **FAULTY)
    assert broker.killed() == [worker]


def parked(broker: FakeBroker, tier: TierName) -> tuple[int, int]:
    """A worker whose trial is parked on ``GPU-0``, and another that trains there."""
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    free = 100 if tier == "resident" else 10
    broker.poll("GPU-0", memory_bytes=100, memory_free_bytes=free)
    broker.say(first, wire.Beat(epoch=epoch, memory_bytes=20))
    broker.advance(10)
    assert broker.last(first, "Yield").tier == tier
    broker.poll("GPU-0", memory_free_bytes=100)
    park(broker, first, epoch, tier)
    begin(broker, second, 1)
    return first, second


def test_what_is_parked_on_a_lost_gpu_is_gone() -> None:
    """Memory of the GPU cannot be saved; what is in host memory is stored."""
    broker = on_gpus(1)
    first, second = parked(broker, "resident")
    broker.poll("GPU-0", **LOST)
    assert sorted(broker.killed()) == [first, second]
    broker = on_gpus(1)
    first, second = parked(broker, "host")
    broker.poll("GPU-0", **LOST)
    assert broker.killed() == [second]
    assert broker.last(first, "Move").tier == "disk"


def test_what_is_parked_on_a_faulty_gpu_is_stored() -> None:
    """It still answers: nobody is ended."""
    broker = on_gpus(1)
    first, second = parked(broker, "resident")
    broker.poll("GPU-0", **FAULTY)
    assert broker.killed() == []
    assert broker.last(first, "Move").tier == "disk"
    assert broker.last(second, "Yield").tier == "disk"


def test_the_process_of_a_user_is_left_alone() -> None:
    """A plain trial on a GPU that is lost will see for itself; the GPU goes to nobody else."""
    broker = FakeBroker(devices=[Device(id="GPU-0", kind="gpu", free=True)])
    plain = broker.plain(0)
    begin(broker, plain, 0)
    broker.poll("GPU-0", **LOST)
    assert broker.killed() == []


def test_what_a_trial_did_to_its_gpu_is_in_its_event_log() -> None:
    """An XID of the program is an event of the trial that has the device, which stays."""
    broker = on_gpus(1)
    begin(broker, broker.worker(), 0)
    slot = broker.handler.state.slots["GPU-0"]
    xids = (Xid(device="GPU-0", code=31), Xid(device="GPU-0", code=48), Xid(device="x", code=31))
    broker.apply(DevicesPolled(devices=(slot.device,), xids=xids))
    reason = "XID 31 (a memory fault of a kernel) was reported."
    assert told(broker, "xid") == [(0, {"device": "GPU-0", "xid": 31, "reason": reason})]
    assert broker.killed() == []


# -- where processes cannot be listed

GIB = 1 << 30
UNSEEN = {"unlisted": True, "memory_bytes": 80 * GIB}


def test_memory_that_nobody_holds_is_a_strangers() -> None:
    """A GPU whose memory is taken is granted to nobody where no process is listed."""
    broker = on_gpus(1)
    broker.poll("GPU-0", **UNSEEN, memory_free_bytes=70 * GIB)
    worker = broker.worker()
    assert broker.last(worker, "Grant") is None
    words = (
        "10.00 GiB of its memory are taken by processes that cannot be listed here: find them "
        "where they can, and wait for them or end them"
    )
    assert broker.handler.status(0.0).devices[0].problem == words
    broker.poll("GPU-0", memory_free_bytes=78 * GIB)  # what a driver and a desktop take
    assert broker.last(worker, "Grant") is not None


def test_memory_of_our_own_trials_is_no_strangers() -> None:
    """Memory that parked trials say to hold, and a context for each, is known."""
    broker = on_gpus(1)
    broker.poll("GPU-0", **UNSEEN, memory_free_bytes=80 * GIB)
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    broker.advance(10)
    broker.poll("GPU-0", memory_free_bytes=55 * GIB)
    park(broker, first, epoch, "resident", held=20 * GIB)
    assert broker.last(second, "Grant") is None, "5 GiB are not accounted for"
    broker.poll("GPU-0", memory_free_bytes=59 * GIB)
    assert broker.last(second, "Grant") is not None


def test_a_named_gpu_that_tells_nothing_is_taken_at_its_users_word() -> None:
    """Neither processes nor memory are known: that it is free was said by naming it."""
    broker = on_gpus(1)
    broker.poll("GPU-0", unlisted=True)
    assert broker.last(broker.worker(), "Grant") is not None


def test_processes_of_our_own_may_take_more_than_is_expected() -> None:
    """Contexts cannot be measured there: each parked trial's may be larger than thought."""
    broker = FakeBroker(devices=[Device(id="GPU-0", kind="gpu")], context_bytes=600 << 20)
    broker.poll("GPU-0", **UNSEEN, free=True, memory_free_bytes=80 * GIB)
    broker.driver(policy="round-robin", unstarted=16, max_alive=16)
    *workers, last = (broker.worker() for _ in range(16))
    for number, worker in enumerate(workers):
        epoch = begin(broker, worker, number)
        broker.advance(10)
        taken = (number + 1) * (GIB + (800 << 20))
        broker.poll("GPU-0", memory_free_bytes=80 * GIB - taken)
        park(broker, worker, epoch, "resident", held=GIB)
    assert broker.last(last, "Grant") is not None
