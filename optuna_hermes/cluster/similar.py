"""Prediction of a trial's device time from trials with similar parameters. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.model import TrialView

Numbers: TypeAlias = NDArray[np.float64]

# Number of nearest trials that a rolling estimate is the mean of.
NEAREST = 5
# Weight of the rolling estimate; the rest is that of the trees.
ROLLING = 0.1
# Number of trees of a fit.
TREES = 100

_TREE_SETTINGS: dict[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.1,
    "num_leaves": 15,
    "min_data_in_bin": 1,
    # The same rows give the same trees, on every machine: decisions have to be reproducible.
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "seed": 0,
    "verbosity": -1,
}


class Service:
    """Predicted device seconds of trials, learned from those that were trained to their end.

    The estimate is ``0.1 * rolling + 0.9 * trees``. The rolling one is that of the nearest trials
    by their parameters. Without LightGBM it is the only one.
    """

    def __init__(self, finished: Sequence[TrialView]) -> None:
        known = sorted(finished, key=lambda trial: trial.number)
        self._columns = _Columns([_params(trial) for trial in known])
        # Fitted to logarithms, since times differ by factors.
        self._logs = np.log([trial.attained_seconds for trial in known])
        self._trees = fit_trees(
            self._columns.known, self._logs, categories=self._columns.categories
        )
        # Keyed by identity, since parameters are immutable; the value keeps them alive, so that no
        # other object gets the same id.
        self._seen: dict[tuple[int, int], tuple[Mapping[str, Any], float]] = {}
        self.typical = median(self.of(known))

    def of(self, trials: Sequence[TrialView]) -> list[float]:
        """Predicted device seconds of each of some trials, over their whole life."""
        keys = [(id(trial.params), trial.devices_wanted) for trial in trials]
        new = {key: trial for key, trial in zip(keys, trials, strict=True) if key not in self._seen}
        if new:
            rows = self._columns.rows([_params(trial) for trial in new.values()])
            found = np.exp([self._logs[self._columns.nearest(row)].mean() for row in rows])
            if self._trees is not None:
                found = ROLLING * found + (1 - ROLLING) * np.exp(self._trees(rows))
            for (key, trial), seconds in zip(new.items(), found.tolist(), strict=True):
                self._seen[key] = (trial.params, seconds)
        return [self._seen[key][1] for key in keys]


def _params(trial: TrialView) -> dict[str, Any]:
    return {**trial.params, _DEVICES: trial.devices_wanted}


# Name of the column for the number of devices; no parameter can have it.
_DEVICES = "\0devices"


class _Columns:
    """Parameters as numbers: choices as codes, numbers plain, or as logarithms if they span far."""

    def __init__(self, known: Sequence[Mapping[str, Any]]) -> None:
        self._names = sorted({name for params in known for name in params})
        self._codes: list[dict[str, int] | None] = []
        self._logs: list[bool] = []
        for name in self._names:
            values = [params[name] for params in known if name in params]
            numbers = [value for value in values if _is_number(value)]
            codes = {text: code for code, text in enumerate(sorted({repr(v) for v in values}))}
            self._codes.append(None if len(numbers) == len(values) else codes)
            low, high = min(numbers, default=0.0), max(numbers, default=0.0)
            self._logs.append(low > 0 and high / low > _FAR)
        self.known = self.rows(known)
        finite = np.isfinite(self.known)
        high = np.where(finite, self.known, -np.inf).max(axis=0)
        low = np.where(finite, self.known, np.inf).min(axis=0)
        self._spans = np.where(high > low, high - low, 1.0)

    @property
    def categories(self) -> list[int]:
        return [column for column, codes in enumerate(self._codes) if codes is not None]

    def rows(self, wanted: Sequence[Mapping[str, Any]]) -> Numbers:
        """Parameters as rows; NaN where one is missing."""
        rows = np.full((len(wanted), len(self._names)), np.nan)
        for row, params in enumerate(wanted):
            for column, name in enumerate(self._names):
                if name in params:
                    rows[row, column] = self._number(column, params[name])
        return rows

    def nearest(self, row: Numbers) -> Sequence[int]:
        # With all that are as near as the last of them, so that their order means nothing.
        gaps = np.abs(self.known - row) / self._spans
        # Codes have no distance: two choices are alike or not.
        for column in self.categories:
            gaps[:, column] = np.where(np.isnan(gaps[:, column]), np.nan, gaps[:, column] != 0)
        missing = np.isnan(self.known) != np.isnan(row)
        gaps = np.where(missing, 1.0, np.where(np.isnan(gaps), 0.0, gaps))
        far = gaps.sum(axis=1)
        reach = np.partition(far, min(NEAREST, len(far)) - 1)[min(NEAREST, len(far)) - 1]
        return [int(index) for index in np.flatnonzero(far <= reach)]

    def _number(self, column: int, value: Any) -> float:
        codes = self._codes[column]
        if codes is not None:
            return float(codes.get(repr(value), len(codes)))  # one not seen before is like no other
        if not _is_number(value):
            return math.nan
        if self._logs[column]:
            return math.log(value) if value > 0 else math.nan
        return float(value)


# Positive numbers that span a larger factor are compared by their logarithms.
_FAR = 100.0


def _is_number(value: Any) -> bool:
    # True is an int to Python; as a parameter it is a choice.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def import_trees() -> None:
    """Import LightGBM, if it is installed: that takes a second, too long for a decision."""
    with suppress(ImportError):
        import lightgbm  # noqa: F401


def fit_trees(
    features: Numbers, targets: Numbers, *, categories: Sequence[int] = ()
) -> Callable[[Numbers], Numbers] | None:
    """Fit gradient boosted trees to features [rows, columns] and targets [rows]. Deterministic.

    ``categories`` are columns that hold codes of 0 or more. The result predicts targets from
    features; it is None without LightGBM (extra ``[qssf]``).
    """
    try:
        import lightgbm
    except ImportError:
        return None
    settings = {**_TREE_SETTINGS, "min_data_in_leaf": max(1, min(20, len(targets) // 10))}
    rows = lightgbm.Dataset(features, targets, categorical_feature=[*categories])
    booster = lightgbm.train(settings, rows, TREES)

    def predict(wanted: Numbers) -> Numbers:
        return np.asarray(booster.predict(wanted, num_threads=1), dtype=np.float64)

    return predict
