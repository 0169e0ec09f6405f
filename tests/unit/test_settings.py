"""Settings of ``optimize`` that are refused before anything is begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.sampler import devices_text
from optuna_hermes.workers._settings import OptimizeSettings


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1"])
def test_seeds_that_are_none(seed: Any) -> None:
    """A seed is kept with the study: a bad one would fail all its trials, now and later."""
    with pytest.raises(InvalidInputError, match="seed must be a whole number from 0"):
        OptimizeSettings(seed=seed)


def test_numbers_of_numpy_are_plain_ones() -> None:
    """They are sent to the broker."""
    given = OptimizeSettings(
        n_trials=np.int64(3), timeout=np.float32(2.0), hang_seconds=np.int32(60)
    )
    assert (given.n_trials, given.timeout, given.hang_seconds) == (3, 2.0, 60.0)
    assert {type(given.n_trials), type(given.timeout), type(given.hang_seconds)} == {int, float}


def test_what_leaving_a_bound_out_means_is_said() -> None:
    """It is no bound for a time to end at, and a slice has a length."""
    with pytest.raises(InvalidInputError, match=r"inf: leave it out for no bound\.$"):
        OptimizeSettings(timeout=float("inf"))
    with pytest.raises(InvalidInputError, match=r"inf: leave it out for 1 s\.$"):
        OptimizeSettings(slice_seconds=float("inf"))


@pytest.mark.parametrize("given", [None, ""])
def test_an_empty_variable_names_no_devices(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does an empty argument; the command line takes the variable so, too."""
    monkeypatch.setenv("OPTUNA_HERMES_DEVICES", "")
    assert devices_text(given) == "auto"
    monkeypatch.setenv("OPTUNA_HERMES_DEVICES", "cpu:3")
    assert devices_text(given) == "cpu:3"


@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1, np.int64(3)])
def test_seeds(seed: Any) -> None:
    """Whole numbers of any kind."""
    assert OptimizeSettings(seed=seed).seed == seed


@pytest.mark.parametrize("name", ["n_trials", "timeout", "device_seconds", "slice_seconds"])
def test_nothing_at_all_may_be_wanted(name: str) -> None:
    """Zero of anything is a bound as any other."""
    assert getattr(OptimizeSettings(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n_trials", value) for value in ("3", 3.0, -1)],
        *[(name, "60") for name in ("timeout", "device_seconds", "slice_seconds", "hang_seconds")],
        *[("timeout", value) for value in (-1.0, float("nan"), float("inf"))],
        ("grace", "30"),
        ("checkpoint_dir", ""),
    ],
)
def test_values_of_another_kind_are_named(name: str, value: Any) -> None:
    """As a script passes them that reads them from its command line or a file."""
    with pytest.raises(InvalidInputError, match=f"^{name} must be .* but got {value!r}"):
        OptimizeSettings(**{name: value})
