"""A suspended loop over ``partial_fit`` is, bit for bit, the loop that was never suspended."""

from __future__ import annotations

import functools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FixedTrial
from sklearn.cluster import Birch, MiniBatchKMeans
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from optuna_hermes.errors import InvalidInputError, Suspended, UnstorableError
from optuna_hermes.model import TierName
from optuna_hermes.sklearn import make_loop, suspendable
from optuna_hermes.testing import FakeSession

EPOCHS, BATCHES = 3, 6
MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: SGDClassifier(average=20, random_state=0),
    "linear-unseeded": lambda: SGDClassifier(learning_rate="adaptive", eta0=0.1),
    "network": lambda: MLPClassifier((8,), random_state=np.random.RandomState(3)),
    "bayes": GaussianNB,
    "clusters": lambda: MiniBatchKMeans(10, random_state=0),
}


@functools.cache
def digits() -> tuple[Any, Any]:
    x, y = load_digits(return_X_y=True)
    return x[:360] / 16, y[:360]


def train(session: FakeSession | None, case: str, *, trial: Any = None, model: Any = None) -> str:
    """One process of a run, as a user would write it; all that it leaves, to the bit."""
    x, y = digits()
    trial = trial or optuna.create_study().ask()
    np.random.seed(1)
    model, scaler, rng = model or MODELS[case](), StandardScaler(), np.random.default_rng(0)
    run = make_loop(trial, {"model": model, "scaler": scaler, "rng": rng}, session)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(np.array_split(rng.permutation(len(x)), BATCHES)):
            scaler.partial_fit(x[batch])
            classes = case in ("linear", "linear-unseeded", "network", "bayes")
            more = {"classes": range(10)} if classes else {}
            model.partial_fit(scaler.transform(x[batch]), y[batch], **more)
            if session is not None:
                session.tick()
        run.report(rng.random() if case == "tree" else model.score(scaler.transform(x), y))
    left = [run.value, rng.random(), np.random.rand(), scaler.mean_.tobytes().hex()]
    parts = {name: each for name, each in vars(model).items() if name.endswith("_")}
    for name in sorted(parts):
        arrays = parts[name] if isinstance(parts[name], list) else [parts[name]]
        left += [a.tobytes().hex() for a in map(np.asarray, arrays) if a.dtype.kind != "O"]
    return json.dumps(left)


@functools.cache
def expected(case: str) -> str:
    """Return the end of the run that is never suspended."""
    return train(FakeSession(), case)


def suspended(session: FakeSession, case: str) -> FakeSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, case)
    return session.again()


@pytest.mark.parametrize("case", MODELS)
def test_disk(case: str, tmp_path: Path) -> None:
    """Suspensions to disk, before anything is learned too, leave no trace."""
    session = suspended(FakeSession({1: "disk"}, checkpoint_dir=tmp_path), case)
    session = suspended(session.again({6: "disk"}), case)
    assert train(session, case) == expected(case)


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_memory(tier: TierName, tmp_path: Path) -> None:
    """A run that waits in its process goes on as it was."""
    session = FakeSession({2: tier, 9: tier}, checkpoint_dir=tmp_path)
    assert train(session, "network") == expected("network")
    assert session.parks == [tier] * 2


def test_without_a_broker() -> None:
    """Under plain Optuna the loop is the same loop."""
    assert train(None, "linear", trial=FixedTrial({})) == expected("linear")


def test_example() -> None:
    """The model that the example tunes learns something."""
    example = Path(__file__).parents[2] / "examples" / "sklearn_partial_fit.py"
    params = {"width": 16, "alpha": 0.01, "learning_rate_init": 0.01}
    assert runpy.run_path(str(example))["objective"](FixedTrial(params)) < 0.5


def test_what_is_none_is_left_out() -> None:
    """As where a scaler is optional."""
    run = suspendable(optuna.create_study().ask(), model=GaussianNB(), scaler=None)
    for _ in run.epochs(1):
        run.report(1.0)
    assert run.value == 1.0


def test_what_cannot_be_named() -> None:
    """Data are none of a run's state."""
    with pytest.raises(InvalidInputError, match=r"x=\.\.\.\) must be an estimator.*of ndarray"):
        suspendable(optuna.create_study().ask(), x=np.zeros(3))


def test_an_estimator_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    """At its first checkpoint, with the place."""
    with pytest.raises(UnstorableError, match=r"model\.\w+.* must have memory of its own"):
        train(FakeSession(checkpoint_dir=tmp_path), "tree", model=Birch(threshold=0.1))
