"""The pool of recorded configurations among which a sampler chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator import CurveSet


class Pool:
    """The trainings of a curve set as points of a cube, each to be taken once.

    A parameter's coordinate is its rank among the set's values, scaled to [0, 1]; equal values
    share their mean rank. So a sampler needs neither scales nor choices of parameters.

    Args:
        curve_set: a set with parameters.

    Raises:
        InvalidInputError: the set has no parameters.

    Attributes:
        names: names of the parameters.
        points: coordinates [n, p].
    """

    def __init__(self, curve_set: CurveSet) -> None:
        rows = [recording.params for recording in curve_set.recordings]
        self.names = tuple(dict.fromkeys(name for row in rows for name in row))
        if not self.names:
            raise InvalidInputError(
                "A sampler needs a curve set with parameters but "
                f"{curve_set.name} has no params and param_names."
            )
        self.points = np.column_stack([_coordinates(rows, name) for name in self.names])
        self._free = np.ones(len(rows), dtype=bool)

    @property
    def left(self) -> int:
        """Number of configurations not taken yet."""
        return int(self._free.sum())

    def take(self, suggestion: Mapping[str, float]) -> int:
        """Take the free configuration that is nearest to a suggestion.

        Args:
            suggestion: a coordinate for each parameter.

        Returns:
            Its index; of several equally near ones the first.
        """
        wanted = np.array([suggestion[name] for name in self.names])
        distances = ((self.points - wanted) ** 2).sum(axis=1)
        index = int(np.argmin(np.where(self._free, distances, np.inf)))
        self._free[index] = False
        return index


def _coordinates(rows: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Coordinates of one parameter; a configuration without it ranks first."""
    ranks = rankdata(_numbers([row.get(name) for row in rows]))
    return np.asarray((ranks - 1) / max(1, len(rows) - 1), dtype=np.float64)


def _numbers(values: Sequence[Any]) -> list[float]:
    known = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) for value in known):
        order = {text: float(i) for i, text in enumerate(sorted({str(value) for value in known}))}
        return [-math.inf if value is None else order[str(value)] for value in values]
    return [-math.inf if value is None or math.isnan(value) else float(value) for value in values]
