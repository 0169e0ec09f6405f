"""Policies: pure functions from a snapshot of a host to a decision about its devices."""

from __future__ import annotations

import difflib
import importlib
from collections import UserDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import UnknownPolicyError, require

if TYPE_CHECKING:
    from optuna_hermes.cluster.energy import Energy as Energy
    from optuna_hermes.cluster.ones import Ones as Ones
    from optuna_hermes.cluster.qssf import Qssf as Qssf
    from optuna_hermes.cluster.smd import Smd as Smd
    from optuna_hermes.policies._asha import Asha as Asha
    from optuna_hermes.policies._fifo import Fifo as Fifo
    from optuna_hermes.policies._freeze_thaw import FreezeThaw as FreezeThaw
    from optuna_hermes.policies._hermes import Hermes as Hermes
    from optuna_hermes.policies._hermes_slope import HermesSlope as HermesSlope
    from optuna_hermes.policies._las import LeastAttainedService as LeastAttainedService
    from optuna_hermes.policies._rank_at_age import rank_at_age as rank_at_age
    from optuna_hermes.policies._round_robin import RoundRobin as RoundRobin
    from optuna_hermes.policies._slaq import Slaq as Slaq
    from optuna_hermes.policies.base import Policy as Policy
    from optuna_hermes.policies.base import Ranked as Ranked
    from optuna_hermes.policies.base import opened as opened
    from optuna_hermes.policies.base import place as place
    from optuna_hermes.policies.base import unopened as unopened
    from optuna_hermes.policies.base import with_openings as with_openings

_NAMED = {
    "hermes": "policies._hermes:Hermes",
    "hermes-slope": "policies._hermes_slope:HermesSlope",
    "fifo": "policies._fifo:Fifo",
    "round-robin": "policies._round_robin:RoundRobin",
    "slaq": "policies._slaq:Slaq",
    "las": "policies._las:LeastAttainedService",
    "asha": "policies._asha:Asha",
    "freeze-thaw": "policies._freeze_thaw:FreezeThaw",
    "qssf": "cluster.qssf:Qssf",
    "ones": "cluster.ones:Ones",
    "smd": "cluster.smd:Smd",
}
_BASE = ("Policy", "Ranked", "opened", "place", "unopened", "with_openings")
_PLACES = (*_NAMED.values(), "cluster.energy:Energy")
_MODULES = {name: module for module, _, name in (each.partition(":") for each in _PLACES)}
_MODULES.update(dict.fromkeys(_BASE, "policies.base"), rank_at_age="policies._rank_at_age")

_SUBJECT = "A policy"
ENERGY = "energy:"
"""Prefix of a policy's name: the same policy, with idle devices powered down."""


def __getattr__(name: str) -> Any:
    # Most processes need one policy or none, and some import SciPy: each is imported on first use,
    # and this room knows those of `cluster/` by name alone.
    if name in _MODULES:
        return getattr(importlib.import_module(f"optuna_hermes.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Policies(UserDict[str, Any]):
    """Policies by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return __getattr__(self.data[name].partition(":")[2])


POLICIES: Mapping[str, type[Policy]] = _Policies(_NAMED)
"""All policies by the names that users give them; the first is the default."""


def make_policy(name: str) -> Policy:
    """Make a policy with its default settings, by its name or one's own by ``FILE.py:CLASS``.

    Raises:
        UnknownPolicyError: there is no such policy.
        InvalidInputError: it cannot be imported, or is no policy.
    """
    check_policy(name)
    if name in POLICIES:
        return POLICIES[name]()
    if name.startswith(ENERGY):
        energy: type[Energy] = __getattr__("Energy")
        return energy(make_policy(name.removeprefix(ENERGY)))
    from optuna_hermes.policies._custom import load_policy  # few have one of their own

    return load_policy(name)


def check_simulated_policy(name: str, others: Collection[str], subject: str = _SUBJECT) -> None:
    """Refuse what cannot be simulated: nothing of that name, or with devices powered down.

    Args:
        name: what a user has given; a class of one's own is made once.
        others: names that only this simulation knows.
        subject: begin of the message about an unknown name.

    Raises:
        UnknownPolicyError: there is no such policy.
        InvalidInputError: it cannot be imported, or is no policy.
    """
    check_policy(name, others, subject)
    if name.startswith(ENERGY):
        raise UnknownPolicyError(
            f"In a simulation no device is powered down but got {name!r}: name "
            f"{name.removeprefix(ENERGY)!r} alone."
        )
    if name not in others:
        make_policy(name)


def check_policy(name: str, others: Collection[str] = (), subject: str = _SUBJECT) -> None:
    """Refuse what cannot be the name of a policy; nothing is imported.

    Args:
        name: what a user has given.
        others, subject: see ``check_simulated_policy``.

    Raises:
        UnknownPolicyError: there is no such policy.
        InvalidInputError: it is no text.
    """
    require(
        isinstance(name, str),
        "A policy must be given by its name",
        name,
        'write "FILE.py:CLASS" or "module:CLASS" for one of your own',
    )
    names, bare = list(dict.fromkeys([*POLICIES, *others])), name.removeprefix(ENERGY)
    if bare not in names and ":" not in bare:
        near = difflib.get_close_matches(bare.lower(), names, n=1)
        raise UnknownPolicyError(
            f"{subject} must be one of {', '.join(names)}, or FILE.py:CLASS or module:CLASS"
            f"{'' if others else f', or one of these after {ENERGY}'}, but got {bare!r}"
            f"{f': did you mean {near[0]!r}?' if near else '.'}"
        )
