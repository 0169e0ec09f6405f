"""Closing suspended trials and clearing files away, on a real study and ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes import _optuna, upkeep
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._protocol import BrokerStatus, Finish, Finished, SetOverrides
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.ledger import (
    CheckpointRecord,
    HostRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
    open_ledger,
)
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend._tiers import _remote
from optuna_hermes.upkeep import _files, _finish, _overrides
from support.records import locked
from support.statuses import broker_status, study_status

NOW = 1_000_000_000.0
OLD = NOW - 2 * _files.ORPHAN_SECONDS


class House:
    """A study with its ledger and its checkpoint folder."""

    def __init__(self, url: str, direction: str = "minimize") -> None:
        self.study = optuna.create_study(storage=url, study_name="study", direction=direction)
        self.key = _optuna.study_key(self.study)
        self.ledger: Ledger = open_ledger(_optuna.ledger_url(self.study))
        self.root = _optuna.checkpoint_root(self.study)

    def suspended(self, *values: float) -> int:
        """A trial that was opened by us, has reported, and was stored."""
        trial = _optuna.open_trial(self.study)
        for step, value in enumerate(values, 1):
            trial.report(value, step)
        self.ledger.save_trial(
            TrialRecord(
                study=self.key,
                number=trial.number,
                trial_id=_optuna.trial_id(trial),
                state="stored",
                tier="disk",
                device_seconds=3.5,
            )
        )
        return trial.number

    def finished(self) -> int:
        """A trial that is COMPLETE."""
        trial = self.study.ask()
        self.study.tell(trial, 1.0)
        return trial.number

    def file(self, number: int, name: str, *, changed: float = OLD) -> Path:
        """A file of 10 bytes in a trial's folder."""
        path = self.root / f"trial-{number:05d}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0123456789")
        os.utime(path, (changed, changed))
        return path

    def checkpoint(
        self, number: int, name: str = "000001-unit-1.safetensors", *, changed: float = OLD
    ) -> Path:
        """A file with its row."""
        path = self.file(number, name, changed=changed)
        self.row(number, path)
        return path

    def row(self, number: int, path: Path) -> None:
        """A row of the ledger."""
        self.ledger.save_checkpoint(
            CheckpointRecord(
                study=self.key,
                number=number,
                checkpoint=Checkpoint(path=str(path), units=1, size_bytes=10, sha256=""),
                at=OLD,
            )
        )

    def journal(self, number: int, *unwritten: tuple[int, float], root: Path | None = None) -> Path:
        """A trial's folder, with values in its journal that Optuna does not have."""
        folder = (root or self.root) / f"trial-{number:05d}"
        folder.mkdir(parents=True)
        _journal.change(folder, unwritten=unwritten)
        return folder

    def report(self, number: int, unit: int, value: float) -> None:
        """A report in the ledger, of the step that is the unit."""
        made = ReportRecord(
            study=self.key,
            number=number,
            unit=unit,
            step=unit,
            value=value,
            device_seconds=1.0,
            at=OLD,
        )
        self.ledger.add_report(made)

    def finish(self, number: int) -> None:
        """Set a suspended trial to COMPLETE."""
        plan = upkeep.plan_finish(self.study, self.ledger, [number], held=())
        upkeep.finish(self.study, self.ledger, plan)

    def litter(self, *held: int) -> upkeep.Litter:
        """Find the files that may go."""
        return upkeep.find_litter(self.study, self.ledger, [self.root], held, NOW)

    def clear(self, *held: int) -> None:
        """Remove it."""
        upkeep.remove(self.study, self.ledger, self.litter(*held))


@pytest.fixture
def house(storage_url: str) -> Iterator[House]:
    house = House(storage_url)
    yield house
    house.ledger.close()


def serving(key: str, driver_pid: int | None, **states: str) -> BrokerStatus:
    trials = [{"trial": int(name[1:]), "state": state} for name, state in states.items()]
    return broker_status(study_status(key=key, driver_pid=driver_pid, trials=trials))


# -- who holds what ----------------------------------------------------------------------------


