"""Values that make no sense are refused where they are made."""

from __future__ import annotations

import pytest

from optuna_hermes.model import Elastic, TrialView


def test_a_trial_is_given_what_it_wants_unless_it_is_elastic() -> None:
    """Without limits of its own a trial takes just the devices it wants."""
    stretch = Elastic(batch_size=8, batch_sizes=(4, 64), devices=(1, 4))
    assert TrialView(number=0, state="pending", devices_wanted=3).device_range == (3, 3)
    assert TrialView(number=0, state="pending", elastic=stretch).device_range == (1, 4)


@pytest.mark.parametrize(
    ("batch_size", "batch_sizes", "devices"),
    [(8, (0, 8), (1, 1)), (8, (9, 16), (1, 1)), (17, (8, 16), (1, 1)), (8, (8, 8), (2, 1))],
)
def test_limits_are_in_order(
    batch_size: int, batch_sizes: tuple[int, int], devices: tuple[int, int]
) -> None:
    """A batch size outside its limits, and limits that are none, are refused."""
    with pytest.raises(ValueError, match=r"batch_size|devices"):
        Elastic(batch_size=batch_size, batch_sizes=batch_sizes, devices=devices)
