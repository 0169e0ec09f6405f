"""The events by which the ledger keeps the event log of each trial."""

from __future__ import annotations

from typing import Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import StudyRead
from optuna_hermes.ledger._records import CheckpointRecord, EventRecord, TrialRecord
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker


def told(broker: FakeBroker, number: int) -> list[tuple[str, dict[str, Any]]]:
    events = (c for c in broker.log if isinstance(c, EventRecord) and c.number == number)
    return [(event.kind, dict(event.detail)) for event in events]


def kinds(broker: FakeBroker, number: int) -> list[str]:
    return [kind for kind, _ in told(broker, number)]


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def saved(units: int) -> Checkpoint:
    return Checkpoint(path=f"/c/{units}", units=units, size_bytes=1, sha256="0")


def park(broker: FakeBroker, worker: int, epoch: int, tier: Any, **fields: Any) -> None:
    said = {"suspend_seconds": 0.1, "can_store": True} | fields
    broker.say(worker, wire.TierChanged(epoch=epoch, tier=tier, **said))


def report(broker: FakeBroker, worker: int, epoch: int, unit: int) -> None:
    broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=0.5))


def test_a_trial_is_told_from_its_admission_to_its_end() -> None:
    """Admission, suspension with its tier, the next grant with device and tier, and the end."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    first = begin(broker, worker, 0)
    report(broker, worker, first, 1)
    park(broker, worker, first, "resident")
    second = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Ended(epoch=second, state="done"))
    assert told(broker, 0) == [
        ("admitted", {"device": "cpu:0", "epoch": first}),
        ("suspended", {"tier": "resident", "device": "cpu:0", "units": 1}),
        ("granted", {"device": "cpu:0", "from": "resident", "epoch": second}),
        ("finished", {"units": 1}),
    ]


def test_a_unit_is_not_an_event() -> None:
    """Reports, beats and checkpoints add nothing to the event log."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    before = kinds(broker, 0)
    for unit in (1, 2, 3):
        report(broker, worker, epoch, unit)
        broker.say(worker, wire.Beat(epoch=epoch))
        broker.say(worker, wire.Saved(epoch=epoch, checkpoint=saved(unit)))
    assert kinds(broker, 0) == before == ["admitted"]


def test_an_error_of_the_trial_is_told() -> None:
    """A trial whose own code raised has failed, with what it raised."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    broker.say(worker, wire.Ended(epoch=epoch, state="failed", error="ValueError: no"))
    assert told(broker, 0)[-1] == ("failed", {"error": "ValueError: no"})


def test_a_parked_trial_goes_down_and_comes_back() -> None:
    """A lower tier is an eviction, a higher one a move; where nothing changed nothing is told."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    worker, other = broker.worker(), broker.worker()
    epoch = begin(broker, worker, 0)
    report(broker, worker, epoch, 1)
    park(broker, worker, epoch, "resident")
    begin(broker, other, 1)
    for tier in ("resident", "host", "resident"):
        park(broker, worker, epoch, tier)
    assert told(broker, 0)[2:] == [
        ("evicted", {"tier": "host", "from": "resident", "device": "cpu:0"}),
        ("moved", {"tier": "resident", "from": "host", "device": "cpu:0"}),
    ]
    park(broker, worker, epoch, "disk", checkpoint=saved(1))
    assert told(broker, 0)[-1][1] == {"tier": "disk", "from": "resident", "device": "cpu:0"}


def test_a_process_that_is_lost_is_told_where_it_was() -> None:
    """Both of a trial that trains and of one that is parked."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    worker, other = broker.worker(), broker.worker()
    epoch = begin(broker, worker, 0)
    report(broker, worker, epoch, 1)
    park(broker, worker, epoch, "resident")
    begin(broker, other, 1)
    broker.hang_up(worker)
    broker.hang_up(other)
    assert told(broker, 0)[-1] == ("process lost", {"device": "cpu:0", "units": 1})
    assert told(broker, 1)[-1] == ("process lost", {"device": "cpu:0", "units": 0})
    assert kinds(broker, 0).count("process lost") == kinds(broker, 1).count("process lost") == 1


def test_a_process_that_ends_in_order_is_not_lost() -> None:
    """After the end of its trial, or on disk, nobody misses it."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=2)
    worker, other = broker.worker(), broker.worker()
    epoch = begin(broker, worker, 0)
    park(broker, worker, epoch, "disk", checkpoint=saved(0))
    broker.hang_up(worker)
    broker.say(other, wire.Ended(epoch=broker.last(other, "Grant").epoch, state="done"))
    broker.hang_up(other)
    assert "process lost" not in kinds(broker, 0) + kinds(broker, 1)


def test_a_kill_is_told_with_its_reason() -> None:
    """A worker that is killed because it did not answer leaves that in its trial's event log."""
    broker = FakeBroker(devices=1, grace_seconds=30.0)
    broker.driver(unstarted=2)
    worker = broker.worker()
    broker.worker()
    begin(broker, worker, 0)
    report(broker, worker, broker.last(worker, "Grant").epoch, 1)
    broker.advance(200.0)
    assert broker.killed()
    detail = {"pid": worker, "device": "cpu:0", "reason": "it did not answer in time"}
    assert ("killed", detail) in told(broker, 0)


def stored(host: str, units: int = 5) -> StudyRead:
    """Return a driver's read of a study with one trial that another process has stored."""
    study = wire.StudySpec(key="s", name="s", ledger_url="memory:")
    trial = TrialRecord(study="s", number=0, trial_id=0, state="stored", host=host, slices=2)
    checkpoints = tuple(
        CheckpointRecord(
            study="s",
            number=0,
            checkpoint=Checkpoint(path=f"/c/{n}", units=n, size_bytes=1, sha256="0"),
            at=0.0,
        )
        for n in (units - 1, units)
    )
    message = wire.OpenStudy(study=study, limit=0, max_alive=1)
    return StudyRead(connection=1, message=message, trials=(trial,), checkpoints=checkpoints)


def carried_on(host: str) -> tuple[FakeBroker, int, int]:
    broker = FakeBroker(devices=1)
    broker.connect("driver")
    broker.apply(stored(host))
    worker = broker.worker()
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return broker, worker, epoch


def test_a_trial_of_another_host_is_carried_on() -> None:
    """The first lease on this host tells where the trial comes from; on its own host none does."""
    broker, _, epoch = carried_on("far")
    assert told(broker, 0) == [
        ("carried on", {"host": "h", "from": "far"}),
        ("granted", {"device": "cpu:0", "from": "disk", "epoch": epoch}),
    ]
    broker, _, _ = carried_on("h")
    assert kinds(broker, 0) == ["granted"]


def test_an_older_checkpoint_is_told_once() -> None:
    """A trial that reports again what its newest checkpoint had went back to an older one."""
    broker, worker, epoch = carried_on("h")
    report(broker, worker, epoch, 5)
    report(broker, worker, epoch, 6)
    detail = {"path": "/c/5", "units": 5, "went_back_to": 4}
    assert told(broker, 0)[1:] == [("checkpoint unreadable", detail)]


def test_the_newest_checkpoint_is_no_news() -> None:
    """A trial that goes on after its newest checkpoint has nothing to tell."""
    broker, worker, epoch = carried_on("h")
    report(broker, worker, epoch, 6)
    assert kinds(broker, 0) == ["granted"]
