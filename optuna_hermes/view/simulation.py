"""Output of ``simulate``: a progress bar, and a table for each kind of simulation."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from optuna_hermes.view import formats

# Columns of families that fit a line; JSON has them all.
MAX_FAMILIES = 4
REFRESH_SECONDS = 0.1

_LEGEND = """\
of work: after which share of all training the best trial was finished
best, top 3, near, auc: times as fast as fifo, geometric means over the sets
  best: the trial with the lowest final value is finished; top 3: one of three
  near: a value 99 % of the way from the median first one to the lowest final
  auc: mean regret of the best value
switches: changes of a device to another trial, to a new one too
killed: how often the best trial was stopped for good"""

_LOOP_LEGEND = """\
any: share of the budget until some value is near the best of the set
fin: until a finished trial is; both within 5 % or 1 % of the set's span
100.0 %: not within the budget; any5 and fin1 take that for the budget's end
opened: trials that were begun; any5, fin1: times as fast as fifo
geometric means over the sets; fifo and stopping rules: plain Optuna"""

_JOB_LEGEND = """\
mean, p99: from submission to end; queue: the part of it without devices, on average
used: of all device time from the first submission to the last end
energy: of all devices meanwhile, 300 W of one that a job has, 45 W of others
sooner: how many times as long the jobs take under fifo, and wait under fifo, on average"""

_SHARES = {"any 5 %": "any5", "any 1 %": "any1", "fin 5 %": "fin5", "fin 1 %": "fin1"}
_COMPARED = {"best": "best_seconds", "top 3": "top3_seconds", "near": "near_seconds", "auc": "auc"}


@contextlib.contextmanager
def counting(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error if that is a terminal; call the given function after each step."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    bar = Progress(
        "simulating",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # No thread: processes are forked while it shows.
        auto_refresh=False,
        redirect_stdout=False,
    )
    task, shown = bar.add_task("", total=total), 0.0

    def step() -> None:
        nonlocal shown
        bar.advance(task)
        if time.monotonic() - shown > REFRESH_SECONDS:
            bar.refresh()
            shown = time.monotonic()

    with bar:
        yield step


def simulation_view(document: dict[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes simulate`` as tables, the best policy first."""
    document = formats.all_printable(document)
    settings, rows = document["settings"], document["table"]
    table = _table("policy", "of work", *_COMPARED, "switches", "killed")
    for row in rows:
        compared = row["ratios"]["fifo"]
        table.add_row(
            row["policy"],
            f"{100 * row['best_seconds'] / row['work_seconds']:.1f} %",
            *(_times(compared[metric]) for metric in _COMPARED.values()),
            f"{row['switches']:.0f}",
            f"{100 * row['killed_best']:.0f} %",
        )
    parts = [_explained(_title(settings, rows[0]["work_seconds"]), table, _LEGEND)]
    families = list(rows[0]["families"])
    if len(families) > 1:
        shown = families[:MAX_FAMILIES]
        table = _table("policy", *shown)
        for row in rows:
            table.add_row(row["policy"], *(_times(row["families"][each]) for each in shown))
        parts += [Text("\nbest, by family", style="bold"), table]
    if len(families) > MAX_FAMILIES:
        left = len(families) - MAX_FAMILIES
        parts.append(Text(f"{formats.plural(left, 'more family', 'more families')}: see --json."))
    return Group(*parts)


