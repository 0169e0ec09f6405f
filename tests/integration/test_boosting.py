"""A suspended boosting is, bit for bit, the boosting that was never suspended."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pytest
import torch
from optuna.trial import FixedTrial
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris

from optuna_hermes.errors import CheckpointError, InvalidInputError, MonitorError, Suspended
from optuna_hermes.model import TierName
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession

lightgbm = pytest.importorskip("lightgbm")
xgboost = pytest.importorskip("xgboost")

from optuna_hermes.lightgbm import HermesCallback as LightGBMCallback  # noqa: E402
from optuna_hermes.xgboost import HermesCallback as XGBoostCallback  # noqa: E402
from optuna_hermes.xgboost import _metric, _values  # noqa: E402

ROUNDS = 20
LIGHTGBM = {"num_threads": 1, "verbosity": -1, "deterministic": True, "force_row_wise": True}
ROWS = {"bagging_fraction": 0.6, "bagging_freq": 3}
COLUMNS = {"colsample_bytree": 0.7, "colsample_bylevel": 0.7, "colsample_bynode": 0.7}


class End(NamedTuple):
    """All that a training leaves."""

    trees: str
    said: Any
    best: int | None


CASES: dict[str, dict[str, Any]] = {
    "xgboost-plain": {},
    "xgboost-rows": {"subsample": 0.6},
    "xgboost-columns": {"subsample": 0.8, **COLUMNS},
    "xgboost-approx": {"tree_method": "approx", "subsample": 0.6, **COLUMNS},
    "xgboost-exact": {"tree_method": "exact", "subsample": 0.6, "colsample_bytree": 0.7},
    "xgboost-forest": {"num_parallel_tree": 2, "subsample": 0.6},
    "xgboost-dart": {"booster": "dart", "rate_drop": 0.3, "skip_drop": 0.3},
    "xgboost-linear": {"booster": "gblinear"},
    "xgboost-classes": {"objective": "multi:softprob", "num_class": 3, "subsample": 0.6},
    "xgboost-gradients": {"sampling_method": "uniform", "max_delta_step": 1, "subsample": 0.5},
    "lightgbm-plain": {},
    "lightgbm-rows": ROWS,
    "lightgbm-rows-of-a-class": {
        "pos_bagging_fraction": 0.5,
        "neg_bagging_fraction": 0.9,
        "bagging_freq": 1,
    },
    "lightgbm-columns": {"feature_fraction": 0.6, "feature_fraction_bynode": 0.7, **ROWS},
    "lightgbm-extra": {"extra_trees": True},
    "lightgbm-classes": {"objective": "multiclass", "num_class": 3, **ROWS},
    "lightgbm-quantile": {"objective": "quantile", "alpha": 0.3, **ROWS},
}
SOME = ["xgboost-columns", "lightgbm-columns"]  # all together take 20 seconds


@functools.cache
def data(case: str) -> tuple[Any, Any, Any, Any]:
    x, y = (load_iris if "classes" in case else load_breast_cancer)(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    n = len(x) * 3 // 4
    return x[order[:n]], y[order[:n]], x[order[n:]], y[order[n:]]


def matrix() -> Any:
    return xgboost.DMatrix([[1.0], [2.0]], [1.0, 2.0])


class Ticks(xgboost.callback.TrainingCallback):
    """Tells a session of each round that is trained in this process."""

    def __init__(self, session: FakeSession | None, hermes: Any) -> None:
        self._session = session
        self._rounds = hermes._rounds

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if self._session is not None and self._rounds.recorded(epoch) is None:
            self._session.tick()
        return False

    def __call__(self, env: Any) -> None:
        self.after_iteration(env.model, env.iteration, None)


def train(
    session: FakeSession | None,
    case: str = "xgboost-plain",
    *,
    trial: Any = None,
    monitor: str | None = None,
    **options: Any,
) -> tuple[Any, End]:
    """One process of a run, as a user would write it."""
    by = xgboost_train if case.startswith("xgboost") else lightgbm_train
    trial = trial or optuna.create_study().ask()
    return by(session, case, trial, monitor, **options)


def xgboost_train(
    session: FakeSession | None,
    case: str,
    trial: Any,
    monitor: str | None,
    *,
    params: Any = None,
    patience: int = 50,
    rate: float = 0.3,
    others: tuple[Any, ...] = (),
) -> tuple[Any, End]:
    x, y, x_valid, y_valid = data(case)
    train, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(x_valid, y_valid)
    given = {"nthread": 1, "objective": "binary:logistic", **CASES[case], **(params or {})}
    metric = "mlogloss" if "classes" in case else "logloss"
    hermes = XGBoostCallback(
        trial, monitor or f"valid-{metric}", report_interval=5, _session=session
    )
    rates = xgboost.callback.LearningRateScheduler(lambda number: rate * 0.95**number)
    said: dict[str, Any] = {}
    booster = xgboost.train(
        given,
        train,
        ROUNDS,
        evals=[(train, "train"), (valid, "valid")],
        evals_result=said,
        verbose_eval=False,
        early_stopping_rounds=patience,
        callbacks=[hermes, rates, Ticks(session, hermes), *others],
    )
    trees = bytes(booster.save_raw("json")).decode()
    return hermes, End(trees, said, booster.best_iteration)


def lightgbm_train(
    session: FakeSession | None,
    case: str,
    trial: Any,
    monitor: str | None,
    *,
    params: Any = None,
    patience: int = 50,
    rate: float = 0.3,
    free: bool = False,
    others: tuple[Any, ...] = (),
) -> tuple[Any, End]:
    x, y, x_valid, y_valid = data(case)
    given = {"objective": "binary", **LIGHTGBM, **CASES[case], **(params or {})}
    train = lightgbm.Dataset(x, y, free_raw_data=free)
    valid = train.create_valid(x_valid, y_valid)
    metric = given.get("metric", {"multiclass": "multi_logloss"}.get(given["objective"]))
    metric = metric or {"quantile": "quantile"}.get(given["objective"], "binary_logloss")
    hermes = LightGBMCallback(
        trial, monitor or f"valid_0-{metric}", report_interval=5, _session=session
    )
    said: dict[str, Any] = {}
    booster = lightgbm.train(
        given,
        train,
        ROUNDS,
        valid_sets=[valid, train],
        callbacks=[
            lightgbm.record_evaluation(said),
            lightgbm.reset_parameter(learning_rate=lambda number: rate * 0.95**number),
            *([lightgbm.early_stopping(patience, verbose=False)] if patience else []),
            hermes,
            Ticks(session, hermes),
            *others,
        ],
    )
    text = booster.model_to_string(num_iteration=-1).partition("\nparameters:")[0]
    # A tree without a split has its weight in the text only until it is read again.
    lines = [line for line in text.splitlines() if not line.startswith(("leaf_weight", "tree_siz"))]
    return hermes, End("\n".join(lines), said, booster.best_iteration)


@functools.cache
def expected(case: str) -> End:
    """Return the end of the run that is never suspended."""
    return train(FakeSession(), case)[1]


def suspended(session: FakeSession, case: str, **options: Any) -> FakeSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, case, **options)
    return session.again()


def scramble() -> None:
    random.seed(5)
    np.random.seed(5)


@pytest.mark.parametrize(
    "case", [case if case in SOME else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_disk(case: str, tmp_path: Path) -> None:
    """Two suspensions to disk, neither at the end of a unit, leave no trace."""
    session = suspended(FakeSession({7: "disk"}, checkpoint_dir=tmp_path), case)
    session = suspended(session.again({4: "disk"}), case)
    assert train(session, case)[1] == expected(case)


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("tiers", [(), ("disk",)])
def test_memory(case: str, tiers: tuple[TierName, ...], tmp_path: Path) -> None:
    """A run that waits in its process, also one that is put on disk later, goes on as it was."""
    session = FakeSession(
        {8: "resident"}, checkpoint_dir=tmp_path, while_parked=scramble, evicts=tiers
    )
    if tiers:
        session = suspended(session, case)
    assert train(session, case)[1] == expected(case)


@pytest.mark.parametrize("case", SOME)
def test_host_memory_is_no_place_for_a_booster(case: str, tmp_path: Path) -> None:
    """State that a library holds outside of torch cannot be moved: the run goes to disk instead."""
    session = FakeSession({8: "host"}, checkpoint_dir=tmp_path)
    again = suspended(session, case)
    assert session.parks == ["disk"]
    assert train(again, case)[1] == expected(case)


@pytest.mark.parametrize("case", ["xgboost-rows", "lightgbm-rows"])
def test_early_stopping(case: str, tmp_path: Path) -> None:
    """The count of rounds without progress goes on, and chooses the same round."""
    whole = train(FakeSession(), case, rate=3.0, patience=3)[1]
    assert whole.best is not None
    assert whole.best + 3 < ROUNDS - 1, "it stops early"
    session = FakeSession({whole.best + 2: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, case, rate=3.0, patience=3)
    assert train(session, case, rate=3.0, patience=3)[1] == whole


class Asks(xgboost.callback.TrainingCallback):
    """Notes what a model says of itself and of other data before and after each round."""

    def __init__(self, case: str) -> None:
        _, _, self._x, self._y = data(case)
        self.said: list[Any] = []
        # LightGBM calls a callback with an attribute ``before_iteration`` only before each round.
        self.all = (self,) if case.startswith("xgboost") else (self, lambda env: self(env))

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        return self.after_iteration(model, epoch, evals_log)

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        held_out = xgboost.DMatrix(self._x, self._y)
        said = {
            "predicted": model.predict(held_out).tolist(),
            "rounds": model.num_boosted_rounds(),
            "saved": bytes(model.save_raw("json")),
            "copied": bytes(model.copy().save_raw("json")),
            "importance": model.get_score(importance_type="gain"),
            "evaluated": model.eval(held_out, "held-out", epoch),
            "evaluated with others": model.eval_set([(held_out, "held"), (held_out, "out")], epoch),
        }
        self.said.append(said)
        return False

    def __call__(self, env: Any) -> None:
        model = env.model
        # A leaf's weight is in the text only until it is read again.
        lines = model.model_to_string().partition("\nparameters:")[0].splitlines()
        text = [line for line in lines if not line.startswith(("leaf_weight", "tree_sizes"))]
        said = {
            "predicted": model.predict(self._x).tolist(),
            "first": model.predict(self._x, num_iteration=1).tolist(),
            "rounds": (model.current_iteration(), model.num_trees()),
            "saved": text,
            "copied": copy.deepcopy(model).predict(self._x).tolist(),
            "importance": model.feature_importance().tolist(),
        }
        self.said.append(said)


@pytest.mark.parametrize("case", [*SOME, "xgboost-forest", "lightgbm-classes"])
def test_callbacks_that_ask_the_model_in_replayed_rounds(case: str, tmp_path: Path) -> None:
    """It answers with the trees of the first rounds, as then, and with those of all at the end."""
    whole = Asks(case)
    train(FakeSession(), case, others=whole.all)
    session = suspended(FakeSession({7: "disk"}, checkpoint_dir=tmp_path), case)
    session = suspended(session.again({4: "disk"}), case)
    again = Asks(case)
    assert train(session, case, others=again.all)[1] == expected(case)
    assert len(again.said) == 2 * ROUNDS
    for number, (said, then) in enumerate(zip(again.said, whole.said, strict=True)):
        differing = [name for name in then if said[name] != then[name]]
        assert not differing, number


def test_a_model_that_cannot_be_cut_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    """Later rounds change the trees of earlier ones: it answers with all, and that is said once."""
    case = "xgboost-dart"
    session = suspended(FakeSession({7: "disk"}, checkpoint_dir=tmp_path), case)
    assert "cannot be cut" not in caplog.text
    asks = Asks(case)
    train(session, case, others=(asks,))
    assert caplog.text.count("a model of dart cannot be cut") == 1
    assert [said["rounds"] for said in asks.said[1::2]] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("case", SOME)
def test_without_a_broker(case: str) -> None:
    """Under plain Optuna the trees are the same, and every unit is reported."""
    trial = optuna.create_study().ask()
    hermes, end = train(None, case, trial=trial)
    assert end == expected(case)
    values = trial.study.trials[0].intermediate_values
    assert sorted(values) == [1, 2, 3, 4]
    assert hermes.value == values[4]


@pytest.mark.parametrize("case", SOME)
def test_of_no_trial(case: str) -> None:
    """The last training, with the best parameters, may have the callback, too."""
    by = xgboost_train if case.startswith("xgboost") else lightgbm_train
    hermes, end = by(None, case, None, None)
    assert end == expected(case)
    assert hermes.value is not None


@pytest.mark.parametrize("case", SOME)
def test_reports(case: str, tmp_path: Path) -> None:
    """A unit is reported once, whoever trained it, and the checkpoint has it."""
    trial = optuna.create_study().ask()
    session = suspended(FakeSession({12: "disk"}, checkpoint_dir=tmp_path), case, trial=trial)
    assert session.checkpoints[0].units == 2
    train(session, case, trial=trial)  # a second report would be a warning
    assert [unit for unit, _, _ in session.reports] == [3, 4]


@pytest.mark.parametrize("case", SOME)
def test_pruned(case: str) -> None:
    """The study's pruner is asked after each unit."""
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
    with pytest.raises(optuna.TrialPruned, match="Pruned after unit 1"):
        train(FakeSession(), case, trial=study.ask())


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("lightgbm-plain", {"free": True}, "free_raw_data=False"),
        ("lightgbm-plain", {"params": {"boosting": "dart"}, "patience": 0}, "boosting=dart"),
        ("lightgbm-plain", {"params": {"data_sample_strategy": "goss"}}, "=goss"),
        ("lightgbm-plain", {"params": {"linear_tree": True}}, "linear_tree"),
        ("lightgbm-plain", {"params": {"use_quantized_grad": True}}, "use_quantized_grad"),
    ],
)
def test_what_would_not_be_exact_waits_in_memory(
    case: str, options: Any, reason: str, tmp_path: Path, caplog: Any
) -> None:
    """A run whose model is not the whole of the training is not stored, and says why."""
    caplog.set_level("INFO")
    session = FakeSession({6: "disk"}, checkpoint_dir=tmp_path)
    end = train(session, case, **options)[1]
    assert session.parks == ["resident"]
    assert "can only wait in memory: " in caplog.text
    assert reason in caplog.text
    assert end == train(FakeSession(), case, **options)[1]


