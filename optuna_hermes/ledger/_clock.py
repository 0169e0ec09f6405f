"""The clock of the database, in SQL: those of hosts may differ."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

_MYSQL_CLOCK = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000.0e0"
_CLOCKS = {
    "sqlite": "hermes_now()",  # a function of ``_engine``
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
    "mysql": _MYSQL_CLOCK,
    "mariadb": _MYSQL_CLOCK,
}


class Now(FunctionElement[float]):
    """Seconds of Unix time by the clock of the database."""

    # Not CURRENT_TIMESTAMP, which is when the transaction began, in the connection's time zone.
    type = Double()
    inherit_cache = True


@compiles(Now)
def _clock(element: Now, compiler: Any, **named: object) -> str:
    return _CLOCKS[compiler.dialect.name]
