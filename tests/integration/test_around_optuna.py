"""Optuna's surroundings of a study: samplers, ways to stop, constraints, several objectives."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import HermesPruner, HermesSampler, _optuna, optimize
from optuna_hermes.ledger import open_ledger
from optuna_hermes.model import MOST_SECONDS
from optuna_hermes.workers._driver import Driver
from optuna_hermes.workers._open_study import open_study_message
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._words import LEFT, NOTHING_LEFT, STOP
from optuna_hermes.workers._worker import WorkerInput, _TrialExecution
from support.memory_ledger import MemoryLedger
from support.statuses import study_status

GRID = {"x": [-1.0, 0.0, 1.0], "k": [0, 1]}
N_TRIALS = 7


def samplers() -> dict[str, optuna.samplers.BaseSampler]:
    found = optuna.samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return {
            "TPE": found.TPESampler(seed=0, n_startup_trials=2),
            "random": found.RandomSampler(seed=0),
            "grid": found.GridSampler(GRID, seed=0),
            "CMA-ES": found.CmaEsSampler(seed=0, n_startup_trials=1),
            "GP": found.GPSampler(seed=0, n_startup_trials=2),
            "QMC": found.QMCSampler(seed=0),
            "NSGA-II": found.NSGAIISampler(seed=0, population_size=3),
            "NSGA-III": found.NSGAIIISampler(seed=0, population_size=3),
            "brute force": found.BruteForceSampler(seed=0),
            "partly fixed": found.PartialFixedSampler({"k": 1}, found.TPESampler(seed=0)),
        }


def objective(trial: optuna.Trial) -> float:
    """Three units; what a brute force can enumerate is all there is."""
    x, k = trial.suggest_float("x", -1, 1, step=1.0), trial.suggest_int("k", 0, 1)
    value = 0.0
    for unit in range(1, 4):
        value = (x - 1) ** 2 + k + 1 / unit
        trial.report(value, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ledgers of studies in memory are the test's own; Optuna warns only."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(verbosity)


def make_study(
    sampler: optuna.samplers.BaseSampler,
    storage: str | optuna.storages.BaseStorage | None = None,
    **parts: Any,
) -> optuna.Study:
    return optuna.create_study(
        storage=storage,
        sampler=HermesSampler(sampler, devices="cpu:2", slice_seconds=0.01),
        pruner=HermesPruner(),
        **parts,
    )


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_every_sampler_of_optuna_proposes() -> None:
    """Each one can be the base of HermesSampler; those that exhaust a space end the study."""
    for name, sampler in samplers().items():
        study = make_study(sampler)
        study.optimize(objective, n_trials=N_TRIALS, n_jobs=3)
        assert {*states(study)} == {"COMPLETE"}, name
        different = {tuple(sorted(trial.params.items())) for trial in study.trials}
        assert len(different) >= 2, name
        exhausts = name in ("grid", "brute force")
        assert len(study.trials) == N_TRIALS or exhausts, name
        assert len(different) == 6 or not exhausts, name


@pytest.mark.parametrize(("n_trials", "limit"), [(None, 6), (50, 6), (3, 3)])
def test_a_grid_bounds_its_study(n_trials: int | None, limit: int) -> None:
    """Nobody is let open a trial for which no point is left."""
    study = make_study(samplers()["grid"])
    spec = _optuna.study_spec(study, policy="hermes", slice_seconds=1.0)
    found = open_study_message(study, spec, MemoryLedger(), "a", n_trials=n_trials, max_alive=2)
    assert found.limit == limit


@pytest.mark.parametrize(
    ("given", "sent"), [(None, None), (-1.0, 0.0), (60.0, 60.0), (1e12, MOST_SECONDS)]
)
def test_a_budget_is_sent_within_what_a_message_holds(
    given: float | None, sent: float | None
) -> None:
    """A call whose time is over has none left, and 30 years are as good as more."""
    study = make_study(samplers()["random"])
    spec = _optuna.study_spec(study, policy="hermes", slice_seconds=1.0)
    found = open_study_message(
        study,
        spec,
        MemoryLedger(),
        "a",
        n_trials=None,
        max_alive=2,
        seconds_left=given,
        device_seconds=given,
    )
    assert (found.seconds_left, found.device_seconds) == (sent, sent)


def test_a_slice_is_sent_within_what_a_message_holds() -> None:
    """One that is longer than a message can say, to mean no slicing, is as good as 30 years."""
    study = make_study(samplers()["random"])
    for given, sent in ((1.0, 1.0), (1e10, MOST_SECONDS)):
        spec = _optuna.study_spec(study, policy="hermes", slice_seconds=given)
        assert spec.slice_seconds == sent


def open_file(trial: optuna.Trial) -> float:
    """An objective with a choice of a file whose name is no UTF-8."""
    trial.suggest_categorical("file", ["caf\udce9.csv"])
    return objective(trial)


@pytest.mark.slow
def test_a_choice_that_is_no_utf8_is_trained_with(storage_url: str) -> None:
    """Enqueued or proposed, by ``optimize`` or plain Optuna: Optuna's databases know it."""
    study = make_study(samplers()["random"], storage_url)
    study.enqueue_trial({"file": "caf\udce9.csv"})
    optimize(study, open_file, n_trials=2, devices="cpu:2", show_progress=False)
    study.optimize(open_file, n_trials=1)
    assert {trial.params["file"] for trial in study.trials} == {"caf\udce9.csv"}
    assert states(study) == ["COMPLETE"] * 3


