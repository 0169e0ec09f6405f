"""Brokers of several hosts on one ledger, as real processes that die and come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from optuna_hermes.broker._server._peer_sync import Seen, read_changes
from optuna_hermes.errors import LedgerError, StaleEpochError
from optuna_hermes.ledger import (
    HostRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
    _engine,
    open_ledger,
)

RUNS = 6
UNITS = 9
SLICE = 3
DEAD_AFTER_SECONDS = 1.0
DEADLINE_SECONDS = 120.0


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def serve(url: str, name: str, start: Barrier) -> None:
    """A broker with one device: it trains whatever run it can claim, until all are done."""
    _engine.SILENT_SECONDS = 1
    instance = f"{name}1"
    with closing(open_ledger(url)) as ledger:
        start.wait(DEADLINE_SECONDS)
        while any(trial.state != "done" for trial in ledger.load_trials("study")):
            for number in range(RUNS):
                # Whoever was thought dead has lost its trial, or its connection.
                with suppress(LedgerError):
                    ledger.beat(HostRecord(name=name, instance=instance))
                    train(ledger, number, name, instance)


def train(ledger: Ledger, number: int, name: str, instance: str) -> None:
    """One slice of a trial, if it can be had."""
    trial = ledger.claim_trial(
        "study", number, host=name, instance=instance, dead_after_seconds=DEAD_AFTER_SECONDS
    )
    if trial is not None:
        epoch, last = grant(ledger, trial), min(trial.units + SLICE, UNITS)
        for unit in range(trial.units + 1, last + 1):
            keep(ledger, trial, unit, epoch, last=unit == last)


def grant(ledger: Ledger, trial: TrialRecord) -> int:
    """The epoch of a new lease; other brokers commit theirs in between."""
    while True:
        epoch = ledger.last_epoch() + 1
        lease = LeaseRecord(
            study="study",
            epoch=epoch,
            number=trial.number,
            devices=(f"{trial.host}/0",),
            host=str(trial.host),
            started=0.0,
            owner=trial.owner,
        )
        try:
            ledger.commit_lease(lease)
            return epoch
        except StaleEpochError:
            pass


def keep(ledger: Ledger, trial: TrialRecord, unit: int, epoch: int, *, last: bool) -> None:
    """Write a unit; with the last of a slice the trial is given back."""
    state = "running" if not last else "done" if unit == UNITS else "stored"
    owner = None if last else trial.owner
    time.sleep(0.05)  # the training
    with ledger.batch():
        ledger.add_report(
            ReportRecord(
                study="study",
                number=trial.number,
                unit=unit,
                step=unit,
                value=0.0,
                device_seconds=0.0,
                at=0.0,
            )
        )
        if last:
            ledger.end_lease(epoch, 1.0)
        ledger.save_trial(
            TrialRecord(
                study="study",
                number=trial.number,
                trial_id=trial.number,
                state=state,  # type: ignore[arg-type]
                host=trial.host,
                owner=owner,
                units=unit,
            ),
            by=trial.owner,
        )


def reported(ledger: Ledger) -> list[tuple[int, int]]:
    """Every report that was ever written, also of a unit that was trained twice."""
    from optuna_hermes.ledger._schema import REPORTS

    database = ledger._database
    rows = database.rows(REPORTS.select())
    return sorted((row["number"], row["unit"]) for row in rows)


def lease(epoch: int) -> LeaseRecord:
    """A lease of a new trial."""
    return LeaseRecord(
        study="study", epoch=epoch, number=None, devices=("a/0",), host="a", started=0.0
    )


@pytest.fixture
def brokers(url: str) -> Iterator[dict[str, SpawnProcess]]:
    """Three of them, on runs that nobody has begun."""
    with closing(open_ledger(url)) as ledger:
        for number in range(RUNS):
            ledger.save_trial(
                TrialRecord(study="study", number=number, trial_id=number, state="pending")
            )
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    brokers = {name: context.Process(target=serve, args=(url, name, start)) for name in "abc"}
    for process in brokers.values():
        process.start()
    yield brokers
    for process in brokers.values():
        process.kill()
        process.join()
        process.close()


def test_trials_of_hosts_that_die_are_carried_on_by_the_others(
    url: str, brokers: dict[str, SpawnProcess], wait_for: Callable[..., Any]
) -> None:
    """One broker is killed, one hangs until it is thought dead: no unit is lost or doubled."""
    with closing(open_ledger(url)) as ledger:
        wait_for(lambda: holds(ledger, "a1"), DEADLINE_SECONDS)
        brokers["a"].kill()
        if not url.startswith("sqlite"):  # who hangs with a file locked makes all others wait
            wait_for(lambda: holds(ledger, "b1"), DEADLINE_SECONDS)
            os.kill(brokers["b"].pid or 0, signal.SIGSTOP)
            wait_for(lambda: not holds(ledger, "b1"), DEADLINE_SECONDS)
            os.kill(brokers["b"].pid or 0, signal.SIGCONT)
        for name in "bc":
            brokers[name].join(DEADLINE_SECONDS)
            assert brokers[name].exitcode == 0
        trials = ledger.load_trials("study")
        assert [(trial.state, trial.units) for trial in trials] == [("done", UNITS)] * RUNS
        assert reported(ledger) == [
            (number, unit) for number in range(RUNS) for unit in range(1, UNITS + 1)
        ]
        ledger.forget_host("a1", dead_after_seconds=0.0)
        assert all(lease.ended is not None for lease in ledger.load_leases())


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_a_process_that_hangs_with_a_lock_does_not_keep_it(
    request: pytest.FixtureRequest, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database ends a transaction that says nothing, and what it wrote is undone."""
    url = request.getfixturevalue(f"{server}_url")
    monkeypatch.setattr(_engine, "SILENT_SECONDS", 1)
    with closing(open_ledger(url)) as hung, closing(open_ledger(url)) as other:

        def hang() -> None:
            with hung.batch():
                hung.save_trial(TrialRecord(study="study", number=0, trial_id=0, state="pending"))
                other.commit_lease(lease(1))  # waits for the lock of the batch
                hung.commit_lease(lease(2))

        with pytest.raises(LedgerError, match=r"cannot be used: .*Check its URL, that "):
            hang()
        assert [held.epoch for held in other.load_leases()] == [1]
        assert other.load_trials("study") == []
        hung.commit_lease(lease(2))


