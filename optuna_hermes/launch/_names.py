"""Launchers by their names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.launch._base import Launcher

LAUNCHERS = {
    "slurm": ("_slurm", "Slurm"),
    "kubernetes": ("_kubernetes", "Kubernetes"),
    "ray": ("_ray", "Ray"),
}
"""The module and the class of each."""


def launcher(name: str, **options: Any) -> Launcher:
    """The launcher of this name; options are those of its class.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in LAUNCHERS:
        raise InvalidInputError(f"No launcher {name!r}: this version has {', '.join(LAUNCHERS)}.")
    module, kind = LAUNCHERS[name]
    found: Launcher = getattr(import_module(f"optuna_hermes.launch.{module}"), kind)(**options)
    return found
