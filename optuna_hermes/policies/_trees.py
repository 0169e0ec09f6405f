"""Gradient boosted trees, where LightGBM is installed (extra ``[qssf]``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

TREES = 100

_SETTINGS: dict[str, Any] = {
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


def fit_trees(
    features: Numbers, targets: Numbers, *, categories: Sequence[int] = ()
) -> Callable[[Numbers], Numbers] | None:
    """Fit a regression to rows of features. Deterministic.

    Args:
        features: [rows, columns]; NaN is unknown.
        targets: [rows].
        categories: columns that hold codes of categories, 0 or more.

    Returns:
        A function that predicts [rows] from features, or None without LightGBM.
    """
    try:
        import lightgbm
    except ImportError:
        return None
    settings = {**_SETTINGS, "min_data_in_leaf": max(1, min(20, len(targets) // 10))}
    rows = lightgbm.Dataset(features, targets, categorical_feature=[*categories])
    booster = lightgbm.train(settings, rows, TREES)

    def predict(wanted: Numbers) -> Numbers:
        return np.asarray(booster.predict(wanted, num_threads=1), dtype=np.float64)

    return predict
