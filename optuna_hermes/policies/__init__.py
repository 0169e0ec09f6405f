"""Policies: pure functions from a snapshot of a host to a decision about its devices."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_hermes.errors import UnknownPolicyError
from optuna_hermes.policies._base import Policy
from optuna_hermes.policies._fifo import Fifo
from optuna_hermes.policies._hermes import Hermes
from optuna_hermes.policies._round_robin import RoundRobin

__all__ = ["POLICIES", "Fifo", "Hermes", "Policy", "RoundRobin", "make_policy"]

POLICIES: Mapping[str, type[Policy]] = {
    "hermes": Hermes,
    "fifo": Fifo,
    "round-robin": RoundRobin,
}
"""Every policy by the name that users give it; the first is the default."""


def make_policy(name: str) -> Policy:
    """A policy with its default settings.

    Args:
        name: a key of ``POLICIES``.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        names = ", ".join(POLICIES)
        raise UnknownPolicyError(f"A policy must be one of {names} but got {name!r}.") from None
