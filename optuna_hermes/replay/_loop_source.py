"""Trials proposed by a real Optuna sampler, trained by replaying the nearest recording."""

from __future__ import annotations

import importlib.util
import math

import optuna
from optuna.samplers import BaseSampler

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Unstarted
from optuna_hermes.replay._pool import Pool
from optuna_hermes.simulator import CurveSet, Recording, Source

SAMPLERS = (
    "TPESampler",
    "RandomSampler",
    "QMCSampler",
    "GPSampler",
    "CmaEsSampler",
    "NSGAIISampler",
)
"""Optuna's samplers that need no more than a seed to propose points of a cube."""

_NEEDS = {"GPSampler": "torch", "CmaEsSampler": "cmaes"}
"""Packages that a sampler of Optuna imports only at its first proposal."""


class Proposals(Source):
    """Source of trials from a study in memory: opened by ``ask``, ended by ``tell``.

    Args:
        curve_set: the pool of configurations, with parameters.
        study: an empty study that minimises; its pruner is called after each report.

    Attributes:
        condemned: numbers of the trials that the study's pruner would prune.
    """

    def __init__(self, curve_set: CurveSet, study: optuna.Study) -> None:
        self._recordings = curve_set.recordings
        self._pool = Pool(curve_set)
        self._study = study
        self._trials: dict[int, optuna.Trial] = {}
        self._last: dict[int, float] = {}
        self.condemned: set[int] = set()

    @property
    def unstarted(self) -> Unstarted:
        """The rest of the pool, as proposals of a sampler that learns."""
        return Unstarted(count=self._pool.left)

    def open(self, number: int) -> Recording:
        """Ask for a trial, and take the configuration that is nearest to it."""
        trial = self._study.ask()
        self._trials[number] = trial
        suggestion = {name: trial.suggest_float(name, 0.0, 1.0) for name in self._pool.names}
        return self._recordings[self._pool.take(suggestion)]

    def reported(self, number: int, unit: int, value: float) -> None:
        """Report as an objective does, and call the pruner."""
        trial = self._trials[number]
        trial.report(value, unit)
        self._last[number] = value
        if trial.should_prune():
            self.condemned.add(number)

    def ended(self, number: int, *, pruned: bool) -> None:
        """End the trial as ``study.optimize`` does: one that ends at NaN has failed."""
        trial = self._trials.pop(number)
        if pruned:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        value = self._last.pop(number)
        if math.isnan(value):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Create one of Optuna's samplers, with its default settings.

    Args:
        name: one of ``SAMPLERS``.
        seed: seed of its random numbers.

    Raises:
        InvalidInputError: there is no such sampler, or it needs a package that is not installed.
    """
    if name not in SAMPLERS:
        raise InvalidInputError(f"A sampler must be one of {', '.join(SAMPLERS)} but got {name!r}.")
    package = _NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise InvalidInputError(f"{name} needs a package of its own: pip install {package}.")
    sampler: BaseSampler = getattr(optuna.samplers, name)(seed=seed)
    return sampler
