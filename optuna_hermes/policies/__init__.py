"""Policies: pure functions from a snapshot of a host to a decision about its devices."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_hermes.errors import UnknownPolicyError
from optuna_hermes.policies._asha import Asha
from optuna_hermes.policies._base import Policy, opened, place, unopened, with_openings
from optuna_hermes.policies._custom import load_policy
from optuna_hermes.policies._energy import ENERGY, Energy
from optuna_hermes.policies._fifo import Fifo
from optuna_hermes.policies._freeze_thaw import FreezeThaw
from optuna_hermes.policies._hermes import Hermes
from optuna_hermes.policies._hermes_slope import HermesSlope
from optuna_hermes.policies._las import LeastAttainedService
from optuna_hermes.policies._ones import Ones
from optuna_hermes.policies._qssf import Qssf, QssfNonPreemptive
from optuna_hermes.policies._ranked import Ranked
from optuna_hermes.policies._round_robin import RoundRobin
from optuna_hermes.policies._slaq import Slaq
from optuna_hermes.policies._smd import Smd

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

POLICIES: Mapping[str, type[Policy]] = {
    "hermes": Hermes,
    "hermes-slope": HermesSlope,
    "fifo": Fifo,
    "round-robin": RoundRobin,
    "slaq": Slaq,
    "las": LeastAttainedService,
    "asha": Asha,
    "freeze-thaw": FreezeThaw,
    "qssf": Qssf,
    "ones": Ones,
    "smd": Smd,
}
"""Every policy by the name that users give it; the first is the default."""


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
        return Energy(make_policy(name.removeprefix(ENERGY)))
    if ":" in name:
        return load_policy(name)
    names = ", ".join(POLICIES)
    raise UnknownPolicyError(
        f"A policy must be one of {names}, or FILE.py:CLASS or module:CLASS, or one of these after "
        f"{ENERGY}, but got {name!r}."
    )
