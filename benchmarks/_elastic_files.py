"""Readers of the applications and workloads of elastic jobs that were published with AdaptDL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from _elastic_applications import Application, Measured, Shape, StepTime, StepTimes, Validation
from _elastic_work import ElasticWork

from optuna_hermes.cluster.job_files import CsvRow, csv_rows
from optuna_hermes.cluster.jobs import ClusterJob
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
    table = [_measured(row, _shape(row)) for row in csv_rows(folder / "placements.csv")]
    table += [_measured(row, None) for row in csv_rows(folder / "scalability.csv")]
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
) -> list[ClusterJob]:
    """Read a workload of jobs: name, time (s), application, num_replicas, batch_size.

    Jobs are elastic up to ``most_devices``; for None they are not.

    Raises:
        InvalidInputError: the file is missing, or has other columns or values or applications.
    """
    jobs: list[ClusterJob] = []
    for number, row in enumerate(csv_rows(Path(path))):
        name, batch_size = _text(row, "application"), _number(row, "batch_size", int)
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
            ClusterJob(
                number=number,
                submitted=_number(row, "time", float),
                work=work,
                devices=_number(row, "num_replicas", int),
                params={"application": name},
            )
        )
    return jobs


def _text(row: CsvRow, column: str) -> str:
    cell = row.cells.get(column)
    if cell is None:
        raise InvalidInputError(f"{row.where} must have a column {column} but has none.")
    return cell


def _number(row: CsvRow, column: str, kind: type[_Number]) -> _Number:
    cell = _text(row, column)
    try:
        return kind(cell)
    except ValueError as error:
        raise InvalidInputError(
            f"{row.where} must have a number as {column} but has {cell!r}."
        ) from error


def _measured(row: CsvRow, shape: Shape | None) -> Measured:
    return Measured(
        shape=shape,
        hosts=_number(row, "num_nodes", int) if shape is None else len(shape),
        devices=_number(row, "num_replicas", int) if shape is None else sum(shape),
        local_batch=_number(row, "local_bsz", int),
        time=StepTime(
            step_seconds=_number(row, "step_time", float),
            sync_seconds=_number(row, "sync_time", float),
        ),
    )


def _shape(row: CsvRow) -> Shape:
    digits = _text(row, "placement")
    if not re.fullmatch(r"[1-9]+", digits):
        raise InvalidInputError(
            f"A placement must be a digit above 0 for each host but got {digits!r}."
        )
    return tuple(sorted(int(digit) for digit in digits))


def _validation(path: Path) -> Validation:
    rows = list(csv_rows(path))
    return Validation(
        progress=tuple(_number(row, "progress", float) for row in rows),
        steps=tuple(_number(row, "iteration", int) for row in rows),
        metric=tuple(_number(row, "metric", float) for row in rows),
        grad_sqr=tuple(_number(row, "grad_sqr", float) for row in rows),
        grad_var=tuple(_number(row, "grad_var", float) for row in rows),
    )
