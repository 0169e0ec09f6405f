"""The result of ``optimize`` for trials whose worker ended without a message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._protocol import FailureSummary
from optuna_hermes.ledger import CheckpointRecord, HostRecord, TrialRecord
from optuna_hermes.model import Checkpoint, TrialStatus
from optuna_hermes.workers._result import TrialResult, failure_of, one_line, trial_results
from support.memory_ledger import MemoryLedger


@pytest.fixture
def study() -> optuna.Study:
    """A study with one trial that is RUNNING and was opened by a worker."""
    study = optuna.create_study()
    _optuna.open_trial(study)
    return study


def ledger_with(study: optuna.Study, state: TrialStatus, *, stored: bool) -> MemoryLedger:
    ledger = MemoryLedger()
    key = _optuna.study_key(study)
    ledger.save_trial(
        TrialRecord(
            study=key,
            number=0,
            trial_id=0,
            state=state,
            tier=None,
            host="h",
            units=1,
            slices=1,
            suspensions=0,
            device_seconds=1.0,
            submitted=0.0,
            updated=1.0,
        )
    )
    if stored:
        ledger.save_checkpoint(
            CheckpointRecord(
                study=key,
                number=0,
                checkpoint=Checkpoint(path="/c", units=1, size_bytes=1, sha256="0"),
                at=1.0,
            )
        )
    return ledger


def test_a_trial_that_never_reached_the_ledger_is_pending(study: optuna.Study) -> None:
    """Its worker died between Optuna and the broker: the next call adopts it."""
    (trial,) = trial_results(study, MemoryLedger())
    assert trial.state == "PENDING"


@pytest.mark.parametrize("state", ["running", "parked"])
@pytest.mark.parametrize(("stored", "shown"), [(True, "STORED"), (False, "PENDING")])
def test_nothing_runs_when_the_call_is_over(
    study: optuna.Study, state: TrialStatus, stored: bool, shown: str
) -> None:
    """The state depends on a checkpoint where the ledger still names a process."""
    (trial,) = trial_results(study, ledger_with(study, state, stored=stored))
    assert trial.state == shown


@pytest.mark.parametrize(("state", "shown"), [("running", "RUNNING"), ("parked", "PARKED")])
def test_a_trial_of_plain_optuna_is_left_as_it_is(state: TrialStatus, shown: str) -> None:
    """Another process of the same study may well train while this call ends."""
    study = optuna.create_study()
    study.ask()
    (trial,) = trial_results(study, ledger_with(study, state, stored=False))
    assert trial.state == shown
    (unknown,) = trial_results(study, MemoryLedger())
    assert unknown.state == "RUNNING"


def test_a_trial_that_another_process_trains_is_left_as_it_is(study: optuna.Study) -> None:
    """The call has waited for that process, or has ended before it could."""
    (trial,) = trial_results(study, ledger_with(study, "parked", stored=True), taken=True)
    assert trial.state == "PARKED"
    (unknown,) = trial_results(study, MemoryLedger(), taken=True)
    assert unknown.state == "RUNNING"


def test_a_trial_of_another_host_goes_on_there(study: optuna.Study) -> None:
    """Its broker beats; one of this call's own broker has no process any more."""
    ledger = ledger_with(study, "running", stored=True)
    (record,) = ledger.load_trials(_optuna.study_key(study))
    ledger.save_trial(replace(record, owner="there"))
    for name in ("here", "there"):
        ledger.beat(HostRecord(name=name, instance=name))
    found = {
        broker: trial_results(study, ledger, broker=broker)[0].state for broker in ("here", "there")
    }
    assert found == {"here": "RUNNING", "there": "STORED"}


def test_a_checkpoint_that_the_ledger_lacks_counts(study: optuna.Study, tmp_path: Path) -> None:
    """A broker that did not answer has not written it: the trial's next process finds it."""
    checkpoint = Checkpoint(path="/c", units=1, size_bytes=1, sha256="0")
    (folder := tmp_path / _optuna.trial_folder(0)).mkdir()
    _journal.change(folder, checkpoints=(checkpoint,))
    (trial,) = trial_results(study, ledger_with(study, "running", stored=False), tmp_path)
    assert trial.state == "STORED"


def test_units_are_those_of_the_ledger_or_else_the_values_that_optuna_has() -> None:
    """The ledger counts those that were trained twice, too; a plain trial may have no record."""
    study = optuna.create_study()
    trial = study.ask()
    for step in range(3):
        trial.report(0.5, step)
    units = [
        trial_results(study, ledger)[0].units
        for ledger in (ledger_with(study, "parked", stored=True), MemoryLedger())
    ]
    assert units == [1, 3]


def results(*states: str) -> list[TrialResult]:
    return [
        TrialResult(
            number=number,
            state=state,
            value=None,
            slices=0,
            suspensions=0,
            device_seconds=0.0,
            units=0,
        )
        for number, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "told", "hopeless", "reason"),
    [
        ("", False, False, None),
        ("WAITING", False, False, None),
        ("FAIL FAIL", False, False, "All trials have failed (2). Trial 0: see its output.log."),
        ("WAITING FAIL", False, False, "All trials have failed (1). Trial 1: see its output.log."),
        ("FAIL FAIL", True, False, "All trials have failed (2). Trial 1: lr is gone."),
        ("FAIL COMPLETE", True, True, None),
        ("FAIL PRUNED", True, True, None),
        ("FAIL STORED", True, False, None),
        (
            "FAIL FAIL STORED",
            True,
            True,
            "The last 10 trials have failed alike, and none has succeeded. Trial 1: lr is gone.",
        ),
    ],
)
def test_a_call_has_failed_if_no_trial_has_succeeded_or_may(
    states: str, told: bool, hopeless: bool, reason: str | None
) -> None:
    """The first error is told; a trial that waits to begin says nothing."""
    failures = FailureSummary(first=1, error="lr is gone.", alike=10, hopeless=hopeless)
    assert failure_of(results(*states.split()), failures if told else None) == reason


def test_a_reason_that_is_cut_off_shows_it() -> None:
    """The sentence around it ends with a full stop of its own."""
    assert one_line("It is\n  gone.") == "It is gone"
    assert one_line("a" * 300 + ".") == "a" * 300 + " [...]"
