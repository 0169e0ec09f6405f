"""Suspend and resume an XGBoost training between any two rounds."""

from __future__ import annotations

import functools
import json
from typing import Any

from optuna_hermes._extras import extra

with extra("xgboost"):
    import xgboost
    from xgboost.callback import TrainingCallback

    from optuna_hermes._boosting import RoundsCallback, untold, watched


_HIGHER = frozenset({"auc", "aucpr", "map", "ndcg", "pre"})
"""XGBoost's metrics that are better higher; of a metric of one's own nobody knows."""
_LOWER = frozenset({"error", "logloss", "mae", "mape", "merror", "mlogloss", "rmse", "rmsle"})


class HermesCallback(RoundsCallback, TrainingCallback):
    """Reports a trial every few rounds, and lets other trials have its device between rounds.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    as if nothing had happened, in this process or in another one: with the same trees, bit for
    bit on a CPU. Under plain Optuna the callback reports to the trial and asks the study's pruner.

    Rows and columns are drawn from the seed and the number of the round (``seed_per_iteration``),
    so that a resumed trial draws the same ones.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        monitor: name of an evaluated value, the data's and the metric's: ``"valid-logloss"``.
        report_interval: number of rounds in one unit of the trial.

    Raises:
        MonitorError: in training, when there is no value of this name.
        InvalidInputError: in training, when the study optimizes it in the wrong direction.

    Example:
        ```python
        def objective(trial):
            params = {"eta": trial.suggest_float("eta", 0.01, 0.3, log=True), "nthread": 1}
            hermes = HermesCallback(trial, "valid-logloss")
            xgboost.train(params, train, 200, evals=[(valid, "valid")], callbacks=[hermes])
            return hermes.value
        ```
    """

    def before_training(self, model: Any) -> Any:
        """Hook into the booster."""
        self._single(model, xgboost.Booster)
        rounds = self._rounds
        self._training = rounds.begin_training(
            self._monitor,
            self._interval,
            lambda: bytes(xgboost.Booster.save_raw(model, "ubj")),
            _why_not_stored(model),
        )
        watched[model] = rounds
        # The class of this very object: the training calls its update and eval_set.
        model.__class__ = _Watched
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Yield the device if asked to."""
        rounds = self._rounds
        if epoch == 0:
            model.set_param({"seed_per_iteration": True})
        rounds.begin_round(epoch)
        if rounds.recorded(epoch) is None:
            # Columns are sampled by a generator that is not saved with a model. Loading the
            # configuration makes it anew, from the seed of the round, also without a suspension.
            model.load_config(model.save_config())
        return False

    def after_training(self, model: Any) -> Any:
        """Remove the hooks from the booster."""
        watched.pop(model, None)
        untold.pop(model, None)
        vars(model).pop("_evaluated", None)
        model.__class__ = xgboost.Booster
        self._rounds.end_training()
        self._rounds.leave()
        return model


class _Watched(xgboost.Booster):
    """A booster that replays the rounds it already has, without training them.

    Asked by other callbacks meanwhile, it answers as it did after the round that is replayed.
    """

    _evaluated = True

    def update(self, dtrain: Any, iteration: int, fobj: Any = None) -> None:
        rounds = watched.get(self)
        if rounds is None or rounds.recorded(iteration) is None:
            super().update(dtrain, iteration, fobj)
        else:
            # Not earlier: other callbacks count a model's rounds before its training.
            if iteration == 0 and rounds.model is not None:
                _go_on(self, rounds.model)
            untold[self] = rounds.recorded_from(iteration + 1)
        self._evaluated = False

    def eval_set(self, evals: Any, iteration: int = 0, *args: Any, **kwargs: Any) -> str:
        rounds = watched.get(self)
        # The training itself calls it once after each round; others are other callbacks' calls.
        if rounds is None or self._evaluated:
            return str(xgboost.Booster.eval_set(self._as_told(), evals, iteration, *args, **kwargs))
        self._evaluated = True
        recorded = rounds.recorded(iteration)
        if recorded is not None:
            return str(recorded)
        said = str(super().eval_set(evals, iteration, *args, **kwargs))
        values = _values(said)
        for name in values:
            metric = _metric(name)
            if metric in _HIGHER or metric in _LOWER:
                rounds.check_direction(name, metric in _HIGHER)
        rounds.end_round(said, values)
        return said

    def num_boosted_rounds(self) -> int:
        return int(super().num_boosted_rounds()) - untold.get(self, 0)

    def _as_told(self) -> xgboost.Booster:
        """This booster as it was after the round that is replayed; else itself."""
        rounds, left = watched.get(self), untold.get(self, 0)
        if not left or rounds is None:
            return self
        kind = _kind(self)
        if kind != "gbtree":  # later rounds change the earlier ones
            rounds.warn_of_uncut(kind)
            return self
        told = self[: self.num_boosted_rounds()]
        told.set_attr(**self.attributes())
        return told


def _of_told(name: str) -> Any:
    method = getattr(xgboost.Booster, name)

    @functools.wraps(method)
    def of_told(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        return method(self._as_told(), *args, **kwargs)

    return of_told


for _name in (
    *("predict", "inplace_predict", "get_dump", "get_score"),
    *("save_model", "save_raw", "__getstate__"),  # the last one is that of copies, too
):
    setattr(_Watched, _name, _of_told(_name))


def _kind(model: xgboost.Booster) -> str:
    """The kind of a booster: ``gbtree``, ``gblinear`` or ``dart``."""
    booster = json.loads(model.save_config())["learner"]["gradient_booster"]
    dropout = booster.get("dart_train_param", {})
    # Since XGBoost 3.4 trees with dropout are no kind of their own.
    drops = any(float(dropout.get(each, 0)) for each in ("rate_drop", "one_drop"))
    return "dart" if drops else str(booster["name"])


def _go_on(model: xgboost.Booster, saved: bytes) -> None:
    """Load a saved model into a booster that is in training, and keep that one's parameters."""
    config = json.loads(model.save_config())
    attributes = model.attributes()
    model.load_model(bytearray(saved))  # resets parameters that are not saved with a model
    model.set_attr(**{**dict.fromkeys(model.attributes()), **attributes})  # others are set again
    loaded = json.loads(model.save_config())
    for of_model, present in zip(_of_model(config), _of_model(loaded), strict=True):
        of_model.update(present)
    model.load_config(json.dumps(config))


def _of_model(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a configuration that describe the model itself."""
    learner = config["learner"]
    booster = learner["gradient_booster"]
    trees = booster.get("gbtree", booster).get("gbtree_model_param", {})  # linear ones have none
    return [learner["learner_model_param"], trees]


def _values(said: str) -> dict[str, float]:
    """The values in a line as XGBoost prints it: ``[7]\\ttrain-logloss:0.4\\tvalid-auc:0.9``."""
    pairs = (part.rpartition(":") for part in said.split("\t")[1:])
    return {name: float(value) for name, _, value in pairs}


def _metric(name: str) -> str:
    """The metric of a value: ``ndcg`` for ``valid-ndcg@5-``."""
    return name.removesuffix("-").rpartition("-")[2].partition("@")[0]


def _why_not_stored(model: xgboost.Booster) -> str | None:
    """The reason why a booster cannot be resumed exactly, None if it can."""
    objective = json.loads(model.save_config())["learner"]["objective"]
    if objective.get("lambdarank_param", {}).get("lambdarank_unbiased") == "1":
        return "lambdarank_unbiased keeps what it has learned of positions"
    return None
