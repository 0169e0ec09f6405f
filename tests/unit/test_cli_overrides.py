"""``hold``, ``boost``, ``release`` and ``policy`` of a study that no broker serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from optuna_hermes import _optuna, upkeep
from optuna_hermes.cli import run
from optuna_hermes.ledger import Ledger, TrialRecord, open_ledger

STUDY = ("--storage", "sqlite:///s.db", "--study-name", "digits")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """The ledger of a study with a trial that is stored, one that is over, and one of nobody's."""
    monkeypatch.chdir(tmp_path)
    verbosity = optuna.logging.get_verbosity()
    study = optuna.create_study(storage=STUDY[1], study_name="digits")
    for _ in range(2):
        _optuna.open_trial(study)
    study.tell(1, 0.5)
    study.ask()
    ledger = open_ledger(_optuna.ledger_url(study))
    for number in range(2):
        ledger.save_trial(
            TrialRecord(
                study=_optuna.study_key(study), number=number, trial_id=number + 1, state="stored"
            )
        )
    yield ledger
    ledger.close()
    optuna.logging.set_verbosity(verbosity)


def overrides(ledger: Ledger) -> dict[int, str]:
    return dict(ledger.load_overrides(ledger.load_studies()[0]))


def test_what_is_wanted_counts_from_the_next_start(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the ledger and in the trial's event log, and the verb says when it counts."""
    assert run(["hold", *STUDY, "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Held 1 trial: 0.\n")
    assert "counts from its next start" in out
    assert overrides(ledger) == {0: "held"}
    assert run(["boost", *STUDY, "0", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"trials": [0], "override": "boosted", "served": False}
    assert run(["release", *STUDY, "0"]) == 0
    assert overrides(ledger) == {}
    capsys.readouterr()
    assert run(["status", *STUDY, "0"]) == 0
    log = capsys.readouterr().out
    assert log.index("held: it gets no device") < log.index("no longer boosted")


def test_other_hosts_may_train_the_study(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of its database may as well train others only: nothing is promised of them."""
    monkeypatch.setattr(upkeep, "want", lambda *_: "soon")
    assert run(["hold", *STUDY, "0"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("Hosts that train the study, if any do, follow within seconds.\n")
    assert run(["hold", *STUDY, "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["served"] is None


def test_a_trial_that_is_named_twice_is_held_once(ledger: Ledger) -> None:
    """Its event log has one line of it."""
    assert run(["hold", *STUDY, "0", "0"]) == 0
    assert [each.kind for each in ledger.load_events(ledger.load_studies()[0], 0)] == ["held"]


def test_status_tells_what_is_wanted(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    """The document of a study without a broker has it too, not for what is over."""
    ledger.save_override(ledger.load_studies()[0], 0, "held")
    ledger.save_override(ledger.load_studies()[0], 1, "boosted")
    assert run(["status", *STUDY, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["study"]["trials"]
    assert {each["trial"]: each["override"] for each in runs} == {0: "held", 1: None}
    assert run(["status", *STUDY]) == 0
    assert "stored, held" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("hold", "0", "1"), "Trial 1 of study 'digits' has ended"),
        (("boost", "2"), "Trial 2 of study 'digits' has ended, or never had a device"),
        (("release", "9"), "Trial 9"),
        (("hold", "99999999999999999999"), "at most 9007199254740992 but got 99999999999999999999"),
        (("hold",), "TRIAL"),
        (("hold", "x"), "TRIAL"),
        (("policy", "fifo"), "say --policy fifo to `optuna-hermes optimize`"),
        (("policy", "best"), "A policy must be one of"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    ledger: Ledger, words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and of several trials all are meant, or none."""
    assert run([words[0], *STUDY, *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert why in err
    assert overrides(ledger) == {}
