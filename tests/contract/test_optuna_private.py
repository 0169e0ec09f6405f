"""The parts of Optuna on which ``_optuna`` relies without a promise; fails when Optuna changes."""

from __future__ import annotations

import copy
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.storages.journal import (
    JournalFileBackend,
    JournalFileOpenLock,
    JournalFileSymlinkLock,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes import HermesSampler, _optuna
from optuna_hermes._optuna import _surrogate_model
from optuna_hermes.errors import StorageError
from optuna_hermes.sampler import devices_of, seed_of


@pytest.fixture
def study(storage_url: str) -> optuna.Study:
    return optuna.create_study(storage=storage_url, study_name="s")


def reported(study: optuna.Study, *values: float) -> optuna.Trial:
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    for step, value in enumerate(values, start=1):
        trial.report(value, step)
    return trial


def constrain(trial: optuna.Trial, value: float) -> None:
    if hasattr(trial, "set_constraint"):
        trial.set_constraint("memory", value)
    else:  # before Optuna 5 samplers alone set them
        trial.storage.set_trial_system_attr(trial._trial_id, "constraints", (value,))


def test_unfinished_trials_are_shown_complete_at_their_last_value(study: optuna.Study) -> None:
    """The base sampler never sees a trial that has reported as RUNNING."""
    reported(study, 0.9, 0.4)
    study.ask()
    seen = _optuna.StudyView(study).get_trials()
    assert [trial.state for trial in seen] == [TrialState.COMPLETE, TrialState.RUNNING]
    assert seen[0].value == 0.4
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2


@pytest.mark.parametrize(("direction", "best"), [("minimize", 0.3), ("maximize", 0.7)])
def test_the_best_trial_is_that_of_the_trials_that_are_shown(direction: str, best: float) -> None:
    """A sampler that is shown complete trials may go on from the best of them."""
    study = optuna.create_study(direction=direction)
    view = _optuna.StudyView(study)
    with pytest.raises(ValueError, match="No trials are completed"):
        view.best_trial  # noqa: B018
    for values in ((0.9, 0.7), (0.1, 0.3)):
        reported(study, *values)
    assert view.best_value == best
    several = _optuna.StudyView(optuna.create_study(directions=["minimize", "maximize"]))
    with pytest.raises(RuntimeError, match="multi-objective"):
        several.best_trial  # noqa: B018


def test_trials_are_shown_once_for_all_parameters_of_a_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Studies have thousands of them, and TPE asks anew for each parameter."""
    study = optuna.create_study()
    study.sampler = HermesSampler(optuna.samplers.TPESampler(n_startup_trials=1, seed=0))
    reported(study, 0.9, 0.4)
    shown = []

    def as_seen(trial: FrozenTrial, directions: list[StudyDirection]) -> FrozenTrial:
        shown.append((trial.number, trial.last_step))
        return _optuna.as_seen(trial, directions)

    monkeypatch.setattr("optuna_hermes._optuna._samplers.as_seen", as_seen)
    trial = study.ask()
    for name in "xyz":
        trial.suggest_float(name, 0, 1)
    assert len(shown) == len(set(shown))
    trial.report(0.5, 1)
    study.ask().suggest_float("y", 0, 1)
    assert (trial.number, 1) in shown


def test_what_is_shown_can_be_copied_and_pickled(study: optuna.Study) -> None:
    """A base sampler may, as with the study itself, or give it to another process."""
    reported(study, 0.9, 0.4)
    view = _optuna.StudyView(study)
    for each in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert [trial.value for trial in each.trials] == [0.4]


def test_a_trial_whose_constraints_are_not_known_yet_is_shown_as_running() -> None:
    """Samplers raise where one COMPLETE trial has constraints and another has none."""
    study = optuna.create_study()
    with_them = reported(study, 0.9)
    constrain(with_them, -1.0)
    study.tell(with_them, 0.9)
    reported(study, 0.4)
    constrain(reported(study, 0.3), 1.0)
    seen = _optuna.StudyView(study).get_trials()
    assert [t.state.name for t in seen] == ["COMPLETE", "RUNNING", "COMPLETE"]


def test_the_first_constraints_of_a_study_may_be_those_of_a_trial_that_is_ending() -> None:
    """Samplers set them shortly before the trial is COMPLETE: until then the others have none."""
    study = optuna.create_study()
    reported(study, 0.4)
    constrain(reported(study, 0.9), -1.0)
    seen = _optuna.StudyView(study).get_trials()
    assert [t.state.name for t in seen] == ["RUNNING", "COMPLETE"]


@pytest.mark.parametrize(
    "base", [None, optuna.samplers.GridSampler({"x": [0.0, 0.5, 1.0]})], ids=["TPE", "grid"]
)
def test_brackets_of_hyperband_are_views_of_the_study(base: optuna.samplers.BaseSampler) -> None:
    """A bracket's view refuses attributes that every study has; a grid still ends the study."""
    study = optuna.create_study(
        study_name="brackets",  # which bracket a trial goes to depends on it
        sampler=HermesSampler(base),
        pruner=optuna.pruners.HyperbandPruner(max_resource=9),
    )

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        for step in range(9):
            trial.report(x + 1 / (step + 1), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x

    study.optimize(objective, 15)
    assert len(study.trials) == (3 if base else 15)
    trial = study.ask()
    bracket = optuna.pruners._filter_study(study, study._storage.get_trial(trial._trial_id))
    assert len(_optuna.StudyView(bracket).get_trials()) == len(bracket.get_trials())
    assert len(bracket.get_trials()) < len(study.trials)


def test_a_grid_has_an_end() -> None:
    """Points that nobody has begun are left, whatever else is in the study; others never end."""
    grid = optuna.samplers.GridSampler({"x": [0.0, 1.0], "k": [1, 2]})
    study = optuna.create_study(sampler=HermesSampler(grid))
    study.enqueue_trial({"x": 1.0, "k": 2})
    study.ask()
    assert _optuna.left_to_propose(study) == 4
    study.ask()
    study.tell(study.ask(), state=TrialState.FAIL)
    assert _optuna.left_to_propose(study) == 2
    assert _optuna.left_to_propose(optuna.create_study(sampler=HermesSampler())) is None


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_brute_force_has_an_end_once_trials_have_begun_everywhere() -> None:
    """Trials that have reported have all their parameters; failed ones without any are nowhere."""
    sampler = HermesSampler(optuna.samplers.BruteForceSampler(seed=0))
    study = optuna.create_study(sampler=sampler)
    study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))
    assert _optuna.left_to_propose(study) is None
    study = optuna.create_study(sampler=sampler)
    left = [_optuna.left_to_propose(study)]
    for _ in range(3):
        trial = study.ask()
        if trial.suggest_categorical("kind", ["a", "b"]) == "a":
            trial.suggest_int("depth", 1, 2)
        left.append(_optuna.left_to_propose(study))
        trial.report(0.0, 1)
    assert left == [None] * 4
    assert _optuna.left_to_propose(study) == 0
    assert {trial.state.name for trial in study.trials} == {"RUNNING"}


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution:UserWarning")
@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        pytest.param(
            *([(1,), (1, 2)], [(1,), (1, 2)], "let choices be text"),
            marks=pytest.mark.skipif(
                not hasattr(RDBStorage, "_set_trial_param"),
                reason="older versions of Optuna compare choices as they are stored",
            ),
        ),
        (["a", "b"], ["a", "c"], ""),
    ],
    ids=["tuples", "other choices"],
)
def test_choices_that_a_storage_gives_back_as_others(
    first: list[Any], second: list[Any], advice: str, study: optuna.Study, storage_url: str
) -> None:
    """Optuna's error says nothing of tuples, which are lists in each other process."""
    study.tell(study.ask({"x": optuna.distributions.CategoricalDistribution(first)}), 0.0)
    study = optuna.load_study(study_name="s", storage=storage_url)
    with pytest.raises(ValueError, match="dynamic value space") as error:
        study.ask().suggest_categorical("x", second)
    said = _optuna.storage_advice(study, error.value)
    assert advice in said
    assert bool(advice) == bool(said)
    assert _optuna.storage_advice(study, ValueError("x")) == ""


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution:UserWarning")
def test_choices_that_no_storage_keeps(tmp_path: Path) -> None:
    """Functions and objects are choices in memory only; Optuna's error does not say of what."""
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    with pytest.raises(TypeError) as error:
        study.ask().suggest_categorical("loss", [abs])
    said = _optuna.storage_advice(study, error.value)
    assert said.endswith("as float(x) or int(x), and let others be keys of a dictionary)")


