"""Another batch size goes from a policy to a trial, and the event log of the trial has it."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import (
    Assignment,
    BatchSizes,
    Decision,
    Elastic,
    Snapshot,
    Speed,
    TrialView,
)
from optuna_hermes.policies import Policy, RoundRobin
from optuna_hermes.view.tables import event_text
from support.broker import FakeBroker

SIZES = BatchSizes(now=8, least=4, most=32, seconds={8: 0.5, 16: 0.75, 4: 0.0}, unit_samples=90)


class Sizing(Policy):
    """Round robin, with a batch size of its own for every trial that may have one."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.seen = Snapshot()

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen = snapshot
        order = RoundRobin().decide(snapshot).assignments
        return Decision(assignments=tuple(self._sized(each) for each in order))

    def _sized(self, each: Assignment) -> Assignment:
        size = None if each.trial is None else self.sizes.get(each.trial)
        return Assignment(trial=each.trial, devices=each.devices, batch_size=size)

    def trial(self, number: int) -> TrialView:
        return next(trial for trial in self.seen.trials if trial.number == number)


@pytest.fixture
def broker() -> FakeBroker:
    """One device and a study whose slices last 1 s."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="round-robin", slice_seconds=1.0, unstarted=2)
    return broker


@pytest.fixture
def sizing(broker: FakeBroker) -> Sizing:
    policy = Sizing()
    broker.handler.state.studies["s"].policy = policy
    return policy


def begin(broker: FakeBroker, worker: int, number: int, sizes: Any = SIZES) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    if sizes is not None:
        broker.say(worker, wire.Beat(epoch=epoch, sizes=sizes))
    return epoch


def stretch(broker: FakeBroker, worker: int, epoch: int, now: int) -> None:
    sizes = BatchSizes(now=now, least=4, most=32)
    broker.say(worker, wire.Beat(epoch=epoch, sizes=sizes))


def changes(broker: FakeBroker, number: int) -> list[dict[str, Any]]:
    events = broker.ledger.load_events("s", number)
    return [event.detail for event in events if event.kind == "batch size"]


def alone(broker: FakeBroker) -> int:
    """The only worker there is: its trial keeps the device."""
    study = broker.handler.state.studies["s"]
    study.limit = 1 + len(study.trials)
    return broker.worker()


def test_a_policy_sees_what_a_trial_may_have(broker: FakeBroker, sizing: Sizing) -> None:
    """Its limits, its size and its speeds; nothing of one that does not stretch."""
    begin(broker, alone(broker), 0)
    broker.advance(1.0)
    assert sizing.trial(0).elastic == Elastic(
        batch_size=8,
        batch_sizes=(4, 32),
        unit_samples=90,
        speeds=(
            Speed(devices=1, batch_size=8, step_seconds=0.5),
            Speed(devices=1, batch_size=16, step_seconds=0.75),
        ),
    )


def test_nobody_else_is_elastic(broker: FakeBroker, sizing: Sizing) -> None:
    """A trial that has said nothing of its batches, or nonsense, is as it always was."""
    worker = alone(broker)
    epoch = begin(broker, worker, 0, sizes=None)
    broker.advance(1.0)
    assert sizing.trial(0).elastic is None
    nonsense = BatchSizes(now=2, least=4, most=32)
    broker.say(worker, wire.Beat(epoch=epoch, sizes=nonsense))
    broker.advance(1.0)
    assert sizing.trial(0).elastic is None


def test_a_trial_that_keeps_its_device_is_told(broker: FakeBroker, sizing: Sizing) -> None:
    """At the end of its slice, once; the event log says when it has changed."""
    worker = alone(broker)
    epoch = begin(broker, worker, 0)
    sizing.sizes[0] = 16
    broker.advance(1.0)
    assert broker.last(worker, "Resize") == wire.Resize(epoch=epoch, batch_size=16)
    assert changes(broker, 0) == []
    stretch(broker, worker, epoch, 16)
    broker.advance(1.0)
    assert sum(isinstance(each, wire.Resize) for each in broker.sent(worker)) == 1
    assert changes(broker, 0) == [{"from": 8, "to": 16, "device": "cpu:0", "units": 0}]


def test_a_trial_that_comes_back_is_told_with_its_grant(broker: FakeBroker, sizing: Sizing) -> None:
    """Every trial its own size; one that has no override is left as it is."""
    first, second = broker.worker(), broker.worker()
    epoch = begin(broker, first, 0)
    sizing.sizes = {0: 16}
    broker.advance(1.0)
    parked = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True)
    broker.say(first, parked)
    assert broker.last(second, "Grant").batch_size is None
    after = begin(broker, second, 1)
    broker.advance(1.0)
    broker.say(
        second, wire.TierChanged(epoch=after, tier="resident", suspend_seconds=0.0, can_store=True)
    )
    grant = broker.last(first, "Grant")
    assert (grant.number, grant.batch_size) == (0, 16)
    broker.say(first, wire.FirstBatch(epoch=grant.epoch, can_store=True))
    stretch(broker, first, grant.epoch, 8)  # as it was suspended
    stretch(broker, first, grant.epoch, 16)
    assert [(each["from"], each["to"]) for each in changes(broker, 0)] == [(8, 16)]
    assert changes(broker, 1) == []


@pytest.mark.parametrize("size", [3, 33])
def test_a_size_beyond_the_limits_ends_the_study(
    broker: FakeBroker, sizing: Sizing, size: int
) -> None:
    """A policy that breaks the contract is named, with what it said."""
    begin(broker, alone(broker), 0)
    sizing.sizes[0] = size
    broker.advance(1.0)
    assert f"within their limits, but got {size} for trial 0" in str(
        broker.handler.state.studies["s"].problem
    )


def test_a_size_for_a_trial_that_has_none_ends_the_study(
    broker: FakeBroker, sizing: Sizing
) -> None:
    """A trial that is not elastic is left alone, by contract."""
    begin(broker, alone(broker), 0, sizes=None)
    sizing.sizes[0] = 8
    broker.advance(1.0)
    assert "batch sizes to elastic trials" in str(broker.handler.state.studies["s"].problem)


def test_the_event_in_words() -> None:
    """``status TRIAL`` says which size came after which."""
    detail = {"from": 8, "to": 16, "device": "cpu:0", "units": 3}
    assert event_text("batch size", detail) == "batch size 16, before 8"


@pytest.mark.parametrize(("now", "known"), [(16, True), (2, False)])
def test_the_next_broker_is_told_too(broker: FakeBroker, now: int, known: bool) -> None:
    """A process that comes back says which size its batches have; nonsense is not believed."""
    worker = alone(broker)
    epoch = begin(broker, worker, 0)
    after = broker.successor()
    after.driver(policy="round-robin")
    sizes = BatchSizes(now=now, least=4, most=32)
    spec = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")
    resume = wire.Reattach(
        study=spec,
        epoch=epoch,
        devices=("cpu:0",),
        number=0,
        trial_id=0,
        training=True,
        sizes=sizes,
    )
    again = after.resume(worker, resume)
    stretch(after, again, epoch, 8)
    assert [(each["from"], each["to"]) for each in changes(after, 0)] == [(16, 8)] * known
