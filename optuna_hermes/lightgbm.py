"""Suspend and resume a LightGBM training between any two rounds."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optuna_hermes._extras import extra
from optuna_hermes.suspend._state import trial_seed

with extra("lightgbm"):
    import lightgbm
    from lightgbm.basic import EvalResult, _InnerPredictor
    from lightgbm.callback import CallbackEnv

    from optuna_hermes._boosting import RoundsCallback, Training, untold, watched

log = logging.getLogger(__name__)

_RARELY = 1 << 20
"""A ``bagging_freq`` that is never reached: rows are only drawn when parameters change."""

_IS_PREDICTED = "_Booster__is_predicted_cur_iter"
"""For each of its data, True if the booster has its predictions: LightGBM's private name."""

_INEXACT = {
    "boosting": ("gbdt", "changes earlier trees, or counts rounds from where it was begun"),
    "data_sample_strategy": ("bagging", "counts rounds from where it was begun"),
    "tree_learner": ("serial", "trains in several processes"),
    "linear_tree": ("0", "predicts with other roundings than it trains"),
    "use_quantized_grad": ("0", "draws random numbers that no model keeps"),
    "bagging_by_query": ("0", "draws random numbers that no model keeps"),
    "cegb_penalty_feature_lazy": ("", "keeps which features it has paid for"),
    "cegb_penalty_feature_coupled": ("", "keeps which features it has paid for"),
    "lambdarank_position_bias_regularization": ("0", "keeps what it has learned of positions"),
}
"""For each parameter, the only value for which a model's text is its whole state, and why."""


class HermesCallback(RoundsCallback):
    """Reports a trial every few rounds, and lets other trials have its device between rounds.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    as if nothing had happened, in this process or in another one: with the same trees, bit for
    bit on a CPU. Under plain Optuna the callback reports to the trial and asks the study's pruner.

    Rows and columns are drawn from the seeds and the number of the round, so that a resumed trial
    draws the same ones. To resume in another process the data are predicted once, so a ``Dataset``
    must keep them: ``free_raw_data=False``. Else the trial waits in memory only.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        monitor: name of an evaluated value, the data's and the metric's:
            ``"valid_0-binary_logloss"``.
        report_interval: number of rounds in one unit of the trial.

    Raises:
        MonitorError: in training, when there is no value of this name.

    Example:
        ```python
        def objective(trial):
            params = {"eta": trial.suggest_float("eta", 0.01, 0.3, log=True), "num_threads": 1}
            hermes = HermesCallback(trial, "valid_0-l2")
            train = lightgbm.Dataset(x, y, free_raw_data=False)
            valid = train.create_valid(x_valid, y_valid)
            lightgbm.train(params, train, 200, valid_sets=[valid], callbacks=[hermes])
            return hermes.value
        ```
    """

    before_iteration = True

    @property
    def order(self) -> int:
        """Its place among the callbacks: before all others, such as those that set parameters."""
        # A property, for LightGBM puts the place in the list among an object's own attributes.
        return -(1 << 20)

    def __call__(self, env: CallbackEnv) -> None:
        """Yield the device if asked to, before each round."""
        number = env.iteration - env.begin_iteration
        model = self._begin(env) if number == 0 else env.model
        assert isinstance(model, _Watched)
        if not model._evaluated:
            self._rounds.end_round(None, {})  # no evaluation has ended it: raises MonitorError
        self._rounds.begin_round(number)
        model._begin_round(number)

    def _begin(self, env: CallbackEnv) -> _Watched:
        model, rounds = self._single(env.model, lightgbm.Booster), self._rounds
        params = _parameters(model)
        self._training = rounds.begin_training(
            self._monitor,
            self._interval,
            lambda: lightgbm.Booster.model_to_string(model, num_iteration=-1).encode(),
            _why_not_stored(model, params, env.begin_iteration),
            env.end_iteration - env.begin_iteration,
        )
        if rounds.can_store and params["force_row_wise"] == params["force_col_wise"] == "0":
            log.warning(
                "%s may differ in the last bits: LightGBM chooses the order of its sums by a "
                "race. Give it force_row_wise=True, or force_col_wise=True.",
                rounds._name.capitalize(),
            )
        watched[model] = rounds
        model.__class__ = _Watched
        assert isinstance(model, _Watched)
        model._seeds, model._given, model._training = _Seeds(params), env.params, self._training
        return model