def test_attributes_that_no_storage_keeps(tmp_path: Path) -> None:
    """Scripts hand the trial's model to their callback like this, with a study in memory."""
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    with pytest.raises(TypeError) as error:
        study.ask().set_user_attr("model", object())
    said = _optuna.storage_advice(study, error.value)
    assert said.endswith("as float(x) or int(x), and save others to a file, whose name is set)")


@pytest.mark.parametrize("url", [None, "sqlite"])
def test_states_of_trials_are_read_without_the_rest(url: str | None, storage_url: str) -> None:
    """They are those of ``get_trials``, of this study only, in a database and in memory."""
    storage = storage_url if url else optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="s")
    reported(optuna.create_study(storage=storage, study_name="other"), 0.5)
    study.tell(reported(study, 0.9), 0.9)
    study.tell(study.ask(), state=TrialState.FAIL)
    reported(study, 0.4)
    assert _optuna.trial_states(study) == {t.number: t.state for t in study.get_trials()}
    assert list(_optuna.trial_states(study).values())[1:] == [TrialState.FAIL, TrialState.RUNNING]


@pytest.mark.parametrize(("direction", "worst"), [("minimize", math.inf), ("maximize", -math.inf)])
def test_a_diverged_trial_is_shown_as_the_worst(direction: str, worst: float) -> None:
    """NaN is no value that a sampler could sort."""
    study = optuna.create_study(direction=direction)
    reported(study, 0.5, math.nan)
    assert _optuna.StudyView(study).get_trials()[0].value == worst


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optuna.samplers.TPESampler, {"n_startup_trials": 2}),
        (optuna.samplers.GPSampler, {"n_startup_trials": 2}),
        (optuna.samplers.RandomSampler, {}),
    ],
    ids=["TPE", "GP", "random"],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_samplers_propose_from_the_view(
    kind: type[optuna.samplers.BaseSampler], options: dict[str, Any], study: optuna.Study
) -> None:
    """Base samplers accept the view in the place of a study."""
    study.sampler = HermesSampler(kind(seed=0, **options))  # before Optuna 5 one of them warns
    for value in (0.9, 0.5, 0.4, 0.3):
        reported(study, value)
    assert 0 <= study.ask().suggest_float("x", 0, 1) <= 1


