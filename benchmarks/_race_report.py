"""The figures of ``race.py`` as text: Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

EXPLANATION = """\
Means over tasks and seeds. Units: those that had a value within the budget. Simulated: as many as
the simulator has, given the contest's mean costs (this project's alone). Inside batches: the
share of devices' time from the first batch's begin to the last one's end. CPU: of all processes of
the contestant until the end of its budget, its start and its scheduler included. Trials are
finished once they have been trained to their last unit. Lease to batch: median time from the begin
of a lease to the first batch in it; value to decision: from the last value in a lease to the
lease's end. Both are read from this project's ledger: the other contestants have no leases, so
there is nothing to read (n/a)."""
REGRET = """\
Regret at the end of the budget, in each task and seed: 0 is the lowest value that any contestant
had, 1 the median of the first values of all configurations that any contestant trained, one each;
at most 1, which a contestant without any value has, too. Any: of all values; finished: of those of
finished trials. As fast: how many times as soon as `optuna` it has a value as low as the last best
of `optuna`, from the start of the command; a geometric mean. A contestant that never has such a
value counts as if it had it at the end of the budget (so often: *never*), and so does `optuna`
where it finishes no trial. In brackets 95 % of the bootstrap over tasks and seeds. p: Wilcoxon's
signed-rank test, one-sided, paired over tasks and seeds, that the regret of `hermes` is not lower
than this one's: it is about these tasks, and says nothing of others. (Settings of `hermes` were
chosen on the tasks of the default.)"""

_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "units": ("units", "{:.0f}".format),
    "simulated": ("simulated", "{:.0f}".format),
    "repeated": ("trained again", "{:.1f}".format),
    "busy_share": ("inside batches", "{:.1%}".format),
    "cpu_seconds": ("CPU s", "{:.0f}".format),
    "cpu_per_unit": ("CPU s a unit", "{:.2f}".format),
    "begun": ("trials begun", "{:.1f}".format),
    "finished": ("finished", "{:.1f}".format),
    "first_batch": ("s to first batch", "{:.1f}".format),
    "opening_wait": ("ms, lease to batch", lambda value: f"{1e3 * value:.0f}"),
    "decision_wait": ("ms, value to decision", lambda value: f"{1e3 * value:.0f}"),
}


def text(result: Mapping[str, Any]) -> str:
    """All of it."""
    exact = result["exactness"]
    return (
        "\n\n".join(
            [
                "# The race in real training",
                "\n".join(f"- {name}: {value}" for name, value in result["setting"].items()),
                "## What each did",
                EXPLANATION,
                _did(result["contests"], result["comparison"]["rows"]),
                f"{exact['compared']} units were trained by more than one contestant, and the "
                f"values of {exact['differing']} differed.",
                "## What each found",
                REGRET,
                _found(result["comparison"]["rows"]),
                "## Best values",
                "The lowest value at the end, in brackets that of a finished trial.",
                _best(result["contests"], list(result["comparison"]["rows"])),
            ]
        )
        + "\n"
    )


def _did(contests: Sequence[Mapping[str, Any]], names: Iterable[str]) -> str:
    rows = []
    for name in names:
        mine = [each["figures"] for each in contests if each["contestant"] == name]
        cells = []
        for key, (_, shown) in _COLUMNS.items():
            known = [each[key] for each in mine if each.get(key) is not None]
            cells.append(shown(statistics.fmean(known)) if known else "n/a")
        rows.append([f"`{name}`", str(len(mine)), *cells])
    return _table(["contestant", "contests", *(head for head, _ in _COLUMNS.values())], rows)


def _found(rows: Mapping[str, Mapping[str, Any]]) -> str:
    heads = ["contestant", "regret, any", "regret, finished", "as fast, any", "never"]
    heads += ["as fast, finished", "never", "p, any", "p, finished"]
    lines = []
    for name, row in rows.items():
        line = [f"`{name}`", *(_interval(row["regret"][kind], 3) for kind in ("any", "finished"))]
        for kind in ("any", "finished"):
            speed = row["speed_up"][kind]
            line += ["n/a", "n/a"] if speed is None else [_interval(speed, 2), str(speed["never"])]
        line += [_p(row["p"][kind]) for kind in ("any", "finished")]
        lines.append(line)
    return _table(heads, lines)


def _best(contests: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    by_cell: dict[tuple[str, int], dict[str, str]] = {}
    for each in contests:
        figures = each["figures"]
        shown = f"{_number(figures['best'])} ({_number(figures['best_finished'])})"
        by_cell.setdefault((each["task"], each["seed"]), {})[each["contestant"]] = shown
    lines = [
        [task, str(seed), *(cells.get(name, "") for name in names)]
        for (task, seed), cells in by_cell.items()
    ]
    return _table(["task", "seed", *(f"`{name}`" for name in names)], lines)


def _interval(found: Mapping[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
