"""Garbage collection of the ledger's rows."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from optuna_hermes import _optuna
from optuna_hermes.ledger import Ledger

# Silence after which a broker's row is removed; its trials could be claimed long before.
FORGET_HOST_SECONDS = 3600.0

# Age up to which events are kept; those since the first of an unfinished trial always are.
EVENT_LOG_SECONDS = 30 * 86400.0

# A younger lease may be newer than the broker's status, which shows it to be held.
_GRANTED_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Garbage in the ledger."""

    leases: tuple[int, ...]  # epochs of those that have not ended though no process can hold them
    hosts: tuple[str, ...]  # brokers that are gone
    studies: tuple[str, ...]  # keys of those that Optuna has deleted
    events: int  # number of those before ``events_before``, all of finished trials
    events_before: float  # seconds since 1970


def find_rows(
    study: _optuna.Study, ledger: Ledger, *, host: str | None, serving: Collection[str], now: float
) -> Rows:
    """Find the garbage in the ledger of a study; changes nothing.

    ``host`` is this host's name, None if trials may still live on it whose broker has died;
    ``serving`` are keys of the studies that its broker serves, and ``now`` is Unix time.
    """
    key = _optuna.study_key(study)
    dead = [each.instance for each in ledger.load_hosts() if each.age_seconds > FORGET_HOST_SECONDS]
    over = {n for n, state in _optuna.trial_states(study).items() if state.is_finished()}
    firsts = ledger.first_events(key).items()
    unfinished = (at for number, at in firsts if number not in over)
    begins = min([now - EVENT_LOG_SECONDS, *unfinished])
    # A broker of another runtime directory may serve it.
    held = key in serving or ledger.is_locked(key)
    return Rows(
        leases=() if held else _orphans(ledger, key, host, now),
        hosts=tuple(dead),
        studies=_deleted(study, ledger, serving),
        events=ledger.count_events(key, begins),
        events_before=begins,
    )


def remove_rows(study: _optuna.Study, ledger: Ledger, rows: Rows) -> None:
    """Remove garbage from the ledger, as ``find_rows`` found it."""
    for epoch in rows.leases:
        ledger.end_lease(epoch, None)
    for instance in rows.hosts:
        # It is asked again there: a broker that was only slow may have come back.
        ledger.forget_host(instance, dead_after_seconds=FORGET_HOST_SECONDS)
    # Again: a study that was beginning when it was looked for has its key by now.
    for key in set(rows.studies).intersection(_deleted(study, ledger, ())):
        ledger.forget_study(key)
    if rows.events:
        ledger.trim_events(_optuna.study_key(study), rows.events_before)


def _orphans(ledger: Ledger, key: str, host: str | None, now: float) -> tuple[int, ...]:
    if host is None:
        return ()
    # Leases with an owner end with that. A file has one broker at a time, and this host does not
    # serve the study: the host may have had another name. If not, it soon has a broker again.
    elsewhere = math.inf if ledger.shared else FORGET_HOST_SECONDS
    return tuple(
        lease.epoch
        for lease in ledger.load_leases(key, live=True)
        if lease.owner is None
        and now - lease.started > (_GRANTED_SECONDS if lease.host == host else elsewhere)
    )


def _deleted(study: _optuna.Study, ledger: Ledger, serving: Collection[str]) -> tuple[str, ...]:
    # With a ledger of several Optuna storages, a study that is not in this one may be in another.
    if not _optuna.shares_its_ledger(study):
        return ()
    # In this order: a study created in between is in ``there``, and so is not taken for deleted.
    known = ledger.load_studies()
    there = {*_optuna.study_keys(study), *serving}
    gone = (key for key in known if key not in there and not _optuna.is_apart(key))
    return tuple(key for key in gone if not ledger.is_locked(key))
