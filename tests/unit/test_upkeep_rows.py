"""What ``gc`` clears away in the ledger, and what it never touches."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import optuna
import pytest

from optuna_hermes import _optuna as private
from optuna_hermes import upkeep
from optuna_hermes.ledger import LeaseRecord, open_ledger

NOW = 1_000_000_000.0


class House:
    """A study with its ledger."""

    def __init__(self, url: str) -> None:
        self.study = optuna.create_study(storage=url, study_name="study")
        self.key = private.study_key(self.study)
        self.ledger = open_ledger(private.ledger_url(self.study))

    def lease(self, epoch: int, *, host: str = "here", started: float = NOW - 61.0) -> None:
        """A lease that is out."""
        self.ledger.commit_lease(
            LeaseRecord(
                study=self.key,
                epoch=epoch,
                number=0,
                devices=(f"{host}/cpu:0",),
                host=host,
                started=started,
            )
        )

    def rows(self, *, host: str | None = "here", serving: Collection[str] = ()) -> upkeep.Rows:
        """What may go."""
        return upkeep.find_rows(self.study, self.ledger, host=host, serving=serving, now=NOW)

    def clear(self, rows: upkeep.Rows) -> None:
        """Let it go."""
        upkeep.remove_rows(self.ledger, rows, NOW)


@pytest.fixture
def house(storage_url: str) -> Iterator[House]:
    house = House(storage_url)
    yield house
    house.ledger.close()


def test_a_lease_of_a_host_without_a_broker_ends(house: House) -> None:
    """Nobody on this host holds it any more; a dry run changes nothing."""
    house.lease(1)
    rows = house.rows()
    assert rows.leases == (1,)
    assert house.ledger.load_leases()[0].ended is None
    house.clear(rows)
    assert house.ledger.load_leases()[0].ended == NOW
    assert house.rows().leases == ()


def test_leases_that_may_be_held_stay(house: House) -> None:
    """Of a study that is served, of another host, and those granted a moment ago."""
    house.lease(1, host="elsewhere")
    house.lease(2, started=NOW - 59.0)
    assert house.rows().leases == ()
    house.lease(3)
    assert house.rows(serving=[house.key]).leases == ()
    assert house.rows(host=None).leases == ()
    assert house.rows().leases == (3,)
