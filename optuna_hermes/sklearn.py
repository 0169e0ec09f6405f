"""Suspend and resume a loop over scikit-learn's ``partial_fit`` between any two calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from optuna_hermes._extras import extra
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.suspend import Session

with extra("sklearn"):
    import sklearn.base

    from optuna_hermes.cooperative import session_of
    from optuna_hermes.pytorch import PyTorchLoop
    from optuna_hermes.suspend._values._objects import Objects

_GENERATORS = (np.random.RandomState, np.random.Generator)


def suspendable(trial: Any, /, **named: Any) -> PyTorchLoop:
    """Let other trials have the device between two calls of ``partial_fit``.

    As ``optuna_hermes.pytorch.suspendable``, which has the same ``epochs``, ``batches``, ``report``
    and ``kept``, for estimators of scikit-learn and random generators of NumPy.

    A trial resumed in another process begins its objective again. This call restores the attributes
    of the estimators that the objective has made: arrays, plain values, and objects of classes of
    their own package. Nothing is unpickled.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        named: all objects that the loop changes, by names of your choice: estimators, scalers,
            random generators, and anything else with ``state_dict`` and ``load_state_dict``.

    Raises:
        InvalidInputError: an object is none of these, or this is the trial's second call.
        CheckpointError: the trial's checkpoints cannot be used.

    Example:
        ```python
        def objective(trial):
            model = SGDClassifier(alpha=trial.suggest_float("alpha", 1e-6, 1e-1, log=True))
            rng = np.random.default_rng(0)
            run = suspendable(trial, model=model, rng=rng)
            for epoch in run.epochs(30):
                for batch in run.batches(np.array_split(rng.permutation(len(x)), 20)):
                    model.partial_fit(x[batch], y[batch], classes=classes)
                run.report(model.score(x_valid, y_valid))
            return run.value
        ```
    """
    return make_loop(trial, named, session_of(trial))


def make_loop(trial: Any, named: dict[str, Any], session: Session | None) -> PyTorchLoop:
    """Make a loop as ``suspendable`` does, with a given session."""
    given = {name: _kept(name, each) for name, each in named.items() if each is not None}
    return PyTorchLoop(trial, given, session)


def _kept(name: str, each: Any) -> Any:
    if isinstance(each, (sklearn.base.BaseEstimator, *_GENERATORS)):
        return Objects(name, each)
    if hasattr(each, "state_dict"):
        return each
    raise InvalidInputError(
        f"suspendable({name}=...) must be an estimator of scikit-learn, a generator of NumPy, or "
        f"have state_dict() and load_state_dict(), but is of {type(each).__name__}."
    )
