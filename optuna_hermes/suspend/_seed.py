"""Seeds of trials."""

from __future__ import annotations

import random
import sys

import numpy as np


def trial_seed(seed: int, number: int) -> int:
    """The seed of trial ``number`` in a study of ``seed``: the same in every process."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and, where it is loaded, torch."""
    random.seed(seed)
    np.random.seed(seed)
    # Not imported here: that takes seconds, and the objective may not need it.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