@pytest.mark.parametrize("kept", ["a list", "a path"])
def test_data_that_lightgbm_cannot_predict_for_waits_in_memory(
    kept: str, tmp_path: Path, caplog: Any
) -> None:
    """It is asked for predictions when a trial comes back from disk."""
    caplog.set_level("INFO")
    x, y = np.random.default_rng(0).random((80, 3)), np.arange(80.0)
    np.savetxt(tmp_path / "train.csv", np.column_stack([y, x]), delimiter=",")
    given: Any = [x[:40], x[40:]] if kept == "a list" else tmp_path / "train.csv"
    labels = {"label": y} if kept == "a list" else {}
    train = lightgbm.Dataset(given, free_raw_data=False, **labels)
    session = FakeSession(checkpoint_dir=tmp_path / "trial")
    hermes = LightGBMCallback(
        optuna.create_study().ask(), "training-l2", report_interval=5, _session=session
    )
    lightgbm.train(LIGHTGBM, train, 10, valid_sets=[train], callbacks=[hermes])
    assert "can only wait in memory: " in caplog.text
    assert ("list of arrays" if kept == "a list" else "free_raw_data") in caplog.text


def test_sums_in_an_order_of_chance_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    """LightGBM may choose another order of sums in the next process."""
    train(FakeSession(checkpoint_dir=tmp_path), "lightgbm-plain", params={"force_row_wise": False})
    assert "force_row_wise=True" in caplog.text


