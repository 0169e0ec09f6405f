"""Reader of traces of jobs, in CSV files."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from optuna_hermes.cluster.jobs import ClusterJob, FixedWork
from optuna_hermes.errors import InvalidInputError

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "submitted": ("submitted", "timestamp", "submit_time"),
    "seconds": ("seconds", "duration"),
    "devices": ("devices", "num_gpus", "gpu_num"),
    "group": ("group", "cluster", "vc"),
    "user": ("user",),
}
"""Names of each column, here and in published traces; the last three may be missing."""

WEEK_SECONDS = 604_800
# From 1 January 1970, a Thursday, to the Monday after it.
MONDAY_SECONDS = 4 * 86_400
# So that the ends of all jobs are finite and a clock tells seconds apart.
MOST_SECONDS = 1e15


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """Jobs of one trace."""

    name: str
    jobs: tuple[ClusterJob, ...]  # the jobs in the order of submission, numbered in that order
    left_out: int = 0  # lines of jobs that had no device, or no time
    # Columns that were not read, of a file without one of devices: one of them may be meant.
    instead_of_devices: tuple[str, ...] = ()


def read_jobs(path: str | Path) -> JobSet:
    """Read jobs from a CSV file, or a gzipped one (``.gz``), with a line of column names.

    ``submitted`` is a number of seconds or a date (ISO 8601), ``seconds`` the job's time on its
    ``devices`` (1 if there is no such column), ``group`` its virtual cluster and ``user`` its
    owner. The names that ``COLUMNS`` lists are accepted too, other columns are ignored. Published
    traces have jobs of no device, or of no time; those are left out.

    Raises:
        InvalidInputError: it cannot be read, lacks a column, has no job, or an impossible value.
    """
    path = Path(path)
    lines = list(csv_rows(path))
    every = [_job_row(row) for row in lines]
    rows = [row for row in every if row.devices and row.seconds]
    if not rows:
        raise InvalidInputError(f"{path} must have a job with a device and a time but has none.")
    if len({row.dated for row in rows}) > 1:
        raise InvalidInputError(f"{path}: submitted must be a date everywhere, or nowhere.")
    # Seconds since the Monday before the first: so an hour is one of the day, a day of the week.
    first = min(row.at for row in rows)
    monday = first - (first - MONDAY_SECONDS) % WEEK_SECONDS if rows[0].dated else 0.0
    rows.sort(key=lambda row: row.at)
    return JobSet(
        name=path.name.split(".")[0],
        jobs=tuple(
            ClusterJob(
                number=number,
                submitted=row.at - monday,
                work=FixedWork(row.seconds),
                devices=row.devices,
                group=row.group,
                params={} if row.user is None else {"user": row.user},
            )
            for number, row in enumerate(rows)
        ),
        left_out=len(every) - len(rows),
        instead_of_devices=_instead_of_devices(lines[0].cells),
    )


def _instead_of_devices(columns: Collection[str]) -> tuple[str, ...]:
    if any(name in columns for name in COLUMNS["devices"]):
        return ()
    known = {name for names in COLUMNS.values() for name in names}
    return tuple(name for name in columns if name and name not in known)


class CsvRow(NamedTuple):
    """A line of a file, with its place for errors."""

    where: str
    cells: Mapping[str, str | None]


def csv_rows(path: Path) -> Iterator[CsvRow]:
    """Read the lines of a CSV file, or a gzipped one (``.gz``), with a line of column names.

    Raises:
        InvalidInputError: it cannot be read, or a line has more cells than there are columns.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"{path} cannot be read: {reason}.") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path} must be a CSV file in UTF-8, gzipped if it ends in .gz, but is not."
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        # Blanks after the commas are no part of a name.
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        twice = [name for name, n in Counter(reader.fieldnames or ()).items() if n > 1]
        if twice:
            raise InvalidInputError(f"{path} must have one column {twice[0]!r} but has several.")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            # Commas at the end are no cells; others have shifted those of the line.
            surplus: Any = row.pop(None, ())
            if any(cell.strip() for cell in surplus):
                n_columns = len(reader.fieldnames)
                raise InvalidInputError(
                    f"{where}: a line must have {n_columns} cells, as there are columns, but has "
                    f"{n_columns + len(surplus)}: quote a cell with a comma in it."
                )
            yield CsvRow(where, row)
    except csv.Error as error:
        raise InvalidInputError(f"{path} must be a CSV file but: {error}.") from error


class _JobRow(NamedTuple):
    at: float
    dated: bool
    seconds: float
    devices: int
    group: str | None
    user: str | None


def _job_row(row: CsvRow) -> _JobRow:
    def cell(name: str, read: Callable[[str], Any], default: str | None = None) -> Any:
        # Published traces leave cells empty where they know nothing.
        text = next((row.cells[key] for key in COLUMNS[name] if row.cells.get(key)), default)
        if text is None:
            raise InvalidInputError(
                f"{row.where}: a job must have {name!r} but the line has "
                f"{', '.join(repr(key) for key, value in row.cells.items() if value) or 'nothing'}."
            )
        try:
            return read(text.strip())
        except (ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{row.where}: {name} must be {_MUST[name]} but got {text!r}."
            ) from error

    at, dated = cell("submitted", _moment)
    return _JobRow(
        at,
        dated,
        cell("seconds", _seconds),
        cell("devices", _count, "1"),
        cell("group", str, "") or None,
        cell("user", str, "") or None,
    )


_MUST = {
    "submitted": "seconds from 0 to 1e15, or a date such as 2017-10-09 07:01:55,",
    "seconds": "a number of 0 or more and below 1e15",
    "devices": "a whole number, 0 or more",
}


def _moment(text: str) -> tuple[float, bool]:
    try:
        seconds = float(text)
    except ValueError:
        # Without a zone UTC is assumed: results must not depend on this machine's zone.
        date = datetime.fromisoformat(text.removesuffix("Z"))  # which Python 3.10 does not know
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp(), True
    if not 0 <= seconds < MOST_SECONDS:
        raise ValueError
    return seconds, False


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < MOST_SECONDS:
        raise ValueError
    return number


def _count(text: str) -> int:
    number = float(text)
    if number != int(number) or number < 0:
        raise ValueError
    return int(number)
