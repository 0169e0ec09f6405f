"""Every policy keeps the contract of policies."""

from __future__ import annotations

import pytest

from optuna_hermes.model import Assignment, Decision, Snapshot
from optuna_hermes.policies import (
    POLICIES,
    Asha,
    Energy,
    Fifo,
    FreezeThaw,
    Hermes,
    HermesSlope,
    LeastAttainedService,
    Ones,
    Qssf,
    RoundRobin,
    Slaq,
    Smd,
)
from optuna_hermes.testing import PolicyContract


class TestHermes(PolicyContract):
    policy = Hermes()
    starves_none = True


class TestHermesSlope(PolicyContract):
    policy = HermesSlope()


class TestEnergy(PolicyContract):
    policy = Energy(Fifo())


class TestFifo(PolicyContract):
    policy = Fifo()


class TestFifoThatOvertakesNobody(PolicyContract):
    policy = Fifo(backfill=False)
    work_conserving = False


class Reserve(Fifo):
    """Keeps a device in reserve, also if there is only one."""

    def decide(self, snapshot: Snapshot) -> Decision:
        decision = super().decide(snapshot)
        kept = len([device for device in snapshot.devices if device.free and device.healthy])
        given = (each for each in decision.assignments if len(each.devices) < kept)
        return Decision(assignments=tuple(given)[:1])


class TestThatHoldsDevicesBack(PolicyContract):
    policy = Reserve()
    work_conserving = False


def test_that_trials_are_left_is_noticed() -> None:
    """A policy that holds devices back has to say so."""

    class Conserving(PolicyContract):
        policy = Reserve()

    with pytest.raises(AssertionError):
        Conserving().test_every_trial_ends()  # type: ignore[call-arg]  # Hypothesis gives them


class Listing(Fifo):
    """Returns a list, and the one device where nothing waits."""

    def decide(self, snapshot: Snapshot) -> Decision:
        given = [*super().decide(snapshot).assignments]
        if snapshot.devices and not given:
            given.append(Assignment(trial=None, devices=(snapshot.devices[0].id,)))
        return Decision(assignments=given)  # type: ignore[arg-type]


def test_a_failure_shows_what_was_decided() -> None:
    """Its values are in the error, as in a user's own tests; a list is as good as a tuple."""

    class Lists(PolicyContract):
        policy = Listing()

    Lists().test_without_devices_nothing_is_assigned()
    with pytest.raises(AssertionError, match=r"Assignment\(trial=None, devices=\('cpu:0',\)"):
        Lists().test_without_runs_nothing_is_assigned()


class TestRoundRobin(PolicyContract):
    policy = RoundRobin()
    starves_none = True


class TestSlaq(PolicyContract):
    policy = Slaq()


class TestLeastAttainedService(PolicyContract):
    policy = LeastAttainedService()
    starves_none = True


class TestAsha(PolicyContract):
    policy = Asha()


class TestFreezeThaw(PolicyContract):
    policy = FreezeThaw()


class TestQssf(PolicyContract):
    policy = Qssf()


class TestOnes(PolicyContract):
    policy = Ones()


class TestSmd(PolicyContract):
    policy = Smd()


def test_no_policy_is_left_out() -> None:
    """Every policy that users can name has its contract checked here."""
    checked = {type(vars(suite).get("policy")) for suite in PolicyContract.__subclasses__()}
    assert checked >= set(POLICIES.values())
