"""Clearing away rows of the ledger that nobody needs any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from optuna_hermes import _optuna as private
from optuna_hermes.ledger import Ledger

_GRANTED_SECONDS = 60.0
"""A lease that is younger may have been granted since the broker was asked what it serves."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What nobody needs any more, in the ledger.

    Args:
        leases: epochs of leases that are out though nobody can hold them.
    """

    leases: tuple[int, ...]


def find_rows(
    study: private.Study, ledger: Ledger, *, host: str | None, serving: Collection[str], now: float
) -> Rows:
    """Find what is left over in the ledger of a study; changes nothing.

    Args:
        study: the study.
        ledger: its ledger.
        host: this host's name, None if trials may live on it whose broker has just died.
        serving: keys of the studies that this host's broker serves.
        now: seconds since 1970.
    """
    key = private.study_key(study)
    return Rows(leases=() if key in serving else _orphans(ledger, key, host, now))


def remove_rows(ledger: Ledger, rows: Rows, now: float) -> None:
    """Clear them away.

    Args:
        ledger: its ledger.
        rows: as ``find_rows`` found them.
        now: seconds since 1970.
    """
    for epoch in rows.leases:
        ledger.end_lease(epoch, now)


def _orphans(ledger: Ledger, key: str, host: str | None, now: float) -> tuple[int, ...]:
    """Leases of a host that does not serve the study; those of other brokers end with them."""
    return tuple(
        lease.epoch
        for lease in ledger.load_leases(key)
        if lease.ended is None
        and lease.owner is None
        and lease.host == host
        and now - lease.started > _GRANTED_SECONDS
    )
