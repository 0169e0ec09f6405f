"""``HermesSampler``, the sampler of a study whose trials are suspended and resumed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes import _optuna
from optuna_hermes.broker import sessions
from optuna_hermes.errors import InvalidInputError, ObjectiveError, require
from optuna_hermes.policies import check_policy

DEVICES_VARIABLE = "OPTUNA_HERMES_DEVICES"


class HermesSampler(BaseSampler):
    """Sampler for studies whose trials are suspended and resumed; it may wrap another one.

    By itself it proposes by a Gaussian process over parameters and age, which foresees from partial
    curves how trials end. Optuna's TPE proposes what that cannot: parameters that only some trials
    have, and those of studies with several objectives or constraints. It also proposes every third
    trial, since it errs in other ways.

    It shows the sampler that proposes, or the one that it wraps, suspended trials at their last
    value. Such a trial is RUNNING in Optuna's database, and samplers take a RUNNING trial for a bad
    one or ignore it. Through this one they see it as COMPLETE at the last value that it reported.

    Together with ``HermesPruner`` it also makes each trial of a plain ``study.optimize`` wait for
    its first lease of a device, before anything is suggested: so a proposal uses all that is known
    when its training begins. With another pruner it only samples.

    Args:
        base: the sampler that proposes, any of Optuna's; the Gaussian process if None.
        seed: of the random numbers of the Gaussian process; ``base`` has its own, which has no
            effect under ``optimize``. That takes this one for a study that has no seed yet.
        devices: as ``--devices``: the devices of a broker that is started for this study. ``auto``
            takes a running broker as it is. The default is ``$OPTUNA_HERMES_DEVICES``, or
            ``auto``.
        policy: as ``--policy``, for a plain ``study.optimize``; ``optimize`` has its own.
        slice_seconds: least length of a slice, likewise.

    Raises:
        InvalidInputError: ``slice_seconds`` is negative or not finite, ``devices`` no text,
            ``policy`` unknown, ``base`` no sampler, or ``seed`` no seed or given beside it.

    Example:
        >>> import optuna
        >>> from optuna_hermes import HermesSampler
        >>> study = optuna.create_study(sampler=HermesSampler())
        >>> study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=3)
        >>> len(study.trials)
        3
    """

    def __init__(
        self,
        base: BaseSampler | None = None,
        *,
        seed: int | None = None,
        devices: str | None = None,
        policy: str = "hermes",
        slice_seconds: float = 1.0,
    ) -> None:
        if not 0.0 <= slice_seconds < math.inf:
            raise InvalidInputError(
                "slice_seconds must be a finite number of seconds, 0 or more, but got "
                f"{slice_seconds}."
            )
        self.base = _base(base, seed)
        """The sampler that proposes."""
        self.seed = seed
        """The seed that it was given."""
        check_policy(policy)
        devices_text(devices)
        self.devices = devices
        """The devices that it was given."""
        self._policy = policy
        self._slice_seconds = float(slice_seconds)  # one of NumPy's is not sent to a broker

    @property
    def terms(self) -> _optuna.SharingTerms:
        """The broker's devices, policy and slice length for a plain ``study.optimize``."""
        return _optuna.SharingTerms(
            devices=devices_text(self.devices),
            policy=self._policy,
            slice_seconds=self._slice_seconds,
        )

    def reseed_rng(self) -> None:
        """Delegate to the base sampler."""
        self.base.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Delegate, with the study as this class shows it."""
        _optuna.read_anew(study, trial._trial_id)
        return self.base.infer_relative_search_space(_optuna.StudyView(study), trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Delegate, with the study as this class shows it."""
        # Optuna infers the space before 4.6 when a trial is asked for: of a batch all first.
        _optuna.read_anew(study, trial._trial_id)
        return self.base.sample_relative(_optuna.StudyView(study), trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Delegate, with the study as this class shows it."""
        return self.base.sample_independent(
            _optuna.StudyView(study), trial, param_name, param_distribution
        )

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Wait for the first lease of a trial of a plain ``study.optimize``, then delegate."""
        if sessions.importing:
            raise ObjectiveError(
                "study.optimize() was called while a worker imported the objective's file: put the "
                'call under `if __name__ == "__main__":`.'
            )
        # Before anything is suggested: the proposal uses all that is known when training begins.
        if _optuna.begin_trial(study, trial, self.terms):
            self.base.before_trial(_optuna.StudyView(study), trial)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Delegate, then give the device back."""
        try:
            self.base.after_trial(_optuna.StudyView(study), trial, state, values)
        finally:
            # Also if the base sampler raises: the device must not stay with a trial that is over.
            _optuna.end_trial(study, trial, state)


def _base(given: BaseSampler | None, seed: int | None) -> BaseSampler:
    if given is None:
        require(
            seed is None or (isinstance(seed, Integral) and 0 <= seed < 2**32),
            f"seed must be a whole number from 0 to {2**32 - 1}",
            seed,
            "leave it out for one that is drawn",
        )
        return _optuna.SurrogateSampler(seed)
    require(
        isinstance(given, BaseSampler),
        "base must be a sampler of Optuna or None",
        given,
        "write a call, such as TPESampler()",
    )
    if seed is not None:
        raise InvalidInputError(f"seed must be given to {type(given).__name__} where base is.")
    return given


def seed_of(sampler: BaseSampler) -> int | None:
    """The seed of a ``HermesSampler``, also within other samplers; None if there is none."""
    ours = (each.seed for each in _optuna.nested(sampler) if isinstance(each, HermesSampler))
    return next((seed for seed in ours if seed is not None), None)


def devices_of(sampler: BaseSampler) -> str | None:
    """The devices given to a ``HermesSampler``, also within others; None if there are none."""
    ours = (each.devices for each in _optuna.nested(sampler) if isinstance(each, HermesSampler))
    return next((devices for devices in ours if devices is not None), None)


def devices_text(given: object) -> str:
    """The devices as for ``--devices``; if None, ``$OPTUNA_HERMES_DEVICES``, else ``auto``.

    Raises:
        InvalidInputError: they are no text, such as a Trainer's number of devices.
    """
    if given in (None, ""):
        given = os.environ.get(DEVICES_VARIABLE) or "auto"
    if not isinstance(given, str):
        raise InvalidInputError(
            'devices must be a text such as "auto", "cpu:2" or "GPU-uuid,GPU-uuid" but got '
            f"{given!r}."
        )
    return given
