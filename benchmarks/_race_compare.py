"""Contestants of ``race.py`` beside each other: regret, speed-ups, intervals and tests. Pure.

A cell is a task with a seed. The regret of a value in its cell is 0 for the lowest value that any
contestant had there, 1 for the median of the first values of all configurations there, one each,
and never above 1: that of a contestant without any value, too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from _race_measure import Record
from numpy.typing import NDArray
from scipy.stats import wilcoxon

Array = NDArray[np.float64]
Cell = tuple[str, int]
Contests = Mapping[Cell, Mapping[str, Record]]
"""By cell and contestant."""

KINDS = ("any", "finished")
"""Of values: any, or those of trials that were trained to their end."""
OURS, REFERENCE = "hermes", "optuna"
N_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
"""Percentiles of the resamples."""
GRID = 200
"""Steps in time."""


class Steps:
    """The lowest value so far, as a function of time.

    Args:
        record: of the contestant.
        kind: of ``KINDS``.
        n_units: those of a finished trial.
    """

    def __init__(self, record: Record, kind: str, n_units: int) -> None:
        self.times: list[float] = []
        self.values: list[float] = []
        for value in record.values:
            if kind == "finished" and value.unit != n_units:
                continue
            if value.value < (self.values[-1] if self.values else math.inf):
                self.times.append(value.at)
                self.values.append(value.value)

    @property
    def best(self) -> float:
        return self.values[-1] if self.values else math.inf

    def at(self, times: Array) -> Array:
        """The lowest value at each time; infinite while there is none."""
        index = np.searchsorted(self.times, times, side="right")
        return np.array([math.inf, *self.values])[index]

    def reach(self, value: float) -> float | None:
        """Return the time of the first value as low as this one; None if there is none."""
        return next((t for t, v in zip(self.times, self.values, strict=True) if v <= value), None)


def scale(records: Iterable[Record]) -> tuple[float, float]:
    """The values whose regret is 0 and 1 in a cell."""
    lowest, first = math.inf, {}
    for record in records:
        for value in record.values:
            if math.isfinite(value.value):
                lowest = min(lowest, value.value)
            if value.unit == 1:
                first[json.dumps(dict(record.trials[value.trial]), sort_keys=True)] = value.value
    worst = [value if math.isfinite(value) else math.inf for value in first.values()]
    return lowest, statistics.median(worst) if worst else lowest


def regret(values: Array, bounds: tuple[float, float]) -> Array:
    low, high = bounds
    if not low < high < math.inf:  # nothing to compare with: only the lowest value has none
        return np.where(values <= low, 0.0, 1.0) if low < math.inf else np.ones(len(values))
    return np.clip((values - low) / (high - low), 0.0, 1.0)


def compare(contests: Contests, contestants: Sequence[str], n_units: int) -> dict[str, Any]:
    """All comparisons, by contestant."""
    bounds = {cell: scale(records.values()) for cell, records in contests.items()}
    grids = _grids(contests)
    ends = _end_regrets(contests, bounds, n_units)
    rows = {}
    for name in contestants:
        cells = [cell for cell, records in contests.items() if name in records]
        if not cells:
            continue
        weights = resample(cells)
        rows[name] = {
            "contests": len(cells),
            "curves": {
                f"{kind}, {origin}": _curve(
                    contests, bounds, cells, name, kind, origin, grid, weights, n_units
                )
                for kind in KINDS
                for origin, grid in grids.items()
            },
            "regret": {
                kind: _mean([ends[kind][cell, name] for cell in cells], weights) for kind in KINDS
            },
            "speed_up": {kind: _speed_up(contests, cells, name, kind, n_units) for kind in KINDS},
            "p": {kind: _p_value(ends[kind], cells, name) for kind in KINDS},
        }
    return {"grids": {origin: grid.tolist() for origin, grid in grids.items()}, "rows": rows}


def _grids(contests: Contests) -> dict[str, Array]:
    """Times from the start of the command, and as long as all have from their first batch."""
    records = [record for cell in contests.values() for record in cell.values()]
    budget = min(record.seconds for record in records)
    firsts = [record.first_batch for record in records if record.first_batch is not None]
    rest = budget - max(firsts, default=0.0)
    return {
        "from the start": np.linspace(0, budget, GRID + 1),
        "from the first batch": np.linspace(0, rest, GRID + 1),
    }


def _curve(
    contests: Contests,
    bounds: Mapping[Cell, tuple[float, float]],
    cells: Sequence[Cell],
    name: str,
    kind: str,
    origin: str,
    grid: Array,
    weights: Array,
    n_units: int,
) -> dict[str, list[float]]:
    rows = []
    for cell in cells:
        record = contests[cell][name]
        begun = (record.first_batch or 0.0) if origin == "from the first batch" else 0.0
        rows.append(regret(Steps(record, kind, n_units).at(grid + begun), bounds[cell]))
    resampled = np.percentile(weights @ np.array(rows), INTERVAL, axis=0)
    mean = np.mean(rows, axis=0)
    return {
        key: [round(float(each), 5) for each in values]
        for key, values in (("mean", mean), ("low", resampled[0]), ("high", resampled[1]))
    }


def _end_regrets(
    contests: Contests, bounds: Mapping[Cell, tuple[float, float]], n_units: int
) -> dict[str, dict[tuple[Cell, str], float]]:
    return {
        kind: {
            (cell, name): float(
                regret(np.array([Steps(record, kind, n_units).best]), bounds[cell])[0]
            )
            for cell, records in contests.items()
            for name, record in records.items()
        }
        for kind in KINDS
    }


def _speed_up(
    contests: Contests, cells: Sequence[Cell], name: str, kind: str, n_units: int
) -> dict[str, Any] | None:
    """Return the ratio of times, the reference's to a contestant's, to the reference's final best.

    One that never has it counts as if it had it at the end of the budget; so does the reference
    where it has no value at all, and any value is as good as its best.
    """
    cells = [cell for cell in cells if REFERENCE in contests[cell]]
    if not cells:
        return None
    logs, never = [], 0
    for cell in cells:
        reference = Steps(contests[cell][REFERENCE], kind, n_units)
        budget = contests[cell][name].seconds
        theirs = reference.reach(reference.best) if reference.values else budget
        ours = Steps(contests[cell][name], kind, n_units).reach(reference.best)
        never += ours is None
        logs.append(math.log((theirs or budget) / (budget if ours is None else ours)))
    found = _mean(logs, resample(cells))
    return {**{key: math.exp(value) for key, value in found.items()}, "never": never}


def _p_value(ends: Mapping[tuple[Cell, str], float], cells: Sequence[Cell], name: str) -> Any:
    """Wilcoxon's signed-rank test, one-sided: is our regret at the end lower than another's?"""
    pairs = [(ends[cell, OURS], ends[cell, name]) for cell in cells if (cell, OURS) in ends]
    if name == OURS or not pairs:
        return None
    if all(ours == theirs for ours, theirs in pairs):
        return 1.0
    ours, theirs = zip(*pairs, strict=True)
    return float(wilcoxon(ours, theirs, alternative="less", zero_method="zsplit").pvalue)


def resample(cells: Sequence[Cell]) -> Array:
    """Weights of the cells in each resample: tasks are drawn again, then the seeds of each."""
    rng = np.random.default_rng(0)
    tasks: dict[str, list[int]] = {}
    for index, (task, _) in enumerate(cells):
        tasks.setdefault(task, []).append(index)
    drawn = rng.multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), size=N_RESAMPLES)
    weights = np.zeros((N_RESAMPLES, len(cells)))
    for times, seeds in zip(drawn.T, tasks.values(), strict=True):
        # A task that is drawn so often has its seeds drawn as often.
        even = np.full(len(seeds), 1 / len(seeds))
        weights[:, seeds] = rng.multinomial(times * len(seeds), even)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _mean(values: Sequence[float], weights: Array) -> dict[str, float]:
    low, high = np.percentile(weights @ np.array(values), INTERVAL)
    return {"mean": statistics.fmean(values), "low": float(low), "high": float(high)}