@pytest.mark.parametrize("case", SOME)
def test_a_value_that_is_not_there(case: str) -> None:
    """The names that there are are told."""
    with pytest.raises(MonitorError, match=r"'valid-auc'.*there are: .*logloss"):
        train(None, case, monitor="valid-auc")


def test_a_metric_that_the_study_is_optimised_away_from() -> None:
    """LightGBM knows which of its metrics are better higher."""
    with pytest.raises(InvalidInputError, match=r"'valid_0-auc' is better higher.*'maximize'"):
        train(None, "lightgbm-plain", params={"metric": "auc"})
    trial = optuna.create_study(direction="maximize").ask()
    assert train(None, "lightgbm-plain", trial=trial, params={"metric": "auc"})[0].value > 0.9


def test_xgboost_s_own_metrics_have_a_direction() -> None:
    """What a study maximises by mistake would be stopped where it is best."""
    with pytest.raises(InvalidInputError, match=r"'valid-auc' is better higher.*'maximize'"):
        train(None, monitor="valid-auc", params={"eval_metric": "auc"})
    higher = optuna.create_study(direction="maximize")
    assert train(None, trial=higher.ask(), monitor="valid-auc", params={"eval_metric": "auc"})
    several = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InvalidInputError, match="of several objectives that of the first one"):
        train(None, trial=several.ask(), monitor="valid-auc", params={"eval_metric": "auc"})
    with pytest.raises(InvalidInputError, match=r"'valid-logloss' is better lower.*'minimize'"):
        train(None, trial=higher.ask())


