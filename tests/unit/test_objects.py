"""Objects come back from plain values: with the same bits, and without running what they name."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from optuna_hermes.errors import SuspendError, UnstorableError
from optuna_hermes.suspend._values._objects import Objects
from optuna_hermes.suspend._values._tree import pack, unpack


class Own:
    """A class of the user's own, with whatever attributes a test gives it."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def back(value: Any, into: Any) -> Any:
    """``into``, made what ``value`` is by way of a checkpoint."""
    tensors, text = pack(Objects("it", value).state_dict(), "trial 0")
    Objects("it", into).load_state_dict(unpack(tensors, text))
    return into


def test_plain_values_come_back() -> None:
    """Each has its type and value, and a shared object is one again."""
    inner = Own(n=1)
    first = {"a": (1, 2.5), 3: {4}, "b": [None, "text", b"octets", float("inf"), np.float32(1.5)]}
    it = back(Own(first=first, inner=inner, again=[inner]), Own(inner=Own()))
    assert it.first == first
    assert type(it.first["b"][-1]) is np.float32
    assert it.again[0] is it.inner
    assert it.inner.n == 1


def test_arrays_come_back() -> None:
    """With order, dtype and shape; one that was there in two shapes shares its memory again."""
    table = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    line = np.arange(4)
    it = back(
        Own(table=table, line=line, square=line.reshape(2, 2), names=np.array(["b", "a"])), Own()
    )
    assert it.table.flags.f_contiguous
    assert it.table.tolist() == table.tolist()
    assert it.names.tolist() == ["b", "a"]
    it.line[3] = 7
    assert it.square[1, 1] == 7


def test_arrays_that_are_parts_of_others_are_refused() -> None:
    """They would be apart afterwards."""
    line = np.arange(4)
    with pytest.raises(UnstorableError, match=r"it\.part must have memory of its own.* it\.line"):
        Objects("it", Own(line=line, part=line[1:3])).state_dict()


def test_generators_come_back_in_place() -> None:
    """The objective may hold them too."""
    generator, old = np.random.default_rng(1), np.random.RandomState(2)
    generator.random(3)
    old.normal(size=3)
    mine = Own(generator=np.random.default_rng(5), old=np.random.RandomState(6))
    held = mine.generator, mine.old
    it = back(Own(generator=generator, old=old, world=np.random.mtrand._rand), mine)
    assert (it.generator, it.old) == held
    assert it.generator.random() == generator.random()
    assert it.old.normal() == old.normal()
    assert it.world is np.random.mtrand._rand


def test_code_stays_the_objective_s() -> None:
    """Functions and classes are none of a checkpoint's business."""
    it = back(Own(call=max, kind=int), Own(call=min, kind=float))
    assert (it.call, it.kind) == (min, float)


def test_what_cannot_be_put_back_is_named() -> None:
    """An object of another package has no place in a checkpoint."""
    with pytest.raises(UnstorableError, match=r"it\.process must be .*subprocess\.CompletedProc"):
        Objects("it", Own(process=subprocess.CompletedProcess([], 0))).state_dict()


@pytest.mark.parametrize("model", [SGDClassifier(random_state=0), MLPClassifier(random_state=0)])
def test_a_new_estimator_goes_on_as_the_old_one(model: Any) -> None:
    """Its later training has the same bits, losses of Cython and optimizers included."""
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = (x[:, 0] > 0).astype(int)
    model.partial_fit(x[:30], y[:30], classes=[0, 1])
    other = back(model, type(model)(random_state=0))
    for each in (model, other):
        each.partial_fit(x[30:], y[30:])
    assert (
        pack(Objects("m", model).state_dict(), "t")[1]
        == (pack(Objects("m", other).state_dict(), "t")[1])
    )
    assert (
        model.predict_proba(x).tobytes() == other.predict_proba(x).tobytes()
        if (hasattr(model, "predict_proba"))
        else (model.coef_.tobytes() == other.coef_.tobytes())
    )


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (["object", "subprocess", "Popen", []], "subprocess.Popen, and not only"),
        (["object", "sklearn.base", "subprocess.Popen", []], "not only"),
        (["object", "sklearn.nowhere", "Thing", []], "not only"),
        (["object", "sklearn.preprocessing", "StandardScaler", []], "another class"),
        (["made", "sklearn.linear_model._ridge", "Ridge", ["tuple", []]], "would call"),
        (["made", "builtins", "exec", ["tuple", [["plain", "1"]]]], "not only"),
        (["drawing", "seed", {}], "no generator"),
        (["drawing", "BitGenerator", {}], "no generator"),
        (["call", "max"], "does not know"),
    ],
)
def test_a_forged_state_runs_nothing(node: list[Any], message: str) -> None:
    """Classes of others, constructors and unknown words are refused by name."""
    name = StandardScaler.__module__
    state = {"object": ["object", name, "StandardScaler", [["mean_", node]]]}
    with pytest.raises(SuspendError, match=message):
        Objects("scaler", StandardScaler()).load_state_dict(state)
