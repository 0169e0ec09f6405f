"""Tables of ``status``, of one trial, and of the result of ``optimize``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from optuna_hermes.ledger import outage_phrase
from optuna_hermes.view import formats

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from optuna_hermes.broker._protocol import (
        BrokerStatus,
        DeviceStatus,
        ResidentStatus,
        StudyStatus,
    )
    from optuna_hermes.view.picture import Picture

Document = Mapping[str, Any]
Rows = Iterator[tuple[str, str]]

# Trials that are listed by number: more fill the screen, and are only counted.
NAMED = 100

# Events that are shown; the document has all.
NEWEST = 40
_CURVE_WIDTH = 50

# Of the table of trials: the columns of any console (trial, state, value); those of several words.
_LEAST = 3
_OF_WORDS = ("state", "device time", "energy")

_RESULT_STATES = ("COMPLETE", "PRUNED", "FAIL", "RUNNING", "PARKED", "STORED", "PENDING", "WAITING")
_TIERS = {
    "resident": "in its device's memory",
    "host": "in host memory",
    "disk": "on disk",
    None: "nowhere",
}
_EVENTS = {
    "admitted": "admitted{on}",
    "granted": "granted {device}{before}",
    "batch size": "batch size {to}, before {from}",
    "suspended": "suspended after unit {units}: {tier}",
    "evicted": "evicted: {tier}{before}",
    "moved": "brought back: {tier}{before}",
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


# -- the broker and a study --------------------------------------------------------------------


def status_view(
    broker: BrokerStatus | None, study: Document | None, *, silent: bool = False
) -> RenderableType:
    """Both parts of ``optuna-hermes status`` as tables: the broker's, and a study's ledger's.

    With ``silent`` there is a broker that does not answer.
    """
    from rich.console import Group

    from optuna_hermes.view.picture import picture_of

    # Names, parameters and errors are other people's texts.
    broker, study = formats.all_printable(broker), formats.all_printable(study)
    elsewhere = study is not None and study.get("elsewhere", False)
    parts: list[RenderableType] = [formats.ELSEWHERE] if elsewhere else []
    if broker is None and not elsewhere:
        away = study is not None and study.get("hosts")
        nothing = f"No broker runs on this host{'' if away else ': nothing trains'}."
        parts.append(formats.SILENT if silent else nothing)
    elif broker is not None:
        devices = map(_device, broker.devices)
        columns = ("device", "trial", "state", "since", "memory")
        parts += _titled(f"Devices of {broker.host}", _table(devices, *columns))
        for device in broker.devices:
            if device.residents:
                columns = ("trial", "state", "process", "of the trial", "of its process")
                rows = map(_resident, device.residents)
                parts += _titled(f"Memory of {device.id}", _table(rows, *columns))
        for served in broker.studies:
            title = f"Study {served.name}, policy {served.policy}"
            parts += _titled(title, _table(_served(served)))
            if 0 < len(served.trials) <= NAMED and (study is None or study["key"] != served.key):
                parts.append(_Fitted(partial(_trials, picture_of(broker, served.key, at=0.0))))
        if not broker.studies:
            parts.append("The broker serves no study.")
    if study is not None:
        parts += _titled(f"Study {study['name']}, as its ledger has it", _ledger(study))
        others = ", ".join(f"{count} {state}" for state, count in study.get("others", {}).items())
        if others:
            parts.append(f"Without a device of this package: {others}; see `optuna-hermes trials`")
        # Hosts train this study, or others of the same database.
        for host in study.get("hosts", ()):
            busy, count = round(host["load"] * host["devices"]), host["devices"]
            parts.append(f"Host {host['host']}: {busy} of {formats.plural(count, 'device')} busy")
    return Group(*parts)


def hosts_view(hosts: Sequence[Document]) -> RenderableType:
    """The hosts of a launch as a table."""
    columns = ("name", "state", "node", "detail")
    rows = (tuple(str(host[each]) for each in columns) for host in formats.all_printable(hosts))
    return _table(rows, "host", *columns[1:])


class _Fitted:
    """A view that depends on the console."""

    def __init__(self, draw: Callable[[Console, ConsoleOptions], RenderResult]) -> None:
        self.__rich_console__ = draw


def _trials(picture: Picture, console: Console, options: ConsoleOptions) -> RenderResult:
    """The trials of a study as ``top`` shows them."""
    from rich.text import Text

    from optuna_hermes.view._top._text import columns, heading, row

    shown = columns(options.max_width, picture)
    # Escapes in place of bars would be no curve.
    shown = [each for each in shown if each.name != "curve" or not options.ascii_only]
    lines = [heading(shown, "", False), *(row(shown, each) for each in picture.trials)]
    for place, cells in enumerate(lines):
        line = " ".join(cell for cell, _ in cells)
        yield Text(f" {line}".rstrip(), "" if place else "bold", no_wrap=True)


def _device(device: DeviceStatus) -> tuple[str, str, str, str, str]:
    holder, memory = device.holder, ""
    if device.memory_bytes is not None:
        free = device.memory_free_bytes
        left = "?" if free is None else formats.size(free)
        memory = f"{left} of {formats.size(device.memory_bytes)} free"
    if holder is None:
        return device.id, "", formats.idle(device), "", memory
    trial = "a new one" if holder.trial is None else str(holder.trial)
    since = formats.duration(holder.since_seconds)
    return device.id, f"{holder.study} {trial}", holder.state, since, memory


def _resident(resident: ResidentStatus) -> tuple[str, str, str, str, str]:
    """Cells of a trial that has memory of a device: its own, and its process's beside that."""
    held, rest = resident.held_bytes, resident.process_bytes
    about = "" if resident.measured else "about "
    return (
        f"{resident.study} {resident.trial}",
        "running" if resident.tier is None else f"parked, {resident.tier}",
        "" if resident.pid is None else str(resident.pid),
        "?" if held is None else formats.size(held),
        "?" if rest is None else f"{about}{formats.size(rest)}",
    )


