"""Every ledger of the package keeps the ledger's contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from optuna_hermes.ledger import Ledger, open_ledger
from support.ledger_contract import LedgerContract
from support.memory_ledger import MemoryLedger
from support.records import STUDY, trial_record


class TestMemoryLedger(LedgerContract):
    """The ledger that ends with its process."""

    @pytest.fixture
    def ledger(self) -> Ledger:
        """A ledger of this process."""
        return MemoryLedger()


class SqlContract(LedgerContract):
    """Tests that ledgers in a database share; a subclass gives the ``url`` of an empty one."""

    @pytest.fixture
    def url(self) -> str:
        """Override it: an empty database."""
        raise NotImplementedError

    @pytest.fixture
    def ledger(self, url: str) -> Iterator[Ledger]:
        """The first handle."""
        with closing(open_ledger(url)) as ledger:
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