@pytest.mark.parametrize(
    ("name", "metric"),
    [("valid-ndcg@5-", "ndcg"), ("my-valid-rmse", "rmse"), ("valid-map", "map"), ("auc", "auc")],
)
def test_the_metric_of_a_value_of_xgboost(name: str, metric: str) -> None:
    """Behind the name of the data, and before its place in a ranking."""
    assert _metric(name) == metric


def test_features_that_nothing_can_be_split_by() -> None:
    """LightGBM trains a tree without splits, and refuses parameters that are set between rounds."""
    train = lightgbm.Dataset(np.zeros((40, 1)), np.arange(40.0), free_raw_data=False)
    hermes = LightGBMCallback(optuna.create_study().ask(), "valid_0-l2", report_interval=5)
    valid = train.create_valid(np.zeros((40, 1)), np.arange(40.0))
    lightgbm.train(LIGHTGBM, train, 10, valid_sets=[valid], callbacks=[hermes])
    assert hermes.value == pytest.approx(np.var(np.arange(40.0)))


def test_a_device_is_yielded_before_other_callbacks_of_lightgbm_begin_a_round() -> None:
    """Else what they measure has the suspension in it, and they act between two leases."""
    calls: list[str] = []

    class Watched(LightGBMCallback):
        def __call__(self, env: Any) -> None:
            calls.append("hermes")
            super().__call__(env)

    def other(env: Any) -> None:
        calls.append("other")

    other.before_iteration = True  # type: ignore[attr-defined]
    train = lightgbm.Dataset(np.zeros((40, 1)), np.arange(40.0), free_raw_data=False)
    valid = train.create_valid(np.zeros((40, 1)), np.arange(40.0))
    callbacks = [other, Watched(optuna.create_study().ask(), "valid_0-l2")]
    lightgbm.train(LIGHTGBM, train, 2, valid_sets=[valid], callbacks=callbacks)
    assert calls == ["hermes", "other"] * 2