def test_tpe_learns_from_trials_that_are_suspended(storage_url: str) -> None:
    """With good suspended trials at one place TPE proposes near it, and plain TPE does not."""

    def proposals(sampler: optuna.samplers.BaseSampler, name: str) -> float:
        study = optuna.create_study(storage=storage_url, study_name=name, sampler=sampler)
        for i in range(30):
            trial = study.ask()
            x = trial.suggest_float("x", 0, 1)
            trial.report(abs(x - 0.2), 1)
            assert i == trial.number
        late = [t.params["x"] for t in study.trials[15:]]
        return sum(abs(x - 0.2) for x in late) / len(late)

    base = optuna.samplers.TPESampler
    ours = proposals(HermesSampler(base(seed=0)), "ours")
    plain = proposals(base(seed=0), "plain")
    assert ours < 0.5 * plain


def test_reseeding_makes_proposals_repeatable(storage_url: str) -> None:
    """The same seed and number give the same draw, another number another one."""

    def draw(seed: int, number: int) -> float:
        sampler = HermesSampler()
        _optuna.reseed(sampler, seed, number)
        study = optuna.create_study(sampler=sampler)
        return study.ask().suggest_float("x", 0, 1)

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


def test_a_trial_that_goes_on_draws_other_numbers() -> None:
    """A late suggestion is no function of the first ones."""

    def draw(n_given: int) -> float:
        sampler = HermesSampler()
        _optuna.reseed(sampler, 1, 2, n_given)
        return optuna.create_study(sampler=sampler).ask().suggest_float("x", 0, 1)

    assert len({draw(n_given) for n_given in (0, 1, 2)}) == 3


