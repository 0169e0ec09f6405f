"""Optuna's published suites over our sampler and storage, and its pruners within ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.testing.pytest_storages import StorageTestCase

from optuna_hermes import HermesPruner, HermesSampler
from optuna_hermes._optuna import SurrogateSampler, _surrogate_sampler
from optuna_hermes._optuna._retrying_storage import RetryingStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]

MakeSampler = Callable[[], BaseSampler]
found = optuna.samplers
RELATIVE: dict[str, MakeSampler] = {
    "TPE": partial(found.TPESampler, n_startup_trials=0, multivariate=True),
    "CMA-ES": partial(found.CmaEsSampler, n_startup_trials=0),
    "GP": partial(found.GPSampler, n_startup_trials=0),
    "own": SurrogateSampler,
}
BASIC: dict[str, MakeSampler] = {
    **RELATIVE,
    "random": found.RandomSampler,
    "univariate TPE": partial(found.TPESampler, n_startup_trials=0, multivariate=False),
    "NSGA-II": found.NSGAIISampler,
    "NSGA-III": found.NSGAIIISampler,
    "QMC": found.QMCSampler,
}
MULTIPLE = ("TPE", "NSGA-II", "NSGA-III", "GP", "own")
SINGLE = ("CMA-ES",)


def cases(names: Any) -> list[Any]:
    """By name; all of them take minutes, a Gaussian process the most."""
    fast = ("TPE", "own", "random")
    return [
        pytest.param(BASIC[name], id=name, marks=() if name in fast else pytest.mark.slow)
        for name in names
    ]


def over(base: MakeSampler) -> MakeSampler:
    """A sampler of ours over one of Optuna's, or over the one that it has by itself."""
    return lambda: HermesSampler(base())


@pytest.fixture(autouse=True)
def no_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites expect proposals from the first trials on, not random numbers."""
    monkeypatch.setattr(_surrogate_sampler, "N_STARTUP", 1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(verbosity)


class TestBasic(BasicSamplerTestCase):
    @pytest.fixture(params=cases(BASIC))
    def sampler(self, request: pytest.FixtureRequest) -> MakeSampler:
        return over(request.param)


class TestRelative(RelativeSamplerTestCase):
    @pytest.fixture(params=cases(RELATIVE))
    def sampler(self, request: pytest.FixtureRequest) -> MakeSampler:
        return over(request.param)


class TestMultipleObjectives(MultiObjectiveSamplerTestCase):
    @pytest.fixture(params=cases(MULTIPLE))
    def sampler(self, request: pytest.FixtureRequest) -> MakeSampler:
        return over(request.param)


class TestSingleObjectiveOnly(SingleOnlySamplerTestCase):
    @pytest.fixture(params=cases(SINGLE))
    def sampler(self, request: pytest.FixtureRequest) -> MakeSampler:
        return over(request.param)


class TestPatientStorage(StorageTestCase):
    """The storage through which workers of ``optimize`` see a study."""

    @pytest.fixture(params=["memory", "SQLite", "journal"])
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseStorage]:
        inner: BaseStorage
        if request.param == "memory":
            inner = optuna.storages.InMemoryStorage()
        elif request.param == "SQLite":
            inner = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
        else:
            file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
            inner = optuna.storages.JournalStorage(file)
        yield RetryingStorage(inner)  # type: ignore[misc]
        if isinstance(inner, optuna.storages.RDBStorage):
            inner.engine.dispose()


PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": partial(optuna.pruners.MedianPruner, n_startup_trials=2),
    "percentile": partial(optuna.pruners.PercentilePruner, 25.0, n_startup_trials=2),
    "halving": partial(optuna.pruners.SuccessiveHalvingPruner, min_resource=1),
    "threshold": partial(optuna.pruners.ThresholdPruner, upper=0.8),
    "patient": partial(
        optuna.pruners.PatientPruner, optuna.pruners.MedianPruner(n_startup_trials=2), patience=1
    ),
    "Wilcoxon": partial(optuna.pruners.WilcoxonPruner, p_threshold=0.3, n_startup_steps=1),
    "none": optuna.pruners.NopPruner,
}


def pruned_at(pruner: optuna.pruners.BasePruner, sampler: BaseSampler) -> list[int | None]:
    """For each of twelve trials, the step after which it was pruned."""
    # Brackets are drawn from the study's name.
    study = optuna.create_study(study_name="peers", pruner=pruner, sampler=sampler)
    ends: list[int | None] = []
    for number in range(12):
        trial = study.ask()
        level, end = trial.suggest_float("x", 0, 1), None
        for step in range(1, 7):
            trial.report(level + (number * step % 5) / 10, step)
            if trial.should_prune():
                end = step
                break
        study.tell(trial, level)
        ends.append(end)
    return ends


@pytest.mark.parametrize("name", [name for name in PRUNERS if name != "Wilcoxon"])
def test_a_wrapped_pruner_prunes_as_it_does_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside HermesPruner each pruner of Optuna stops the same trials after the same steps."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        alone = pruned_at(PRUNERS[name](), found.RandomSampler(seed=3))
        wrapped = pruned_at(
            HermesPruner(PRUNERS[name]()),
            HermesSampler(found.RandomSampler(seed=3), devices="cpu:1"),
        )
    assert wrapped == alone
    assert name == "none" or any(end is not None for end in alone)


@pytest.mark.parametrize("name", [*PRUNERS, "Hyperband"])
def test_a_pruner_beside_the_sampler_prunes_as_it_does_alone(name: str) -> None:
    """With HermesSampler each pruner of Optuna stops the same trials after the same steps."""
    make = {**PRUNERS, "Hyperband": partial(optuna.pruners.HyperbandPruner, 1, 6)}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        alone = pruned_at(make(), found.RandomSampler(seed=3))
        beside = pruned_at(make(), HermesSampler(found.RandomSampler(seed=3)))
    assert beside == alone
