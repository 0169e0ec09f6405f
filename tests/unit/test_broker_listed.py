"""Listed trials at a broker: which worker takes which, and what comes between."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import Decision, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import opened, place
from support.broker import FakeBroker


class Backwards(Policy):
    """Opens listed trials from the end of the list, then goes on with those that wait."""

    def __init__(self) -> None:
        self.seen: Snapshot = Snapshot()

    def decide(self, snapshot: Snapshot) -> Decision:
        if any(device.free for device in snapshot.devices):
            self.seen = snapshot
        listed: list[TrialView | None] = [*reversed(snapshot.unstarted.listed)]
        new = [None] * (snapshot.unstarted.count or 0) if not listed else []
        return Decision(assignments=place(snapshot, [*listed, *opened(snapshot), *new]))


PARAMS: dict[int, dict[str, Any]] = {number: {"x": number / 10} for number in range(4)}


def served(
    *, devices: int = 1, policy: Policy | None = None, **fields: Any
) -> tuple[FakeBroker, Backwards]:
    broker = FakeBroker(devices=devices)
    fields = {"unstarted": 4, "waiting": (0, 1, 2, 3), "fixed": True, "params": PARAMS, **fields}
    broker.driver(max_alive=8, **fields)
    backwards = Backwards()
    broker.handler.state.studies["s"].policy = policy or backwards
    return broker, backwards


def numbers(policy: Backwards) -> list[int]:
    return [trial.number for trial in policy.seen.unstarted.listed]


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True, params={}))
    return epoch


def test_a_worker_is_told_which_trial_it_takes() -> None:
    """The one that the policy has named, whose parameters are known from then on."""
    broker, policy = served(devices=2)
    first, second = broker.worker(), broker.worker()
    assert [broker.last(each, "Grant").listed_number for each in (first, second)] == [3, 2]
    begin(broker, first, 3)
    begin(broker, second, 2)
    study = broker.handler.state.studies["s"]
    assert study.trials[3].params == {"x": 0.3}
    assert broker.unstarted() == 2
    broker.advance(1.0)
    assert numbers(policy) == [0, 1]
    assert [dict(trial.params) for trial in policy.seen.unstarted.listed] == [
        {"x": 0.0},
        {"x": 0.1},
    ]
    broker.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"fixed": False},
        {"params": {0: {"x": 0.0}, 1: {"x": 0.1}, 2: {"x": 0.2}}},
        {"unstarted": 5},
        {"waiting": ()},
        {"unstarted": None, "fixed": False},
    ],
)
def test_nothing_is_listed_unless_all_is_known(fields: dict[str, Any]) -> None:
    """Of what a sampler proposes no parameters are known, nor of a list of which some lack."""
    broker, policy = served(**fields)
    worker = broker.worker()
    assert numbers(policy) == []
    assert broker.last(worker, "Grant").listed_number is None


def test_of_a_long_list_those_are_meant_that_shall_be_trained() -> None:
    """A study that ends after two more trials trains the first two of the list."""
    broker, policy = served(unstarted=2)
    worker = broker.worker()
    assert numbers(policy) == [0, 1]
    assert broker.last(worker, "Grant").listed_number == 1


def test_a_policy_that_names_none_gets_the_first_ones() -> None:
    """A trial that a worker then finds is not listed any more."""
    broker, _ = served()
    broker.handler.state.studies["s"].policy = in_order = Backwards()
    in_order.decide = lambda snapshot: Decision(  # type: ignore[method-assign]
        assignments=place(snapshot, [None] * (snapshot.unstarted.count or 0))
    )
    worker = broker.worker()
    assert broker.last(worker, "Grant").listed_number is None
    begin(broker, worker, 0)
    assert list(broker.handler.state.studies["s"].listed) == [1, 2, 3]


def test_a_trial_whose_worker_dies_before_it_begins_is_listed_again() -> None:
    """The next worker is told to take it, and to look for what the first one may have left."""
    broker, _ = served()
    first = broker.worker()
    assert broker.last(first, "Grant").listed_number == 3
    broker.hang_up(first)
    second = broker.worker()
    grant = broker.last(second, "Grant")
    assert grant.listed_number == 3
    assert grant.lost != ()
    broker.check()


def test_a_worker_may_find_another_trial() -> None:
    """Another process has taken the named one from Optuna's queue: that one is still listed."""
    broker, policy = served()
    worker = broker.worker()
    assert broker.last(worker, "Grant").listed_number == 3
    begin(broker, worker, 0)
    broker.advance(1.0)
    assert numbers(policy) == [1, 2, 3]
    assert broker.handler.state.studies["s"].trials[0].params == {"x": 0.0}
    broker.check()


def test_a_reservation_that_is_cancelled_leaves_its_trial_in_the_list() -> None:
    """Nobody has taken it: another worker can be told to."""
    broker, _ = served()
    first = broker.worker()
    begin(broker, first, 3)
    broker.worker()
    broker.advance(1.0)
    state = broker.handler.state
    (reservation,) = state.reserved("s")
    assert reservation.listed_number == 2
    assert list(state.listed(state.studies["s"])) == [0, 1]
    state.unreserve(reservation)
    assert list(state.listed(state.studies["s"])) == [0, 1, 2]
    assert broker.unstarted() == 3


def test_trials_are_set_up_in_the_order_that_the_policy_wants() -> None:
    """A worker that waits takes the one that would be opened next, and it is listed no more."""
    broker, policy = served(sets_up=True)
    first, second = broker.worker(), broker.worker()
    begin(broker, first, broker.last(first, "Grant").listed_number)
    broker.advance(0.1)
    broker.poll("cpu:0")
    told = broker.last(second, "SetUp")
    assert told.listed_number == 2
    study = broker.handler.state.studies["s"]
    assert list(broker.handler.state.listed(study)) == [0, 1]
    broker.say(second, wire.Begin(epoch=0, number=2, trial_id=2))
    assert study.trials[2].state == "pending"
    assert study.trials[2].params == {"x": 0.2}
    assert list(broker.handler.state.listed(study)) == [0, 1]
    broker.advance(1.0)
    assert numbers(policy) == [0, 1]
    broker.check()


def test_the_driver_of_a_new_broker_lists_what_is_left() -> None:
    """Trials that have begun since are known to the ledger, and listed no more."""
    broker, _ = served()
    worker = broker.worker()
    begin(broker, worker, 3)
    successor = broker.successor()
    successor.driver(max_alive=8, unstarted=3, waiting=(0, 1, 2), fixed=True, params=PARAMS)
    study = successor.handler.state.studies["s"]
    assert list(study.listed) == [0, 1, 2]
    assert study.trials[3].params == {"x": 0.3}


def test_the_driver_of_a_new_broker_lists_what_workers_are_about_to_take() -> None:
    """A worker of the earlier broker has a lease for a trial that it has not begun."""
    broker, _ = served()
    worker = broker.worker()
    grant = broker.last(worker, "Grant")
    successor = broker.successor()
    spec = broker.handler.state.studies["s"].spec
    again = wire.Reattach(study=spec, epoch=grant.epoch, devices=("cpu:0",))
    successor.resume(worker, again)
    successor.driver(max_alive=8, limit=4, waiting=(0, 1, 2, 3), fixed=True, params=PARAMS)
    study = successor.handler.state.studies["s"]
    assert successor.unstarted() == 3
    assert list(study.listed) == [0, 1, 2, 3]
