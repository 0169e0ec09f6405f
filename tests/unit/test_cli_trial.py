"""``optuna-hermes status TRIAL``: one trial with its event log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.cli import run
from optuna_hermes.cli._web import _actions
from optuna_hermes.ledger import (
    CheckpointRecord,
    EventRecord,
    ReportRecord,
    TrialRecord,
    open_ledger,
)
from optuna_hermes.model import Checkpoint
from optuna_hermes.view.tables import NEWEST

STUDY = ("--storage", "sqlite:///s.db", "--study-name", "digits")


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[optuna.Study]:
    """A study that maximises: trial 0 is stored and has an event log, trial 1 never ran."""
    monkeypatch.chdir(tmp_path)
    verbosity = optuna.logging.get_verbosity()
    study = optuna.create_study(storage=STUDY[1], study_name="digits", direction="maximize")
    trial = _optuna.open_trial(study)
    trial.suggest_float("lr", 0.5, 0.5)
    study.ask()
    key, number = _optuna.study_key(study), trial.number
    ledger = open_ledger(_optuna.ledger_url(study))
    trial_id = _optuna.trial_id(trial)
    ledger.save_trial(
        TrialRecord(
            study=key, number=0, trial_id=trial_id, state="parked", host="elsewhere", units=2
        )
    )
    for unit, value in enumerate((-0.5, -0.7), start=1):
        ledger.add_report(
            ReportRecord(
                study=key, number=0, unit=unit, step=unit, value=value, device_seconds=1.0, at=0.0
            )
        )
    ledger.save_checkpoint(
        CheckpointRecord(
            study=key,
            number=0,
            checkpoint=Checkpoint(path="/c", units=2, size_bytes=9, sha256=""),
            at=3.0,
        )
    )
    for n, kind in ((number, "admitted"), (1, "of another trial")):
        ledger.add_event(EventRecord(study=key, number=n, kind=kind, at=1.0))
    ledger.close()
    yield study
    optuna.logging.set_verbosity(verbosity)


def test_the_event_log_of_a_trial_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, the curve as its user knows it, where it is, and its own events with times."""
    assert run(["status", *STUDY, "0", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["trial"], document["state"]) == (0, "stored")
    assert document["params"] == {"lr": 0.5}
    assert document["where"] == {"host": "elsewhere", "tier": "disk", "device": None}
    assert document["curve"] == {
        "units": 2,
        "values": [0.5, 0.7],
        "steps": [1, 2],
        "best": {"value": 0.7, "unit": 2},
    }
    ranked = document["standing"]
    assert (ranked["rank"], ranked["among"], ranked["units"]) == (1, 1, 2)
    assert document["checkpoints"] == [{"path": "/c", "units": 2, "size_bytes": 9, "at": 3.0}]
    assert document["events"] == [{"at": 1.0, "kind": "admitted", "detail": {}}]


def test_units_of_a_trial_in_its_first_slice(
    study: optuna.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row is written when that ends: until then its reports say how far it is."""
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        (record,) = ledger.load_trials(_optuna.study_key(study))
        ledger.save_trial(dataclasses.replace(record, units=0))
        assert run(["status", *STUDY, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["study"]["trials"]
        assert (row["units"], row["units_trained"]) == (2, 2)
        assert run(["status", *STUDY, "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["units_trained"] == 2
        ledger.save_trial(dataclasses.replace(record, units=5))  # some of them twice
        assert run(["status", *STUDY, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["study"]["trials"]
        assert (row["units"], row["units_trained"]) == (2, 5)


def test_the_event_log_of_a_trial_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The same for people."""
    assert run(["status", "0", *STUDY]) == 0
    out = capsys.readouterr().out
    for words in ("Trial 0 of study digits", "lr=0.5", "best 0.7 at unit 2", "admitted"):
        assert words in out


def test_of_a_long_event_log_the_page_has_its_end(study: optuna.Study) -> None:
    """As the command line does, and with the number of events before it."""
    found = _actions(STUDY[1], "digits").event_log(0)
    assert [each["text"] for each in found["events"]] == ["admitted"]
    assert found["events_left_out"] == 0
    key = _optuna.study_key(study)
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger, ledger.batch():
        for n in range(NEWEST + 2):
            ledger.add_event(EventRecord(study=key, number=0, kind=f"event-{n}", at=2.0 + n))
    found = _actions(STUDY[1], "digits").event_log(0)
    assert [each["text"] for each in found["events"]] == [f"event-{n + 2}" for n in range(NEWEST)]
    assert found["events_left_out"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["7", *STUDY], "Study 'digits' has no trial 7 (there: 0 to 1): name one of those."),
        (
            ["1", *STUDY],
            "Trial 1 of study 'digits' has no event log, for it never had a device of "
            "this package's: see `optuna-hermes trials`.",
        ),
        (["0"], "got trial 0 alone: add --storage URL and --study-name NAME."),
        (["x", *STUDY], "'[TRIAL]': Input should be a valid integer"),
    ],
)
def test_a_trial_that_cannot_be_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is one line that says what to do, and status 2."""
    assert run(["status", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1