class WithOwnNumbers(optuna.samplers.BaseSampler):
    """A sampler as users write them, with random numbers of a kind of its own."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> float:
        return float(self._numbers.random())


class WithHiddenNumbers(WithOwnNumbers):
    def __init__(self) -> None:
        self._hidden = SimpleNamespace(numbers=np.random.RandomState(0))

    def reseed_rng(self) -> None:
        self._hidden.numbers.seed()

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> float:
        return float(self._hidden.numbers.uniform())


@pytest.mark.parametrize(
    "numbers", [np.random.RandomState(0), np.random.default_rng(0), random.Random(0)]
)
def test_samplers_of_users_draw_anew_for_each_trial(numbers: Any) -> None:
    """Each trial has a copy of the sampler as it was at the beginning."""

    def draw(seed: int, number: int) -> float:
        copied = pickle.loads(pickle.dumps(HermesSampler(WithOwnNumbers(numbers))))
        _optuna.reseed(copied, seed, number)
        return optuna.create_study(sampler=copied).ask().suggest_float("x", 0, 1)

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


@pytest.mark.parametrize("held", [list, tuple, lambda each: {"a": [*each]}])
def test_random_numbers_in_lists_are_found(held: Any) -> None:
    """A sampler that takes turns with several has them in a list, or in a dictionary by name."""

    class TakesTurns(WithOwnNumbers):
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            inner = self._numbers["a"] if isinstance(self._numbers, dict) else self._numbers
            return inner[0].sample_independent(study, trial, name, distribution)

    def draw(seed: int, number: int) -> float:
        sampler = HermesSampler(TakesTurns(held([optuna.samplers.RandomSampler(seed=0)])))
        _optuna.reseed(sampler, seed, number)
        return optuna.create_study(sampler=sampler).ask().suggest_float("x", 0, 1)

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


def test_a_generator_of_torch_is_seeded() -> None:
    """One of the kinds of random numbers that a sampler may have."""
    torch = pytest.importorskip("torch")

    def draw(seed: int, number: int) -> float:
        numbers = torch.Generator().manual_seed(0)
        _optuna.reseed(WithOwnNumbers([numbers]), seed, number)
        return float(torch.rand(1, generator=numbers))

    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(1, 3), draw(2, 2)}) == 3


@pytest.mark.parametrize("kind", ["Sobol", "Halton"])
def test_each_trial_has_its_point_of_a_sequence(kind: str) -> None:
    """As if all were drawn one after the other; a trial that goes on takes no point twice."""
    qmc = pytest.importorskip("scipy.stats.qmc")
    points = getattr(qmc, kind)(1, seed=0)

    def draw(number: int, n_given: int = 0) -> float:
        sampler = pickle.loads(pickle.dumps(WithOwnNumbers(points)))
        _optuna.reseed(sampler, 1, number, n_given)
        return float(sampler._numbers.random(1)[0, 0])

    one_by_one = getattr(qmc, kind)(1, seed=0)
    expected = [float(one_by_one.random(1)[0, 0]) for _ in range(4)]
    assert [draw(number) for number in range(4)] == pytest.approx(expected)
    assert draw(2, 1) == draw(3)


def test_samplers_whose_random_numbers_are_not_found_reseed_themselves() -> None:
    """So trials differ, though they are others each time."""
    drawn = set()
    for number in range(2):
        sampler = HermesSampler(WithHiddenNumbers())
        _optuna.reseed(sampler, 1, number)
        drawn.add(optuna.create_study(sampler=sampler).ask().suggest_float("x", 0, 1))
    assert len(drawn) == 2


@pytest.mark.parametrize("ending", [TrialState.FAIL, TrialState.PRUNED])
def test_parents_that_fail_later_keep_a_value(ending: TrialState) -> None:
    """Genetic samplers choose parents once, suspended ones too, and raise if one has no value."""
    base = optuna.samplers.NSGAIISampler(population_size=3, seed=0)
    study = optuna.create_study(sampler=HermesSampler(base))

    def begin() -> optuna.Trial:
        trial = study.ask()
        trial.report(trial.suggest_float("x", 0, 1), 1)
        return trial

    first, *_ = [begin() for _ in range(6)]
    first.report(math.nan, 2)
    study.tell(first, state=ending)
    assert study.trials[0].value is None
    begin()
    seen = _optuna.StudyView(study).get_trials()
    assert (seen[0].state, seen[0].value) == (TrialState.COMPLETE, math.inf)


def test_a_batch_that_is_asked_for_first_is_not_proposed_in_one_place(
    storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial sees what those before it were given, though Optuna reads trials once for all."""
    seen = []

    def counted(space: Any, tried: Any, begun: Any, *others: Any, **named: Any) -> Any:
        seen.append(len(begun))
        return proposals(space, tried, begun, *others, **named)

    study = optuna.create_study(storage=storage_url, sampler=HermesSampler(seed=0))
    study.optimize(lambda trial: (trial.suggest_float("x", 0, 1) - 0.3) ** 2, n_trials=12)
    proposals = _surrogate_model.proposals
    monkeypatch.setattr(_surrogate_model, "proposals", counted)
    for trial in [study.ask() for _ in range(4)]:
        trial.suggest_float("x", 0, 1)
    assert seen == [0, 1, 2, 3]


