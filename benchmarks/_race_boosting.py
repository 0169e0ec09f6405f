"""A task of ``race.py``: LightGBM on a made-up table; a unit is a group of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from _race_tasks import UNITS, Params, Range
from _race_watch import Watch

KIND = "lightgbm"
METRIC = "loss"
MONITOR = f"valid_0-{METRIC}"
ROUNDS = 5
"""In a unit."""
N_FEATURES = 16
N_TRAINED = 1500
N_HELD_OUT = 1000
WRONG = 0.15
"""Share of the labels that are wrong."""
SPACE = {
    "learning_rate": Range(low=0.005, high=1.0, log=True),
    "num_leaves": Range(low=2, high=64, log=True, whole=True),
    "min_data_in_leaf": Range(low=1, high=200, log=True, whole=True),
    "lambda_l2": Range(low=1e-3, high=100.0, log=True),
    "path_smooth": Range(low=0.01, high=100.0, log=True),
}
"""None that draws random numbers: their seeds would be the callback's, not the parameters'."""


def _table() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N_TRAINED + N_HELD_OUT, N_FEATURES))
    score = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + x[:, 3:7].sum(axis=1) / 2
    return x, (score > 0) ^ (rng.random(len(x)) < WRONG)


_x, _y = _table()


def n_batches(params: Params) -> int:
    return ROUNDS


class Paced:
    """The trial's watch: a round is a batch, which ends with its evaluation."""

    before_iteration = True

    def __init__(self, watch: Watch) -> None:
        self.order = 1  # after a callback that waits for a device; LightGBM reads no class's order
        self._watch = watch
        self._round = 0
        self._begun = 0.0

    def __call__(self, env: Any) -> None:
        self._round = env.iteration + 1
        self._begun = time.time()

    def evaluate(self, predicted: Any, data: lightgbm.Dataset) -> tuple[str, float, bool]:
        """The logarithmic loss, once the round has taken as long as it should."""
        likely = np.clip(np.where(_y[N_TRAINED:], predicted, 1 - predicted), 1e-7, 1.0)
        value = float(-np.log(likely).mean())
        unit, over = divmod(self._round, ROUNDS)
        self._watch.end_batch(unit + (over > 0), self._begun)
        if not over:
            self._watch.value(unit, value)
        return METRIC, value, False


class Reported:
    """Passes on each unit's value, and a function that saves the training into a folder."""

    def __init__(self, report: Callable[[float, Callable[[Path], None]], object]) -> None:
        self._report = report

    def __call__(self, env: Any) -> None:
        if (env.iteration + 1) % ROUNDS == 0:
            ((_, _, value, _),) = env.evaluation_result_list
            self._report(value, lambda folder: env.model.save_model(folder / "model.txt"))


def boost(
    params: Params, watch: Watch, callbacks: Sequence[Any], resumed: Path | None = None
) -> None:
    train = lightgbm.Dataset(_x[:N_TRAINED], _y[:N_TRAINED], free_raw_data=False)
    valid = train.create_valid(_x[N_TRAINED:], _y[N_TRAINED:])
    fixed = {
        "objective": "binary", "metric": "none", "num_threads": 1, "force_row_wise": True,
        "deterministic": True, "verbosity": -1,
    }  # fmt: skip
    before = None if resumed is None else lightgbm.Booster(model_file=resumed / "model.txt")
    done = 0 if before is None else before.current_iteration()
    paced = Paced(watch)
    lightgbm.train(
        {**fixed, **params}, train, ROUNDS * UNITS - done, valid_sets=[valid],
        feval=paced.evaluate, callbacks=[paced, *callbacks], init_model=before,
    )  # fmt: skip