class _Seeds:
    """Seeds of each round, independent of the numbers drawn before it."""

    def __init__(self, params: dict[str, str]) -> None:
        names = ("bagging_seed", "feature_fraction_seed", "extra_seed")
        self._seeds = {name: int(params[name]) for name in names}
        self._freq = int(params["bagging_freq"])
        self._odd = False
        self._now: dict[str, int] = {}

    def begin_round(self, number: int) -> None:
        """Take the seeds of a round; rows are drawn again after each ``bagging_freq``."""
        turns = dict.fromkeys(self._seeds, number)
        if self._freq:
            turns["bagging_seed"] = number // self._freq
        # Halved: LightGBM's seeds are signed numbers of 32 bits.
        self._now = {n: trial_seed(seed, turns[n]) >> 1 for n, seed in self._seeds.items()}

    def again(self) -> dict[str, int]:
        """Parameters to add to any change of parameters, so that rows are drawn again."""
        # LightGBM draws rows anew only if bagging_freq changes: so each call gives another one.
        self._odd = not self._odd
        return {**self._now, "bagging_freq": _RARELY + self._odd} if self._freq else self._now


class _Watched(lightgbm.Booster):
    """A booster that replays the rounds it already has, without training them.

    Asked by other callbacks meanwhile, it answers as it did after the round that is replayed.
    """

    _seeds: _Seeds
    _given: dict[str, Any]
    _training: Training
    _train_said: list[EvalResult]
    _answers: dict[tuple[str, str], list[EvalResult]]
    _before: _InnerPredictor | None = None
    _number: int = -1
    _trained: bool = True
    _evaluated: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as LightGBM's own booster: whoever loads a model need not have this package.
        state = self.__getstate__()
        for name in _Watched.__annotations__:
            state.pop(name, None)
        return object.__new__, (lightgbm.Booster,), state

    def _begin_round(self, number: int) -> None:
        self._number, self._trained = number, False
        self._train_said = []
        self._seeds.begin_round(number)
        try:
            self.reset_parameter({})
        except lightgbm.basic.LightGBMError as error:
            # Raised for data without a feature to split by, which training itself accepts.
            if "num_features" not in str(error):
                raise

    def reset_parameter(self, params: dict[str, Any]) -> lightgbm.Booster:
        given = {**self.params, **params}
        super().reset_parameter({**params, **self._seeds.again()})
        self.params = given  # others may train again with what it says
        return self

    def model_from_string(self, model_str: str) -> lightgbm.Booster:
        # ``lightgbm.train`` cuts it at its best round, of which a replay would know no more.
        rounds = watched.get(self)
        if rounds is not None:
            rounds.end_training()
        return super().model_from_string(model_str)

    def add_valid(self, data: lightgbm.Dataset, name: str) -> lightgbm.Booster:
        if self._before is None:
            return super().add_valid(data, name)
        # LightGBM would evaluate these data without the trees that this booster goes on from.
        with _begun_from(self._before, data):
            data.construct()._predictor = None  # as that of this booster
            return super().add_valid(data, name)

    def update(self, *args: Any, **kwargs: Any) -> bool:
        rounds = watched.get(self)
        if rounds is None or self._trained:  # of a booster that is kept after its training
            return bool(super().update(*args, **kwargs))
        self._trained, self._evaluated = True, False
        recorded = self._told()
        if recorded is None:
            return bool(super().update(*args, **kwargs))
        # Not earlier: other callbacks may ask the model before its first round.
        if self._number == 0 and rounds.model is not None:
            self._before = _go_on(self, self._given, rounds.model.decode())
        # Not the number of the round: one in which nothing could be split has added no iteration.
        then = recorded.get("iterations", self._number + 1)  # not in earlier versions' checkpoints
        untold[self] = max(0, super().current_iteration() - then)
        self._answers = {}
        for row in _rows(recorded.get("asked", [])):
            self._answers.setdefault((row[0], row[1]), []).append(row)
        if self._number == self._training.replayed - 1:
            recorded.pop("asked", None)  # they are evaluated, and recorded, again
        return False

    def current_iteration(self) -> int:
        return super().current_iteration() - untold.get(self, 0)

    def num_trees(self) -> int:
        return self.current_iteration() * self.num_model_per_iteration()

    def eval(self, data: lightgbm.Dataset, name: str, feval: Any = None) -> list[EvalResult]:
        return self._as_then(super().eval(data, name, feval))

    def eval_train(self, feval: Any = None) -> list[EvalResult]:
        if self._evaluated:
            return self._as_then(super().eval_train(feval))
        recorded = self._told()
        self._train_said = (
            super().eval_train(feval) if recorded is None else _rows(recorded["train"])
        )
        return self._train_said

    def eval_valid(self, feval: Any = None) -> list[EvalResult]:
        rounds = watched.get(self)
        # The training itself calls it once after each round; others are other callbacks' calls.
        if rounds is None or self._evaluated:
            return self._as_then(super().eval_valid(feval))
        self._evaluated = True
        recorded = self._told()
        if recorded is not None:
            return _rows(recorded["valid"])
        said = super().eval_valid(feval)
        all_said = [*self._train_said, *said]
        for row in all_said:
            rounds.check_direction(f"{row[0]}-{row[1]}", bool(row[3]))
        plain = {
            "train": _plain(self._train_said),
            "valid": _plain(said),
            "iterations": super().current_iteration(),
        }
        rounds.end_round(plain, {f"{row[0]}-{row[1]}": float(row[2]) for row in all_said})
        return said

    def _as_then(self, said: list[EvalResult]) -> list[EvalResult]:
        """Record an evaluation for a callback, or answer it as it was in the round replayed."""
        training = self._training
        at = self._number - (not self._trained)  # the round that has ended last
        if 0 <= at < training.replayed - 1:  # evaluated with the trees of later rounds
            return [self._answer_then(row) for row in said]
        # Not for a kept booster whose training is over.
        if 0 <= at == len(training.history) - 1 and training.save is not None:
            training.history[at].setdefault("asked", []).extend(_plain(said))
        return said

    def _answer_then(self, row: EvalResult) -> EvalResult:
        # One after the other: several data sets may be evaluated under one name.
        answers = self._answers.get((row[0], row[1]), [row])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def _told(self) -> Any:
        return self._training.recorded(self._number)


