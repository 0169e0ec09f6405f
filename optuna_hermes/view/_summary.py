"""The final summary of ``optimize``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from optuna_hermes.view import _words as words

if TYPE_CHECKING:
    from rich.console import RenderableType

_ORDER = ("COMPLETE", "PRUNED", "FAIL", "RUNNING", "PARKED", "STORED", "PENDING", "WAITING")


def summary_view(document: dict[str, Any]) -> RenderableType:
    """A short table of the result document of ``optimize``.

    Args:
        document: as ``OptimizeResult.document`` makes it.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    document = words.all_printable(document)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _facts(document):
        table.add_row(label, Text(text))
    return Group(Text(f"Study {document['study']}", style="bold"), table)


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    best = document["best"]
    overhead = document["overhead_fraction"]
    return [
        *_best(best),
        ("trials", _states(document["trials"])),
        ("suspended", suspensions(document["trials"])),
        (
            "device time",
            f"{words.duration(document['device_seconds'])} on {', '.join(document['devices'])}, "
            f"in {words.duration(document['elapsed_seconds'])}",
        ),
        *_energy(document["watt_hours"]),
        (
            "switching",
            f"{words.plural(document['switches'], 'switch', 'switches')}, "
            f"{100 * overhead:.1f} % of device time",
        ),
    ]


def _energy(watt_hours: float | None) -> list[tuple[str, str]]:
    return [] if watt_hours is None else [("energy", words.energy(watt_hours))]


def _best(best: dict[str, Any] | None) -> list[tuple[str, str]]:
    if best is None:
        return [("best", "none: no trial is finished")]
    return [
        ("best", f"{words.number(best['value'], 6)} (trial {best['number']})"),
        ("parameters", words.parameters(best["params"])),
    ]


def _states(trials: list[dict[str, Any]]) -> str:
    tally = Counter(trial["state"] for trial in trials)
    return ", ".join(f"{tally[s]} {s.lower()}" for s in _ORDER if tally[s]) or "none"


def suspensions(trials: list[dict[str, Any]]) -> str:
    """The number of suspended trials, of their suspensions, and their outcome, in words.

    Example:
        >>> suspensions([{"state": "COMPLETE", "suspensions": 2}])
        '1 of 1 trial, 2 times; each was resumed and finished'
    """
    paused = [trial for trial in trials if trial["suspensions"]]
    if not paused:
        return "none"
    times = sum(trial["suspensions"] for trial in paused)
    waiting = sum(trial["state"] in ("PARKED", "STORED", "PENDING") for trial in paused)
    ending = (
        f"{waiting} still are"
        if waiting
        else "each was resumed and finished"
        if all(trial["state"] == "COMPLETE" for trial in paused)
        else "each was resumed"
    )
    return (
        f"{len(paused)} of {words.plural(len(trials), 'trial')}, "
        f"{words.plural(times, 'time')}; {ending}"
    )