def test_only_a_turn_has_a_limit_of_silence_on_postgresql(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poolers lend connections to others, and building what was read may take longer."""
    monkeypatch.setattr(_engine, "SILENT_SECONDS", 7)
    show = sqlalchemy.text("SHOW idle_in_transaction_session_timeout")
    with closing(open_ledger(postgres_url)) as ledger:
        with ledger._turn() as connection:
            assert connection.scalar(show) == "7s"
        with ledger._database.reading() as connection:  # the same one, out of the pool
            assert connection.scalar(show) == "0"


@pytest.mark.parametrize(
    ("server", "zone"),
    [
        ("postgres", "options=-ctimezone%3DAsia/Tokyo"),
        ("mariadb", "init_command=SET time_zone='%2B09:00'"),
    ],
)
def test_the_time_zone_of_a_connection_does_not_matter(
    request: pytest.FixtureRequest, server: str, zone: str
) -> None:
    """Ages are the same for hosts in Tokyo and in Greenwich."""
    url = request.getfixturevalue(f"{server}_url")
    with closing(open_ledger(url)) as here, closing(open_ledger(f"{url}&{zone}")) as there:
        for name, ledger in (("here", here), ("there", there)):
            ledger.beat(HostRecord(name=name, instance=name))
        for ledger in (here, there):
            assert all(host.age_seconds < 60 for host in ledger.load_hosts())


@contextmanager
def statements() -> Iterator[list[str]]:
    """The statements that this process executes in the block, on any engine."""
    executed: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        executed.append(statement.split()[0])

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
    try:
        yield executed
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)


def test_a_look_at_a_ledger_without_changes_is_one_statement(url: str) -> None:
    """A host at rest sends one, and every second time its heartbeat, for any number of trials."""
    presence = HostRecord(name="a", instance="a1")
    with closing(open_ledger(url)) as ledger:
        with ledger.batch():
            for number in range(100):
                ledger.save_trial(
                    TrialRecord(study="study", number=number, trial_id=number, state="stored")
                )
        ledger.beat(presence)
        first, seen = read_changes("study", presence, {}, Seen(), True, ledger)
        known = {row.number: row for row in first.trials}
        assert len(known) == 100
        with statements() as executed:
            news, seen = read_changes("study", presence, known, seen, False, ledger)
            assert (news.trials, news.hosts[0].instance) == ((), "a1")
            assert [each for each in executed if each != "BEGIN"] == ["SELECT"]
        with statements() as executed:
            news, seen = read_changes("study", presence, known, seen, True, ledger)
            assert sorted(each for each in executed if each[:5] != "BEGIN") == ["SELECT", "UPDATE"]
        ledger.save_trial(replace(known[7], units=1))
        news, seen = read_changes("study", presence, known, seen, False, ledger)
        assert [row.number for row in news.trials] == [7]


def holds(ledger: Ledger, instance: str) -> bool:
    return any(trial.owner == instance for trial in ledger.load_trials("study"))