def loop_view(document: dict[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes simulate --sampler`` as a table, the best policy first."""
    document = formats.all_printable(document)
    settings, rows = document["settings"], document["table"]
    table = _table("policy", *_SHARES, "opened", "any5", "fin1")
    for row in rows:
        ratios = row["ratios"]["fifo"]
        table.add_row(
            row["policy"],
            *(f"{100 * row[measure]:.1f} %" for measure in _SHARES.values()),
            f"{row['trials_opened']:.0f}",
            _times(ratios["any5"]),
            _times(ratios["fin1"]),
        )
    budget = f"a budget of {settings['budget']:g} full trainings"
    title = f"{_sets(settings)}: {settings['sampler']}, {budget}\n{_rules(settings)}"
    return _explained(title, table, _LOOP_LEGEND)


def _sets(settings: dict[str, Any]) -> str:
    sets = settings["sets"]
    return f"{len(sets)} curve sets" if len(sets) > 1 else str(sets[0]["name"])


def _rules(settings: dict[str, Any]) -> str:
    return (
        f"{formats.plural(settings['devices'], 'device')}, "
        f"{formats.plural(len(settings['seeds']), 'seed')}, "
        f"switch cost {100 * settings['switch_cost']:g} %"
    )


def _title(settings: dict[str, Any], work_seconds: float) -> str:
    sets, trials = settings["sets"], settings["trials"]
    drawn = [min(trials, each["trials"]) for each in sets]
    there = [each["trials"] for each in sets]
    n_trials = _span(drawn) if drawn == there else f"{_span(drawn)} of {_span(there)}"
    work = "" if len(sets) > 1 else f"\nTo train them all takes {formats.duration(work_seconds)}."
    return f"{_sets(settings)}: {n_trials} trials, {_rules(settings)}{work}"


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def jobs_view(document: dict[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes simulate --jobs`` as a table, the shortest mean first."""
    settings, results = document["settings"], document["results"]
    means = {
        name: _means(results, name) for name in dict.fromkeys(row["policy"] for row in results)
    }
    fifo = means["fifo"]
    table = _table("policy", "mean", "p99", "queue", "used", "energy", "sooner", "")
    for name, row in sorted(means.items(), key=lambda each: each[1]["mean_completion_seconds"]):
        table.add_row(
            name,
            formats.duration(row["mean_completion_seconds"]),
            formats.duration(row["p99_completion_seconds"]),
            formats.duration(row["mean_queueing_seconds"]),
            f"{100 * row['utilisation']:.1f} %",
            formats.energy(row["energy_joules"] / 3600),
            _times(_ratio(fifo, row, "mean_completion_seconds")),
            _times(_ratio(fifo, row, "mean_queueing_seconds")),
        )
    return _explained(_job_title(settings), table, _JOB_LEGEND)


def _means(results: list[dict[str, Any]], name: str) -> dict[str, float]:
    rows = [row for row in results if row["policy"] == name]
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return {key: fmean(row[key] for row in rows) for key in numbers}


def _ratio(fifo: dict[str, float], row: dict[str, float], key: str) -> float:
    return fifo[key] / row[key] if row[key] else float("nan")


def _job_title(settings: dict[str, Any]) -> str:
    every = settings["slice_seconds"]
    rule = "never interrupted" if every is None else f"interrupted every {formats.duration(every)}"
    if every is None and "srtf_slice_seconds" in settings:
        rule += f", but by srtf every {formats.duration(settings['srtf_slice_seconds'])}"
    if rule != "never interrupted":
        rule += ", at no cost"
    jobs, refused = formats.plural(settings["jobs"], "job"), settings["refused"]
    served = f"{settings['jobs'] - refused} of {jobs}" if refused else jobs
    return (
        f"{settings['trace']}: {served}, "
        f"{formats.plural(settings['devices'], 'device')}, {settings['devices_per_host']} a host, "
        f"{rule}"
    )


def _explained(title: str, table: Table, legend: str) -> RenderableType:
    return Group(Text(title, style="bold"), table, Text(legend, style="dim"))


def _times(ratio: float) -> str:
    """A ratio with three digits; a dash where there is none.

    Example:
        >>> _times(0.4812), _times(6.0779), _times(13.57), _times(123.4), _times(float("nan"))
        ('0.48x', '6.08x', '13.6x', '123x', '-')
    """
    if math.isnan(ratio):
        return "-"
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}x"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
