"""The lines of ``top`` as coloured text: head, foot and trials; pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from optuna_hermes.broker._core._curve_shape import POINTS
from optuna_hermes.broker._protocol import TrialRow
from optuna_hermes.view import formats
from optuna_hermes.view.picture import Picture

INK, DIM, FAINT = "#d8dee9", "#8a94a6", "#5b6577"
GROUND, RAISED, CHOSEN = "#12161d", "#1a202a", "#2b3648"
GOOD, WARM, COOL, BAD, LEAD = "#8fd19e", "#e3c078", "#7fb2e5", "#ea8a8a", "#b7a3ef"

STATE_COLOURS = {
    "running": GOOD,
    "yielding": WARM,
    "parked": WARM,
    "stored": COOL,
    "pending": DIM,
    "done": INK,
    "failed": BAD,
}
OVERRIDE_COLOURS = {"held": BAD, "boosted": LEAD, "finishing": COOL}
OVERRIDE_MARKS = {"held": "‖", "boosted": "▲", "finishing": "✓"}
# From this width on there is room for more columns, and for whole words.
WIDE = 120

# Characters of a curve.
LEAST_CURVE = 5


class Column(NamedTuple):
    """A column of the table of trials; with ``width`` 0 it takes the rest, up to a maximum."""

    name: str
    width: int
    text: Callable[[TrialRow, int], str]
    colour: Callable[[TrialRow], str]
    right: bool = True


# -- trials ------------------------------------------------------------------------------------


def columns(width: int, picture: Picture) -> list[Column]:
    """The columns that fit into ``width``; energy only if it is measured."""
    wide = width >= WIDE
    found = [
        Column("trial", 6, lambda t, _: str(t.number), _ink),
        Column("state", 8, lambda t, _: t.state, _state_colour, right=False),
        Column("override", 9, lambda t, _: t.override or "", _override_colour, right=False)
        if wide
        else Column("", 1, lambda t, _: OVERRIDE_MARKS.get(t.override or "", ""), _override_colour),
        Column("value", 9, _value, _ink),
        # Eight suffice; more are nicer where there is room.
        Column(
            "slope",
            10 if wide or not picture.memory else 8,
            lambda t, _: "-" if t.slope is None else f"{t.slope:+.2g}",
            lambda t: _slope_colour(t, picture.maximize),
        ),
        Column("curve", 0, lambda t, w: formats.sparkline(t.curve, w), _state_colour, right=False),
        Column("units", 5, lambda t, _: str(t.units), _ink),
        Column("device time" if wide else "time", 11 if wide else 9, _seconds, _ink),
        Column("tier", 8, lambda t, _: t.tier or "", lambda _: DIM, right=False),
    ]
    if wide:
        device = max((len(each.id) for each in picture.devices), default=6)
        found += [
            Column(
                "device",
                min(12, max(6, device)),
                lambda t, _: t.device or "",
                _state_colour,
                right=False,
            ),
            Column("slices", 6, lambda t, _: str(t.slices), lambda _: DIM),
            Column("suspensions", 11, lambda t, _: str(t.suspensions), lambda _: DIM),
        ]
    elif not picture.memory:
        found.append(Column("susp", 4, lambda t, _: str(t.suspensions), lambda _: DIM))
    if picture.memory:
        found.append(Column("memory", 9, lambda t, _: _memory(t, picture.memory), _state_colour))
    if wide and picture.watt_hours is not None:
        found.append(Column("energy", 9, lambda t, _: formats.energy(t.watt_hours), lambda _: DIM))
    # A number that is cut would be another one: columns go whole, from the right.
    while len(found) > 4 and sum(c.width or LEAST_CURVE for c in found) + len(found) > width:
        found.pop()
    left = width - len(found) - sum(column.width for column in found)
    most = POINTS if wide else 16
    # The curve takes the rest, but no more than it has points.
    return [c if c.width else c._replace(width=max(LEAST_CURVE, min(most, left))) for c in found]


def heading(shown: Sequence[Column], by: str, back: bool) -> list[tuple[str, Style]]:
    """The names of columns; an arrow marks the one that trials are sorted by."""
    mark = "↑" if back else "↓"
    plain, sorted_ = Style(color=DIM), Style(color=INK, bold=True)
    parts = []
    for column in shown:
        is_key = column.name.split()[-1:] == [by]
        name = column.name + (mark if is_key and len(column.name) < column.width else "")
        parts.append((_fit(name, column), sorted_ if is_key else plain))
    return parts


def row(shown: Sequence[Column], trial: TrialRow) -> list[tuple[str, Style]]:
    """The cells of a trial."""
    return [
        (_fit(column.text(trial, column.width), column), Style(color=column.colour(trial)))
        for column in shown
    ]


def _fit(text: str, column: Column) -> str:
    # A number without its end would be another number.
    if len(text) > column.width:
        text = "…" if column.right else text[: column.width - 1] + "…"
    return text.rjust(column.width) if column.right else text.ljust(column.width)


def _ink(trial: TrialRow) -> str:
    return DIM if trial.state == "pending" or trial.value is None else INK


def _state_colour(trial: TrialRow) -> str:
    return STATE_COLOURS[trial.state]


def _override_colour(trial: TrialRow) -> str:
    return OVERRIDE_COLOURS.get(trial.override or "", DIM)


def _slope_colour(trial: TrialRow, maximize: bool) -> str:
    slope = (-1.0 if maximize else 1.0) * (trial.slope or 0.0)
    return GOOD if slope < 0 else WARM if slope > 0 else DIM


def _value(trial: TrialRow, width: int) -> str:
    """A trial's value, with as many digits as there is room for."""
    texts = (formats.number(trial.value, digits) for digits in (4, 3, 2, 1))
    return next((text for text in texts if len(text) <= width), "…")