def test_without_a_broker_nothing_is_held(house: House) -> None:
    """No broker, or one that does not know the study, holds no trial."""
    house.suspended(1.0)
    other = serving("other", 1, t0="running")
    assert upkeep.held_trials(None, house.study, house.ledger) == frozenset()
    assert upkeep.held_trials(other, house.study, house.ledger) == frozenset()


def test_a_driver_holds_every_unfinished_trial(house: House) -> None:
    """While an ``optimize`` runs, it may carry on with any unfinished trial."""
    house.finished()
    number = house.suspended(1.0)
    status = serving(house.key, 4711)
    assert upkeep.held_trials(status, house.study, house.ledger) == {number}


def test_without_a_driver_only_living_trials_are_held(house: House) -> None:
    """A broker that still knows a study holds what has a process: running and parked trials."""
    status = serving(house.key, None, t0="stored", t1="parked", t2="running")
    assert upkeep.held_trials(status, house.study, house.ledger) == {1, 2}


def test_a_broker_of_another_runtime_directory_holds_every_unfinished_trial(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock on the study is all that is seen of it; one that ends soon is waited for."""
    house.finished()
    number = house.suspended(1.0)
    monkeypatch.setattr(_finish, "UNLOCK_SECONDS", 0.1)
    with locked(tmp_path / "study.db", house.key):
        for status in (None, serving("other", 1)):
            assert upkeep.held_trials(status, house.study, house.ledger) == {number}
        here = serving(house.key, None, t1="stored")
        assert upkeep.held_trials(here, house.study, house.ledger) == frozenset()
    assert upkeep.held_trials(None, house.study, house.ledger) == frozenset()
    assert not house.ledger.is_locked(house.key)
    house.ledger.lock_study(house.key)  # ours
    assert not house.ledger.is_locked(house.key)


def test_what_a_living_broker_of_another_host_has_is_held(house: House) -> None:
    """Trials of a broker which was heard of lately stay; what is nobody's can be finished."""
    house.ledger.beat(HostRecord(name="b", instance="b1"))
    for number, (state, owner) in enumerate([("running", "b1"), ("stored", None), ("done", "b1")]):
        trial = TrialRecord(
            study=house.key, number=number, trial_id=number, state=state, owner=owner
        )
        house.ledger.save_trial(trial, by=owner)
    assert upkeep.held_trials(None, house.study, house.ledger) == {0}
    house.ledger.forget_host("b1", dead_after_seconds=0.0)
    assert upkeep.held_trials(None, house.study, house.ledger) == frozenset()


def test_what_waits_for_another_host_is_held_where_all_are_to_be_finished(house: House) -> None:
    """That host may resume any of them at any moment; where none trains they are nobody's."""
    over, other, here, stored = house.finished(), *(house.suspended(0.9) for _ in range(3))
    house.ledger.beat(HostRecord(name="b", instance="b1"))
    serves = serving(house.key, None, **{f"t{here}": "parked", f"t{stored}": "stored"})

    def held(status: BrokerStatus | None) -> frozenset[int]:
        return upkeep.held_trials(status, house.study, house.ledger, waiting=True)

    assert (held(None), held(serves)) == (frozenset(), {here})
    (record,) = (row for row in house.ledger.load_trials(house.key) if row.number == other)
    house.ledger.save_trial(dataclasses.replace(record, state="running", owner="b1"))
    assert over not in held(None)
    assert held(None) == held(serves) == {other, here, stored}
    assert upkeep.held_trials(None, house.study, house.ledger) == {other}


# -- finish ------------------------------------------------------------------------------------


def test_finish_completes_at_the_last_value(house: House) -> None:
    """A suspended trial becomes COMPLETE at its last report, and done in the ledger."""
    number = house.suspended(3.0, 2.0, 2.5)
    house.finish(number)
    trial = house.study.trials[number]
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 2.5)
    assert trial.user_attrs["hermes:state"] == "done"
    (run,) = house.ledger.load_trials(house.key)
    assert (run.state, run.tier, run.device_seconds) == ("done", None, 3.5)
    (event,) = house.ledger.load_events(house.key, number)
    assert (event.kind, event.detail) == ("finished", {"value": 2.5})