def test_a_seed_of_numpy_is_kept_as_a_number(storage_url: str) -> None:
    """A database holds it as JSON."""
    study = optuna.create_study(storage=storage_url)
    assert _optuna.study_seed(study, np.int64(3)) == 3
    assert _optuna.study_seed(study, None) == 3


def test_a_trial_is_marked_from_its_first_moment(study: optuna.Study) -> None:
    """A trial that was opened and never registered can be told from a plain worker's."""
    study.ask()
    mine = _optuna.open_trial(study)
    assert [_optuna.ours(trial) for trial in study.get_trials()] == [False, True]
    study.tell(mine, 1.0)
    assert not _optuna.ours(study.trials[1])


def test_marks_of_trials_have_one_name(study: optuna.Study) -> None:
    """``trials_dataframe`` makes a column of each; one that was found again has the same."""
    for number in range(5):
        _optuna.open_trial(study, name=str(number))
    assert _optuna.open_trial(study, name="5", lost=["2"]).number == 2
    names = {name for trial in study.trials for name in trial.system_attrs}
    assert names == {"hermes:opened", "hermes:seed"}
    assert [*map(_optuna.opened_by, study.trials)] == [{name} for name in "01534"]


def test_marks_of_a_trial_are_not_those_of_its_copy_in_the_queue(study: optuna.Study) -> None:
    """Optuna's callbacks enqueue a failed trial again with all of its attributes."""
    study.tell(_optuna.open_trial(study, name="7"), state=TrialState.FAIL)
    attributes = study.trials[0].system_attrs
    study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=attributes))
    assert _optuna.open_trial(study, name="8").number == 1
    assert _optuna.opened_by(study.trials[1]) == {"8"}


@pytest.mark.parametrize("queued", [True, False])
def test_a_proposal_reads_no_trials_that_were_just_read(
    study: optuna.Study, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first proposal of a trial is made from those that were there when it was opened."""
    study.sampler = HermesSampler(optuna.samplers.TPESampler(n_startup_trials=1, seed=0))
    for value in (0.9, 0.4):
        reported(study, value)
    if queued:
        study.enqueue_trial({})
    reads: list[int] = []
    storage: Any = study._storage
    read = storage.get_all_trials

    def counted(*args: Any, **named: Any) -> Any:
        found = read(*args, **named)
        reads.append(len(found))
        return found

    monkeypatch.setattr(storage, "get_all_trials", counted)
    trial = _optuna.open_trial(study)
    trial.suggest_float("x", 0, 1)
    assert reads == [3 if queued else 2]
    known: Any = study._thread_local.cached_all_trials
    assert [each.number for each in known] == [0, 1, 2]
    assert known[2].state == TrialState.RUNNING


def test_steps_that_were_reported_are_those_of_one_trial(study: optuna.Study) -> None:
    """Another trial's are not among them."""
    reported(study, 0.9, 0.8, 0.7)
    assert _optuna.reported_steps(reported(study, 0.4, 0.3)) == {1, 2}
    assert _optuna.reported_steps(optuna.trial.FixedTrial({"x": 0.0})) == set()


def test_queued_trials_are_opened_first(study: optuna.Study) -> None:
    """``enqueue_trial`` works as with ``study.ask``, and the trial is marked as well."""
    study.enqueue_trial({"x": 0.25})
    trial = _optuna.open_trial(study)
    assert trial.suggest_float("x", 0, 1) == 0.25
    assert _optuna.ours(study.trials[0])


def test_a_queued_trial_can_be_taken_before_others(study: optuna.Study) -> None:
    """One that waits no more is no reason to create another while there are some in the queue."""
    for number in range(4):
        study.enqueue_trial({"x": number / 4})
    assert _optuna.open_trial(study, listed_number=2).suggest_float("x", 0, 1) == 0.5
    assert [_optuna.open_trial(study, listed_number=each).number for each in (2, None, 3)] == [
        0,
        1,
        3,
    ]
    assert _optuna.open_trial(study, listed_number=1).number == 4


def test_parameters_of_queued_trials_are_known(study: optuna.Study) -> None:
    """Before they are suggested; values that JSON lacks are shown as texts."""
    study.enqueue_trial({"x": 0.25, "act": "relu", "none": None})
    study.ask()
    study.enqueue_trial({})
    study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING))
    added = {
        "params": {"x": 0.5},
        "distributions": {"x": optuna.distributions.FloatDistribution(0, 1)},
    }
    study.add_trial(optuna.trial.create_trial(state=TrialState.WAITING, **added))
    listed = [
        _optuna.listed_params(trial) for trial in study.trials if trial.state.name == "WAITING"
    ]
    assert listed == [{}, {}, {"x": 0.5}]
    assert _optuna.listed_params(study.trials[0]) == {"x": 0.25, "act": "relu", "none": None}


