"""Pictures of ``top`` from a broker's status, and past leases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.cli import _top
from optuna_hermes.cli._top import StudySource
from optuna_hermes.model import Device
from optuna_hermes.view._top._devices import UNNUMBERED, Past
from optuna_hermes.view.formats import sparkline
from optuna_hermes.view.history import Bar, Point, StudyHistory, TrialHistory
from optuna_hermes.view.picture import Picture, picture_of, picture_of_history
from support.broker import FakeBroker
from support.records import trial_record
from support.statuses import broker_status, device_status, study_status


def reporting(broker: FakeBroker, number: int, *values: float, key: str = "s") -> None:
    worker = broker.worker(key=key)
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    for unit, value in enumerate(values, 1):
        broker.say(worker, wire.Report(epoch=epoch, unit=unit, step=unit, value=value))


def seen(broker: FakeBroker, key: str = "", at: float = 50.0, **fields: Any) -> Picture:
    return picture_of(broker.handler.status(broker.now, curves=True), key, at, **fields)


def test_a_picture_of_what_a_broker_tells() -> None:
    """Values as their user knows them, device time until now, and what is left of the slice."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2, slice_seconds=10.0, maximize=True)
    reporting(broker, 0, -0.5, -0.75, math.nan, -0.875)
    broker.advance(4.0)
    picture = seen(broker)
    (trial,) = picture.trials
    assert (picture.key, picture.policy, picture.maximize) == ("s", "hermes", True)
    assert (trial.value, trial.curve) == (0.875, (0.5, 0.75, None, 0.875))
    assert trial.slope == pytest.approx((0.875 - 0.75) / 2)
    assert (trial.state, trial.device_seconds, trial.device) == ("running", 4.0, "cpu:0")
    assert picture.best == (0, 0.875)
    first, second = picture.devices
    assert first.holder is not None
    left = (first.holder.trial, first.holder.left_seconds, first.holder.slice_seconds)
    assert (left, second.holder) == ((0, 6.0, 10.0), None)


def test_long_curves_are_thinned_out_and_keep_their_ends() -> None:
    """The curve that is told has a bounded length, whatever the trial reports."""
    broker = FakeBroker(devices=1)
    broker.driver(unstarted=1)
    reporting(broker, 0, *(1000.0 - n for n in range(500)))
    (trial,) = seen(broker).trials
    assert len(trial.curve) == 40
    assert (trial.curve[0], trial.curve[-1]) == (1000.0, 501.0)
    assert (trial.units, trial.slope) == (500, -1.0)
    plain = broker.handler.status(broker.now).studies[0].trials[0]
    assert plain.curve == ()


def test_the_study_that_is_asked_for_is_shown() -> None:
    """Of several one is chosen; one that is not served any more gives way to another."""
    broker = FakeBroker(devices=2)
    for key in ("s", "t"):
        broker.driver(key=key, unstarted=1)
    assert seen(broker).studies == ("s", "t")
    assert seen(broker, "t").key == "t"
    assert seen(broker, "gone").key == "s"
    assert seen(FakeBroker(devices=1)).key == ""


def test_studies_of_one_name_have_their_own_devices() -> None:
    """Two databases may hold studies of one name, and trials of one number."""
    broker = FakeBroker(devices=2)
    for key in ("a", "b"):
        broker.driver(key=key, unstarted=1)
        reporting(broker, 0, 0.5, key=key)
    for study in broker.handler.state.studies.values():
        study.spec = structs.replace(study.spec, name="digits")
    broker.advance(4.0)
    (row,) = seen(broker, "a").trials
    assert (row.device, row.device_seconds) == ("cpu:0", 4.0)
    (row,) = seen(broker, "b").trials
    assert (row.device, row.device_seconds) == ("cpu:1", 4.0)


def test_trials_that_are_not_listed_are_counted() -> None:
    """Of a very large study a broker lists those that have a process."""
    study = study_status(
        counts={"running": 1, "done": 5999}, trials=[{"trial": 7, "state": "running"}]
    )
    assert picture_of(broker_status(study), "s", 0.0).counts == {"running": 1, "done": 5999}


def test_the_best_of_a_ledger_is_the_best_value_ever_reported() -> None:
    """Of a trial that has not failed, and of equal ones the first trial's."""

    def trial(number: int, *values: float, state: str = "done") -> TrialHistory:
        points = tuple(Point(unit, value, unit, unit) for unit, value in enumerate(values, 1))
        record = trial_record(number)
        return TrialHistory(number=number, state=state, record=record, points=points)

    def best(*trials: TrialHistory, maximize: bool = False) -> tuple[int, float] | None:
        history = StudyHistory(key="s", trials=trials, maximize=maximize)
        return picture_of_history(history, "s").best

    assert best(trial(0, 0.5), trial(1, 0.1, state="failed")) == (0, 0.5)
    assert best(trial(0, 0.5, 0.2, 0.9), trial(1, 0.3)) == (0, 0.2)
    assert best(trial(0, 0.5, 0.9), trial(1, 0.9, math.nan), maximize=True) == (0, 0.9)
    assert best(trial(0, math.nan, math.inf)) is None
    shown = picture_of_history(StudyHistory(key="s", trials=(trial(0, 0.5),)), "s")
    assert shown.counts == {"done": 1}


