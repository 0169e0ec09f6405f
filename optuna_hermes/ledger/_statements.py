"""What is written with every grant, as statements built once: to build one costs more than it does.

A record's ``row`` gives the columns. The other names are of what a row must be to be written.
"""

from __future__ import annotations

from sqlalchemy import bindparam, func, insert, select, update

from optuna_hermes.ledger._schema import EVENTS, LEASES, REPORTS, RUNS, SCHEMA

TURN = select(SCHEMA.c.id).with_for_update()
"""Locks what every transaction of a broker locks."""

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
"""Keeps a run with its owner until the end of the transaction."""

EPOCHS = select(
    select(func.max(LEASES.c.epoch)).scalar_subquery(),
    SCHEMA.c.forgotten_epoch,
)
"""The highest epoch of those that are kept, and of those that are not."""