def test_names_with_spaces() -> None:
    """Data and metrics of XGBoost may have any names."""
    assert _values("[7]\tmy train-log loss:0.4\tvalid-auc:0.9") == {
        "my train-log loss": 0.4,
        "valid-auc": 0.9,
    }


def test_no_data_to_evaluate_with() -> None:
    """Without them there is nothing to report."""
    trial = optuna.create_study().ask()
    x, y, _, _ = data("lightgbm-plain")
    with pytest.raises(MonitorError, match="there are: none"):
        lightgbm.train(
            LIGHTGBM, lightgbm.Dataset(x, y), 3, callbacks=[LightGBMCallback(trial, "valid_0-l2")]
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda hermes: xgboost.cv({}, matrix(), 1, nfold=2, callbacks=[hermes]),
        lambda hermes: XGBoostCallback(hermes, "a-b", report_interval=0),
    ],
)
def test_refused(call: Callable[[Any], Any]) -> None:
    """A training that cannot be suspended is refused in one line."""
    with pytest.raises(InvalidInputError, match="must be"):
        call(XGBoostCallback(optuna.create_study().ask(), "test-rmse"))


def test_cross_validation_of_lightgbm_is_refused() -> None:
    """Several boosters at once are no run."""
    x, y, _, _ = data("lightgbm-plain")
    hermes = LightGBMCallback(optuna.create_study().ask(), "valid-l2")
    with pytest.raises(InvalidInputError, match=r"lightgbm\.cv cannot be suspended"):
        lightgbm.cv(LIGHTGBM, lightgbm.Dataset(x, y), 1, nfold=2, callbacks=[hermes])


def folds(
    session: FakeSession | None, case: str, *, shared: bool = False, trial: Any = None
) -> tuple[list[float], list[str]]:
    """Three trainings of a trial, which end early; the value of each, and what each has said."""
    x, y, _, _ = data(case)
    trial = trial or optuna.create_study().ask()
    order = np.random.permutation(len(x))  # as user code draws, from the global generator
    make = XGBoostCallback if case.startswith("xgboost") else LightGBMCallback
    name = "valid-logloss" if case.startswith("xgboost") else "valid_0-binary_logloss"
    hermes = make(trial, name, report_interval=3, _session=session)
    values, ends = [], []
    for fold in range(3):
        if fold and not shared:
            hermes = make(trial, name, report_interval=3, _session=session)
        kept, held = order[fold::3], np.concatenate([order[(fold + k) % 3 :: 3] for k in (1, 2)])
        if case.startswith("xgboost"):
            train, valid = xgboost.DMatrix(x[held], y[held]), xgboost.DMatrix(x[kept], y[kept])
            booster = xgboost.train(
                {"nthread": 1, "objective": "binary:logistic", "eta": 0.9, **CASES[case]},
                train,
                ROUNDS,
                evals=[(valid, "valid")],
                verbose_eval=False,
                early_stopping_rounds=2,
                callbacks=[hermes, Ticks(session, hermes)],
            )
            ends.append(bytes(booster.save_raw("json")).decode())
        else:
            train = lightgbm.Dataset(x[held], y[held], free_raw_data=False)
            rounds: list[int] = []
            booster = lightgbm.train(
                {"objective": "binary", "learning_rate": 0.9, **LIGHTGBM, **CASES[case]},
                train,
                ROUNDS,
                valid_sets=[train.create_valid(x[kept], y[kept])],
                callbacks=[
                    lightgbm.early_stopping(2, verbose=False),
                    hermes,
                    Ticks(session, hermes),
                    lambda env, rounds=rounds: rounds.append(env.model.current_iteration()),
                ],
            )
            predicted = booster.predict(x[kept]).tolist()
            ends.append(str((booster.best_iteration, rounds, predicted)))
        values.append(hermes.value)
    return values, ends


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("case", SOME)
def test_folds(case: str, shared: bool, tmp_path: Path) -> None:
    """Suspended again and again in whatever fold: all folds have the same models and values."""
    np.random.seed(1)
    wanted = folds(FakeSession(), case, shared=shared)
    assert len(set(wanted[1])) == 3
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    processes = 1
    while True:
        np.random.seed(1)
        try:
            got = folds(session, case, shared=shared)
            break
        except Suspended:
            session = session.again({4: "disk"})
            processes += 1
    assert got == wanted
    assert processes > 3


