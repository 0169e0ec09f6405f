"""The data of the plots, for every backend; pure functions."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from optuna_hermes.view import formats
from optuna_hermes.view.history import StudyHistory, TrialHistory, best_so_far, end_of

Axis = Literal["unit", "device_seconds"]

# Of trials, by number modulo their count: a prime, so that rounds do not repeat them.
COLOURS = (
    *("#4C78A8", "#F58518", "#54A24B", "#E45756", "#72B7B2", "#EECA3B"),
    *("#B279A2", "#9D755D", "#FF9DA6", "#17BECF", "#2F4B7C", "#A05D00"),
    *("#88D27A", "#8C1C13", "#7F7F7F", "#6A3D9A", "#BCBD22"),
)

BEST_COLOUR = "#111111"

# Bars: more are too narrow for the numbers of their trials and for lines between them, and slow to
# draw with them.
LABELLED = 300

# Trials that are named in a title.
_NAMED = 8

# Beyond, what is computed of an axis' ends may overflow.
_MOST = 1e300


class CurveStyle(NamedTuple):
    """The style of curves of trials in some states."""

    label: str
    colour: str
    opacity: float


LOOKS = {
    "done": CurveStyle("done", "#4C78A8", 0.75),
    "running": CurveStyle("running", "#2CA02C", 1.0),
    "suspended": CurveStyle("suspended", "#7F7F7F", 0.4),
    "failed": CurveStyle("failed", "#E45756", 0.6),
}

_GROUPS = {"parked": "suspended", "stored": "suspended", "pending": "suspended"}


class Box(NamedTuple):
    """A bar of the schedule: a trial on a device, with times in seconds of Unix time."""

    device: str
    label: str
    colour: str
    begin: float
    end: float
    hover: str


class InfoLine(NamedTuple):
    """Points (x, y) of a trial, or of a policy."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CurvesInfo:
    """Curves by group of states, in the order of drawing, and the best one.

    ``counts`` is true if x has whole numbers. ``bounds`` are those of the y axis if trials diverge,
    as the title then says, else None.
    """

    title: str
    groups: tuple[tuple[CurveStyle, tuple[InfoLine, ...]], ...]
    best: InfoLine | None
    bounds: tuple[float, float] | None
    x_label: str
    counts: bool


@dataclass(frozen=True, kw_only=True)
class BestInfo:
    """Steps of the best value so far, the study's own first; all end at one x.

    ``bounds`` are as of ``CurvesInfo``, here if first values are those of trials that diverged.
    """

    title: str
    lines: tuple[InfoLine, ...]
    bounds: tuple[float, float] | None
    x_label: str


def schedule_info(history: StudyHistory, now: float, held: Container[int] = ()) -> tuple[Box, ...]:
    """The bars of the schedule, by device and begin; those of running trials end ``now``.

    ``held`` are the epochs of the leases that this host's broker knows to last.
    """
    trials = {trial.number: trial for trial in history.trials}
    names = device_names(bar.device for bar in history.bars)
    order = sorted(names, key=_natural)
    bars = sorted(history.bars, key=lambda bar: (order.index(bar.device), bar.begin))
    boxes = []
    for bar in bars:
        found = end_of(bar, trials, held)
        end = now if found is None else found
        if end > bar.begin:
            label = "" if bar.trial is None else str(bar.trial)
            trial = f"trial {label}" if label else "new trial"
            boxes.append(
                Box(
                    device=names[bar.device],
                    label=label,
                    colour=COLOURS[(bar.trial or 0) % len(COLOURS)],
                    begin=bar.begin,
                    end=end,
                    hover=f"{trial}, {formats.duration(end - bar.begin)}",
                )
            )
    return tuple(boxes)


def device_names(devices: Iterable[str]) -> dict[str, str]:
    """Labels of devices: without the host if all have the same, and with short UUIDs.

    Example:
        >>> device_names(["a/cpu:0", "a/GPU-5c1ae4b2-9f0e-4f0c"])
        {'a/GPU-5c1ae4b2-9f0e-4f0c': 'GPU-5c1ae4b2', 'a/cpu:0': 'cpu:0'}
    """
    ids = sorted(set(devices))
    parts = [id_.rpartition("/") for id_ in ids]
    if len({host for host, _, _ in parts}) > 1:
        return {id_: id_ for id_ in ids}
    return dict(zip(ids, formats.short_devices([name for _, _, name in parts]), strict=True))


