"""The event log of a study that has run, as its ledger has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optuna

from optuna_hermes import _optuna
from optuna_hermes.ledger import open_ledger
from optuna_hermes.ledger._records import EventRecord

WRONG = ("no room", "outgrew its memory", "process lost", "killed", "failed", "released")
"""Kinds of events that a study has none of where all goes well."""


def events_of(url: str, study_name: str = "s") -> list[EventRecord]:
    study = optuna.load_study(study_name=study_name, storage=url)
    ledger = open_ledger(url)
    try:
        return list(ledger.load_events(_optuna.study_key(study)))
    finally:
        ledger.close()


def of_kind(events: Iterable[EventRecord], *kinds: str) -> list[Mapping[str, Any]]:
    """The details of the events of some kinds."""
    return [event.detail for event in events if event.kind in kinds]