def _memory(trial: TrialRow, memory: Mapping[int, int]) -> str:
    return formats.size(memory[trial.number]) if trial.number in memory else ""


def _seconds(trial: TrialRow, width: int) -> str:
    return formats.duration(trial.device_seconds) if trial.device_seconds else "-"


# -- head and foot -----------------------------------------------------------------------------


def head(picture: Picture, width: int) -> Text:
    """Two lines: the study with its policy and best value, and its progress."""
    left = Text(no_wrap=True)
    left.append(" optuna-hermes top ", Style(color=GROUND, bgcolor=COOL, bold=True))
    if picture.read_only:
        left.append("  read-only", Style(color=WARM, bold=True))
    left.append(f"  {formats.printable(picture.study or 'no study')}", Style(color=INK, bold=True))
    if picture.policy:
        left.append(f"  policy {picture.policy}", DIM)
    clock = time.strftime("%H:%M:%S", time.localtime(picture.at))
    right = Text(no_wrap=True)
    if picture.best is not None:
        number, value = picture.best
        right.append("best ", DIM).append(formats.number(value), Style(color=GOOD, bold=True))
        right.append(f" trial {number}  ", DIM)
    right.append(clock + " ", DIM)
    second = Text(" ", no_wrap=True)
    total, listed = sum(picture.counts.values()), len(picture.trials)
    second.append(formats.plural(total, "trial"), INK)
    if listed < total:
        second.append(f"  {listed} listed", DIM)
    for state, count in picture.counts.items():
        second.append(f"  {count} {state}", STATE_COLOURS[state])
    spent = Text("device time ", DIM).append(formats.duration(picture.device_seconds), INK)
    if picture.watt_hours is not None:
        spent.append(f"  {formats.energy(picture.watt_hours)}", INK)
    # What does not fit is left out whole: half a number would be a wrong one.
    if picture.overhead_fraction is not None:
        overhead = f"  {100 * picture.overhead_fraction:.1f} % outside of batches"
        if second.cell_len + spent.cell_len + len(overhead) + 1 < width:
            spent.append(overhead, DIM)
    spent.append(" ")
    if second.cell_len + spent.cell_len >= width:
        spent = Text()
    return Text("\n", no_wrap=True).join([_ends(left, right, width), _ends(second, spent, width)])


def _ends(left: Text, right: Text, width: int) -> Text:
    """One text at the left, the other at the right; the left one is cut if it does not fit."""
    room = width - right.cell_len
    left.truncate(max(0, room - 1), overflow="ellipsis")
    left.pad_right(max(0, room - left.cell_len))
    return left.append_text(right)


def foot(picture: Picture, width: int) -> Text:
    """The keys that have an effect now."""
    acts = [("h", "hold"), ("b", "boost"), ("f", "finish"), ("p", "policy")]
    keys = [] if picture.read_only else acts
    keys = [*keys, ("⏎", "events"), ("nvlts", "sort"), ("?", "help"), ("q", "quit")]
    if len(picture.studies) > 1:
        keys.insert(-2, ("tab", "study"))
    line = Text(" ", no_wrap=True)
    gap = " " * (2 if width < WIDE else 4)
    for key, verb in keys:
        line.append(key, Style(color=COOL, bold=True)).append(f" {verb}{gap}", INK)
    return line
