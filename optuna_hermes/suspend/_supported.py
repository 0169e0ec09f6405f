"""Refuses a torch that is too old; imported by the public modules that need torch."""

from __future__ import annotations

import torch

from optuna_hermes._versions import require

require("torch", torch.__version__)
