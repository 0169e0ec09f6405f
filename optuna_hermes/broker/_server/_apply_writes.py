"""Effects of a broker's records on a ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optuna_hermes.broker._core import _events as events
from optuna_hermes.errors import NotOwnerError, StaleEpochError, StudyFullError
from optuna_hermes.ledger._records import (
    DEAD_SECONDS,
    CheckpointRecord,
    LeaseRecord,
    ReportRecord,
    TrialRecord,
)

if TYPE_CHECKING:
    from optuna_hermes.ledger import Ledger

_RACES = (NotOwnerError, StudyFullError)
"""Claim conflicts of brokers that share a study, besides an epoch that another one has taken."""


@dataclass(kw_only=True)
class WriterTerms:
    """Name and limits with which a broker writes.

    Args:
        instance: itself, as other hosts know it.
        limits: the bounds of ``LimitTrials`` in force, by the keys of their studies.
    """

    host: str = ""
    instance: str = ""
    limits: dict[str, int | None] = field(default_factory=dict)


def write(ledger: Ledger, item: events.Write, terms: WriterTerms) -> None:
    if isinstance(item, LeaseRecord):
        ledger.commit_lease(item, limit=_limit(ledger, item, terms))
    elif isinstance(item, events.LimitTrials):
        terms.limits[item.study] = item.limit
    elif isinstance(item, events.EndLease):
        ledger.end_lease(item.epoch, item.ended)
    elif isinstance(item, events.NameLease):
        ledger.name_lease(item.epoch, item.number)
    elif isinstance(item, TrialRecord):
        ledger.save_trial(item, by=terms.instance if ledger.shared else None)
    elif isinstance(item, events.Claim):
        _claim(ledger, item, terms)
    elif isinstance(item, events.ForgetBroker):
        ledger.forget_host(item.instance, dead_after_seconds=DEAD_SECONDS)
    elif isinstance(item, ReportRecord):
        ledger.add_report(item)
    elif isinstance(item, CheckpointRecord):
        ledger.save_checkpoint(item)
    elif isinstance(item, events.DropCheckpoint):
        ledger.drop_checkpoint(item.study, item.number, item.path)
    elif isinstance(item, events.SaveMemory):
        ledger.save_memory(item.study, item.memory, terms.host if ledger.shared else "")
    elif isinstance(item, events.SaveOverride):
        ledger.save_override(item.study, item.number, item.override)
    else:
        ledger.add_event(item)


def is_race(ledger: Ledger, error: Exception) -> bool:
    """True if a ledger refuses because another broker was faster."""
    # A file has one broker a study, but another one may train another study of it.
    return isinstance(error, StaleEpochError) or (ledger.shared and isinstance(error, _RACES))


def _limit(ledger: Ledger, lease: LeaseRecord, terms: WriterTerms) -> int | None:
    is_new = ledger.shared and lease.number is None
    return terms.limits.get(lease.study) if is_new else None


def _claim(ledger: Ledger, item: events.Claim, terms: WriterTerms) -> None:
    trial = ledger.claim_trial(
        item.study,
        item.number,
        host=terms.host,
        instance=terms.instance,
        dead_after_seconds=DEAD_SECONDS,
    )
    # With other slices another broker has trained it since it was read here.
    if trial is None or trial.slices != item.slices:
        raise NotOwnerError(f"Another broker has trial {item.number}.", item.number)
