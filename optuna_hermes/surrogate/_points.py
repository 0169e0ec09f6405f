"""Parameters of trials as points of a unit cube, without knowing their search space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optuna_hermes.curves import Floats

MOST_CHOICES = 8
"""Values of a choice that have a column of their own, the commonest ones."""
MOST_COLUMNS = 32
"""Columns of all parameters: each is a length scale to fit."""

_MISSING = object()
_HUGE = 1e300


def points_of(params: Sequence[Mapping[str, Any]]) -> Floats:
    """Return a point of the unit cube for the parameters of each trial [n, d].

    A number counts by its rank among those of all trials, so that it needs no scale: a logarithmic
    one is as good as a linear one. A choice has a column for each of its values, of which one is 1
    and the others 0. Where a parameter is missing its number is in the middle, and a column says
    that it is missing. What all trials share has no column.

    Example:
        >>> from optuna_hermes.surrogate import points_of
        >>> points_of([{"lr": 1e-5, "act": "relu"}, {"lr": 1.0, "act": "tanh"}]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    columns: list[Floats] = []
    for name in sorted({name for each in params for name in each}):
        values = [each.get(name, _MISSING) for each in params]
        known = [value for value in values if value is not _MISSING]
        columns += _numbers(values) if all(map(_is_number, known)) else _choices(values)
    varied = [column for column in columns if column.min() < column.max()][:MOST_COLUMNS]
    return np.column_stack(varied) if varied else np.zeros((len(params), 0))


def _is_number(value: Any) -> bool:
    # True is an int to Python; as a parameter it is a choice.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -_HUGE < value < _HUGE


def _numbers(values: Sequence[Any]) -> list[Floats]:
    missing = np.array([value is _MISSING for value in values])
    column = np.full(len(values), 0.5)
    column[~missing] = _ranks([float(value) for value in values if value is not _MISSING])
    return [column, missing.astype(np.float64)]


def _ranks(values: Sequence[float]) -> Floats:
    """The ranks of values, 0 for the lowest and 1 for the highest, equal ones at their mean."""
    _, place, count = np.unique(np.array(values), return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - (count + 1) / 2
    low, high = middle[0], middle[-1]
    return np.asarray((middle[place.reshape(-1)] - low) / max(high - low, 1.0))


def _choices(values: Sequence[Any]) -> list[Floats]:
    texts = ["" if each is _MISSING else repr(each) for each in values]
    found = Counter(texts)
    chosen = sorted(found, key=lambda text: (-found[text], text))[:MOST_CHOICES]
    if len(found) == 2:
        chosen = chosen[:1]  # of two the other one is the opposite
    return [np.array([text == each for text in texts], dtype=np.float64) for each in chosen]
