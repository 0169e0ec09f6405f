"""Statements of the ledger, each built once, since building one takes longer than running it.

A record's ``row`` gives the columns that are written. Parameters named ``of_...`` are conditions.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    true,
    union,
    update,
)

from optuna_hermes.ledger._clock import Now
from optuna_hermes.ledger._engine import end_if_silent
from optuna_hermes.ledger._records import LeaseRecord, TrialRecord
from optuna_hermes.ledger._schema import (
    CHECKPOINTS,
    EVENTS,
    HOSTS,
    LEASES,
    MEMORY,
    OF_STUDIES,
    REPORTS,
    SCHEMA,
    TRIALS,
)
from optuna_hermes.model import Checkpoint


def _of_study(table: Table) -> ColumnElement[bool]:
    return table.c.study == bindparam("of_study")


def _of_trial(table: Table) -> ColumnElement[bool]:
    return and_(_of_study(table), table.c.number == bindparam("of_number"))


def _of_some(table: Table) -> ColumnElement[bool]:
    return table.c.number.in_(bindparam("of_numbers", expanding=True))


def _all_of(table: Table, record: type[Any]) -> Select[Any]:
    """Select the columns of a record, which have its fields' names, in the order of the key."""
    columns = (table.c[entry.name] for entry in fields(record))
    return select(*columns).order_by(*table.primary_key)


@cache
def load(table: Table, record: type[Any], *, of_trial: bool = False) -> Select[Any]:
    """Select the records of a study, or of one trial."""
    return _all_of(table, record).where(_of_trial(table) if of_trial else _of_study(table))


# -- trials --------------------------------------------------------------------------------------

NEXT_CHANGE = update(SCHEMA).values(last_change=SCHEMA.c.last_change + 1)
"""Begins a change; its number is that of the rows which are written after it."""

_CHANGE = {"changed": select(SCHEMA.c.last_change).scalar_subquery()}
ADD_TRIAL = insert(TRIALS).values(_CHANGE)
CHANGE_TRIAL = update(TRIALS).where(_of_trial(TRIALS)).values(_CHANGE)
REPLACE_TRIAL = CHANGE_TRIAL.where(TRIALS.c.owner.is_not_distinct_from(bindparam("of_owner")))
OWNER = select(TRIALS.c.owner).where(_of_trial(TRIALS))
TRIAL = _all_of(TRIALS, TrialRecord).where(_of_trial(TRIALS))
_WITH_OVERRIDES = load(TRIALS, TrialRecord).add_columns(TRIALS.c.override)
CHANGED_TRIALS = _WITH_OVERRIDES.where(TRIALS.c.changed > bindparam("of_change"))
SOME_TRIALS = _WITH_OVERRIDES.where(_of_some(TRIALS))
OVERRIDES = (
    select(TRIALS.c.number, TRIALS.c.override)
    .where(_of_study(TRIALS), TRIALS.c.override.is_not(None))
    .order_by(TRIALS.c.number)
)

# -- reports -----------------------------------------------------------------------------------

ADD_REPORT = insert(REPORTS)
_REPORTED = tuple(
    REPORTS.c[name] for name in ("number", "unit", "step", "value", "not_finite", "device_seconds")
)
CURVES = select(*_REPORTED).where(_of_study(REPORTS)).order_by(REPORTS.c.id)
"""Reports as ``curves_of`` reads them."""

SOME_CURVES = CURVES.where(_of_some(REPORTS))
LATER_REPORTS = (
    select(REPORTS.c.id, REPORTS.c.at, *_REPORTED)
    .where(_of_study(REPORTS), REPORTS.c.id > bindparam("of_position"))
    .order_by(REPORTS.c.id)
)

# -- leases ------------------------------------------------------------------------------------

ADD_LEASE = insert(LEASES)
CHANGE_LEASE = update(LEASES).where(LEASES.c.epoch == bindparam("of_epoch"))
END_LEASE = CHANGE_LEASE.where(LEASES.c.ended.is_(None))
_LAST_REPORT = select(func.max(REPORTS.c.at)).where(
    REPORTS.c.study == LEASES.c.study,
    REPORTS.c.number == LEASES.c.number,
    REPORTS.c.at > LEASES.c.started,
)
_LAST_SIGN = func.coalesce(_LAST_REPORT.scalar_subquery(), LEASES.c.started)
"""The time until which a lease was held for certain, if nobody saw it end."""

END_LOST_LEASE = END_LEASE.values(ended=_LAST_SIGN)
EPOCHS = select(
    select(func.max(LEASES.c.epoch)).scalar_subquery(),
    SCHEMA.c.forgotten_epoch,
)
"""The highest epoch of the leases in the table, and of removed ones."""