@pytest.mark.parametrize("case", SOME)
def test_folds_without_a_broker(case: str) -> None:
    """Units count on from fold to fold: no step is reported twice."""
    study = optuna.create_study()
    trial = study.ask()
    np.random.seed(1)
    values, _ = folds(None, case, trial=trial)
    reported = study.trials[0].intermediate_values
    assert list(reported) == [*range(1, len(reported) + 1)]
    assert len(reported) >= 3
    assert len(values) == 3


def on_one_dataset(
    session: FakeSession, *, n: int = 2, with_callback: int = 2, change: tuple[Any, ...] = ()
) -> list[Any]:
    """Trainings with other seeds on the same data; their predictions, and what they have said."""
    x, y, x_valid, y_valid = data("lightgbm-columns")
    train = lightgbm.Dataset(x, y, weight=np.full(len(y), 0.5), free_raw_data=False)
    valid = train.create_valid(x_valid, y_valid)
    hermes = LightGBMCallback(
        optuna.create_study().ask(), "valid_0-binary_logloss", report_interval=3, _session=session
    )
    ends: list[Any] = []
    for seed in range(n):
        said: dict[str, Any] = {}
        callbacks = [hermes, Ticks(session, hermes)] if seed < with_callback else []
        booster = lightgbm.train(
            {"objective": "binary", **LIGHTGBM, **CASES["lightgbm-columns"], "bagging_seed": seed},
            train,
            8,
            valid_sets=[valid],
            callbacks=[*change, lightgbm.record_evaluation(said), *callbacks],
        )
        ends += [booster.predict(x_valid).tolist(), said]
    return ends


@pytest.mark.parametrize("with_callback", [2, 1], ids=["each", "first"])
def test_trainings_on_one_dataset(with_callback: int, tmp_path: Path) -> None:
    """A training that comes back leaves nothing in the data for the next one to begin from."""
    wanted = on_one_dataset(FakeSession(), with_callback=with_callback)
    assert wanted[:2] != wanted[2:]
    session = FakeSession(checkpoint_dir=tmp_path)
    for rounds in (4, 6)[:with_callback]:  # four rounds of the first training, two of the second
        session = session.again({rounds: "disk"})
        with pytest.raises(Suspended):
            on_one_dataset(session, with_callback=with_callback)
    assert on_one_dataset(session.again(), with_callback=with_callback) == wanted


def weigh(env: Any) -> None:
    if env.iteration == 6:
        rows = env.model.train_set.num_data()
        env.model.train_set.set_weight(np.linspace(0.1, 1.0, rows))


def add_data(env: Any) -> None:
    if env.iteration == 0:
        x, y, _, _ = data("lightgbm-columns")
        env.model.add_valid(env.model.train_set.create_valid(x[:50], y[:50]), "more")


add_data.before_iteration = weigh.before_iteration = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [weigh, add_data])
def test_data_that_change_in_training(change: Any, tmp_path: Path) -> None:
    """Other callbacks may change a training's data after it came back, as if it had never left."""
    wanted = on_one_dataset(FakeSession(), n=1, change=(change,))
    assert wanted != on_one_dataset(FakeSession(), n=1)
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        on_one_dataset(session, n=1, change=(change,))
    assert on_one_dataset(session.again(), n=1, change=(change,)) == wanted


