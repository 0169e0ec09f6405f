"""Statements of every grant, built once, since building one takes longer than running it.

A record's ``row`` gives the columns; other parameters are conditions on the rows to be written.
"""

from __future__ import annotations

from sqlalchemy import bindparam, func, insert, select, update

from optuna_hermes.ledger._schema import EVENTS, LEASES, REPORTS, RUNS, SCHEMA

TURN = select(SCHEMA.c.id).with_for_update()
"""Locks the row by which transactions of brokers are serialised."""

ADD_REPORT = insert(REPORTS)

ADD_EVENT = insert(EVENTS)

ADD_LEASE = insert(LEASES)

END_LEASE = (
    update(LEASES)
    .where(LEASES.c.epoch == bindparam("of_epoch"), LEASES.c.ended.is_(None))
    .values(ended=bindparam("at"))
)

ADD_RUN = insert(RUNS)

_RUN = (RUNS.c.study == bindparam("of_study"), RUNS.c.number == bindparam("of_number"))

REPLACE_RUN = update(RUNS).where(*_RUN, RUNS.c.owner.is_not_distinct_from(bindparam("by")))

OWNER = select(RUNS.c.owner).where(*_RUN).with_for_update()
"""Reads a run's owner and locks its row until the end of the transaction."""

EPOCHS = select(
    select(func.max(LEASES.c.epoch)).scalar_subquery(),
    SCHEMA.c.forgotten_epoch,
)
"""The highest epoch of the leases in the table, and of removed ones."""
