"""Many clients that leave at one moment."""

from __future__ import annotations

from optuna_hermes.broker._core._events import Disconnected
from optuna_hermes.model import Decision, Snapshot
from optuna_hermes.policies import Policy
from support.broker import FakeBroker


class Counted(Policy):
    """Does as another, and counts how often it is asked."""

    def __init__(self, policy: Policy) -> None:
        self.asked = 0
        self._policy = policy

    def decide(self, snapshot: Snapshot) -> Decision:
        self.asked += 1
        return self._policy.decide(snapshot)


def test_a_device_is_decided_about_when_the_last_of_a_crowd_has_left() -> None:
    """Nobody of the crowd is granted what another of it has left, and the policy is asked once."""
    broker = FakeBroker(devices=1)
    crowd = [broker.plain(number) for number in range(20)]
    stays = broker.plain(20)
    study = broker.handler.state.studies["s"]
    study.policy = policy = Counted(study.policy)
    granted = len(broker.leases())
    broker.apply(Disconnected(connections=tuple(crowd)))
    assert policy.asked == 1
    assert len(broker.leases()) == granted + 1
    assert broker.last(stays, "Grant").number == 20


def test_a_decision_is_not_forgotten_when_the_last_to_leave_served_nothing() -> None:
    """The crowd's last may be somebody who only looked on."""
    broker = FakeBroker(devices=1)
    holder, stays = broker.plain(0), broker.plain(1)
    viewer = broker.connect("viewer")
    broker.apply(Disconnected(connections=(holder, viewer)))
    assert broker.last(stays, "Grant").number == 1