def test_a_trial_that_somebody_died_over_is_not_lost_once_it_is_taken(
    storage_url: str, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it from the queue takes the mark away, and nobody looks for it any more."""
    study.enqueue_trial({"x": 0.25})
    storage = type(study._storage)

    def die(*args: object, **options: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "set_trial_state_values", die)
        with pytest.raises(KeyboardInterrupt):
            _optuna.open_trial(study, name="7")
    assert _optuna.open_trial(study, name="8").number == 0
    assert _optuna.open_trial(study, name="9", lost=["7"]).number == 1


@pytest.mark.parametrize("queued", [False, True])
def test_a_trial_of_somebody_who_died_is_found(study: optuna.Study, queued: bool) -> None:
    """The one with that mark is taken, and only while it has no end and no other has it."""
    if queued:
        study.enqueue_trial({"x": 0.25})
    _optuna.open_trial(study, name="7")
    assert _optuna.open_trial(study, name="8", lost=["7"]).number == 0
    assert _optuna.open_trial(study, name="9", lost=["7"]).number == 1
    study.tell(1, 0.5)
    assert _optuna.open_trial(study, name="10", lost=["9"]).number == 2
    assert _optuna.open_trial(study, name="11", lost=["12", "8"]).number == 0
    assert all(_optuna.ours(study.trials[number]) for number in (0, 2))


def test_another_process_gets_the_same_trial(storage_url: str, study: optuna.Study) -> None:
    """A trial that is taken up again has its parameters and its reported values."""
    first = reported(study, 0.5)
    again = optuna.load_study(study_name="s", storage=storage_url)
    trial = _optuna.reattach(again, _optuna.trial_id(first))
    assert trial.suggest_float("x", 0, 1) == first.params["x"]
    trial.suggest_float("y", 0, 1)
    trial.report(0.4, 2)
    again.tell(trial, 0.4)
    assert study.trials[0].intermediate_values == {1: 0.5, 2: 0.4}


def test_a_trial_keeps_the_seed_that_it_was_begun_with(
    storage_url: str, study: optuna.Study
) -> None:
    """With that of a later call it would split its data otherwise when it is resumed."""
    study.enqueue_trial({"x": 0.5})
    begun = [_optuna.open_trial(study, seed=3) for _ in range(2)]
    assert [_optuna.seed_of_trial(trial, 5) for trial in begun] == [3, 3]
    plain = study.ask()  # as that of an earlier version
    again = optuna.load_study(study_name="s", storage=storage_url)
    resumed = [_optuna.reattach(again, _optuna.trial_id(each)) for each in (*begun, plain)]
    assert [_optuna.seed_of_trial(trial, 5) for trial in resumed] == [3, 3, 5]


def test_a_study_made_again_has_another_key(storage_url: str, study: optuna.Study) -> None:
    """The ledger of a deleted study is not taken for that of its namesake."""
    key = _optuna.study_key(study)
    assert _optuna.study_key(optuna.load_study(study_name="s", storage=storage_url)) == key
    optuna.delete_study(study_name="s", storage=storage_url)
    assert _optuna.study_key(optuna.create_study(storage=storage_url, study_name="s")) != key


def test_the_seed_is_kept(study: optuna.Study) -> None:
    """Without a seed one is drawn once, so that a later call seeds its trials alike."""
    assert _optuna.study_seed(study, None) == _optuna.study_seed(study, None)
    assert _optuna.study_seed(study, 7) == 7
    assert _optuna.study_seed(study, None) == 7
    assert _optuna.study_seed(study, None, 8) == 7  # of the sampler on another host


def test_the_first_seed_may_be_the_samplers(study: optuna.Study) -> None:
    """One that is given for the call comes before it."""
    assert seed_of(HermesSampler(HermesSampler(seed=0))) == 0
    assert seed_of(optuna.samplers.TPESampler(seed=0)) is None
    assert devices_of(HermesSampler(HermesSampler(devices="cpu:3"))) == "cpu:3"
    assert devices_of(optuna.samplers.TPESampler()) is None
    assert _optuna.study_seed(study, None, 0) == 0
    assert _optuna.study_seed(study, 7, 0) == 7


def test_where_ledger_and_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: optuna.Study
) -> None:
    """Beside an SQLite file, whatever the folder a process runs in; else in the user's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert _optuna.ledger_url(study) == f"sqlite:///{tmp_path / 'study.db'}"
    assert _optuna.checkpoint_root(study).parent == tmp_path / "study.db.hermes"
    monkeypatch.chdir(tmp_path)
    relative = optuna.create_study(storage="sqlite:///other.db")
    assert _optuna.ledger_url(relative) == f"sqlite:///{tmp_path / 'other.db'}"
    key = _optuna.study_key(relative)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for study in (relative, optuna.load_study(study_name=None, storage=relative._storage)):
        assert _optuna.ledger_url(study) == f"sqlite:///{tmp_path / 'other.db'}"
        assert _optuna.study_key(study) == key
    changed = optuna.create_study(storage="sqlite:///../other.db")
    monkeypatch.chdir(tmp_path)
    assert _optuna.ledger_url(changed) == f"sqlite:///{tmp_path / 'other.db'}"
    assert not list((tmp_path / "elsewhere").iterdir())
    journal = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    )
    for storage in (None, journal):
        away = optuna.create_study(storage=storage)
        assert _optuna.ledger_url(away).startswith(f"sqlite:///{tmp_path / 'state'}")
        assert _optuna.shared(away) == (storage is not None)