def _served(study: StudyStatus) -> Rows:
    yield from _states(structs.asdict(study.counts), [(t.number, t.state) for t in study.trials])
    best = None if study.best is None else (study.best.trial, study.best.value)
    yield from _figures(best, study.device_seconds, study.watt_hours)
    if study.spent_seconds:
        yield _overhead(study.overhead_fraction, study.overhead_seconds)
    yield "driver", str(study.driver_pid or "none: `optimize` opens no new trials")
    if study.outage_seconds is not None:
        outage = formats.duration(study.outage_seconds)
        then = "training goes on" if study.problem is None else "every trial is to be on disk"
        yield "database", f"{outage_phrase(study.outage_reason)} since {outage}: {then}"
    overrides = (("held", study.held), ("boosted", study.boosted), ("finishing", study.finishing))
    for override, numbers in overrides:
        if numbers:
            yield override, formats.ranges(numbers)
    if study.no_room:
        who = formats.ranges(study.no_room)
        yield "no room", f"{who}: no device has the memory until another trial has left it"
    if study.problem:
        yield "problem", study.problem


def _states(counts: Mapping[str, int], trials: Sequence[tuple[int, str]]) -> Rows:
    """The rows of a study's trials by state: their numbers, if they are few."""
    for state in formats.STATES:
        found = [number for number, each in trials if each == state]
        count = counts.get(state, 0)
        # A broker lists the trials of a very large study in part.
        if 0 < len(found) == count <= NAMED:
            yield state, formats.ranges(found)
        elif count:
            yield state, formats.plural(count, "trial")


def _figures(
    best: tuple[int, float] | None, device_seconds: float, watt_hours: float | None
) -> Rows:
    if best is not None:
        yield "best report", f"{formats.number(best[1])} (trial {best[0]})"
    yield "device time", formats.duration(device_seconds)
    yield from _energy(watt_hours)


def _energy(watt_hours: float | None) -> Rows:
    if watt_hours is not None:
        yield "energy", formats.energy(watt_hours)


