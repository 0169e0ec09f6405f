"""What a broker writes together, and what it keeps when the ledger refuses."""

from __future__ import annotations

import pytest

from optuna_hermes.broker._ledgers import Ledgers
from optuna_hermes.errors import StaleEpochError
from optuna_hermes.ledger import LeaseRecord, ReportRecord


def report(unit: int) -> ReportRecord:
    return ReportRecord(
        study="s", number=0, unit=unit, step=unit, value=0.5, device_seconds=1.0, at=0.0
    )


def lease(epoch: int) -> LeaseRecord:
    return LeaseRecord(
        study="s", epoch=epoch, number=0, devices=("h/cpu:0",), host="h", started=0.0
    )


def test_reports_wait_for_what_may_not() -> None:
    """A report alone is not written; a lease takes it along, in their order."""
    ledgers = Ledgers()
    ledger = ledgers.open("s", "memory:")
    ledgers.write([report(1)])
    assert ledger.load_curves("s") == {}
    ledgers.write([report(2), lease(1)])
    assert ledger.load_curves("s")[0].units == 2
    assert ledger.last_epoch() == 1
    ledgers.write([report(3)])
    ledgers.flush()
    assert ledger.load_curves("s")[0].units == 3


def test_reports_outlive_a_lease_that_was_refused() -> None:
    """When a batch fails its lease is gone, and its reports go with the next batch."""
    ledgers = Ledgers()
    ledger = ledgers.open("s", "memory:")
    ledgers.write([lease(5)])
    with pytest.raises(StaleEpochError):
        ledgers.write([report(1), lease(5)])
    assert ledger.load_curves("s") == {}
    ledgers.write([lease(6)])
    assert ledger.load_curves("s")[0].units == 1
    assert [held.epoch for held in ledger.load_leases()] == [5, 6]