@pytest.mark.parametrize("lock", [None, JournalFileSymlinkLock, JournalFileOpenLock])
def test_an_objective_may_change_its_folder(
    lock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's values go into the journal that the study was made in, whatever its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    file = JournalFileBackend("journal.log", lock and lock("journal.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(file))
    worker = cloudpickle.loads(_optuna.for_workers(study))
    monkeypatch.chdir("elsewhere")
    trial = worker.ask()
    trial.report(0.5, 1)
    worker.tell(trial, 0.25)
    assert list(Path().iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert [(each.value, each.intermediate_values) for each in study.trials] == [(0.25, {1: 0.5})]
    assert sorted(path.name for path in Path().iterdir()) == ["elsewhere", "journal.log"]


def test_stop_works_inside_of_the_loop_only(study: optuna.Study) -> None:
    """``study.stop()`` may be called by callbacks, as in ``study.optimize``."""
    with pytest.raises(RuntimeError):
        study.stop()
    with _optuna.optimize_loop(study):
        assert not _optuna.asked_to_stop(study)
        study.stop()
        assert _optuna.asked_to_stop(study)


def test_a_study_inside_of_a_trial_is_no_copy_of_its_study(tmp_path: Path) -> None:
    """In a file of its own it has the same id, and may have the same name; it stops itself."""
    study, inner = (
        optuna.create_study(storage=f"sqlite:///{tmp_path}/{file}.db", study_name="tune")
        for file in ("outer", "inner")
    )
    copied = cloudpickle.loads(_optuna.for_workers(study))
    with _optuna.optimize_loop(study), _optuna.stopped_by_copies(study):
        inner.optimize(lambda _: 0.0, 5, callbacks=[optuna.study.MaxTrialsCallback(2)])
        assert len(inner.trials) == 2
        assert not _optuna.asked_to_stop(study)
        copied.stop()
        assert _optuna.asked_to_stop(study)


def test_storages_that_cannot_be_used_are_named_without_their_password() -> None:
    """One line says which storage, and hides what must not be seen."""
    with pytest.raises(StorageError, match="localhost") as raised:
        _optuna.create_study("postgresql://me:secret@localhost:1/x", "s")
    assert "secret" not in str(raised.value)
    assert _optuna.without_password("sqlite:///a@b:c.db") == "sqlite:///a@b:c.db"


LOADED = """
import sys
from pathlib import Path
import cloudpickle
study = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
trial = study.ask()
study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
print(len(study.trials), "alembic" in sys.modules)
"""


def test_a_worker_does_not_look_for_tables_that_are_there(
    study: optuna.Study, tmp_path: Path
) -> None:
    """A study for workers can do what a study can, and alembic is not imported for it."""
    packed = tmp_path / "study"
    packed.write_bytes(_optuna.for_workers(study))
    script = [sys.executable, "-c", LOADED, str(packed)]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["1", "False"]
    assert len(study.trials) == 1


def test_mappers_are_configured_before_a_fork() -> None:
    """The first query of each fork would configure them again."""
    script = (
        "from optuna.storages._rdb.models import TrialModel; from optuna_hermes import _optuna; "
        "print(TrialModel.__mapper__.configured); _optuna.prepare_storages(); "
        "print(TrialModel.__mapper__.configured)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert said.stdout.split() == ["False", "True"]


INHERITED = """
import os, sys
from pathlib import Path
import cloudpickle
from optuna_hermes import _optuna
study = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
_optuna.read_trials(study)
opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
print(sum("study.db" in each for each in opened))
known = len(study._storage._studies[study._study_id].trials)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        trial = study.ask()
        study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print(known, len(study.trials))
"""


COMPILED = """
import os, sys
from pathlib import Path
import cloudpickle
from optuna_hermes import _optuna
from sqlalchemy.sql.compiler import SQLCompiler
study = cloudpickle.loads(Path(sys.argv[1]).read_bytes())
_optuna.prepare_storages()
_optuna.read_trials(study)
init, compiled = SQLCompiler.__init__, []
def count(self, dialect, statement, *args, **named):
    if statement._generate_cache_key():  # before SQLAlchemy 2.1 upserts have none
        compiled.append(repr(type(statement)))
    init(self, dialect, statement, *args, **named)
SQLCompiler.__init__ = count
trial = _optuna.open_trial(study)
trial.report(trial.suggest_float("x", 0.0, 1.0) + trial.suggest_int("y", 0, 1), 1)
trial.set_user_attr("state", "running")
study.tell(trial, 1.0)
print(len(compiled), len(study.trials), *compiled)
"""


def test_forks_compile_no_statement(tmp_path: Path) -> None:
    """The process that they are forked from has, for all of them, and left the study as it was."""
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    packed = tmp_path / "packed"
    packed.write_bytes(_optuna.for_workers(study))
    script = [sys.executable, "-c", COMPILED, str(packed)]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert said.split()[:2] == ["0", "1"], said


def test_forks_inherit_the_trials_that_were_read_and_no_connection(tmp_path: Path) -> None:
    """Each fork opens its own: a file's locks do not survive a fork."""
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=3)
    packed = tmp_path / "packed"
    packed.write_bytes(_optuna.for_workers(study))
    script = [sys.executable, "-c", INHERITED, str(packed)]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["0", "3", "5"]


def test_trials_are_not_read_ahead_from_a_server_or_in_an_outage(tmp_path: Path) -> None:
    """A process that others wait for does not wait for a database."""
    _optuna.read_trials(optuna.create_study())
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    (tmp_path / "study.db").write_bytes(b"no database")
    _optuna.read_trials(study)


def test_a_fork_does_not_read_again_what_was_read_before(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes since then are read where they are needed, when a trial is opened."""
    reads: list[bool] = []
    read = study.get_trials
    monkeypatch.setattr(study, "get_trials", lambda **named: (reads.append(True), read(**named))[1])
    _optuna.read_trials_once(study)
    assert len(reads) == 1
    _optuna.read_trials(study)
    _optuna.read_trials_once(study)
    assert len(reads) == 2


def test_suggested_numbers_are_replaced() -> None:
    """The study has the new ones, as a sampler sees them, with the bounds of the suggestion."""
    study = optuna.create_study()
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    _optuna.replace_params(trial, {"x": 0.25})
    study.tell(trial, 1.0)
    assert study.trials[0].params == {"x": 0.25}
    assert study.trials[0].distributions == {"x": optuna.distributions.FloatDistribution(0, 1)}
