"""Every policy keeps the contract of policies."""

from __future__ import annotations

from optuna_hermes.policies import POLICIES, Fifo, Hermes, RoundRobin
from optuna_hermes.testing import PolicyContract


class TestHermes(PolicyContract):
    policy = Hermes()


class TestHermesOfSlopes(PolicyContract):
    policy = Hermes(alpha=0.0, opening=0.0, signal="slope")


class TestFifo(PolicyContract):
    policy = Fifo()


class TestRoundRobin(PolicyContract):
    policy = RoundRobin()


def test_no_policy_is_left_out() -> None:
    """Every policy that users can name has its contract checked here."""
    checked = {type(suite.policy) for suite in PolicyContract.__subclasses__()}
    assert checked >= set(POLICIES.values())
