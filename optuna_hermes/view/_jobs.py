"""The table of policies that ``simulate --jobs`` shows."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from optuna_hermes.view import _words as words
from optuna_hermes.view._simulation import _table, times

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEGEND = """\
mean, p99: from submission to end; queue: the part of it without devices, on average
used: of all device time from the first submission to the last end
energy: of all devices meanwhile, 300 W of one that a job has, 45 W of others
sooner: how many times as long the jobs take under fifo, and wait under fifo, on average"""


def jobs_view(document: dict[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes simulate --jobs`` as a table, the shortest mean first.

    Args:
        document: ``settings`` and ``results`` of it.
    """
    from rich.console import Group
    from rich.text import Text

    settings, results = document["settings"], document["results"]
    means = {name: _means(results, name) for name in settings["policies"]}
    fifo = means["fifo"]
    table = _table("policy", "mean", "p99", "queue", "used", "energy", "sooner", "")
    for name, row in sorted(means.items(), key=lambda each: each[1]["mean_completion_seconds"]):
        table.add_row(
            name,
            words.duration(row["mean_completion_seconds"]),
            words.duration(row["p99_completion_seconds"]),
            words.duration(row["mean_queueing_seconds"]),
            f"{100 * row['utilisation']:.1f} %",
            words.energy(row["energy_joules"] / 3600),
            times(_ratio(fifo, row, "mean_completion_seconds")),
            times(_ratio(fifo, row, "mean_queueing_seconds")),
        )
    return Group(Text(_title(settings), style="bold"), table, Text(_LEGEND, style="dim"))


def _means(results: list[dict[str, Any]], name: str) -> dict[str, float]:
    rows = [row for row in results if row["policy"] == name]
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return {key: fmean(row[key] for row in rows) for key in numbers}


def _ratio(fifo: dict[str, float], row: dict[str, float], key: str) -> float:
    return fifo[key] / row[key] if row[key] else float("nan")


def _title(settings: dict[str, Any]) -> str:
    every = settings["slice_seconds"]
    rule = "never interrupted" if every is None else f"interrupted every {words.duration(every)}"
    return (
        f"{settings['trace']}: {words.plural(settings['jobs'], 'job')}, "
        f"{words.plural(settings['devices'], 'device')}, {settings['devices_per_host']} a host, "
        f"{rule}"
    )
