"""HermesSampler, for OptunaHub: all of it is in the package optuna-hermes."""

from __future__ import annotations

try:
    from optuna_hermes import HermesSampler
except ModuleNotFoundError as error:
    if error.name != "optuna_hermes":
        raise
    raise ImportError(
        "samplers/hermes needs the package optuna-hermes: run `pip install optuna-hermes`.",
        name="optuna_hermes",
    ) from error

__all__ = ["HermesSampler"]
