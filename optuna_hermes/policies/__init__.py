"""Policies: pure functions from a snapshot of a host to a decision about its devices."""

from __future__ import annotations

import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import UnknownPolicyError
from optuna_hermes.policies.base import (
    ENERGY,
    Policy,
    Ranked,
    opened,
    place,
    unopened,
    with_openings,
)

if TYPE_CHECKING:
    from optuna_hermes.cluster.energy import Energy
    from optuna_hermes.cluster.ones import Ones
    from optuna_hermes.cluster.qssf import Qssf, QssfNonPreemptive
    from optuna_hermes.cluster.smd import Smd
    from optuna_hermes.policies._asha import Asha
    from optuna_hermes.policies._fifo import Fifo
    from optuna_hermes.policies._freeze_thaw import FreezeThaw
    from optuna_hermes.policies._hermes import Hermes
    from optuna_hermes.policies._hermes_slope import HermesSlope
    from optuna_hermes.policies._las import LeastAttainedService
    from optuna_hermes.policies._round_robin import RoundRobin
    from optuna_hermes.policies._slaq import Slaq

__all__ = [
    "ENERGY",
    "POLICIES",
    "Asha",
    "Energy",
    "Fifo",
    "FreezeThaw",
    "Hermes",
    "HermesSlope",
    "LeastAttainedService",
    "Ones",
    "Policy",
    "Qssf",
    "QssfNonPreemptive",
    "Ranked",
    "RoundRobin",
    "Slaq",
    "Smd",
    "make_policy",
    "opened",
    "place",
    "unopened",
    "with_openings",
]

_MODULES = {
    "Asha": "policies._asha",
    "Energy": "cluster.energy",
    "Fifo": "policies._fifo",
    "FreezeThaw": "policies._freeze_thaw",
    "Hermes": "policies._hermes",
    "HermesSlope": "policies._hermes_slope",
    "LeastAttainedService": "policies._las",
    "Ones": "cluster.ones",
    "Qssf": "cluster.qssf",
    "QssfNonPreemptive": "cluster.qssf",
    "RoundRobin": "policies._round_robin",
    "Slaq": "policies._slaq",
    "Smd": "cluster.smd",
}


def __getattr__(name: str) -> Any:
    # Most processes need one policy or none, and some import SciPy: each is imported on first use,
    # and this room knows those of `cluster/` by name alone.
    if name in _MODULES:
        return getattr(importlib.import_module(f"optuna_hermes.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Policies(UserDict[str, Any]):
    """Policies by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return __getattr__(self.data[name])


POLICIES: Mapping[str, type[Policy]] = _Policies(
    {
        "hermes": "Hermes",
        "hermes-slope": "HermesSlope",
        "fifo": "Fifo",
        "round-robin": "RoundRobin",
        "slaq": "Slaq",
        "las": "LeastAttainedService",
        "asha": "Asha",
        "freeze-thaw": "FreezeThaw",
        "qssf": "Qssf",
        "ones": "Ones",
        "smd": "Smd",
    }
)
"""All policies by the names that users give them; the first is the default."""


def make_policy(name: str) -> Policy:
    """A policy with its default settings.

    Args:
        name: a key of ``POLICIES``, or ``FILE.py:CLASS`` or ``module:CLASS`` for one's own
            subclass of ``Policy``; with ``energy:`` before it, devices that it leaves idle may
            be powered down.

    Raises:
        UnknownPolicyError: there is no such policy.
        InvalidInputError: it cannot be imported, or is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    if name.startswith(ENERGY):
        energy: type[Energy] = __getattr__("Energy")
        return energy(make_policy(name.removeprefix(ENERGY)))
    if ":" in name:
        from optuna_hermes.policies._custom import load_policy  # few have one of their own

        return load_policy(name)
    names = ", ".join(POLICIES)
    raise UnknownPolicyError(
        f"A policy must be one of {names}, or FILE.py:CLASS or module:CLASS, or one of these after "
        f"{ENERGY}, but got {name!r}."
    )
