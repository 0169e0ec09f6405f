"""Readers of traces of jobs, and of models and workloads of elastic jobs, in CSV files."""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from optuna_hermes.cluster.elastic_applications import (
    Application,
    Measured,
    StepTime,
    StepTimes,
    Validation,
)
from optuna_hermes.cluster.elastic_work import ElasticWork
from optuna_hermes.cluster.jobs import FixedWork, Job
from optuna_hermes.errors import InvalidInputError

_Number = TypeVar("_Number", int, float)

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
# Devices of each of Philly's nodes, as in its authors' replay; the trace does not give them.
DEVICES_OF_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """Jobs of one trace."""

    name: str
    jobs: tuple[Job, ...]  # the jobs in the order of submission, numbered in that order
    # Number of nodes of each group, where the trace gives them.
    groups: Mapping[str, int] | None = None
    left_out: int = 0  # number of jobs whose group has no nodes


def read_jobs(path: str | Path) -> JobSet:
    """Read jobs from a CSV file, or a gzipped one (``.gz``), with a line of column names.

    ``submitted`` is a number of seconds or a date (ISO 8601), ``seconds`` the job's time on its
    ``devices`` (1 if there is no such column), ``group`` its virtual cluster and ``user`` its
    owner. The names that ``COLUMNS`` lists are accepted too, other columns are ignored.

    Raises:
        InvalidInputError: it cannot be read, lacks a column, has no job, or an impossible value.
    """
    path = Path(path)
    rows = [_job_row(row) for row in _rows(path)]
    if not rows:
        raise InvalidInputError(f"{path} must have a job at least but has none.")
    if len({row.dated for row in rows}) > 1:
        raise InvalidInputError(f"{path}: submitted must be a date everywhere, or nowhere.")
    # Seconds since the Monday before the first: so an hour is one of the day, a day of the week.
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
    """Read ``jobs.csv.gz`` and ``vc_nodes.csv`` (vc, node num), as published with Helios.

    Raises:
        InvalidInputError: a file is missing or has other columns.
    """
    folder = Path(folder)
    nodes = {}
    for row in _rows(folder / "vc_nodes.csv"):
        name, count = row.cells.get("vc"), row.cells.get("node num") or ""
        if not name or not count.isdecimal() or int(count) < 1:
            raise InvalidInputError(
                f"{row.where}: must be a virtual cluster and its number of nodes but got "
                f"{row.cells}."
            )
        nodes[name] = int(count)
    everything = read_jobs(folder / "jobs.csv.gz").jobs
    jobs = tuple(job for job in everything if job.group in nodes)
    return JobSet(name="philly", jobs=jobs, groups=nodes, left_out=len(everything) - len(jobs))


def read_application(folder: str | Path) -> Application:
    """Read the measurements of one application (Qiao et al., "Pollux", OSDI 2021).

    Args:
        folder: folder with ``placements.csv`` (placement, local_bsz, step_time, sync_time), where a
            placement is a digit for each host, ``scalability.csv`` (num_nodes, num_replicas, then
            the same) and ``validation-BATCH.csv`` (progress, iteration, metric, grad_sqr,
            grad_var), one for each batch size.

    Raises:
        InvalidInputError: a file is missing, or has other columns or values.
    """
    folder = Path(folder)
    table = [_measured(row, _shape(row)) for row in _rows(folder / "placements.csv")]
    table += [_measured(row, None) for row in _rows(folder / "scalability.csv")]
    trainings = {
        int(found.group(1)): _validation(path)
        for path in sorted(folder.glob("validation-*.csv"))
        if (found := re.fullmatch(r"validation-(\d+)\.csv", path.name))
    }
    return Application(folder.name, StepTimes(table), trainings)


def read_elastic_jobs(
    path: str | Path,
    applications: Mapping[str, Application],
    *,
    most_devices: int | None = None,
    shows_epochs_left: bool = True,
) -> list[Job]:
    """Read a workload of jobs: name, time (s), application, num_replicas, batch_size.

    Jobs are elastic up to ``most_devices``; for None they are not.

    Raises:
        InvalidInputError: the file is missing, or has other columns or values or applications.
    """
    jobs: list[Job] = []
    for number, row in enumerate(_rows(Path(path))):
        name, batch_size = row.text("application"), row.number("batch_size", int)
        if name not in applications:
            known = ", ".join(sorted(applications))
            raise InvalidInputError(f"An application must be one of {known} but got {name!r}.")
        low, high = applications[name].batch_sizes
        if not low <= batch_size <= high:
            raise InvalidInputError(
                f"A batch size of {name} must be {low} to {high} but got {batch_size}."
            )
        work = ElasticWork(
            application=applications[name],
            batch_size=batch_size,
            most_devices=most_devices,
            shows_epochs_left=shows_epochs_left,
        )
        jobs.append(
            Job(
                number=number,
                submitted=row.number("time", float),
                work=work,
                devices=row.number("num_replicas", int),
                params={"application": name},
            )
        )
    return jobs


class _Row(NamedTuple):
    """A line of a file, with its place for errors."""

    where: str
    cells: Mapping[str, str | None]

    def text(self, column: str) -> str:
        cell = self.cells.get(column)
        if cell is None:
            raise InvalidInputError(f"{self.where} must have a column {column} but has none.")
        return cell

    def number(self, column: str, kind: type[_Number]) -> _Number:
        cell = self.text(column)
        try:
            return kind(cell)
        except ValueError as error:
            raise InvalidInputError(
                f"{self.where} must have a number as {column} but has {cell!r}."
            ) from error


def _rows(path: Path) -> Iterator[_Row]:
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
            yield _Row(f"{path}, line {reader.line_num}", row)
    except csv.Error as error:
        raise InvalidInputError(f"{path} must be a CSV file but: {error}.") from error


class _JobRow(NamedTuple):
    at: float
    dated: bool
    seconds: float
    devices: int
    group: str | None
    user: str | None


def _job_row(row: _Row) -> _JobRow:
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


def _measured(row: _Row, shape: tuple[int, ...] | None) -> Measured:
    return Measured(
        shape=shape,
        hosts=row.number("num_nodes", int) if shape is None else len(shape),
        devices=row.number("num_replicas", int) if shape is None else sum(shape),
        local_batch=row.number("local_bsz", int),
        time=StepTime(
            step_seconds=row.number("step_time", float),
            sync_seconds=row.number("sync_time", float),
        ),
    )


def _shape(row: _Row) -> tuple[int, ...]:
    digits = row.text("placement")
    if not re.fullmatch(r"[1-9]+", digits):
        raise InvalidInputError(
            f"A placement must be a digit above 0 for each host but got {digits!r}."
        )
    return tuple(sorted(int(digit) for digit in digits))


def _validation(path: Path) -> Validation:
    rows = list(_rows(path))
    return Validation(
        progress=tuple(row.number("progress", float) for row in rows),
        steps=tuple(row.number("iteration", int) for row in rows),
        metric=tuple(row.number("metric", float) for row in rows),
        grad_sqr=tuple(row.number("grad_sqr", float) for row in rows),
        grad_var=tuple(row.number("grad_var", float) for row in rows),
    )