def _of_told(name: str) -> Any:
    method = getattr(lightgbm.Booster, name)
    signature = inspect.signature(method)
    argument = "iteration" if "iteration" in signature.parameters else "num_iteration"

    @functools.wraps(method)
    def of_told(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        if untold.get(self, 0) and (given.arguments.get(argument) or 0) <= 0:  # all there are
            first = max(0, given.arguments.get("start_iteration", 0))
            given.arguments[argument] = self.current_iteration() - first
        return method(*given.args, **given.kwargs)

    return of_told


for _name in ("predict", "save_model", "model_to_string", "dump_model", "feature_importance"):
    setattr(_Watched, _name, _of_told(_name))


def _go_on(model: lightgbm.Booster, params: dict[str, Any], text: str) -> _InnerPredictor:
    """Let a booster that is in training continue from another one's text; return that one."""
    before = lightgbm.Booster(model_str=text)
    predictor = _InnerPredictor.from_booster(before, pred_parameter={})
    # Keeps the booster alive, whose handle the predictor uses.
    vars(predictor)["source"] = before
    with _begun_from(predictor, model.train_set, *model.valid_sets):
        fresh = lightgbm.Booster({**params, **model.params}, model.train_set)
        for data, name in zip(model.valid_sets, model.name_valid_sets, strict=True):
            fresh.add_valid(data, name)
    # The handles change places, as ``lightgbm.train`` and other callbacks hold this very object.
    model._handle, fresh._handle = fresh._handle, model._handle
    model.train_set_version = fresh.train_set_version
    # Else metrics of one's own are given predictions of before.
    vars(model)[_IS_PREDICTED] = vars(fresh)[_IS_PREDICTED]
    return predictor


@contextmanager
def _begun_from(predictor: _InnerPredictor, *sets: lightgbm.Dataset) -> Iterator[None]:
    """Give data a booster's predictions as init_score, which a new booster copies."""
    for data in sets:
        data._set_predictor(predictor)
    yield
    # Taken back: LightGBM itself would leave zeros, and a next training would begin from those.
    for data in sets:
        data._predictor = data.init_score = None
        data.set_field("init_score", None)


def _why_not_stored(
    model: lightgbm.Booster, params: dict[str, str], begin_iteration: int
) -> str | None:
    """The reason why a booster cannot be resumed exactly, None if it can."""
    sets = (model.train_set, *model.valid_sets)
    if begin_iteration:
        return "it goes on from an init_model"
    if any(data.data is None or isinstance(data.data, str | os.PathLike) for data in sets):
        return "its Datasets do not keep their data: give them free_raw_data=False"
    if any(isinstance(data.data, list) for data in sets):
        return "LightGBM predicts for no list of arrays: make a Dataset of one array"
    if any(data.get_init_score() is not None for data in sets):
        return "its Datasets have an init_score"
    if params["objective"] == "rank_xendcg":
        return "its objective draws random numbers that no model keeps"
    for name, (exact, reason) in _INEXACT.items():
        if params[name] != exact:
            return f"with {name}={params[name]} LightGBM {reason}"
    return None


def _parameters(model: lightgbm.Booster) -> dict[str, str]:
    """All parameters of a booster, under the names that LightGBM itself uses."""
    return dict(re.findall(r"^\[(\w+): (.*)\]$", model.model_to_string(), re.MULTILINE))


def _plain(rows: list[EvalResult]) -> list[list[Any]]:
    return [[str(row[0]), str(row[1]), float(row[2]), bool(row[3])] for row in rows]


def _rows(plain: list[list[Any]]) -> list[EvalResult]:
    return [EvalResult(*row) for row in plain]
