"""Surrogate: a model of how trials will end, from parameters and partial curves. Pure."""

from __future__ import annotations

from optuna_hermes.surrogate._observations import Observations as Observations
from optuna_hermes.surrogate._observations import observe as observe
from optuna_hermes.surrogate._points import points_of as points_of
from optuna_hermes.surrogate._process import Process as Process
from optuna_hermes.surrogate._proposal import Cube as Cube
from optuna_hermes.surrogate._proposal import propose as propose