@cache
def leases(*, of_study: bool, live: bool, since: bool) -> Select[Any]:
    """Select leases of a study, live ones, or those since an epoch."""
    query = _all_of(LEASES, LeaseRecord)
    if since:
        query = query.where(LEASES.c.epoch >= bindparam("of_epoch"))
    if of_study:
        query = query.where(_of_study(LEASES))
    return query.where(LEASES.c.ended.is_(None)) if live else query


_END_LEASES = update(LEASES).where(LEASES.c.ended.is_(None)).values(ended=_LAST_SIGN)
END_LEASES_OF_TRIAL = _END_LEASES.where(_of_trial(LEASES))
END_LEASES_OF_HOST = _END_LEASES.where(LEASES.c.owner == bindparam("of_instance"))


def _known_trials() -> Select[Any]:
    trials = select(func.count()).where(_of_study(TRIALS)).scalar_subquery()
    same = and_(_of_study(TRIALS), TRIALS.c.number == LEASES.c.number)
    further = and_(
        _of_study(LEASES),
        LEASES.c.ended.is_(None),
        or_(LEASES.c.number.is_(None), ~select(TRIALS.c.number).where(same).exists()),
    )
    # One statement: a lease whose trial is inserted between two would be counted by neither.
    leases = select(func.count()).select_from(LEASES).where(further).scalar_subquery()
    return select(trials + leases)


KNOWN_TRIALS = _known_trials()
"""Number of a study's trials, plus its live leases of trials not created yet."""

# -- brokers -----------------------------------------------------------------------------------

TURN = select(SCHEMA.c.id).with_for_update()
"""Locks the row by which transactions of brokers are serialised."""

TURN_OF_POSTGRESQL = TURN.add_columns(end_if_silent())
"""As ``TURN``; the server ends the transaction if it is silent."""

_OF_INSTANCE = HOSTS.c.instance == bindparam("of_instance")
# An age by the ledger's clock alone: the clocks of hosts may differ.
HOSTS_WITH_AGES = select(
    *(column for column in HOSTS.c if column is not HOSTS.c.seen),
    (Now() - HOSTS.c.seen).label("age_seconds"),
)
LOOK = (
    select(SCHEMA.c.last_change, SCHEMA.c.forgotten_change)
    .add_columns(*HOSTS_WITH_AGES.selected_columns)
    .select_from(SCHEMA.outerjoin(HOSTS, true()))
)
"""The change numbers, with each broker: one row without if there is none."""

ADD_HOST = insert(HOSTS).values(seen=Now())
REPLACE_HOST = update(HOSTS).where(_OF_INSTANCE).values(seen=Now())
DROP_HOST = delete(HOSTS).where(_OF_INSTANCE)


# -- the rest of a study -----------------------------------------------------------------------


CHECKPOINTS_OF_STUDY = load(CHECKPOINTS, Checkpoint).add_columns(
    CHECKPOINTS.c.number, CHECKPOINTS.c.at
)
SOME_CHECKPOINTS = CHECKPOINTS_OF_STUDY.where(_of_some(CHECKPOINTS))
ADD_CHECKPOINT = insert(CHECKPOINTS)
HAS_CHECKPOINT = select(CHECKPOINTS.c.id).where(_of_trial(CHECKPOINTS)).limit(1)
DROP_CHECKPOINT = delete(CHECKPOINTS).where(
    _of_trial(CHECKPOINTS), CHECKPOINTS.c.path == bindparam("of_path")
)
LOAD_MEMORY = select(MEMORY.c.memory).where(_of_study(MEMORY))
REPLACE_MEMORY = update(MEMORY).where(_of_study(MEMORY))
ADD_MEMORY = insert(MEMORY)
ADD_EVENT = insert(EVENTS)
FIRST_EVENTS = (
    select(EVENTS.c.number, func.min(EVENTS.c.at).label("at"))
    .where(_of_study(EVENTS), EVENTS.c.number.is_not(None))
    .group_by(EVENTS.c.number)
)
COUNT_EVENTS = select(func.count()).where(_of_study(EVENTS), EVENTS.c.at < bindparam("of_time"))
TRIM_EVENTS = delete(EVENTS).where(_of_study(EVENTS), EVENTS.c.at < bindparam("of_time"))
STUDIES = union(*(select(table.c.study) for table in OF_STUDIES))
FORGET_ROWS = update(SCHEMA).values(forgotten_change=SCHEMA.c.last_change)
"""Notes that rows are removed by this change, and the highest epoch of their leases."""

FORGET_STUDY = tuple(delete(table).where(_of_study(table)) for table in OF_STUDIES)
