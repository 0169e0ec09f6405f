"""Proposals: the point of a search space that may end best, by a process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optuna_hermes.curves import Floats, Places
from optuna_hermes.surrogate._process import Process

N_UNIFORM = 256
N_NEAR = 256
N_CENTRES = 8
"""Points of the most promising trials, which candidates lie near."""
ROUNDS = 3
"""Rounds of candidates: those after the first lie near its best ones, ever nearer."""
_MUTATED = 0.6
"""Share of its coordinates in which a candidate differs from its centre."""
_STEPS = 0.05, 0.15
_REFINED = 0.04


class Cube:
    """Unit cube with a column for each number, and one for each value of a choice.

    Args:
        choices: the columns of each choice, of which one is 1 and the others 0.
        n_columns: number of all columns.
    """

    def __init__(self, choices: Sequence[Places], n_columns: int) -> None:
        self._choices = choices
        chosen = {int(column) for columns in choices for column in columns}
        self._numbers = np.array([c for c in range(n_columns) if c not in chosen], dtype=np.int64)
        self._n_columns = n_columns

    def draw(self, n: int, rng: np.random.Generator) -> Floats:
        """Draw points, uniformly [n, d]."""
        points = np.zeros((n, self._n_columns))
        points[:, self._numbers] = rng.random((n, len(self._numbers)))
        for columns in self._choices:
            points[np.arange(n), rng.choice(columns, n)] = 1.0
        return points

    def near(self, centres: Floats, steps: Floats, rng: np.random.Generator) -> Floats:
        """Draw a point near each centre [n, d], with deviations of so much in a column [n]."""
        points: Floats = centres.copy()
        shape = len(points), len(self._numbers)
        moved = rng.normal(size=shape) * steps[:, None] * (rng.random(shape) < _MUTATED)
        # Reflected at the borders, beyond which there is nothing.
        numbers = np.abs(points[:, self._numbers] + moved)
        points[:, self._numbers] = np.clip(np.where(numbers > 1, 2 - numbers, numbers), 0.0, 1.0)
        for columns in self._choices:
            other = np.flatnonzero(rng.random(len(points)) < _MUTATED / (1 + len(self._choices)))
            points[np.ix_(other, columns)] = 0.0
            points[other, rng.choice(columns, len(other))] = 1.0
        return points


def propose(
    process: Process,
    known: Floats,
    end: float,
    cube: Cube,
    rng: np.random.Generator,
    *,
    anywhere: bool = False,
) -> Floats:
    """Candidates in the order of the process's lower bound at the end, the lowest first [m, d].

    Args:
        process: of values, lower is better.
        known: the points of the trials that have begun [k, d].
        end: the logarithmic age that counts.
        cube: that candidates are points of.
        rng: source of all random numbers.
        anywhere: True for candidates that are drawn uniformly, none of them near known points.
    """
    points = cube.draw(N_UNIFORM, rng)
    if anywhere:
        return _ordered(points, process.lower_bound(points, end))
    foreseen = process.predict(known, end)[0]
    best = known[np.argsort(foreseen, kind="stable")[:N_CENTRES]]
    centres = best[rng.integers(len(best), size=N_NEAR)]
    points = np.vstack([points, cube.near(centres, rng.choice(_STEPS, N_NEAR), rng)])
    bounds = process.lower_bound(points, end)
    for each in range(1, ROUNDS):
        top = _ordered(points, bounds)[:N_CENTRES]
        centres = top[rng.integers(len(top), size=N_NEAR // 2)]
        more = cube.near(centres, np.full(len(centres), _REFINED / each), rng)
        points = np.vstack([points, more])
        bounds = np.append(bounds, process.lower_bound(more, end))
    return _ordered(points, bounds)


def _ordered(points: Floats, bounds: Floats) -> Floats:
    return np.asarray(points[np.argsort(bounds, kind="stable")])