class Evaluates:
    """Has a model evaluated, with other data, too, before and after each round."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.before = lambda env: self(env)
        self.before.before_iteration = True  # type: ignore[attr-defined]
        self._data: list[Any] = []

    def __call__(self, env: Any) -> None:
        model = env.model
        if not self._data:
            x, y, _, _ = data("lightgbm-columns")
            parts = (slice(50), slice(50, 90))
            self._data = [model.train_set.create_valid(x[part], y[part]) for part in parts]
        said = [
            (model.current_iteration(), model.num_trees()),
            *model.eval(self._data[0], "held-out"),
            *model.eval(self._data[1], "held-out"),
            *model.eval(self._data[0], "held-out", lambda by, data: ("sum", by.sum(), True)),
            *model.eval_train(),
            *model.eval_valid(),
        ]
        self.said.append([tuple(row) for row in said])


@pytest.mark.parametrize("stalled", [(), (2, 3, 6)])
def test_evaluations_that_callbacks_ask_lightgbm_for(
    stalled: tuple[int, ...], tmp_path: Path
) -> None:
    """In a replayed round they are those of its trees, and none of them counts as a round.

    So they are where rounds add no tree, since nothing can be split.
    """
    gains = [1e9 if number in stalled else 0.0 for number in range(8)]
    stall = lightgbm.reset_parameter(min_gain_to_split=gains)
    whole = Evaluates()
    wanted = on_one_dataset(FakeSession(), n=1, change=(stall, whole.before, whole))
    assert len(whole.said) == 16
    assert whole.said[-1][0][0] == 8 - len(stalled)
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    for then in ({3: "disk"}, {}):
        asks = Evaluates()
        with pytest.raises(Suspended):
            on_one_dataset(session, n=1, change=(stall, asks.before, asks))
        assert asks.said == whole.said[: len(asks.said)]
        session = session.again(then)
    asks = Evaluates()
    assert on_one_dataset(session, n=1, change=(stall, asks.before, asks)) == wanted
    assert asks.said == whole.said


def test_what_a_kept_booster_is_asked_later_is_in_no_checkpoint(tmp_path: Path) -> None:
    """Such as that of the first fold, in each round of the second one."""
    kept: list[Any] = []
    x, y, x_valid, y_valid = data("lightgbm-plain")
    hermes = LightGBMCallback(
        optuna.create_study().ask(),
        "valid_0-binary_logloss",
        _session=FakeSession(checkpoint_dir=tmp_path),
    )
    sizes = []

    def asks(env: Any) -> None:
        for booster in kept:
            booster.eval_valid()
        sizes.append(len(str(hermes._rounds._trainings.begun[0].history)))

    for fold in range(2):
        train = lightgbm.Dataset(x[fold::2], y[fold::2], free_raw_data=False)
        booster = lightgbm.train(
            {"objective": "binary", **LIGHTGBM},
            train,
            4,
            valid_sets=[train.create_valid(x_valid, y_valid)],
            callbacks=[hermes, asks],
            keep_training_booster=True,
        )
        kept.append(booster)
    assert sizes[3:] == [sizes[3]] * 5


def test_boosters_that_are_kept_in_training(tmp_path: Path) -> None:
    """After the last fold, those of earlier ones evaluate and train as they are."""

    def kept(session: FakeSession) -> list[Any]:
        x, y, x_valid, y_valid = data("lightgbm-plain")
        hermes = LightGBMCallback(
            optuna.create_study().ask(), "valid_0-binary_logloss", _session=session
        )
        boosters = []
        for fold in range(2):
            train = lightgbm.Dataset(x[fold::2], y[fold::2], free_raw_data=False)
            booster = lightgbm.train(
                {"objective": "binary", **LIGHTGBM},
                train,
                6 * (fold + 1),
                valid_sets=[train.create_valid(x_valid[fold::2], y_valid[fold::2])],
                callbacks=[hermes, Ticks(session, hermes)],
                keep_training_booster=True,
            )
            boosters.append(booster)
        ends = [booster.eval_valid() for booster in boosters]
        for booster in boosters:
            booster.update()
        return [*ends, *([each.eval_valid(), each.num_trees()] for each in boosters)]

    session = FakeSession({15: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        kept(session)
    assert kept(session.again()) == kept(FakeSession())


def test_pickled_boosters_are_those_of_lightgbm(tmp_path: Path) -> None:
    """Also where this package is not installed, and without the one that a run came back from."""
    x, y, x_valid, y_valid = data("lightgbm-plain")

    def trained(session: FakeSession) -> Any:
        hermes = LightGBMCallback(
            optuna.create_study().ask(), "valid_0-binary_logloss", _session=session
        )
        train = lightgbm.Dataset(x, y, free_raw_data=False)
        return lightgbm.train(
            {"objective": "binary", **LIGHTGBM},
            train,
            8,
            valid_sets=[train.create_valid(x_valid, y_valid)],
            callbacks=[lightgbm.early_stopping(3, verbose=False), hermes, Ticks(session, hermes)],
        )

    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        trained(session)
    for booster in (trained(FakeSession()), trained(session.again())):
        pickled = pickle.dumps(booster)
        loaded = pickle.loads(pickled)
        assert b"optuna_hermes" not in pickled
        assert pickled.count(b"\nend of trees") == 1
        assert type(loaded) is lightgbm.Booster
        assert loaded.best_iteration == booster.best_iteration
        assert loaded.predict(x_valid).tolist() == booster.predict(x_valid).tolist()


def test_a_booster_has_the_parameters_that_it_was_given() -> None:
    """Another training may begin with them."""
    x, y, x_valid, y_valid = data("lightgbm-rows")

    def params(callbacks: list[Any]) -> Any:
        train = lightgbm.Dataset(x, y, free_raw_data=False)
        given = {"objective": "binary", **LIGHTGBM, **ROWS}
        valid = [train.create_valid(x_valid, y_valid)]
        rate = lightgbm.reset_parameter(learning_rate=lambda number: 0.3 / (1 + number))
        return lightgbm.train(
            given, train, 4, valid_sets=valid, callbacks=[*callbacks, rate]
        ).params

    hermes = LightGBMCallback(optuna.create_study().ask(), "valid_0-binary_logloss")
    assert params([hermes]) == params([])


def test_a_classifier_is_cloned_and_pickled_without_its_trial(tmp_path: Path) -> None:
    """A file of a model has neither the trial nor its database's URL, with which none can train."""
    x, y, x_valid, y_valid = data("xgboost-plain")
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/secret.db")
    hermes = XGBoostCallback(study.ask(), "validation_0-logloss", _session=FakeSession())
    model = xgboost.XGBClassifier(n_estimators=12, n_jobs=1, callbacks=[hermes])
    model = clone(model).fit(x, y, eval_set=[(x_valid, y_valid)], verbose=False)
    assert hermes.value == model.evals_result()["validation_0"]["logloss"][-1]
    pickled = pickle.dumps(model)
    assert b"secret" not in pickled
    loaded = pickle.loads(pickled)
    assert loaded.predict(x_valid).tolist() == model.predict(x_valid).tolist()
    with pytest.raises(InvalidInputError, match="was unpickled has no trial"):
        loaded.fit(x, y, eval_set=[(x_valid, y_valid)], verbose=False)
    study._storage.remove_session()
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]


