"""Trials proposed by a real Optuna sampler, and pruned by Optuna's pruners, on recordings."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler
from scipy.stats import rankdata

from optuna_hermes import _optuna
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Snapshot, TrialView, Unstarted
from optuna_hermes.simulator import CurveSet, Recording, Source
from optuna_hermes.simulator.rivals import StopPolicy


class Pool:
    """The trainings of a curve set as points of a cube, each to be taken once.

    Raises:
        InvalidInputError: the set has no parameters.
    """

    def __init__(self, curve_set: CurveSet) -> None:
        rows = [recording.params for recording in curve_set.recordings]
        self.names = tuple(dict.fromkeys(name for row in rows for name in row))
        if not self.names:
            raise InvalidInputError(
                "A sampler needs a curve set with parameters but "
                f"{curve_set.name} has no params and param_names."
            )
        # Ranks, scaled to [0, 1]: so a sampler needs neither scales nor choices of parameters.
        ranks = [rankdata(_numbers([row.get(name) for row in rows])) for name in self.names]
        self.points = (np.column_stack(ranks) - 1) / max(1, len(rows) - 1)
        self._free = np.ones(len(rows), dtype=bool)

    @property
    def left(self) -> int:
        return int(self._free.sum())

    def take(self, suggestion: Mapping[str, float]) -> int:
        """Take the free configuration nearest to a suggestion, the first of equals: its index."""
        wanted = np.array([suggestion[name] for name in self.names])
        distances = ((self.points - wanted) ** 2).sum(axis=1)
        index = int(np.argmin(np.where(self._free, distances, np.inf)))
        self._free[index] = False
        return index


def _numbers(values: Sequence[Any]) -> list[float]:
    # A configuration without the parameter ranks first.
    known = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) for value in known):
        order = {text: float(i) for i, text in enumerate(sorted({str(value) for value in known}))}
        return [-math.inf if value is None else order[str(value)] for value in values]
    return [-math.inf if value is None or math.isnan(value) else float(value) for value in values]


SAMPLERS = (
    "TPESampler",
    "RandomSampler",
    "QMCSampler",
    "GPSampler",
    "CmaEsSampler",
    "NSGAIISampler",
    "surrogate",
)
"""Samplers that need no more than a seed to propose points of a cube; all but one are Optuna's."""

# Packages that a sampler of Optuna imports only at its first proposal.
_NEEDS = {"GPSampler": "torch", "CmaEsSampler": "cmaes"}


class Proposals(Source):
    """Source of trials from an empty study in memory: opened by ``ask``, ended by ``tell``.

    The study's pruner would prune the trials whose numbers are in ``to_prune``.
    """

    def __init__(self, curve_set: CurveSet, study: optuna.Study) -> None:
        self._recordings = curve_set.recordings
        self._pool = Pool(curve_set)
        self._study = study
        self._trials: dict[int, optuna.Trial] = {}
        self._last: dict[int, float] = {}
        self.to_prune: set[int] = set()

    @property
    def unstarted(self) -> Unstarted:
        return Unstarted(count=self._pool.left)

    def open(self, number: int) -> Recording:
        trial = self._study.ask()
        self._trials[number] = trial
        suggestion = {name: trial.suggest_float(name, 0.0, 1.0) for name in self._pool.names}
        index = self._pool.take(suggestion)
        # An objective trains what was suggested; here the sampler is told what is trained.
        point = self._pool.points[index].tolist()
        _optuna.replace_params(trial, dict(zip(self._pool.names, point, strict=True)))
        return self._recordings[index]

    def reported(self, number: int, unit: int, value: float) -> None:
        trial = self._trials[number]
        trial.report(value, unit)
        self._last[number] = value
        if trial.should_prune():
            self.to_prune.add(number)

    def ended(self, number: int, *, pruned: bool) -> None:
        trial = self._trials.pop(number)
        if pruned:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        value = self._last.pop(number)
        # As ``study.optimize`` does, which takes an objective's NaN for a failure.
        if math.isnan(value):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Create one of ``SAMPLERS``, with its default settings.

    Raises:
        InvalidInputError: there is no such sampler, or it needs a package that is not installed.
    """
    if name == "HermesSampler":  # whose own sampler it is
        name = "surrogate"
    if name not in SAMPLERS:
        raise InvalidInputError(f"A sampler must be one of {', '.join(SAMPLERS)} but got {name!r}.")
    if name == "surrogate":
        return _optuna.SurrogateSampler(seed)
    package = _NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise InvalidInputError(f"{name} needs a package of its own: pip install {package}.")
    sampler: BaseSampler = getattr(optuna.samplers, name)(seed=seed)
    return sampler


# The reduction factors are those of the rivals of these names.
PRUNERS: Mapping[str, Callable[[int], BasePruner]] = {
    "median-stop": lambda units: MedianPruner(),
    "asha-stop": lambda units: SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    "hyperband-stop": lambda units: HyperbandPruner(
        min_resource=1, max_resource=units, reduction_factor=3
    ),
}
"""Makers of the pruners by the names of their policies, from the units of a full training."""


class OptunaPruning(StopPolicy):
    """First in, first out, with the trials pruned that Optuna's pruner would prune."""

    def __init__(self, to_prune: set[int]) -> None:
        # The caller adds to the set as trials report.
        self._to_prune = to_prune

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        parked = {trial.number for trial in snapshot.trials if trial.state == "parked"}
        return parked & self._to_prune