def test_finish_takes_no_value_that_only_a_lost_process_has_reached(house: House) -> None:
    """A trial that begins anew has the weights of its second life; Optuna keeps all values."""
    number, whole = house.suspended(0.9, 0.8, 0.1), house.suspended(0.9, 0.8, 0.1)
    for step, value in ((1, 0.9), (2, 0.8), (3, 0.1), (1, 0.9), (2, 0.8)):
        house.report(number, step, value)
    house.report(whole, 1, 0.9)  # the ledger may lack what was reported last
    house.finish(number)
    house.finish(whole)
    assert [trial.value for trial in house.study.trials] == [0.8, 0.1]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_finish_takes_the_value_of_the_present_life(tmp_path: Path, direction: str) -> None:
    """Optuna keeps the first value of a step, and only a deterministic training repeats it."""
    house = House(f"sqlite:///{tmp_path}/lives.db", direction)
    number, sign = house.suspended(0.9, 0.5, 0.2), _optuna.sign(house.study)
    for step, value in ((1, 0.9), (2, 0.5), (3, 0.2), (1, 0.95), (2, 0.7)):
        house.report(number, step, sign * value)
    house.finish(number)
    assert house.study.trials[number].value == 0.7
    house.ledger.close()


def test_a_broker_that_owned_a_finished_trial_does_so_no_more(house: House) -> None:
    """A trial that is still owned by a broker that is gone can be finished too."""
    number = house.suspended(1.0)
    (trial,) = house.ledger.load_trials(house.key)
    house.ledger.save_trial(dataclasses.replace(trial, owner="gone"))
    house.finish(number)
    (trial,) = house.ledger.load_trials(house.key)
    assert (trial.state, trial.owner) == ("done", None)


@pytest.mark.parametrize("place", ["default", "named by the ledger", "chosen"])
def test_finish_takes_values_that_optuna_could_not_be_told(
    house: House, tmp_path: Path, place: str
) -> None:
    """They are in the trial's journal, where the ledger names a checkpoint or one was to be."""
    number, other = house.suspended(0.9), tmp_path / "chosen"
    root = house.root if place == "default" else other
    folder = house.journal(number, (2, 0.5), (3, 0.1), root=root)
    if place == "named by the ledger":
        house.row(number, folder / "000001-unit-1.safetensors")
    folders = [other] if place == "chosen" else []
    held = upkeep.plan_finish(house.study, house.ledger, None, {number}, folders)
    assert held.values == {}
    plan = upkeep.plan_finish(house.study, house.ledger, None, (), folders)
    assert plan.values == {number: 0.1}
    upkeep.finish(house.study, house.ledger, plan)
    assert house.study.trials[number].intermediate_values == {1: 0.9, 2: 0.5, 3: 0.1}
    assert house.study.trials[number].value == 0.1
    assert _journal.find(folder).unwritten == ()


def test_finish_leaves_the_journal_of_a_study_that_was_copied(house: House, tmp_path: Path) -> None:
    """The copy's ledger names the original's checkpoints, with which the original may go on."""
    number = house.suspended(0.9)
    folder = house.journal(number, (2, 0.5), root=tmp_path / "original")
    for name in ("000001-unit-1.safetensors", "000002-unit-1.safetensors"):
        house.row(number, folder / name)  # the older one may have gone
    house.file(number, name)
    house.finish(number)
    assert house.study.trials[number].value == 0.9
    assert _journal.find(folder).unwritten == ((2, 0.5),)


def test_a_plan_to_finish_changes_nothing(house: House) -> None:
    """A process that trains the trial may be writing into Optuna, and into its journal."""
    number = house.suspended(0.9)
    folder = house.journal(number, (2, 0.5))
    plan = upkeep.plan_finish(house.study, house.ledger, [number], held=())
    assert plan.values == {number: 0.5}
    assert house.study.trials[number].intermediate_values == {1: 0.9}
    assert _journal.find(folder).unwritten == ((2, 0.5),)


