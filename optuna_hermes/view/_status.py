"""Tables of ``status``: a broker's devices and studies, and a study's ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna_hermes.view import _words as words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from optuna_hermes.view._top._picture import Picture

NAMED = 100
"""Most trials that are listed by number; more are only counted."""

_STATES = ("running", "parked", "stored", "pending", "done", "failed")


def status_view(document: dict[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes status`` as tables.

    Args:
        document: ``broker`` (the broker's status, or None) and ``study`` (the ledger's content,
            or None).
    """
    from rich.console import Group

    from optuna_hermes.view._top._read import picture_of

    document = words.all_printable(document)
    broker, study = document["broker"], document["study"]
    parts: list[RenderableType] = []
    if broker is None:
        parts.append("No broker runs on this host: nothing trains.")
    else:
        parts += _titled(f"Devices of {broker['host']}", _devices(broker))
        for entry in broker["studies"]:
            parts += _titled(f"Study {entry['name']}, policy {entry['policy']}", _served(entry))
            listed = entry.get("trials", [])
            if 0 < len(listed) <= NAMED and (study is None or study["name"] != entry["name"]):
                parts.append(_Trials(picture_of(broker, entry["key"], at=0.0)))
        if not broker["studies"]:
            parts.append("The broker serves no study.")
    if study is not None:
        parts += _titled(f"Study {study['name']}, as its ledger has it", _ledger(study))
        parts += [_host(host) for host in study.get("hosts", ())]
    return Group(*parts)


def _host(host: dict[str, Any]) -> str:
    """A line for a host that trains this study, or others of the same database."""
    busy = round(host["load"] * host["devices"])
    return f"Host {host['host']}: {busy} of {words.plural(host['devices'], 'device')} busy"


def _titled(title: str, table: Table) -> list[RenderableType]:
    from rich.text import Text

    return [Text(title, style="bold"), table]


def trials_by_state(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """States with the numbers of their trials, in the order of a trial's life cycle.

    Example:
        >>> trials_by_state([{"trial": 2, "state": "parked"}, {"trial": 1, "state": "parked"}])
        [('parked', '1, 2')]
    """
    numbers = {state: [r["trial"] for r in runs if r["state"] == state] for state in _STATES}
    return [(state, words.ranges(found)) for state, found in numbers.items() if found]


class _Trials:
    """The trials of a study as ``top`` shows them."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        from optuna_hermes.view._top._text import columns, heading, row

        shown = columns(options.max_width, self._picture)
        lines = [heading(shown, "", False), *(row(shown, each) for each in self._picture.trials)]
        for place, cells in enumerate(lines):
            words_ = " ".join(cell for cell, _ in cells)
            yield Text(f" {words_}".rstrip(), "" if place else "bold", no_wrap=True)


def _devices(broker: dict[str, Any]) -> Table:
    table = _table("device", "trial", "state", "since", "memory")
    for device in broker["devices"]:
        table.add_row(*_device(device))
    return table


def _device(device: dict[str, Any]) -> tuple[str, str, str, str, str]:
    holder = device["holder"]
    if holder is None:
        return device["id"], "", device["problem"] or words.idle(device), "", _memory(device)
    trial = "a new one" if holder["trial"] is None else str(holder["trial"])
    since = words.duration(holder["since_seconds"])
    return device["id"], f"{holder['study']} {trial}", holder["state"], since, _memory(device)


def _memory(device: dict[str, Any]) -> str:
    total, free = device["memory_bytes"], device["memory_free_bytes"]
    if total is None:
        return ""
    return f"{words.size(free) if free is not None else '?'} of {words.size(total)} free"


def _served(entry: dict[str, Any]) -> Table:
    table = _table()
    for row in _states(entry["counts"], entry.get("trials", [])):
        table.add_row(*row)
    best = entry["best"]
    if best is not None:
        table.add_row("best until now", f"{words.number(best['value'])} (trial {best['trial']})")
    table.add_row("device time", words.duration(entry["device_seconds"]))
    if entry["watt_hours"] is not None:
        table.add_row("energy", words.energy(entry["watt_hours"]))
    table.add_row("driver", str(entry["driver_pid"] or "none: nobody opens new trials"))
    if entry["away_seconds"] is not None:
        away = words.duration(entry["away_seconds"])
        then = "training goes on" if entry["problem"] is None else "every trial is to be on disk"
        table.add_row("database", f"does not answer since {away}: {then}")
    for wish in ("held", "boosted", "finishing"):
        if entry.get(wish):
            table.add_row(wish, words.ranges(entry[wish]))
    if entry["no_room"]:
        who = words.ranges(entry["no_room"])
        table.add_row("no room", f"{who}: no device has the memory until another trial has left it")
    if entry["problem"]:
        table.add_row("problem", entry["problem"])
    return table


def _states(counts: Mapping[str, int], runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """As ``trials_by_state``, with a count in place of more than ``NAMED`` numbers."""
    rows = []
    for state in _STATES:
        found, count = [r["trial"] for r in runs if r["state"] == state], counts.get(state, 0)
        if 0 < len(found) == count <= NAMED:
            rows.append((state, words.ranges(found)))
        elif count:
            rows.append((state, words.plural(count, "trial")))
    return rows


def _summary(study: dict[str, Any]) -> Table:
    table = _table()
    for row in _states(study["counts"], study["trials"]):
        table.add_row(*row)
    best = study["best"]
    if best is not None:
        table.add_row("best until now", f"{words.number(best['value'])} (trial {best['trial']})")
    table.add_row("device time", words.duration(study["device_seconds"]))
    if study["watt_hours"] is not None:
        table.add_row("energy", words.energy(study["watt_hours"]))
    table.add_row("one trial", "optuna-hermes status TRIAL tells its story, --json lists all")
    return table


def _ledger(study: dict[str, Any]) -> Table:
    if len(study["trials"]) > NAMED:
        return _summary(study)
    columns = ["trial", "state", "value", "units", "slices", "suspensions", "device time"]
    is_counted = study["watt_hours"] is not None
    table = _table(*columns, *["energy"] * is_counted)
    for run in study["trials"]:
        table.add_row(
            str(run["trial"]),
            ", ".join(filter(None, (run["state"], run.get("wish")))),
            words.number(run["value"]),
            str(run["units"]),
            str(run["slices"]),
            str(run["suspensions"]),
            words.duration(run["device_seconds"]),
            *[words.energy(run["watt_hours"]) if run["watt_hours"] is not None else "-"]
            * is_counted,
        )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table