def test_power_is_what_a_counter_counts_between_two_changes() -> None:
    """Devices are read less often than pictures are made."""
    gpu = Device(id="GPU-0", kind="gpu", free=True, energy_joules=1000.0)
    broker = FakeBroker(devices=[gpu])
    first = seen(broker, at=10.0)
    assert first.power["GPU-0"].watts is None
    broker.poll("GPU-0", energy_joules=1600.0)
    second = seen(broker, at=12.0, before=first)
    assert second.power["GPU-0"].watts == 300.0
    third = seen(broker, at=13.0, before=second)
    assert third.power["GPU-0"].watts == 300.0
    broker.poll("GPU-0", energy_joules=1800.0)
    assert seen(broker, at=14.0, before=third).power["GPU-0"].watts == 100.0


def test_the_past_shows_who_had_most_of_each_part() -> None:
    """The ledger's record of this host and what was seen are one line; it has idle parts."""
    past = Past(100.0)
    mine = [Bar("h/cpu:0", 5, 0.0, 20.0, 1), Bar("h/cpu:0", 6, 20.0, 34.0, 2)]
    bars = [*mine, Bar("other/cpu:0", 9, 0.0, 60.0, 8)]
    past.read(bars, Picture(at=60.0, host="h", key="k"))
    holder = {"key": "k", "trial": None, "epoch": 3, "since_seconds": 10.0}
    picture = Picture(at=100.0, devices=(device_status(holder=holder),))
    past.see(picture)
    free = [None] * 6
    assert past.cells("cpu:0", "k", 100.0, 10) == [5, 5, 6, *free, UNNUMBERED]
    past.see(replace(picture, devices=(device_status(holder=holder | {"trial": 7}),)))
    assert past.cells("cpu:0", "k", 100.0, 10)[-1] == 7
    past.see(replace(picture, at=300.0, devices=()))
    assert past.cells("cpu:0", "k", 300.0, 10) == [None] * 10


def test_the_past_tells_leases_of_two_studies_apart() -> None:
    """Those of two databases may have one epoch, and only one study's numbers are shown."""
    past = Past(100.0)
    device = device_status(holder={"key": "l", "trial": 7, "since_seconds": 50.0})
    picture = Picture(at=100.0, host="h", key="k", devices=(device,))
    past.read([Bar("h/cpu:0", 5, 0.0, 50.0, 1)], picture)
    past.see(picture)
    assert past.cells("cpu:0", "k", 100.0, 4) == [5, 5, UNNUMBERED, UNNUMBERED]
    assert past.cells("cpu:0", "l", 100.0, 4) == [UNNUMBERED, UNNUMBERED, 7, 7]


class FakeReader:
    """A broker that serves two studies, and the ledger of one; its reads are counted."""

    silence = ""

    def __init__(self) -> None:
        self.reads = 0
        self.outage_seconds: float | None = None
        self.outage_reason = ""

    def status(self) -> wire.BrokerStatus:
        mine = study_status(
            key="s", outage_seconds=self.outage_seconds, outage_reason=self.outage_reason
        )
        return broker_status(mine, study_status(key="t"))

    def apart(self, broker: wire.BrokerStatus) -> wire.BrokerStatus:
        return broker

    def history(self, broker: wire.BrokerStatus | None) -> StudyHistory:
        self.reads += 1
        return StudyHistory(key="s", trials=(), bars=(Bar("box/cpu:0", 5, 0.0, 50.0, 1),))


def test_past_leases_are_read_while_their_study_is_shown_and_its_database_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have its numbers, and a database that is away may keep the picture for half a minute."""
    source, reader = StudySource("sqlite:///none.db", "s"), FakeReader()
    monkeypatch.setattr(source, "_reader", reader)
    source.look("")
    assert len(source.past()) == 1
    source.look("t")
    assert source.past() == ()
    reads, reader.outage_seconds = reader.reads, 1.0
    picture = source.look("s")
    assert picture.problem == "The database does not answer: training goes on."
    reader.outage_reason = "database or disk is full"
    full = "The database cannot be written, as its disk is full: training goes on."
    assert source.look("s").problem == full
    assert source.past() == ()
    assert reader.reads == reads
    reader.outage_seconds = None
    source.look("s")
    assert len(source.past()) == 1


def test_a_study_that_nobody_serves_is_drawn_once_for_each_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its picture takes all its reports; the time and the reason are of now."""
    source, reader = StudySource("sqlite:///none.db", "s"), FakeReader()
    monkeypatch.setattr(source, "_reader", reader)
    monkeypatch.setattr(reader, "status", lambda: None)
    first = source.look("")
    assert reader.reads == 1
    reader.silence = "It is away."
    second = source.look("")
    assert (second.trials is first.trials, second.counts is first.counts) == (True, True)
    assert second.at > first.at
    assert second.read_only.startswith("It is away.")
    monkeypatch.setattr(_top, "REST_SECONDS", -1.0)
    assert source.look("").counts is not first.counts


def test_a_flat_curve_and_none_have_a_line() -> None:
    """No division by nothing."""
    assert sparkline((1.0, 1.0), 5) == "▁▁"
    assert sparkline((-1e308, 1e308), 5) == "▁█"
    assert sparkline((0.0, 5e-324), 5) == "▁▁"
    assert sparkline((), 5) == ""
    assert sparkline((None, float("nan")), 5) == "··"
    assert len(sparkline(tuple(map(float, range(100))), 7)) == 7
