"""Every ledger of the package keeps the ledger's contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import sqlalchemy

from optuna_hermes.ledger import Ledger, _sharing, open_ledger
from support.ledger_contract import LedgerContract
from support.records import STUDY, trial_record
from support.sharing_contract import SharingContract


class TestMemoryLedger(LedgerContract):
    """The ledger that ends with its process."""

    @pytest.fixture
    def ledger(self) -> Ledger:
        """A ledger of this process."""
        return open_ledger("memory:")

    def test_memory_names_it(self, ledger: Ledger) -> None:
        """The URL ``memory:`` gives the ledger without a database."""
        assert repr(ledger) == "Ledger('memory:')"
        assert not ledger.shared


class SqlContract(LedgerContract):
    """What ledgers in a database share; a subclass gives the ``url`` of an empty one."""

    @pytest.fixture
    def url(self) -> str:
        """Override it: an empty database."""
        raise NotImplementedError

    @pytest.fixture
    def ledger(self, url: str) -> Iterator[Ledger]:
        """The first handle."""
        with closing(open_ledger(url)) as ledger:
            assert repr(ledger) != "Ledger('memory:')"
            yield ledger

    @pytest.fixture
    def reopen(self, url: str) -> Iterator[Callable[[], Ledger]]:
        """Further handles, closed after the test."""
        handles: list[Ledger] = []

        def open_again() -> Ledger:
            handles.append(open_ledger(url))
            return handles[-1]

        yield open_again
        for handle in handles:
            handle.close()

    def test_handles_that_open_at_once_share_the_tables(self, url: str) -> None:
        """Whoever makes the tables of a new ledger, the others wait for them and find them."""
        start = Barrier(4)

        def open_and_write(number: int) -> None:
            start.wait(timeout=60)
            with closing(open_ledger(url)) as ledger:
                ledger.save_trial(trial_record(number))
                ledger.save_trial(trial_record(99))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(open_and_write, range(4)))
        with closing(open_ledger(url)) as ledger:
            assert ledger.load_trials(STUDY) == [
                trial_record(number) for number in (0, 1, 2, 3, 99)
            ]

    def test_a_new_row_may_be_saved_by_a_batch_and_another_handle_at_once(
        self, ledger: Ledger, reopen: Callable[[], Ledger]
    ) -> None:
        """Neither fails because the other one was faster to insert it."""
        rounds, start, other = 40, Barrier(2), reopen()

        def alone() -> None:
            for number in range(rounds):
                start.wait(timeout=60)
                other.save_trial(trial_record(number))
                other.save_memory(f"study {number}", "alone")

        def in_batch() -> None:
            for number in range(rounds):
                start.wait(timeout=60)
                with ledger.batch():
                    ledger.save_trial(trial_record(number))
                    ledger.save_memory(f"study {number}", "in a batch")

        with ThreadPoolExecutor(2) as pool:
            for work in [pool.submit(alone), pool.submit(in_batch)]:
                work.result(timeout=120)
        assert ledger.load_trials(STUDY) == [trial_record(number) for number in range(rounds)]


class TestSqlite(SqlContract):
    """A file of SQLite."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        """A file that is not there yet."""
        return f"sqlite:///{tmp_path}/ledger.db"


class TestPostgres(SqlContract):
    """A database of PostgreSQL."""

    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        """An empty database on the server."""
        return postgres_url


class TestMariaDb(SqlContract):
    """A database of MariaDB."""

    @pytest.fixture
    def url(self, mariadb_url: str) -> str:
        """An empty database on the server."""
        return mariadb_url


class TestWithoutSkipLocked(SharingContract):
    """A database whose locks can only be waited for, as MySQL before 8.0.1."""

    @pytest.fixture
    def ledger(self, mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
        """MariaDB, taken for an old one."""
        monkeypatch.setattr(_sharing, "skips_locked", lambda connection: False)
        with closing(open_ledger(mariadb_url)) as ledger:
            yield ledger


@pytest.mark.parametrize(
    ("url", "version", "skips"),
    [
        ("mysql+pymysql://", (8, 0, 0), False),
        ("mysql+pymysql://", (8, 0, 1), True),
        ("mariadb+pymysql://", (10, 5, 9), False),
        ("mariadb+pymysql://", (10, 6, 1), True),
        ("postgresql+psycopg://", (9, 6), True),
        ("sqlite://", (3, 40), True),
    ],
)
def test_who_can_skip_what_is_locked(url: str, version: tuple[int, ...], skips: bool) -> None:
    """Databases that do not know the words are not asked to."""
    dialect = sqlalchemy.make_url(url).get_dialect()()
    dialect.server_version_info = version
    assert _sharing.skips_locked(SimpleNamespace(dialect=dialect)) is skips  # type: ignore[arg-type]


def test_a_trial_that_somebody_writes_is_skipped(postgres_url: str, mariadb_url: str) -> None:
    """A claim does not wait for the row of a run that another transaction has locked."""
    for url in (postgres_url, mariadb_url):
        with closing(open_ledger(url)) as ledger, closing(open_ledger(url)) as other:
            ledger.save_trial(trial_record(0))
            claim = {"host": "a", "instance": "a1", "dead_after_seconds": 1e9}
            with other.batch():
                other.save_trial(trial_record(0, units=1))
                assert ledger.claim_trial(STUDY, 0, **claim) is None  # type: ignore[arg-type]
            taken = ledger.claim_trial(STUDY, 0, **claim)  # type: ignore[arg-type]
            assert taken is not None
            assert taken.units == 1