def _ledger(study: Document) -> RenderableType:
    if len(study["trials"]) > NAMED:
        listed = [(trial["trial"], trial["state"]) for trial in study["trials"]]
        best = study["best"] and (study["best"]["trial"], study["best"]["value"])
        figures = _figures(best, study["device_seconds"], study["watt_hours"])
        more = "optuna-hermes status TRIAL shows its event log, --json lists all"
        return _table([*_states(study["counts"], listed), *figures, ("one trial", more)])
    is_counted = study["watt_hours"] is not None
    columns = ["trial", "state", "value", "units", "slices", "suspensions", "device time"]
    rows = [
        (
            str(trial["trial"]),
            ", ".join(filter(None, (trial["state"], trial.get("override")))),
            formats.number(trial["value"]),
            *(str(trial[count]) for count in columns[3:6]),
            formats.duration(trial["device_seconds"]),
            *[formats.energy(trial["watt_hours"])] * is_counted,
        )
        for trial in study["trials"]
    ]
    columns += ["energy"] * is_counted

    def draw(console: Console, options: ConsoleOptions) -> RenderResult:
        # No word is broken: where it is too wide, columns go from the right.
        unbound = options.update(width=1000)
        for count in range(len(columns), _LEAST - 1, -1):
            table = _table([row[:count] for row in rows], *columns[:count])
            for column in table.columns:
                column.no_wrap = column.header not in _OF_WORDS
            if console.measure(table, options=unbound).minimum <= options.max_width:
                break
        yield table

    return _Fitted(draw)


# -- one trial ---------------------------------------------------------------------------------


def trial_view(document: Document) -> RenderableType:
    """The document of ``optuna-hermes status TRIAL`` as tables: its figures, then its events."""
    from rich.console import Group

    document = formats.all_printable(document)
    title = f"Trial {document['trial']} of study {document['study']}: {_where(document)}"
    rows = list(_trial_rows(document))
    # Its curve is shown only where the encoding has bars.
    plain = [row for row in rows if row[0] != "curve"]

    def facts(console: Console, options: ConsoleOptions) -> RenderResult:
        yield _plain_table(plain if options.ascii_only else rows)

    parts = _titled(title, _Fitted(facts))
    events = document["events"]
    if len(events) > NEWEST:
        left_out = formats.plural(len(events) - NEWEST, "earlier event")
        parts.append(f"{left_out}: --json tells all.")
    if events:
        lines = (
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"])),
                event_text(event["kind"], event["detail"]),
            )
            for event in events[-NEWEST:]
        )
        parts.append(_plain_table(lines))
    return Group(*parts)


def _where(document: Document) -> str:
    where, state = document["where"], document["state"]
    places = {"running": f"on {where['device'] or 'a device'}", "pending": "it waits for a device"}
    place = places.get(state, _TIERS[where["tier"]] if where["tier"] else "")
    host = f" of {where['host']}" if where["host"] and state not in ("done", "failed") else ""
    override = f", {document['override']}" if document.get("override") else ""
    return f"{', '.join(filter(None, (state, place)))}{host}{override}"


def _trial_rows(document: Document) -> Rows:
    curve, checkpoints = document["curve"], document["checkpoints"]
    yield "parameters", formats.parameters(document["params"]) or "-"
    yield "value", _value(curve)
    if len(curve["values"]) > 1:
        yield "curve", formats.sparkline(curve["values"], _CURVE_WIDTH, log=False)
    if ranked := document["standing"]:
        age = formats.plural(ranked["units"], "unit")
        rank = f"{ranked['rank']} of {ranked['among']} after {age}"
        yield "rank", f"{rank}; {ranked['chance']:.0%} to end as the best of all so far"
    trained = formats.plural(document["units_trained"], "unit")
    yield "trained", f"{trained}, {formats.duration(document['device_seconds'])} of a device"
    yield from _energy(document["watt_hours"])
    slices = formats.plural(document["slices"], "slice")
    yield "slices", f"{slices}, suspended {formats.plural(document['suspensions'], 'time')}"
    kept = "none"
    if checkpoints:
        newest = checkpoints[-1]
        size = formats.size(newest["size_bytes"])
        kept = f"{len(checkpoints)}, the newest of unit {newest['units']}, {size}"
    yield "checkpoints", kept


def _value(curve: Document) -> str:
    if not curve["units"]:
        return "nothing reported"
    last = f"{formats.number(curve['values'][-1])} after {formats.plural(curve['units'], 'unit')}"
    best = curve["best"]
    if best is None:
        return last
    first = formats.number(curve["values"][0])
    return f"{last} (first {first}, best {formats.number(best['value'])} at unit {best['unit']})"


