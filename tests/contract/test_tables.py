"""The facts that ``_optuna_tables`` reads of a study equal Optuna's; fails when Optuna changes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from optuna_hermes import _optuna
from optuna_hermes._optuna_tables import ends_of, read_facts
from optuna_hermes.ledger import open_ledger


@pytest.fixture(params=["storage_url", "postgres_url", "mariadb_url"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database."""
    return str(request.getfixturevalue(request.param))


def make_study(storage: RDBStorage, name: str, direction: str = "minimize") -> optuna.Study:
    """A study with one trial in each state."""
    study = optuna.create_study(storage=storage, study_name=name, direction=direction)
    for state in TrialState:
        value = 1.0 if state == TrialState.COMPLETE else None
        study.add_trial(optuna.trial.create_trial(state=state, value=value))
    return study


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_facts_of_a_study_are_those_that_optuna_knows(url: str, direction: str) -> None:
    """Its key, direction and ends of trials, whatever other studies there are."""
    storage = RDBStorage(url)
    make_study(storage, "other")
    study = make_study(storage, "s", direction)
    assert study.trials[0].number == 0
    key = _optuna.study_key(study)
    facts = read_facts(url, "s")
    assert facts is not None
    assert (facts.key, facts.sign) == (key, _optuna.sign(study))
    assert facts.ends == {
        each.number: "failed" if each.state == TrialState.FAIL else "done"
        for each in study.trials
        if each.state.is_finished()
    }
    with closing(open_ledger(str(facts.ledger_url))) as ledger:
        ledger.save_memory(key, 1)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        assert ledger.load_memory(key) == 1
    storage.remove_session()
    storage.engine.dispose()


def test_every_state_of_a_trial_is_known() -> None:
    """A trial has ended, by name, exactly if it has ended for Optuna."""
    ends = ends_of((number, state.name) for number, state in enumerate(TrialState))
    assert set(ends) == {n for n, state in enumerate(TrialState) if state.is_finished()}


def test_a_study_that_never_met_this_package_has_no_key(storage_url: str) -> None:
    """To look at it gives it none."""
    optuna.create_study(storage=storage_url, study_name="s")
    facts = read_facts(storage_url, "s")
    assert facts is not None
    assert (facts.key, facts.ledger_url) == (None, None)


def test_where_optuna_has_to_be_asked(storage_url: str, tmp_path: Path) -> None:
    """Of a study that is not there, tables that are not there, and what is no database."""
    optuna.create_study(storage=storage_url, study_name="other")
    assert read_facts(storage_url, "s") is None
    assert read_facts(f"sqlite:///{tmp_path}/empty.db", "s") is None
    assert read_facts(str(tmp_path / "journal.log"), "s") is None
    assert read_facts("sqlite://", "s") is None