def curves_info(history: StudyHistory, axis: Axis) -> CurvesInfo:
    """The curves of trials, grouped by state.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in ("unit", "device_seconds"):
        raise ValueError(f'axis must be "unit" or "device_seconds" but got {axis!r}.')
    shown = [trial for trial in history.trials if any(map(math.isfinite, _values(trial)))]
    most = max((trial.points[-1].device_seconds for trial in shown), default=0.0)
    scale, unit = _time_unit(most)
    lines = {trial.number: _curve(trial, axis, scale) for trial in shown}
    best = _best(shown, history.maximize)
    low, high = usual_bounds([line.ys for line in lines.values()], history.maximize)
    away = [n for n, line in lines.items() if min(line.ys) < low or max(line.ys) > high]
    groups = {name: list[InfoLine]() for name in ("suspended", "failed", "done", "running")}
    for trial in shown:
        groups[_GROUPS.get(trial.state, trial.state)].append(lines[trial.number])
    return CurvesInfo(
        title=f"Curves ({_leave(away)} the scale)" if away else "Curves",
        bounds=_with_room(low, high) if away else None,
        groups=tuple((LOOKS[name], tuple(found)) for name, found in groups.items() if found),
        best=None if best is None else lines[best],
        counts=axis == "unit",
        x_label="Unit" if axis == "unit" else f"Device Time of the Trial ({unit})",
    )


def usual_bounds(curves: Sequence[Sequence[float]], maximize: bool) -> tuple[float, float]:
    """The bounds of the curves of trials that do not diverge, which would flatten all others.

    Only at the bad end is anything left out. The web page has the same rule (``paint.js``).

    Example:
        >>> usual_bounds([(0.9, 0.5), (0.8, 0.4), (0.9, 0.3), (0.7, 1e20)], False)
        (0.3, 0.9)
    """
    if not curves:
        return 0.0, 0.0
    sign = -1.0 if maximize else 1.0
    ordered = [sorted(sign * value for value in values) for values in curves]
    good = _quantile(sorted(values[0] for values in ordered), 0.25)
    # A few peaks count as little as a few trials.
    bad = _quantile(sorted(_quantile(values, 0.95) for values in ordered), 0.75)
    fence = bad + 3 * (max(bad - good, abs(bad)) or math.inf)
    low = min(values[0] for values in ordered)
    high = max(value for values in ordered for value in values if value <= fence)
    first, last = sorted((sign * low, sign * high))
    return max(first, -_MOST), min(last, _MOST)


def _with_room(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def best_info(
    history: StudyHistory, against: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> BestInfo:
    """The best value so far over device time, of a study and of other policies by name."""
    own = [(best.device_seconds, best.value) for best in best_so_far(history)]
    lines = [("this study", own), *against] if own else []
    used = math.fsum(trial.points[-1].device_seconds for trial in history.trials if trial.points)
    end = max([used, *(steps[-1][0] for _, steps in lines if steps)], default=0.0)
    scale, unit = _time_unit(end)
    drawn = tuple(_steps(name, steps, end, scale) for name, steps in lines if steps)
    curves = ([*filter(math.isfinite, _values(trial))] for trial in history.trials)
    low, high = usual_bounds([curve for curve in curves if curve], history.maximize)
    values = [value for line in drawn for value in line.ys]
    usual = [value for value in values if low <= value <= high]
    away = 0 < len(usual) < len(values)
    return BestInfo(
        title=f"Best Value over Device Time{' (first values leave the scale)' * away}",
        lines=drawn,
        bounds=_with_room(min(usual), max(usual)) if away else None,
        x_label=f"Device Time of All Trials ({unit})",
    )


def _natural(device: str) -> list[tuple[int, str]]:
    # With digits as numbers, so that ``cpu:10`` comes after ``cpu:9``.
    parts = "".join(each if each.isdecimal() else f" {each} " for each in device).split()
    return [(int(each), "") if each.isdecimal() else (-1, each) for each in parts]


def _values(trial: TrialHistory) -> Iterator[float]:
    return (point.value for point in trial.points)


def _curve(trial: TrialHistory, axis: Axis, scale: float) -> InfoLine:
    finite = [point for point in trial.points if math.isfinite(point.value)]
    return InfoLine(
        str(trial.number),
        tuple(point.unit if axis == "unit" else point.device_seconds / scale for point in finite),
        tuple(point.value for point in finite),
    )


def _best(trials: Iterable[TrialHistory], maximize: bool) -> int | None:
    last = [(each.points[-1].value, each.number) for each in trials if each.state != "failed"]
    finite = [each for each in last if math.isfinite(each[0])]
    if not finite:
        return None
    return min(finite, key=lambda each: (-each[0] if maximize else each[0], each[1]))[1]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


def _leave(numbers: Sequence[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} trials leave"
    many = len(numbers) > 1
    return f"trial{'s' * many} {formats.ranges(numbers)} leave{'s' * (not many)}"


def _steps(name: str, steps: Sequence[tuple[float, float]], end: float, scale: float) -> InfoLine:
    points = [*steps, (end, steps[-1][1])]
    ys = tuple(max(-_MOST, min(y, _MOST)) for _, y in points)
    return InfoLine(name, tuple(x / scale for x, _ in points), ys)


def _time_unit(seconds: float) -> tuple[float, str]:
    """A readable unit for times up to this: its length in seconds, and its symbol."""
    if seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if seconds < 4 * 3600 else (3600.0, "h")
