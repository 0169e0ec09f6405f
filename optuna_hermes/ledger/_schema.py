"""The ledger's tables in the user's database, all named ``hermes_*``.

There is no foreign key to Optuna's tables: one would make ``optuna.delete_study`` fail. Names and
texts compare byte for byte on MySQL too, whose default collation would take ``a`` for ``A``.

A column added here needs a step in ``_migrations.py`` that adds it to old ledgers.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.dialects.mysql import LONGTEXT, VARCHAR

METADATA = MetaData()
"""Metadata of the ledger's tables only, without Optuna's and its ``alembic_version``."""

_MYSQL = ("mysql", "mariadb")
_MYSQL_TEXT = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}

_Integer = BigInteger().with_variant(Integer, "sqlite")  # SQLite's autoincrement needs INTEGER
_Name = String(255).with_variant(VARCHAR(255, **_MYSQL_TEXT), *_MYSQL)
_Word = String(64).with_variant(VARCHAR(64, **_MYSQL_TEXT), *_MYSQL)
_Long = Text().with_variant(LONGTEXT(**_MYSQL_TEXT), *_MYSQL)

SCHEMA = Table(
    "hermes_schema",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    # The highest epoch of removed leases: new epochs must be above it too.
    Column("forgotten_epoch", _Integer),
)

RUNS = Table(
    "hermes_runs",
    METADATA,
    Column("study", _Name, primary_key=True),
    Column("number", _Integer, primary_key=True, autoincrement=False),
    Column("trial_id", _Integer, nullable=False),
    Column("state", _Word, nullable=False),
    Column("tier", _Word),
    Column("host", _Name),
    Column("owner", _Name),
    Column("units", _Integer, nullable=False),
    Column("slices", _Integer, nullable=False),
    Column("suspensions", _Integer, nullable=False),
    Column("device_seconds", Double, nullable=False),
    Column("energy_joules", Double),
    Column("wish", _Word),
    Column("losses", Integer, nullable=False, server_default="0"),
    Column("submitted", Double, nullable=False),
    Column("updated", Double, nullable=False),
)

REPORTS = Table(
    "hermes_reports",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer, nullable=False),
    Column("unit", _Integer, nullable=False),
    Column("step", _Integer, nullable=False),
    # MySQL's DOUBLE cannot be NaN or infinite: such a value is stored as a string in not_finite.
    Column("value", Double),
    Column("not_finite", _Word),
    Column("device_seconds", Double, nullable=False),
    Column("at", Double, nullable=False),
    Index("ix_hermes_reports_run", "study", "number"),
)

LEASES = Table(
    "hermes_leases",
    METADATA,
    Column("epoch", _Integer, primary_key=True, autoincrement=False),
    Column("study", _Name, nullable=False, index=True),
    Column("number", _Integer),
    Column("devices", _Long, nullable=False),
    Column("host", _Name, nullable=False),
    Column("started", Double, nullable=False),
    Column("ended", Double),
    Column("owner", _Name),
)

HOSTS = Table(
    "hermes_hosts",
    METADATA,
    Column("instance", _Name, primary_key=True),
    Column("name", _Name, nullable=False),
    Column("devices", _Long, nullable=False),
    Column("load", Double, nullable=False),
    Column("wants", _Long, nullable=False),
    # Seconds of Unix time, by the clock of the database.
    Column("seen", Double, nullable=False),
)

CHECKPOINTS = Table(
    "hermes_checkpoints",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer, nullable=False),
    Column("path", _Long, nullable=False),
    Column("units", _Integer, nullable=False),
    Column("size_bytes", _Integer, nullable=False),
    Column("sha256", _Word, nullable=False),
    Column("at", Double, nullable=False),
    Index("ix_hermes_checkpoints_run", "study", "number"),
)

MEMORY = Table(
    "hermes_memory",
    METADATA,
    Column("study", _Name, primary_key=True),
    Column("memory", _Long, nullable=False),
)

EVENTS = Table(
    "hermes_events",
    METADATA,
    Column("id", _Integer, primary_key=True),
    Column("study", _Name, nullable=False),
    Column("number", _Integer),
    Column("kind", _Name, nullable=False),
    Column("at", Double, nullable=False),
    Column("detail", _Long, nullable=False),
    Index("ix_hermes_events_run", "study", "number"),
)

OF_STUDIES = (RUNS, REPORTS, LEASES, CHECKPOINTS, MEMORY, EVENTS)
"""Tables whose rows each belong to one study, by their column ``study``."""