def test_a_second_framework_in_a_trial_is_refused(tmp_path: Path) -> None:
    """It would read the checkpoints of the first."""
    session = FakeSession(checkpoint_dir=tmp_path)
    trial = optuna.create_study().ask()
    PyTorchLoop(trial, {"model": torch.nn.Linear(1, 1)}, session)
    with pytest.raises(InvalidInputError, match=r"suspendable\(\) of one .* HermesCallback\(\) of"):
        XGBoostCallback(trial, "valid-logloss", _session=session)


@pytest.mark.parametrize("case", SOME)
def test_no_good_checkpoint(case: str, tmp_path: Path) -> None:
    """A run none of whose checkpoints is good is an error, never a restart from round 0."""
    session = suspended(FakeSession({7: "disk"}, checkpoint_dir=tmp_path), case)
    for state in session.checkpoints:
        Path(state.path).write_bytes(Path(state.path).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"No checkpoint of trial 0 can be used.*must have"):
        train(session, case)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("xgboost", {"eta": 0.3, "max_depth": 2, "colsample_bytree": 0.5, "lambda": 1.0}),
        ("lightgbm", {"learning_rate": 0.1, "num_leaves": 4, "feature_fraction": 0.5}),
    ],
)
def test_example(name: str, params: dict[str, Any]) -> None:
    """The model that the example tunes learns something."""
    example = Path(__file__).parents[2] / "examples" / f"{name}_boosting.py"
    trial = FixedTrial({**params, "subsample": 0.7, "bagging_fraction": 0.7})
    assert runpy.run_path(str(example))["objective"](trial) < 0.2


@pytest.mark.filterwarnings("ignore:The argument 'eval_set'")  # of later LightGBMs
def test_folds_of_classifiers_wait_in_memory(tmp_path: Path) -> None:
    """As most people write it: their data are freed, so they come back in this process only."""
    x, y, _, _ = data("lightgbm-plain")

    def scores(session: FakeSession) -> list[float]:
        trial = optuna.create_study().ask()
        found = []
        for fold in range(2):
            model = lightgbm.LGBMClassifier(n_estimators=6, **LIGHTGBM)
            hermes = LightGBMCallback(trial, "valid_0-binary_logloss", _session=session)
            callbacks = [hermes, Ticks(session, hermes)]
            kept = np.arange(len(x)) % 2 == fold
            model.fit(x[~kept], y[~kept], eval_set=[(x[kept], y[kept])], callbacks=callbacks)
            found.append(hermes.value)
        return found

    session = FakeSession({3: "resident", 8: "resident"}, checkpoint_dir=tmp_path)
    assert scores(session) == scores(FakeSession())
    assert session.parks == ["resident", "resident"]
