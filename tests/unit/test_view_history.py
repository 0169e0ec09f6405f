"""The history of a study, read from a ledger."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes._optuna_tables import StudyFacts
from optuna_hermes.ledger import Ledger
from optuna_hermes.view.history import Bar, Best, best_so_far, read_history, trial_states
from support.memory_ledger import MemoryLedger
from support.records import OTHER, STUDY, checkpoint, lease, locked, report, trial_record
from support.statuses import broker_status, study_status


def facts(*, sign: float = 1.0, **ends: str) -> StudyFacts:
    return StudyFacts(
        key=STUDY,
        ledger_url="memory:",
        sign=sign,
        ends={int(name[1:]): end for name, end in ends.items()},
    )


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """Two trials, one of them with a unit that was trained twice, on two devices."""
    is_file = request.param == "sqlite"
    ledger: Ledger = Ledger(f"sqlite:///{tmp_path}/l.db") if is_file else MemoryLedger()
    here: dict[str, Any] = {"host": socket.gethostname(), "state": "running"}
    ledger.save_trial(trial_record(0, **here, device_seconds=3.0, energy_joules=7200.0))
    ledger.save_trial(trial_record(1, **{**here, "state": "done"}, device_seconds=1.0))
    ledger.commit_lease(lease(1, ended=3.0))
    ledger.commit_lease(lease(2, devices=("a/cpu:1", "a/cpu:2"), number=None, started=2.0))
    ledger.add_report(report(1, 0.9, at=1.0))
    ledger.add_report(report(1, 0.8, number=1, at=2.0))
    ledger.add_report(report(2, math.nan, at=3.0))
    ledger.add_report(report(2, 0.4, at=5.0, device_seconds=3.0))
    ledger.add_report(report(1, 0.1, at=0.0, study=OTHER))
    yield ledger
    ledger.close()


def test_curves_show_each_unit_as_last_reported(ledger: Ledger) -> None:
    """A trial's points have unit, value, device time and wall time; others' are not among them."""
    first, second = read_history(ledger, facts()).trials
    assert first.points == ((1, 0.9, 1.0, 1.0), (2, 0.4, 3.0, 5.0))
    assert second.points == ((1, 0.8, 1.0, 2.0),)
    assert (first.record.device_seconds, second.state) == (3.0, "done")


def test_a_trial_that_went_back_has_the_curve_of_its_present_life(ledger: Ledger) -> None:
    """What a process that was lost had reported beyond is gone, also if it was read before."""
    before = read_history(ledger, facts())
    ledger.add_report(report(1, 0.7, at=6.0, device_seconds=4.0))
    after = read_history(ledger, facts(), before=before)
    assert after.trials[0].points == ((1, 0.7, 4.0, 6.0),)
    assert after == read_history(ledger, facts())


def test_values_of_a_maximised_study_are_the_users_own(ledger: Ledger) -> None:
    """The ledger has them turned round; its reader turns them back, and higher is better."""
    history = read_history(ledger, facts(sign=-1.0))
    assert [point.value for point in history.trials[0].points] == [-0.9, -0.4]
    assert [each.value for each in best_so_far(history)] == [-0.9, -0.8, -0.4]


def test_each_device_of_a_lease_is_a_bar(ledger: Ledger) -> None:
    """A lease that lasts has no end, one of a new trial no number."""
    assert read_history(ledger, facts()).bars == (
        Bar("a/cpu:0", 0, 1.5, 3.0, 1),
        Bar("a/cpu:1", None, 2.0, None, 2),
        Bar("a/cpu:2", None, 2.0, None, 2),
    )


def test_the_best_so_far_is_told_by_the_device_time_of_all(ledger: Ledger) -> None:
    """Device time of all trials until then; a value that is no number is never the best."""
    assert best_so_far(read_history(ledger, facts())) == (
        Best(1.0, 0.9, 0),
        Best(2.0, 0.8, 1),
        Best(4.0, 0.4, 0),
    )


def test_a_trial_that_has_failed_is_never_the_best(ledger: Ledger) -> None:
    """Its device time counts, its values do not."""
    history = read_history(ledger, facts(_0="failed"))
    assert best_so_far(history) == (Best(2.0, 0.8, 1),)


def test_totals_are_those_of_the_trials(ledger: Ledger) -> None:
    """Device time is summed up, and energy as far as somebody could tell it."""
    history = read_history(ledger, facts())
    assert (history.device_seconds, history.watt_hours) == (4.0, 2.0)
    empty = read_history(MemoryLedger(), facts())
    assert (empty.device_seconds, empty.watt_hours, empty.trials, empty.bars) == (0, None, (), ())


def test_a_trial_is_where_its_process_is(ledger: Ledger) -> None:
    """Without a broker nobody runs it; with a checkpoint it is stored; Optuna knows ends best."""
    broker = broker_status(study_status(key=STUDY))

    def states(*args: Any, **kwargs: Any) -> list[str]:
        return [trial.state for trial in read_history(ledger, *args, **kwargs).trials]

    assert states(facts()) == ["pending", "done"]
    records = ledger.load_trials(STUDY)
    assert trial_states(ledger, facts(), records, None, silent=True)[0] == "running"
    assert states(facts(), broker=broker) == ["running", "done"]
    ledger.save_checkpoint(checkpoint("/1"))
    assert states(facts()) == ["stored", "done"]
    assert states(facts(_0="failed")) == ["failed", "done"]
    file = ledger._database.file
    if file is not None:  # another process has it locked: a broker of another runtime directory
        with locked(Path(file), STUDY):
            assert states(facts()) == ["running", "done"]


def test_a_trial_of_a_former_name_of_this_host_is_where_its_process_is(ledger: Ledger) -> None:
    """One without an owner has this study's only broker, though a container's name has changed."""
    ledger.save_trial(trial_record(0, host="former", state="running"))
    assert read_history(ledger, facts()).trials[0].state == "pending"
    broker = broker_status(study_status(key=STUDY))
    assert read_history(ledger, facts(), broker=broker).trials[0].state == "running"


def test_reading_on_gives_what_reading_anew_gives(ledger: Ledger) -> None:
    """Reports, leases that ended or were named, and runs since then are added; the rest stays."""
    before = read_history(ledger, facts())
    assert read_history(ledger, facts(), before=before) == before
    ledger.add_report(report(1, 0.7, number=1, at=6.0))
    ledger.add_report(report(1, 0.5, number=2, at=7.0))
    ledger.save_trial(trial_record(2))
    ledger.name_lease(2, 2)
    ledger.end_lease(2, 8.0)
    ledger.commit_lease(lease(3, number=0, started=9.0))
    after = read_history(ledger, facts(), before=before)
    assert after == read_history(ledger, facts())
    assert after.trials[0] is before.trials[0]
    assert after.trials[1].points != before.trials[1].points
    assert [bar.trial for bar in after.bars] == [0, 2, 2, 0]


def test_reading_on_reads_only_what_is_new(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that polls does not read again what it has: neither reports nor leases that ended."""
    before = read_history(ledger, facts())
    asked: list[Any] = []
    for name in ("load_reports", "load_leases"):
        load = getattr(type(ledger), name)

        def spy(self: Ledger, *args: Any, _load: Any = load, **kwargs: Any) -> Any:
            found = _load(self, *args, **kwargs)
            asked.append(len(found))
            return found

        monkeypatch.setattr(type(ledger), name, spy)
    read_history(ledger, facts(), before=before)
    assert asked == [0, 1]


def test_what_was_read_of_another_study_is_not_read_on(ledger: Ledger) -> None:
    """A study that was made again under a name has another key, and begins anew."""
    elsewhere = read_history(ledger, StudyFacts(key=OTHER, ledger_url="", sign=1.0, ends={}))
    assert read_history(ledger, facts(), before=elsewhere) == read_history(ledger, facts())
