"""The tasks of ``race.py``, and one contest of them: what each process of a contestant is told."""

from __future__ import annotations

import importlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HERMES_RACE_CONTEST"
TASKS = {
    "digits": "_race_digits",
    "characters-gru": "_race_characters_gru",
    "characters-transformer": "_race_characters_transformer",
    "tabular": "_race_tabular",
    "boosting": "_race_boosting",
    "autoencoder": "_race_autoencoder",
    "ratings": "_race_ratings",
    "lines": "_race_lines",
    "marked": "_race_marked",
}
"""The module of each. Importing it loads the task's data."""
N_CHOSEN_ON = 5
"""So many of them, the first ones, are those that policy and sampler were chosen on."""
UNITS = 27
"""Of every trial."""
N_FIRST = 10
"""Configurations that are the same for all contestants: as many as TPE draws at random."""

Params = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One contestant on one task with one seed."""

    task: str
    seed: int
    contestant: str
    devices: int  # that its trials may train on at once
    seconds: float  # of its budget, from ``begun``
    unit_seconds: float  # that a unit takes
    folder: str  # for its files, its alone
    begun: float = 0.0  # when its command was started

    @property
    def name(self) -> str:
        return f"{self.task}-{self.seed}-{self.contestant}"

    @property
    def storage(self) -> str:
        return f"sqlite:///{Path(self.folder, 'study.db')}"

    @property
    def ends(self) -> float:
        return self.begun + self.seconds

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def of_environment() -> Contest:
        return Contest(**json.loads(os.environ[VARIABLE]))


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that a parameter may have: numbers, whole ones, or spread by their logarithm."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def clean(self, value: float) -> int | float:
        """As a plain Python number: equal for all contestants, also in JSON."""
        return int(value) if self.whole else float(value)


Space = Mapping[str, Range]


def load_task(name: str) -> Any:
    return importlib.import_module(TASKS[name])


def suggest(space: Space, trial: Any) -> dict[str, Any]:
    """A configuration out of Optuna's trial."""
    return {
        name: trial.suggest_int(name, int(each.low), int(each.high), log=each.log)
        if each.whole
        else trial.suggest_float(name, each.low, each.high, log=each.log)
        for name, each in space.items()
    }


def first_configurations(space: Space, contest: Contest) -> list[dict[str, Any]]:
    """Those that every contestant begins with: a function of task and seed."""
    import numpy as np

    rng = np.random.default_rng([zlib.crc32(contest.task.encode()), contest.seed])
    return [{name: draw(each, rng) for name, each in space.items()} for _ in range(N_FIRST)]


def draw(each: Range, rng: Any) -> int | float:
    import numpy as np

    low, high = each.low, each.high + (1 if each.whole else 0)
    value = float(
        np.exp(rng.uniform(np.log(low), np.log(high))) if each.log else rng.uniform(low, high)
    )
    return each.clean(min(max(value, each.low), each.high))


def digest(params: Params) -> int:
    """A number of the parameters alone: the seed of their curve."""
    return zlib.crc32(json.dumps(dict(params), sort_keys=True).encode())
