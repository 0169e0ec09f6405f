"""Clearing away rows of the ledger that nobody needs any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from optuna_hermes import _optuna as private
from optuna_hermes.ledger import EventRecord, Ledger

DEAD_SECONDS = 3600.0
"""A broker that was silent for so long is forgotten; its runs could be claimed long before."""

STORY_SECONDS = 30 * 86400.0
"""Events are kept for so long, and those since the first of any unfinished trial in any case."""

_GRANTED_SECONDS = 60.0
"""A lease that is younger may have been granted since the broker was asked what it serves."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What nobody needs any more, in the ledger.

    Args:
        leases: epochs of leases that are out though nobody can hold them.
        hosts: brokers that are gone.
        studies: keys of studies that Optuna has no more.
        events: how many are older than ``story_begins``, all of finished trials.
        story_begins: seconds since 1970.
    """

    leases: tuple[int, ...]
    hosts: tuple[str, ...]
    studies: tuple[str, ...]
    events: int
    story_begins: float


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
    dead = [each.instance for each in ledger.load_hosts() if each.age_seconds > DEAD_SECONDS]
    events = ledger.load_events(key)
    begins = _story_begins(study, events, now)
    return Rows(
        leases=() if key in serving else _orphans(ledger, key, host, now),
        hosts=tuple(dead),
        studies=_deleted(study, ledger, serving),
        events=sum(event.at < begins for event in events),
        story_begins=begins,
    )


def remove_rows(study: private.Study, ledger: Ledger, rows: Rows, now: float) -> None:
    """Clear them away.

    Args:
        study: the study.
        ledger: its ledger.
        rows: as ``find_rows`` found them.
        now: seconds since 1970.
    """
    for epoch in rows.leases:
        ledger.end_lease(epoch, now)
    for instance in rows.hosts:
        ledger.forget_host(instance, dead_after_seconds=DEAD_SECONDS)
    for key in rows.studies:
        ledger.forget_study(key)
    if rows.events:
        ledger.trim_events(private.study_key(study), rows.story_begins)


def _orphans(ledger: Ledger, key: str, host: str | None, now: float) -> tuple[int, ...]:
    """Leases of a host that does not serve the study; those of other brokers end with them."""
    return tuple(
        lease.epoch
        for lease in ledger.load_leases(key, live=True)
        if lease.owner is None and lease.host == host and now - lease.started > _GRANTED_SECONDS
    )


def _deleted(study: private.Study, ledger: Ledger, serving: Collection[str]) -> tuple[str, ...]:
    """Studies that Optuna does not know any more, where it could know all that the ledger knows."""
    if not private.shares_its_ledger(study):
        return ()
    # In this order: a study that is made in between is in both.
    known = ledger.load_studies()
    there = {*private.study_keys(study), *serving}
    return tuple(key for key in known if key not in there)


def _story_begins(study: private.Study, events: Collection[EventRecord], now: float) -> float:
    over = {n for n, state in private.trial_states(study).items() if state.is_finished()}
    unfinished = (e.at for e in events if e.number is not None and e.number not in over)
    return min([now - STORY_SECONDS, *unfinished])