def test_finish_looks_at_no_trial_but_those_that_are_named(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may train, and there may be thousands of them."""
    number, others = house.suspended(0.9), [house.suspended(0.8) for _ in range(3)]
    folders = [house.journal(other, (2, 0.5)) for other in others]
    for other, folder in zip(others, folders, strict=True):
        house.row(other, folder / "000001-unit-1.safetensors")
    find, looked = _journal.find, []
    with monkeypatch.context() as patch:
        patch.setattr(_journal, "find", lambda folder: looked.append(folder) or find(folder))
        house.finish(number)
    assert looked == [house.root / f"trial-{number:05d}"]
    assert [_journal.find(folder).unwritten for folder in folders] == [((2, 0.5),)] * 3
    assert [house.study.trials[other].intermediate_values for other in others] == [{1: 0.8}] * 3


def test_a_trial_that_ends_while_it_is_finished_is_reported_as_such(house: House) -> None:
    """Its own words count, not Optuna's of a value that came too late; the journal stays."""
    number = house.suspended(0.9)
    folder = house.journal(number, (2, 0.5))
    plan = upkeep.plan_finish(house.study, house.ledger, [number], held=())
    house.study.tell(number, 0.7)
    with pytest.raises(StorageError, match=rf"^Trial {number} cannot be finished: "):
        upkeep.finish(house.study, house.ledger, plan)
    assert house.study.trials[number].value == 0.7
    assert _journal.find(folder).unwritten == ((2, 0.5),)


def test_another_error_of_writing_a_late_value_is_raised(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the trial would be completed without the value, and the journal be lost."""
    number = house.suspended(0.9)
    folder = house.journal(number, (2, 0.5))
    plan = upkeep.plan_finish(house.study, house.ledger, [number], held=())

    def fail(*arguments: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(_optuna, "write_value", fail)
    with pytest.raises(RuntimeError, match=r"^no$"):
        upkeep.finish(house.study, house.ledger, plan)
    assert not house.study.trials[number].state.is_finished()
    assert _journal.find(folder).unwritten == ((2, 0.5),)


def test_a_live_trial_is_finished_at_the_value_that_it_has_left(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is asked until its process has gone; what that has journaled counts then."""
    number, said = house.suspended(0.9), []

    class Broker:
        def want(self, message: Any) -> bool:
            said.append(type(message).__name__)
            if said == ["Finish"]:
                house.journal(number, (2, 0.5), root=tmp_path)
            return len(said) == 1

    monkeypatch.setattr(_overrides, "_broker_of", lambda study: contextlib.nullcontext(Broker()))
    live = upkeep.finish_live(house.study, house.ledger, [number], [tmp_path])
    assert live == ({number: 0.5}, {})
    assert house.study.trials[number].value == 0.5
    assert said == ["Finish", "Finish", "Finished"]


def test_live_trials_are_finished_whatever_becomes_of_the_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends by itself, one reports NaN, one does not stop: they are named, and as before."""
    ends, diverges, hangs, healthy = (house.suspended(0.9) for _ in range(4))
    house.ledger.save_override(house.key, hangs, "held")
    said: list[tuple[Any, ...]] = []

    class Broker:
        def want(self, message: Any) -> bool:
            if not isinstance(message, Finish):
                said.append((type(message), *message.numbers, getattr(message, "override", "")))
            elif len(message.numbers) > 1:
                house.study.tell(ends, 0.7)
                house.journal(diverges, (2, math.nan))
            elif message.numbers == (ends,):
                raise InvalidInputError("it has ended")
            return message.numbers == (hangs,)

    monkeypatch.setattr(_overrides, "_broker_of", lambda study: contextlib.nullcontext(Broker()))
    monkeypatch.setattr(_overrides, "STOP_SECONDS", 0.2)
    named = [ends, diverges, hangs, healthy]
    values, refused = upkeep.finish_live(house.study, house.ledger, named)
    assert values == {healthy: 0.9}
    assert sorted(refused) == [ends, diverges, hangs]
    assert "not suspended but COMPLETE" in refused[ends]
    assert "the last value is nan" in refused[diverges]
    assert "has not stopped for" in refused[hangs]
    assert said == [
        (Finished, ends, ""),
        (SetOverrides, diverges, None),
        (SetOverrides, hangs, "held"),
        (Finished, healthy, ""),
    ]
    assert [trial.value for trial in house.study.trials] == [0.7, None, None, 0.9]


def test_of_many_live_trials_each_is_asked_about_more_rarely(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has the reports of those that train to answer."""
    asked = list[int]()

    class Broker:
        def want(self, message: Any) -> bool:
            asked.extend(message.numbers)
            return True

    monkeypatch.setattr(_overrides, "STOP_SECONDS", 0.5)
    refused = _overrides._refused_to_stop(Broker(), house.key, range(20))  # type: ignore[arg-type]
    assert sorted(refused) == sorted(asked) == [*range(20)]


def test_a_live_trial_that_ends_at_the_last_moment_is_named(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own end counts; the one after it is finished."""
    late, healthy = house.suspended(0.9), house.suspended(0.8)
    house.journal(late, (2, 0.5))
    write = _optuna.write_value

    class Broker:
        def want(self, message: Any) -> bool:
            return False

    def end_first(*arguments: Any) -> None:
        house.study.tell(late, 0.7)
        write(*arguments)

    monkeypatch.setattr(_overrides, "_broker_of", lambda study: contextlib.nullcontext(Broker()))
    monkeypatch.setattr(_optuna, "write_value", end_first)
    live = upkeep.finish_live(house.study, house.ledger, [late, healthy])
    assert live[0] == {healthy: 0.8}
    assert "cannot be finished" in live[1][late]


def test_a_broker_that_has_just_ended_finishes_no_live_trial(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do, and nothing is changed."""
    number = house.suspended(0.9)
    monkeypatch.setattr(_overrides, "_broker_of", lambda study: contextlib.nullcontext(None))
    with pytest.raises(InvalidInputError, match="any more: say `finish` again"):
        upkeep.finish_live(house.study, house.ledger, [number])
    assert not house.study.trials[number].state.is_finished()


def test_live_trials_go_on_if_the_database_is_away_as_they_are_to_be_finished(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would stay on hold: nothing of them has been changed."""
    boosted, other = house.suspended(0.9), house.suspended(0.8)
    house.ledger.save_override(house.key, boosted, "boosted")
    said: list[tuple[Any, ...]] = []

    class Broker:
        def want(self, message: Any) -> bool:
            if isinstance(message, SetOverrides):
                said.append((*message.numbers, message.override))
            return False

    def fail(*arguments: Any) -> None:
        raise StorageError("it is away")

    monkeypatch.setattr(_overrides, "_broker_of", lambda study: contextlib.nullcontext(Broker()))
    monkeypatch.setattr(_overrides, "plan_finish", fail)
    with pytest.raises(StorageError, match=r"^it is away$"):
        upkeep.finish_live(house.study, house.ledger, [boosted, other])
    assert said == [(boosted, "boosted"), (other, None)]


def test_finish_all_takes_what_is_suspended(house: House) -> None:
    """Without numbers it is every suspended trial; those of plain Optuna are not touched."""
    house.finished()
    house.study.ask()
    number = house.suspended(1.0)
    plan = upkeep.plan_finish(house.study, house.ledger, None, held=())
    assert plan.values == {number: 1.0}
    assert plan.refused == {}


def test_finish_refuses_a_trial_whose_constraints_are_not_known(house: House) -> None:
    """It would be the best one, however infeasible; samplers set them, or the objective's end."""

    def constrain(number: int) -> None:
        trial = optuna.Trial(house.study, _optuna.trial_id(house.study.trials[number]))
        if hasattr(trial, "set_constraint"):
            trial.set_constraint("memory", -1.0)
        else:  # before Optuna 5 samplers alone set them
            trial.storage.set_trial_system_attr(trial._trial_id, "constraints", (-1.0,))

    done, known, unknown = house.suspended(0.5), house.suspended(0.4), house.suspended(0.1)
    for number in (done, known):
        constrain(number)
    house.study.tell(done, 0.5)
    plan = upkeep.plan_finish(house.study, house.ledger, None, held=())
    assert plan.values == {known: 0.4}
    assert plan.refused.keys() == {unknown}
    assert "its constraints are not known" in plan.refused[unknown]
    assert "--state fail" in plan.refused[unknown]


def test_finish_says_why_not(house: House) -> None:
    """Every trial that cannot be finished is named with its reason, and nothing is changed."""
    silent, broken = house.suspended(), house.suspended(1.0, math.nan)
    held, done, missing = house.suspended(1.0), house.finished(), 99
    plan = upkeep.plan_finish(
        house.study, house.ledger, [silent, broken, held, done, missing], held={held}
    )
    assert plan.values == {}
    assert "nothing was reported" in plan.refused[silent]
    assert "the last value is nan" in plan.refused[broken]
    assert "held by a live process" in plan.refused[held]
    assert plan.refused[done] == "not suspended but COMPLETE, so leave it out"
    assert plan.refused[missing] == "no such trial, see `optuna-hermes trials`"


def test_a_trial_of_several_objectives_has_no_value_to_finish_with(tmp_path: Path) -> None:
    """Its values went to the broker alone: it is said how it is closed."""
    study = optuna.create_study(
        storage=f"sqlite:///{tmp_path}/s.db", directions=["minimize", "maximize"]
    )
    trial = _optuna.open_trial(study)
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        plan = upkeep.plan_finish(study, ledger, None, held=())
    assert plan.values == {}
    assert "--values V1 V2" in plan.refused[trial.number]


# -- gc ----------------------------------------------------------------------------------------


def test_gc_removes_checkpoints_of_finished_trials(house: House) -> None:
    """Files, rows and folders of finished trials go; what they printed stays."""
    number, quiet = house.finished(), house.finished()
    files = [
        house.checkpoint(number, "000001-unit-1.safetensors"),
        house.checkpoint(number, "000002-unit-1.safetensors", changed=NOW),
    ]
    log = house.file(number, "output.log")
    lonely = house.checkpoint(quiet)
    litter = house.litter()
    assert set(litter.files) == {*files, lonely}
    assert litter.size_bytes == 30
    house.clear()
    assert not any(path.exists() for path in files)
    assert log.exists()
    assert not lonely.parent.exists()
    assert house.ledger.load_checkpoints(house.key) == []
    assert house.litter().files == {}


def test_two_gc_at_once_are_no_error(house: House) -> None:
    """Both have found the same files: the rows go, too, whoever was faster with these."""
    number, mixed = house.finished(), house.finished()
    for each in (number, mixed):
        house.checkpoint(each)
    printed = house.file(mixed, "output.log")
    mine, its = house.litter(), house.litter()
    upkeep.remove(house.study, house.ledger, its)
    assert not (house.root / f"trial-{number:05d}").exists()
    upkeep.remove(house.study, house.ledger, mine)
    assert house.ledger.load_checkpoints(house.key) == []
    assert printed.exists()


def test_gc_keeps_what_a_suspended_trial_needs(house: House) -> None:
    """Checkpoints that the ledger names for an unfinished trial stay, with their rows."""
    path = house.checkpoint(house.suspended(1.0))
    house.clear()
    assert path.exists()
    assert len(house.ledger.load_checkpoints(house.key)) == 1


@pytest.mark.parametrize("way", ["a link", "dots"])
def test_gc_keeps_what_a_trial_needs_however_its_folder_is_spelled(
    way: str, house: House, tmp_path: Path
) -> None:
    """The study was trained from another working folder, or by another path to the same disk."""
    path = house.checkpoint(house.suspended(1.0))
    folder = house.root / ".." / house.root.name
    if way == "a link":
        folder = tmp_path / "link"
        folder.symlink_to(house.root)
    found = upkeep.find_litter(house.study, house.ledger, [folder], (), NOW)
    assert found.files == {}
    assert path.exists()


def test_gc_keeps_what_a_trial_needs_though_its_folder_was_moved(house: House) -> None:
    """Or is seen under another path, as in a container: it may be moved back."""
    stored, over = house.suspended(1.0), house.finished()
    for number in (stored, over):
        house.row(
            number, Path(f"/elsewhere/{house.key}/trial-{number:05d}/000001-unit-1.safetensors")
        )
        house.file(number, "000001-unit-1.safetensors")
    assert list(house.litter().files) == [
        house.root / f"trial-{over:05d}" / "000001-unit-1.safetensors"
    ]
    store = f"file://{house.root.parent.parent}/moved/{house.key}"
    _remote.put(
        house.file(stored, "000001-unit-1.safetensors"),
        f"{store}/trial-{stored:05d}/000001-unit-1.safetensors",
    )
    late = NOW + 1e9
    litter = upkeep.find_litter(house.study, house.ledger, [house.root], (), late, [store])
    assert not any(isinstance(place, str) for place in litter.files)


def test_gc_removes_orphans_that_are_old(house: House) -> None:
    """A file the ledger does not name goes once it is too old to be in the making."""
    number = house.suspended(1.0)
    old = house.file(number, "000001-unit-1.partial")
    young = house.file(number, "000002-unit-1.partial", changed=NOW - 1)
    unknown = house.file(77, "000001-unit-1.safetensors")
    house.clear()
    assert not old.exists()
    assert not unknown.exists()
    assert young.exists()


def test_gc_keeps_what_a_trial_has_saved_itself(house: House, tmp_path: Path) -> None:
    """Its folder is its Trainer's ``default_root_dir``: models and profiles are the user's."""
    over, stored = house.finished(), house.suspended(1.0)
    names = (
        "best.ckpt",
        "model.safetensors",
        "000001-notes.txt",
        "a.partial",
        ".tmp",
        "output.log",
    )
    files = [house.file(number, name) for number in (over, stored) for name in names]
    store = f"file://{tmp_path}/bucket"
    _remote.put(files[0], f"{store}/trial-{over:05d}/{names[0]}")
    house.checkpoint(over)
    litter = upkeep.find_litter(house.study, house.ledger, [house.root], (), NOW, [store])
    assert len(litter.files) == 1
    upkeep.remove(house.study, house.ledger, litter)
    litter, _ = upkeep.with_deleted(litter, house.ledger, [house.key], [house.root.parent])
    assert all(path.exists() and path not in litter.files for path in files)


def test_gc_keeps_what_a_suspended_trial_could_tell_nobody(house: House, tmp_path: Path) -> None:
    """A database that was away for long: values, and checkpoints that the ledger does not know.

    In a store, too, as the journal lies on the disk.
    """
    told, over = house.suspended(1.0), house.finished()
    house.file(told, "unconfirmed.msgpack")
    house.file(told, "000009-unit-1.safetensors")
    gone = house.file(over, "unconfirmed.msgpack")
    assert set(house.litter().files) == {gone}
    store = f"file://{tmp_path}/bucket"
    name = f"trial-{told:05d}/000010-unit-2.safetensors"
    _remote.put(house.file(over, "output.log"), f"{store}/{name}")
    late = NOW + 1e9
    litter = upkeep.find_litter(house.study, house.ledger, [house.root], (), late, [store])
    assert set(litter.files) == {gone}


def test_gc_forgets_no_checkpoint_that_it_cannot_look_at(
    house: House, tmp_path: Path, take_away: Callable[[Path], None]
) -> None:
    """Its row says where it is; and a folder that cannot be read is no folder without files."""
    lost, number = tmp_path / "lost", house.finished()
    house.row(number, lost / house.key / f"trial-{number:05d}" / "000001-unit-1.safetensors")
    assert house.litter().rows
    take_away(lost)
    assert (house.litter().rows, house.litter().elsewhere) == ((), (str(lost),))
    take_away(house.root)
    with pytest.raises(OSError, match="Stale file handle"):
        house.litter()


def test_gc_leaves_live_trials_alone(house: House) -> None:
    """Nothing of a trial that a live process answers for is removed."""
    number = house.suspended(1.0)
    path = house.file(number, "000001-unit-1.partial")
    house.clear(number)
    assert path.exists()


def test_gc_stays_in_the_folders_of_trials(house: House, tmp_path: Path) -> None:
    """Neither other files, nor links, nor what lies behind them, nor odd rows are touched."""
    number = house.finished()
    house.root.mkdir(parents=True)
    precious = tmp_path / "precious.ckpt"
    precious.write_text("mine")
    beside = house.root / "notes.txt"
    beside.write_text("mine")
    copied = house.root / "kept" / "000003-unit-1.safetensors"
    copied.parent.mkdir()
    copied.write_text("mine")
    (house.root / "trial-00050").symlink_to(tmp_path)
    link = house.root / f"trial-{number:05d}" / "000003-unit-1.safetensors"
    link.parent.mkdir()
    link.symlink_to(precious)
    house.row(number, precious)
    house.clear()
    assert precious.exists()
    assert beside.exists()
    assert copied.exists()
    assert link.is_symlink()


def test_gc_removes_nothing_outside_the_studys_folders(house: House, tmp_path: Path) -> None:
    """A row is data of whoever writes to the database: what it names elsewhere stays, as it does.

    With that folder among the study's, as ``--checkpoint-dir`` puts it, both go.
    """
    number = house.finished()
    root = tmp_path / "elsewhere"
    path = root / f"trial-{number:05d}" / "000001-unit-1.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"0123456789")
    dotted = f"{root}/../elsewhere/{path.parent.name}/{path.name}"
    house.row(number, path)
    house.row(number, Path(dotted))
    house.clear()
    assert path.exists()
    assert len(house.ledger.load_checkpoints(house.key)) == 2
    litter = upkeep.find_litter(house.study, house.ledger, [root], (), time.time())
    upkeep.remove(house.study, house.ledger, litter)
    assert not path.exists()
    assert house.ledger.load_checkpoints(house.key) == []


def test_a_row_without_a_file_is_forgotten(house: House) -> None:
    """A finished trial's row goes although somebody has removed the file before."""
    number = house.finished()
    house.checkpoint(number).unlink()
    assert house.litter().size_bytes == 0
    house.clear()
    assert house.ledger.load_checkpoints(house.key) == []


def test_now_is_the_wall_clock(house: House) -> None:
    """Ages are counted on the clock that files are stamped with."""
    house.file(77, "000001-unit-1.safetensors", changed=time.time())
    litter = upkeep.find_litter(house.study, house.ledger, [house.root], (), time.time())
    assert litter.files == {}


def test_what_is_over_goes_from_a_store_too(house: House, tmp_path: Path) -> None:
    """Rows and objects go together; what a stored trial needs stays, with this host's copy."""
    store = f"file://{tmp_path}/bucket"
    url = _optuna.checkpoint_url(house.study, store)
    over, stored = house.finished(), house.suspended(1.0)
    objects = {}
    for number in (over, stored):
        copy = house.file(number, "000001-unit-1-abc.safetensors")
        place = f"{url}/trial-{number:05d}/{copy.name}"
        _remote.put(copy, place)
        house.ledger.save_checkpoint(
            CheckpointRecord(
                study=house.key,
                number=number,
                checkpoint=Checkpoint(path=place, units=1, size_bytes=10, sha256=""),
                at=OLD,
            )
        )
        objects[number] = place
    unseen = upkeep.find_litter(house.study, house.ledger, [house.root], (), NOW)
    assert unseen.elsewhere == (store,)
    assert unseen.rows == ()

    litter = upkeep.find_litter(house.study, house.ledger, [house.root], (), NOW, [url])
    copy = house.root / f"trial-{over:05d}" / "000001-unit-1-abc.safetensors"
    assert litter.files == {copy: 10, objects[over]: 10}
    assert litter.size_bytes == 20
    upkeep.remove(house.study, house.ledger, litter)
    assert [row.checkpoint.path for row in house.ledger.load_checkpoints(house.key)] == [
        objects[stored]
    ]
    assert [file.url for file in _remote.files(url)] == [objects[stored]]
    assert (house.root / f"trial-{stored:05d}" / "000001-unit-1-abc.safetensors").exists()
