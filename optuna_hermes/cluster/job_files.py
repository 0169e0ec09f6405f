"""Readers of traces of jobs in CSV files."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from optuna_hermes.cluster.jobs import FixedWork, Job
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
MONDAY_SECONDS = 4 * 86_400
"""From 1 January 1970, a Thursday, to the Monday after it."""

DEVICES_OF_A_NODE = 8
"""Devices of each of Philly's nodes, as in its authors' replay; the trace does not give them."""


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """Jobs of one trace.

    Args:
        name: name of the trace.
        jobs: the jobs in the order of submission, numbered in that order.
        groups: number of nodes of each group, where the trace gives them.
        left_out: number of jobs whose group has no nodes.
    """

    name: str
    jobs: tuple[Job, ...]
    groups: Mapping[str, int] | None = None
    left_out: int = 0


def read_jobs(path: str | Path) -> JobSet:
    """Read jobs from a CSV file, or a gzipped one (``.gz``), with a line of column names.

    ``submitted`` is a number of seconds or a date (ISO 8601), ``seconds`` the job's time on its
    ``devices`` (1 if there is no such column), ``group`` its virtual cluster and ``user`` its
    owner. The names that ``COLUMNS`` lists are accepted too, other columns are ignored.
    Dates become seconds since the Monday before the first, so that an hour is an hour of the day.

    Args:
        path: path of the file.

    Raises:
        InvalidInputError: it cannot be read, lacks a column, has no job, or a value is out of its
            range.
    """
    path = Path(path)
    rows = [_row(path, line, row) for line, row in _rows(path)]
    if not rows:
        raise InvalidInputError(f"{path} must have a job at least but has none.")
    if len({row.dated for row in rows}) > 1:
        raise InvalidInputError(f"{path}: submitted must be a date everywhere, or nowhere.")
    first = min(row.at for row in rows)
    monday = first - (first - MONDAY_SECONDS) % WEEK_SECONDS if rows[0].dated else 0.0
    rows.sort(key=lambda row: row.at)
    return JobSet(
        name=path.name.split(".")[0],
        jobs=tuple(
            Job(
                number=number,
                submitted=row.at - monday,
                work=FixedWork(row.seconds),
                devices=row.devices,
                group=row.group,
                params={} if row.user is None else {"user": row.user},
            )
            for number, row in enumerate(rows)
        ),
    )


def read_philly(folder: str | Path) -> JobSet:
    """Read Philly's jobs and the nodes of its virtual clusters, as published with Helios.

    Args:
        folder: folder with ``jobs.csv.gz`` and ``vc_nodes.csv`` (vc, node num).

    Raises:
        InvalidInputError: a file is missing or has other columns.
    """
    folder = Path(folder)
    nodes = {}
    for line, row in _rows(folder / "vc_nodes.csv"):
        text = row.get("node num") or ""
        if not row.get("vc") or not text.isdecimal() or int(text) < 1:
            raise InvalidInputError(
                f"{folder / 'vc_nodes.csv'}, line {line}: must be a virtual cluster and its "
                f"number of nodes but got {dict(row)}."
            )
        nodes[str(row["vc"])] = int(text)
    everything = read_jobs(folder / "jobs.csv.gz").jobs
    jobs = tuple(job for job in everything if job.group in nodes)
    return JobSet(name="philly", jobs=jobs, groups=nodes, left_out=len(everything) - len(jobs))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """The rows of a file with their line numbers."""
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
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidInputError(f"{path} must be a CSV file but: {error}.") from error


class _JobRow(NamedTuple):
    at: float
    dated: bool
    seconds: float
    devices: int
    group: str | None
    user: str | None


def _row(path: Path, line: int, row: Mapping[str, str | None]) -> _JobRow:
    def cell(name: str, read: Callable[[str], Any], default: str | None = None) -> Any:
        text = next((row[key] for key in COLUMNS[name] if row.get(key)), default)
        if text is None:
            raise InvalidInputError(
                f"{path}, line {line}: a job must have {name!r} but the line has "
                f"{', '.join(repr(key) for key, value in row.items() if value) or 'nothing'}."
            )
        try:
            return read(text.strip())
        except (ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{path}, line {line}: {name} must be {_MUST[name]} but got {text!r}."
            ) from error

    at, dated = cell("submitted", _moment)
    return _JobRow(
        at,
        dated,
        cell("seconds", _positive),
        cell("devices", _count, "1"),
        cell("group", str, "") or None,
        cell("user", str, "") or None,
    )


_MUST = {
    "submitted": "seconds of at least 0, or a date such as 2017-10-09 07:01:55,",
    "seconds": "a number above 0",
    "devices": "a whole number above 0",
}


def _moment(text: str) -> tuple[float, bool]:
    try:
        seconds = float(text)
    except ValueError:
        date = datetime.fromisoformat(text)
        # Without a zone UTC is assumed: results must not depend on this machine's zone.
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp(), True
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds, False


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _count(text: str) -> int:
    number = float(text)
    if number != int(number) or number < 1:
        raise ValueError
    return int(number)