def event_text(kind: str, detail: Document) -> str:
    """An event in words.

    Example:
        >>> event_text("granted", {"device": "cpu:0", "from": "host", "epoch": 7})
        'granted cpu:0, before in host memory'
    """
    known = {**dict.fromkeys(("tier", "from")), **detail}
    known["device"] = ", ".join(detail.get("devices", [known.get("device") or "a device"]))
    known["tier"] = _TIERS.get(known["tier"], known["tier"])
    known["on"] = f" on {known['device']}" if detail.get("device") else ""
    source = known["from"]  # none if a trial begins
    known["before"] = "" if source is None else f", before {_TIERS.get(source, source)}"
    if kind in _EVENTS:
        try:
            return _EVENTS[kind].format(**known)
        except KeyError:
            # Written by another version: shown as it is.
            pass
    rest = ", ".join(f"{name} {value}" for name, value in detail.items())
    return f"{kind}: {rest}" if rest else kind


# -- the result of a study ---------------------------------------------------------------------


def summary_view(document: Document) -> RenderableType:
    """A short table of the result document of ``optimize``, see ``OptimizeResult.document``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    document = formats.all_printable(document)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _result(document):
        table.add_row(label, Text(text))
    return Group(*_titled(f"Study {document['study']}", table))


def _result(document: Document) -> Rows:
    best, trials = document["best"], document["trials"]
    tally = Counter(trial["state"] for trial in trials)
    if best is None:
        lacks = "feasible" if tally["COMPLETE"] else "complete"
        yield "best final value", f"none: no trial is {lacks}"
    else:
        yield "best final value", f"{formats.number(best['value'], 6)} (trial {best['number']})"
        yield "parameters", formats.parameters(best["params"])
    counts = (f"{tally[state]} {state.lower()}" for state in _RESULT_STATES if tally[state])
    yield "trials", ", ".join(counts) or "none"
    yield "suspended", suspensions(trials)
    spent, in_all = (formats.duration(document[f"{of}_seconds"]) for of in ("spent", "device"))
    took = formats.duration(document["elapsed_seconds"])
    earlier = "" if spent == in_all else f"; {in_all} in all calls"
    devices = ", ".join(document["devices"])  # none if the call has ended before it had any
    yield "device time", f"{spent}{devices and f' on {devices}'}, in {took}{earlier}"
    yield from _energy(document["watt_hours"])
    yield _overhead(document["overhead_fraction"], document["overhead_seconds"])
    yield "switches", str(document["switches"])


def _overhead(share: float, seconds: Mapping[Any, float]) -> tuple[str, str]:
    kinds = ", ".join(f"{kind} {each:.1f} s" for kind, each in seconds.items() if each >= 0.05)
    return "outside of batches", f"{100 * share:.1f} % of device time{kinds and f' ({kinds})'}"


def suspensions(trials: Sequence[Document]) -> str:
    """The number of suspended trials, of their suspensions, and their outcome, in words.

    Example:
        >>> suspensions([{"state": "COMPLETE", "slices": 3, "suspensions": 2}])
        '1 of 1 trial, 2 times; each was resumed and finished'
    """
    paused = [trial for trial in trials if trial["suspensions"]]
    if not paused:
        return "none"
    times = sum(trial["suspensions"] for trial in paused)
    waiting = sum(trial["state"] in ("PARKED", "STORED", "PENDING") for trial in paused)
    # One that a person has finished was not resumed.
    resumed = all(trial["slices"] > trial["suspensions"] for trial in paused)
    if waiting:
        ending = f"{waiting} still are"
    elif all(trial["state"] == "COMPLETE" for trial in paused):
        ending = "each was resumed and finished" if resumed else "each was finished"
    else:
        ending = "each was resumed" if resumed else "none still is"
    of_all = f"{len(paused)} of {formats.plural(len(trials), 'trial')}"
    return f"{of_all}, {formats.plural(times, 'time')}; {ending}"


# -- tables ------------------------------------------------------------------------------------


def _titled(title: str, table: RenderableType) -> list[RenderableType]:
    from rich.text import Text

    return [Text(title, style="bold"), table]


def _table(rows: Iterable[Sequence[str]], *columns: str) -> Table:
    """A table with lines; without names of columns it has two."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # brackets are no markup, whoever prints it
    return table


def _plain_table(rows: Iterable[Sequence[str]]) -> Table:
    """Two columns without lines."""
    table = _table(rows)
    table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"
    return table
