"""Settings of ``optimize`` that are refused before anything is begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.workers._settings import Settings


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1"])
def test_seeds_that_are_none(seed: Any) -> None:
    """A seed is kept with the study: a bad one would fail all its trials, now and later."""
    with pytest.raises(InvalidInputError, match="seed must be a whole number from 0"):
        Settings(seed=seed)


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1, np.int64(3)])
def test_seeds(seed: Any) -> None:
    """Whole numbers of any kind."""
    assert Settings(seed=seed).seed == seed
