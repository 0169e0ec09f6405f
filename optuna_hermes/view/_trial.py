"""The view of one trial: its figures and its event log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna_hermes.view import _words as words

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

NEWEST = 40
"""Most events that are shown; the document has all."""

_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 50
_TIERS = {
    "resident": "in its device's memory",
    "host": "in host memory",
    "disk": "on disk",
    None: "nowhere",
}


def trial_view(document: Mapping[str, Any]) -> RenderableType:
    """The document of ``optuna-hermes status TRIAL`` as tables: its figures, then its events."""
    from rich.console import Group
    from rich.text import Text

    document = words.all_printable(document)
    title = f"Trial {document['trial']} of study {document['study']}: {_where(document)}"
    parts: list[RenderableType] = [Text(title, style="bold"), _facts(document)]
    events = document["events"]
    if events:
        left_out = len(events) - NEWEST
        if left_out > 0:
            parts.append(f"{words.plural(left_out, 'earlier event')}: --json tells all.")
        parts.append(_events(events[-NEWEST:]))
    return Group(*parts)


def _where(document: Mapping[str, Any]) -> str:
    where, state = document["where"], document["state"]
    place = {"running": f"on {where['device'] or 'a device'}", "pending": "it waits for a device"}
    told = place.get(state, _TIERS[where["tier"]] if where["tier"] else "")
    host = f" of {where['host']}" if where["host"] and state not in ("done", "failed") else ""
    wish = f", {document['wish']}" if document.get("wish") else ""
    return f"{state}{', ' if told else ''}{told}{host}{wish}"


def _facts(document: Mapping[str, Any]) -> Table:
    table = _table()
    curve = document["curve"]
    table.add_row("parameters", words.parameters(document["params"]) or "-")
    table.add_row("value", _value(curve))
    bars = _chart(curve["values"])
    if bars:
        table.add_row("curve", bars)
    trained = words.plural(document["units_trained"], "unit")
    table.add_row("trained", f"{trained}, {words.duration(document['device_seconds'])} of a device")
    if document["watt_hours"] is not None:
        table.add_row("energy", words.energy(document["watt_hours"]))
    slices = words.plural(document["slices"], "slice")
    table.add_row("slices", f"{slices}, suspended {words.plural(document['suspensions'], 'time')}")
    table.add_row("checkpoints", _checkpoints(document["checkpoints"]))
    return table


def _value(curve: Mapping[str, Any]) -> str:
    if not curve["units"]:
        return "nothing reported"
    last = f"{words.number(curve['values'][-1])} after {words.plural(curve['units'], 'unit')}"
    best = curve["best"]
    if best is None:
        return last
    first = words.number(curve["values"][0])
    return f"{last} (first {first}, best {words.number(best['value'])} at unit {best['unit']})"


def _chart(values: Sequence[float]) -> str:
    """A curve as one line of bars, thinned out if it is long.

    Example:
        >>> _chart([3.0, 2.0, 1.0])
        '█▅▁'
    """
    stride = max(1, math.ceil(len(values) / _BARS_WIDTH))
    shown = [*values[:-1:stride], *values[-1:]]
    finite = [value for value in shown if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else "?"
        for value in shown
    )


def _checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    if not checkpoints:
        return "none"
    newest = checkpoints[-1]
    return f"{len(checkpoints)}, the newest of unit {newest['units']}, " + words.size(
        newest["size_bytes"]
    )


def _events(events: Sequence[Mapping[str, Any]]) -> Table:
    table = _table()
    for event in events:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
        table.add_row(at, say(event["kind"], event["detail"]))
    return table


def say(kind: str, detail: Mapping[str, Any]) -> str:
    """An event in words.

    Example:
        >>> say("granted", {"device": "cpu:0", "from": "host", "epoch": 7})
        'granted cpu:0, before in host memory'
    """
    words_of = _WORDS.get(kind)
    known = {**dict.fromkeys(("tier", "from")), **detail}
    known["device"] = ", ".join(detail.get("devices", [known.get("device") or "a device"]))
    known["tier"] = _TIERS.get(known["tier"], known["tier"])
    known["before"] = _TIERS.get(known["from"], known["from"])
    if words_of is not None:
        try:
            return words_of.format(**known)
        except KeyError:  # written by another version
            pass
    rest = ", ".join(f"{name} {value}" for name, value in detail.items())
    return f"{kind}: {rest}" if rest else kind


_WORDS = {
    "granted": "granted {device}, before {before}",
    "batch size": "batch size {to}, before {from}",
    "suspended": "suspended after unit {units}: {tier}",
    "evicted": "evicted: {tier}, before {before}",
    "moved": "brought back: {tier}, before {before}",
    "checkpoint unreadable": "checkpoint unreadable: went back to unit {went_back_to} ({path})",
    "process lost": "process lost on {device} after unit {units}",
    "killed": "process {pid} killed: {reason}",
    "carried on": "carried on by {host}, before on {from}",
    "failed": "failed: {error}",
    "outgrew its memory": "{reason}",
    "no room": "{reason}",
    "released": "released: {reason}",
    "held": "held: it gets no device until it is released",
    "boosted": "boosted: it gets the next device",
    "finishing": "to be finished at its last value",
}


def _table() -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    return table
