"""Another number of devices only where it wins more than it costs, and slices that end together."""

from __future__ import annotations

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._elastic import pays
from optuna_hermes.model import (
    Assignment,
    BatchSizes,
    Checkpoint,
    Decision,
    Elastic,
    Snapshot,
    Speed,
)
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import free_devices, opened, unopened
from support.broker import FakeBroker


def elastic(**seconds: float) -> Elastic:
    """A trial whose steps took so long on ``one``, ``two`` and ``four`` devices."""
    counts = {"one": 1, "two": 2, "four": 4}
    speeds = tuple(
        Speed(devices=counts[name], batch_size=64, step_seconds=each)
        for name, each in seconds.items()
    )
    return Elastic(batch_size=64, batch_sizes=(64, 64), devices=(1, 4), speeds=speeds)


def worth(trial: Elastic, before: int, after: int, cost: float, given_away: int = 0) -> bool:
    """For a slice of 10 s; a change costs ``cost`` on each device, on the way out and in."""
    return pays(
        trial,
        before,
        after,
        given_away=given_away,
        slice_seconds=10.0,
        leave_seconds=cost,
        back_seconds=cost,
    )


def test_growing_wins_what_the_old_devices_would_have_needed() -> None:
    """At 1.5 times the speed a slice of 10 s wins 5 s of the one device, for 3 times the cost."""
    trial = elastic(one=0.3, two=0.2)
    limit = 5.0 / 3 / 1.1
    assert worth(trial, 1, 2, limit - 0.01)
    assert not worth(trial, 1, 2, limit + 0.01)


def test_what_was_never_tried_counts_as_perfect() -> None:
    """So it is tried once; a trial of which nothing was measured stays as it is."""
    assert worth(elastic(one=0.3), 1, 2, 10.0 / 3 / 1.1 - 0.01)
    assert not worth(elastic(one=0.3), 1, 2, 10.0 / 3 / 1.1 + 0.01)
    assert not worth(elastic(), 1, 2, 0.0)


def test_devices_that_make_it_slower_are_not_taken() -> None:
    """Though the change cost nothing."""
    assert not worth(elastic(one=0.2, two=0.25), 1, 2, 0.0)


def test_shrinking_wins_what_others_get() -> None:
    """Two devices for a slice are 20 s; devices that nobody gets are no reason."""
    trial = elastic(one=0.4, four=0.1)
    assert worth(trial, 4, 2, 20.0 / 6 / 1.1 - 0.01, given_away=2)
    assert not worth(trial, 4, 2, 20.0 / 6 / 1.1 + 0.01, given_away=2)
    assert not worth(trial, 4, 2, 0.0, given_away=0)


class Greedy(Policy):
    """Free devices to the first trial that waits, as many as it may have; the rest to others."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        free = [device.id for device in free_devices(snapshot)]
        given: list[Assignment] = []
        for trial in [*opened(snapshot), *unopened(snapshot)]:
            least, most = (1, 1) if trial is None else trial.device_range
            if trial is not None:
                self.asked.append((least, most))
            if len(free) >= least:
                number = None if trial is None else trial.number
                given.append(Assignment(trial=number, devices=tuple(free[:most])))
                free = free[most:]
        return Decision(assignments=tuple(given))


def studying(devices: int, unstarted: int) -> tuple[FakeBroker, Greedy]:
    broker = FakeBroker(devices=devices)
    broker.driver(slice_seconds=10.0, unstarted=unstarted)
    policy = Greedy()
    broker.handler.state.studies["s"].policy = policy
    return broker, policy


def begin(broker: FakeBroker, worker: int, number: int, seconds: float = 1.0) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    sizes = BatchSizes(now=8, least=8, most=8, seconds={8: seconds}, most_devices=2)
    broker.say(worker, wire.Beat(epoch=epoch, sizes=sizes))
    return epoch


def store(broker: FakeBroker, worker: int, epoch: int) -> None:
    saved = Checkpoint(path=f"/{epoch}", units=0, size_bytes=1, sha256="0")
    broker.say(
        worker, wire.TierChanged(epoch=epoch, tier="disk", suspend_seconds=0.1, checkpoint=saved)
    )
    broker.hang_up(worker)


def test_a_change_that_does_not_pay_is_asked_about_once_more() -> None:
    """The trial keeps its device, and the policy says what becomes of the other one."""
    broker, policy = studying(devices=2, unstarted=1)
    worker = broker.worker()
    begin(broker, worker, 0)
    broker.handler.state.studies["s"].costs["disk"] = 1.0  # a slice lasts at least 60 s then
    broker.handler.state.studies["s"].leave_seconds = 100.0
    broker.advance(10.0)
    assert policy.asked[-2:] == [(1, 2), (1, 1)]
    assert broker.last(worker, "Yield") is None
    (lease,) = broker.handler.state.leases()
    assert (lease.devices, lease.deadline) == (("cpu:0",), 70.0)


def test_one_that_pays_is_made_and_its_cost_is_measured() -> None:
    """Leaving and coming back are measured for the next decision."""
    broker, _ = studying(devices=2, unstarted=1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    broker.advance(10.0)
    assert broker.last(worker, "Yield").tier == "disk"
    store(broker, worker, epoch)
    again = broker.worker()
    broker.now += 0.5
    begin(broker, again, 0, seconds=0.6)
    study = broker.handler.state.studies["s"]
    assert len(broker.last(again, "Grant").devices) == 2
    assert (study.leave_seconds, study.cost("disk")) == (0.1, 0.5)


@pytest.mark.parametrize(("began", "end"), [(3.0, 10.0), (5.0, 10.0), (6.0, 20.0)])
def test_slices_end_together(began: float, end: float) -> None:
    """One that begins in between ends with the others, or a slice later."""
    broker, _ = studying(devices=2, unstarted=2)
    begin(broker, broker.worker(), 0)
    broker.advance(began)
    begin(broker, broker.worker(), 1)
    assert [lease.deadline for lease in broker.handler.state.leases()] == [10.0, end]
    broker.advance(25.0 - began)
    assert len({lease.deadline for lease in broker.handler.state.leases()}) == 1


def test_slices_do_not_end_with_one_that_was_ended_early() -> None:
    """A trial leaves a broken device long before its slice would have ended."""
    broker, _ = studying(devices=2, unstarted=2)
    begin(broker, broker.worker(), 0)
    broker.advance(3.0)
    broker.poll("cpu:0", healthy=False)
    begin(broker, broker.worker(), 1)
    first, second = broker.handler.state.leases()
    assert (first.yielding, first.deadline, second.deadline) == ("disk", 10.0, 13.0)


def test_slices_of_other_studies_end_as_they_did() -> None:
    """Nothing waits for anything where no trial may have several devices."""
    broker = FakeBroker(devices=2)
    broker.driver(slice_seconds=10.0, unstarted=2)
    broker.worker()
    broker.advance(3.0)
    broker.worker()
    assert [lease.deadline for lease in broker.handler.state.leases()] == [10.0, 13.0]