@pytest.mark.slow
def test_a_grid_is_trained_once(storage_url: str) -> None:
    """No point twice, however many trials may be alive; nothing is left, and nothing unfinished."""
    study = make_study(optuna.samplers.GridSampler({"x": [-1.0, 1.0], "k": [0, 1]}), storage_url)
    assert _optuna.left_to_propose(study) == 4
    optimize(study, objective, n_trials=50, devices="cpu:2", show_progress=False)
    points = [(trial.params["x"], trial.params["k"]) for trial in study.trials]
    assert sorted(points) == [(-1.0, 0), (-1.0, 1), (1.0, 0), (1.0, 1)]
    assert {*states(study)} == {"COMPLETE"}
    assert _optuna.left_to_propose(study) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_brute_force_opens_few_trials_more_than_there_are_points(storage_url: str) -> None:
    """Also while none has ended: suspended ones are known, and what they were given."""
    study = make_study(optuna.samplers.BruteForceSampler(seed=0), storage_url)

    def train(trial: optuna.Trial) -> float:
        x, value = trial.suggest_int("x", 1, 4), 0.0
        for unit in range(1, 9):
            time.sleep(0.2)
            value = x + 1 / unit
            trial.report(value, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    optimize(study, train, devices="cpu:2", slice_seconds=0.2, show_progress=False)
    assert {trial.params["x"] for trial in study.trials} == {1, 2, 3, 4}
    assert {*states(study)} == {"COMPLETE"}
    assert len(study.trials) <= 8


@pytest.mark.slow
def test_enqueued_trials_are_opened_best_first(storage_url: str) -> None:
    """After the first ones, those whose parameters look good; all of them as they were enqueued."""
    study = make_study(optuna.samplers.RandomSampler(seed=0), storage_url)
    # The good ones are the last of the list, and the worst the first after its beginning.
    rest = [-1.0, -0.9, -0.8, 0.2, 0.3, 0.4]
    given = [*[number / 7 - 1 for number in range(15)], *rest]
    for x in given:
        study.enqueue_trial({"x": x})

    def train(trial: optuna.Trial) -> float:
        x, value = trial.suggest_float("x", -1, 1), 0.0
        for unit in range(1, 6):
            time.sleep(0.02)
            value = (x - 0.3) ** 2 + 0.1 / unit
            trial.report(value, unit)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    optimize(study, train, n_trials=len(given), devices="cpu:1", show_progress=False)
    assert {*states(study)} == {"COMPLETE"}
    assert [trial.params["x"] for trial in study.trials] == given
    begun = sorted(study.trials, key=lambda trial: str(trial.datetime_start))
    order = [trial.number for trial in begun]
    assert {*order[:15]} == {*range(15)}
    assert order[-1] in (15, 16, 17)


@pytest.mark.slow
def test_a_sampler_with_nothing_left_ends_the_study(storage_url: str) -> None:
    """Trials that are alive are trained to their end, and no further trial is opened."""
    study = make_study(samplers()["brute force"], storage_url)
    result = optimize(study, objective, n_trials=200, devices="cpu:1", show_progress=False)
    assert {*states(study)} == {"COMPLETE"}
    assert 6 <= len(study.trials) < 200
    assert not result.unfinished


def stops_itself(trial: optuna.Trial) -> float:
    value = objective(trial)
    trial.study.stop()
    return value


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stop of the trial's", "stop of its own", "MaxTrialsCallback"])
def test_a_study_is_stopped_as_in_optuna(way: str, storage_url: str) -> None:
    """It ends early, and the same call goes on with what is unfinished."""
    study = make_study(samplers()["random"], storage_url)
    train: Callable[[optuna.Trial], float] = objective
    more: dict[str, Any] = {}

    def stops_its_own(trial: optuna.Trial) -> float:
        value = objective(trial)
        study.stop()
        return value

    if way == "MaxTrialsCallback":
        more = {"callbacks": [optuna.study.MaxTrialsCallback(2)]}
    else:
        train = stops_its_own if "own" in way else stops_itself
    one_by_one = {"devices": "cpu:1", "policy": "fifo", "show_progress": False}
    result = optimize(study, train, 60, **one_by_one, **more)
    assert result.stopped
    assert 1 <= states(study).count("COMPLETE") < 60
    assert "FAIL" not in states(study)


def waiting(trial: optuna.Trial) -> float:
    """It can be suspended to disk."""
    import torch

    from optuna_hermes import suspendable

    x = trial.suggest_float("x", 0, 1)
    run = suspendable(trial, model=torch.nn.Linear(1, 1))
    for _ in run.epochs(4 if trial.number else 1):
        for _ in run.batches(range(5)):
            time.sleep(0.02)
        run.report(x)
    return x


def test_a_callback_is_given_a_copy_of_its_trial_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To copy all trials of a large study would take the driver seconds; an exit is noted."""
    study = optuna.create_study()
    study.add_trial(optuna.create_trial(value=1.0))
    (kept,) = study.get_trials(deepcopy=False)
    monkeypatch.setattr(study, "get_trials", lambda deepcopy: [] if deepcopy else [kept])
    given: list[optuna.trial.FrozenTrial] = []

    def leaves(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        given.append(trial)
        sys.exit(3)

    screen: Any = SimpleNamespace(note=print, warn=print)
    pool: Any = SimpleNamespace(began=0.0)
    driver = Driver(study, pool, OptimizeSettings(), screen, [leaves])
    driver._callbacks.update(1)
    assert given == [kept]
    assert given[0] is not kept
    assert driver._should_stop(study_status())


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    # The last one is how an `optimize` within the callback ends at Ctrl-C.
    [ZeroDivisionError("enough"), SystemExit("enough"), KeyboardInterrupt("enough")],
)
def test_a_callback_that_raises_suspends_the_study(error: BaseException, storage_url: str) -> None:
    """Its error is that of the call, as in Optuna; what the others have trained is kept."""

    ended: list[int] = []

    def raises(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        ended.append(trial.number)
        raise error

    study = make_study(samplers()["random"], storage_url)
    options: dict[str, Any] = {"devices": "cpu:1", "slice_seconds": 0.05, "show_progress": False}
    with pytest.raises(type(error), match="enough"):
        optimize(study, waiting, 4, policy="round-robin", callbacks=[raises], **options)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        kept = {
            record.number: record.state for record in ledger.load_trials(_optuna.study_key(study))
        }
    assert [kept[number] for number in ended] == ["done"]
    assert "stored" in kept.values()
    optimize(study, waiting, 4, **options)
    assert states(study) == ["COMPLETE"] * 4


@pytest.mark.slow
def test_a_sampler_that_has_tried_all_ends_a_study_that_hosts_share(postgres_url: str) -> None:
    """A brute force stops the study after six combinations, however many trials it may have."""
    study = make_study(samplers()["brute force"], postgres_url)
    optimize(study, objective, 60, devices="cpu:2", policy="fifo", show_progress=False)
    trials = study.trials
    study._storage.remove_session()
    _optuna.disconnect(study)
    tried = Counter((trial.params["x"], trial.params["k"]) for trial in trials)
    assert len(tried) == 6
    assert len(trials) <= 12, tried  # two at a time may try the same


def test_a_suggestion_that_a_journal_refuses_fails_its_own_trial_alone(tmp_path: Path) -> None:
    """Whoever reads the line of another worker there passes over it."""
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    study = make_study(samplers()["random"], optuna.storages.JournalStorage(backend))
    first = optuna.distributions.CategoricalDistribution("ab")
    given = optuna.create_trial(value=1.0, params={"name": "a"}, distributions={"name": first})
    study.add_trial(given)

    def train(trial: optuna.Trial) -> float:
        trial.suggest_categorical("name", "cd" if trial.number == 1 else "ab")
        return objective(trial)

    optimize(study, train, 8, devices="cpu:2", show_progress=False)
    assert Counter(states(study)) == {"FAIL": 1, "COMPLETE": 7}


def test_a_worker_says_who_has_called_stop() -> None:
    """Its objective, or the sampler once the trial is told."""
    study = optuna.create_study()
    job = WorkerInput(study=b"", spec=None, checkpoint_root=Path())  # type: ignore[arg-type]
    session: Any = SimpleNamespace(left=False)
    found = []
    for calls in (False, True):
        worker = _TrialExecution(job, study, session, lambda word, reason: None)
        with _optuna.optimize_loop(study):
            worker._run(study.ask(), lambda trial: trial.study.stop() if calls else 0.0)  # noqa: B023
            found.append(worker.end)
            study.stop()
            found.append(worker.end)
    assert found == [LEFT, NOTHING_LEFT, STOP, STOP]


def constrained(trial: optuna.Trial) -> float:
    value = objective(trial)
    trial.set_user_attr("excess", trial.params["x"] - 0.5)
    return value


@pytest.mark.parametrize("journal", [False, True])
def test_a_deletion_is_looked_for_where_ids_return(journal: bool, tmp_path: Path) -> None:
    """At the end of a trial in SQLite; elsewhere no time of its device is spent on that."""
    looked = tmp_path / "looked"

    def look(study: optuna.Study, key: str | None) -> bool:
        looked.touch()
        return False

    def objective(trial: optuna.Trial) -> float:
        _optuna.is_deleted = look  # of this process
        return 0.0

    place = str(tmp_path / "study")
    storage: Any = JournalStorage(JournalFileBackend(place)) if journal else f"sqlite:///{place}"
    study = optuna.create_study(storage=storage)
    result = optimize(study, objective, n_trials=1, devices="cpu:1", show_progress=False)
    assert [trial.state for trial in result.trials] == ["COMPLETE"]
    assert looked.exists() == (not journal)


def test_constraints_are_known_at_the_end_of_a_trial() -> None:
    """A suspended trial that has none yet is shown as running: samplers raise if some have none."""

    def excess(trial: optuna.trial.FrozenTrial) -> tuple[float]:
        return (float(trial.user_attrs["excess"]),)

    found: dict[str, Any] = {
        "TPE": optuna.samplers.TPESampler,
        "GP": optuna.samplers.GPSampler,
        "NSGA-II": optuna.samplers.NSGAIISampler,
    }
    for name, make in found.items():
        with warnings.catch_warnings():  # Optuna would rather have set_constraint
            warnings.simplefilter("ignore")
            study = make_study(make(seed=0, constraints_func=excess))
        if name == "GP":
            study.sampler.base._n_startup_trials = 2
        study.optimize(constrained, n_trials=N_TRIALS, n_jobs=4)
        assert {*states(study)} == {"COMPLETE"}, name
        assert study.best_trial.params["x"] <= 0.5, name


def two_objectives(trial: optuna.Trial) -> tuple[float, float]:
    import torch

    from optuna_hermes import suspendable

    x = trial.suggest_float("x", 0, 1)
    model = torch.nn.Linear(1, 1)
    run = suspendable(trial, model=model)
    for _ in run.epochs(3):
        for _ in run.batches([0, 1]):
            pass
        run.report(x)
    return x, 1 - x


@pytest.mark.slow
def test_trials_of_several_objectives_take_turns(storage_url: str) -> None:
    """Optuna keeps no intermediate values of theirs, the ledger does: turns go by them."""
    directions = ["maximize", "minimize"]
    study = make_study(samplers()["NSGA-II"], storage_url, directions=directions)
    optimize(study, two_objectives, n_trials=3, devices="cpu:2", show_progress=False)
    assert {*states(study)} == {"COMPLETE"}
    assert all(trial.values == [trial.params["x"], 1 - trial.params["x"]] for trial in study.trials)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        curves = ledger.load_curves(_optuna.study_key(study))
    assert {n: curve.values for n, curve in curves.items()} == {
        trial.number: (-trial.params["x"],) * 3 for trial in study.trials
    }


def test_a_trial_of_several_objectives_reports_to_nobody_but_the_broker() -> None:
    """Optuna refuses its intermediate values and never prunes it: neither is an error here."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    trial = study.ask()
    _optuna.report(trial, 0.5, 1)
    assert _optuna.should_prune(trial) is False
    single = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.1)).ask()
    _optuna.report(single, 0.5, 1)
    assert _optuna.should_prune(single) is True
