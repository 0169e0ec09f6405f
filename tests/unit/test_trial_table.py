"""Trials as rows of arrays, which are kept from one decision to the next."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.model import Curve, TrialStatus, TrialView
from optuna_hermes.policies._trial_table import TrialTable

STATES = st.sampled_from(["pending", "parked", "stored", "running", "done"])
VIEWS = st.lists(
    st.tuples(
        STATES,
        st.lists(st.floats(0, 1), max_size=99),
        st.sampled_from([None, 0, 5]),
        st.sampled_from([(), ("cpu:0",)]),
    ),
    max_size=40,
)


def view(
    number: int,
    state: TrialStatus,
    values: list[float],
    left: int | None = None,
    bound_to: tuple[str, ...] = (),
) -> TrialView:
    steps = tuple(range(1, len(values) + 1))
    curve = Curve(steps=steps, values=tuple(values), device_seconds=tuple(map(float, steps)))
    return TrialView(number=number, state=state, curve=curve, units_left=left, bound_to=bound_to)


def left_is_known(trial: TrialView) -> bool:
    return trial.units_left is not None and trial.curve.units > 0


@given(st.lists(VIEWS, max_size=6))
def test_a_table_that_remembers_is_one_that_was_made_now(
    calls: list[list[tuple[TrialStatus, list[float], int | None, tuple[str, ...]]]],
) -> None:
    """Whatever was asked before, trials stand in the table as they are."""
    table, kept = TrialTable(), [view(0, "parked", [0.5, 0.25])]
    for made in calls:
        trials = [*kept, *(view(number, *each) for number, each in enumerate(made))]
        for row, trial in zip(table.rows(trials).tolist(), trials, strict=True):
            assert table.numbers[row] == trial.number
            assert table.waits[row] == (trial.state in ("parked", "stored"))
            assert table.begun[row] == (trial.state != "pending")
            assert table.bound[row] == bool(trial.bound_to)
            assert table.done[row] == (trial.state == "done")
            needed, finals = table.ends()
            assert needed[row] == (trial.units_left or 0 if left_is_known(trial) else math.inf)
            assert len(finals) == len(needed) == len(table.units)
            left = table.left[row]
            assert math.isnan(left) if trial.units_left is None else left == trial.units_left
            units = trial.curve.units
            assert (table.units[row], table.seconds[row]) == (units, units)
            values = table.curves.values[table.starts[row] :][:units]
            assert tuple(values.tolist()) == trial.curve.values
        kept = trials[::2]


def test_a_table_forgets_what_is_not_asked_for() -> None:
    """Years of reports leave no more rows than there are trials, and some to spare."""
    table = TrialTable()
    for _ in range(1000):
        table.rows([view(0, "parked", [0.5]), view(1, "pending", [])])
    assert len(table.units) < 100
    for _ in range(60):
        table.rows([view(0, "parked", [0.5] * 5000)])
    assert table.curves.values.nbytes < 1e6


def test_a_trial_that_changes_with_the_same_curve_keeps_the_row_of_that() -> None:
    """To be parked does not copy thousands of values."""
    table, parked = TrialTable(), view(0, "parked", [0.5, 0.25])
    (before,) = table.rows([parked]).tolist()
    (after,) = table.rows([TrialView(number=0, state="running", curve=parked.curve)]).tolist()
    assert table.starts[before] == table.starts[after]
