"""Readers of elastic job models and workloads in the format published with AdaptDL."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from optuna_hermes.cluster.elastic_applications import Application, Validation
from optuna_hermes.cluster.elastic_times import Measured, StepTime, StepTimes
from optuna_hermes.cluster.elastic_work import ElasticWork
from optuna_hermes.cluster.jobs import Job
from optuna_hermes.errors import InvalidInputError

_Number = TypeVar("_Number", int, float)


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
    table = [_placed(row) for row in _rows(folder / "placements.csv")]
    table += [_counted(row) for row in _rows(folder / "scalability.csv")]
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
    told: bool = True,
) -> list[Job]:
    """Read a workload of elastic jobs.

    Args:
        path: CSV file with columns name, time (s), application, num_replicas, batch_size.
        applications: the measured applications, by name.
        most_devices: the most devices a job can be given; None for jobs that are not elastic.
        told: whether policies see the number of epochs that an elastic job has left.

    Raises:
        InvalidInputError: the file is missing, or has other columns or values, or names an
            application that is not in ``applications``.
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
            told=told,
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


class _ElasticRow:
    """A line of a file, which raises errors that name its place."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str | None]) -> None:
        self._where = f"{path}, line {line}"
        self._cells = cells

    def text(self, column: str) -> str:
        cell = self._cells.get(column)
        if cell is None:
            raise InvalidInputError(f"{self._where} must have a column {column} but has none.")
        return cell

    def number(self, column: str, kind: type[_Number]) -> _Number:
        cell = self.text(column)
        try:
            return kind(cell)
        except ValueError as error:
            raise InvalidInputError(
                f"{self._where} must have a number as {column} but has {cell!r}."
            ) from error


def _rows(path: Path) -> Iterator[_ElasticRow]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line, cells in enumerate(csv.DictReader(file), start=2):
                yield _ElasticRow(path, line, cells)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} must be a file of comma-separated text.") from error


def _placed(row: _ElasticRow) -> Measured:
    digits = row.text("placement")
    if not re.fullmatch(r"[1-9]+", digits):
        raise InvalidInputError(
            f"A placement must be a digit above 0 for each host but got {digits!r}."
        )
    shape = tuple(sorted(int(digit) for digit in digits))
    return Measured(
        shape=shape,
        hosts=len(shape),
        devices=sum(shape),
        local_batch=row.number("local_bsz", int),
        time=_time(row),
    )


def _counted(row: _ElasticRow) -> Measured:
    return Measured(
        shape=None,
        hosts=row.number("num_nodes", int),
        devices=row.number("num_replicas", int),
        local_batch=row.number("local_bsz", int),
        time=_time(row),
    )


def _time(row: _ElasticRow) -> StepTime:
    return StepTime(
        step_seconds=row.number("step_time", float), sync_seconds=row.number("sync_time", float)
    )


def _validation(path: Path) -> Validation:
    rows = list(_rows(path))
    return Validation(
        progress=tuple(row.number("progress", float) for row in rows),
        steps=tuple(row.number("iteration", int) for row in rows),
        metric=tuple(row.number("metric", float) for row in rows),
        grad_sqr=tuple(row.number("grad_sqr", float) for row in rows),
        grad_var=tuple(row.number("grad_var", float) for row in rows),
    )
