"""Names of a user's own policy, for a broker that may have been started in another folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from optuna_hermes.policies import ENERGY


def absolute_policy_name(policy: str) -> str:
    """A policy's name as any process of this host understands it, ``energy:`` before it included.

    A file, and a module that is one, become an absolute path: a broker runs that anew for each
    call, and two modules of one name in different folders do not meet. A module of a package
    stays what it is.

    Args:
        policy: a name of ``POLICIES``, ``FILE.py:CLASS`` or ``module:CLASS``.
    """
    if policy.startswith(ENERGY):
        return ENERGY + absolute_policy_name(policy.removeprefix(ENERGY))
    place, colon, name = policy.rpartition(":")
    if not colon:
        return policy
    if not place.endswith(".py"):
        place = _file_of(place) or place
    return f"{Path(place).absolute()}:{name}" if place.endswith(".py") else policy


def import_folders() -> tuple[str, ...]:
    """Folders from which this process imports."""
    return tuple(dict.fromkeys(str(Path(each).absolute()) for each in sys.path))


def _file_of(module: str) -> str | None:
    """The file of a module that is in no package; None for others."""
    if "." in module:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return f"{module}.py"  # of the folder in which it was named
    return None if spec.submodule_search_locations else spec.origin
