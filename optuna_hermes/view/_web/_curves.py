"""Data of the web page's charts, from a history: curves, best so far, bars; no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optuna_hermes.view._history import Bar, Point, StudyHistory, TrialHistory, best_so_far
from optuna_hermes.view._web._trials import LIVE, Json, rounded

MOST_CURVES = 500
"""Most curves that are drawn: those of live trials first, then the best ones."""

MOST_POINTS = 400
"""Most points of a curve that are drawn, besides the last one."""


class Charts:
    """Data of charts; a part that has not changed since the last call is the same object."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[tuple[Point, ...], Json]] = {}
        self._best: tuple[StudyHistory | None, list[list[Any]]] = (None, [])

    def curves(self, history: StudyHistory | None, trials: Json) -> Json:
        """Units and values of the curves that are drawn, by trial."""
        found = {}
        reported = [trial for trial in history.trials if trial.points] if history else []
        sign = -1.0 if history and history.maximize else 1.0
        for trial in _foremost(reported, trials, sign):
            points, columns = self._columns.get(trial.number, (None, None))
            if points is not trial.points or columns is None:
                columns = _columns(trial.points)
                self._columns[trial.number] = (trial.points, columns)
            found[str(trial.number)] = columns
        return found

    def path(self, history: StudyHistory | None) -> list[list[Any]]:
        """Best so far against device time; the same object if no value was reported since."""
        before, path = self._best
        same = before is not None and history is not None and before.position == history.position
        if history is not None and not (same and before and before.key == history.key):
            path = [
                [round(best.device_seconds, 2), rounded(best.value), best.trial]
                for best in best_so_far(history)
            ]
        self._best = (history, path)
        return path


def beginning(history: StudyHistory | None) -> float:
    """The begin of the schedule: that of the first lease, in wall clock seconds."""
    bars = history.bars if history else ()
    return round(min((bar.begin for bar in bars), default=0.0), 2)


def bars(history: StudyHistory | None, begin: float) -> Json:
    """The bars of the schedule, by epoch and device."""
    found: Json = {}
    for bar in history.bars if history else ():
        found[f"{bar.epoch} {bar.device}"] = _bar(bar, begin)
    return found


def _bar(bar: Bar, begin: float) -> list[Any]:
    """Device, trial, begin and end in seconds of the schedule; the end is None while it lasts."""
    end = None if bar.end is None else round(bar.end - begin, 2)
    return [bar.device, bar.trial, round(bar.begin - begin, 2), end]


def _foremost(
    reported: Sequence[TrialHistory], trials: Json, sign: float
) -> Sequence[TrialHistory]:
    """The trials whose curves are drawn: all if they are few, else live ones, then the best."""
    if len(reported) <= MOST_CURVES:
        return reported

    def rank(trial: TrialHistory) -> tuple[bool, float]:
        value = sign * trial.points[-1].value
        is_live = trials[str(trial.number)]["state"] in LIVE
        return not is_live, value if math.isfinite(value) else math.inf

    return sorted(sorted(reported, key=rank)[:MOST_CURVES], key=lambda trial: trial.number)


def _columns(points: Sequence[Point]) -> Json:
    """A curve, thinned out if it is long: every second point, every fourth, and the last."""
    stride = 1
    while len(points) > stride * MOST_POINTS:
        stride *= 2
    shown = points if stride == 1 else (*points[:-1:stride], points[-1])
    return {
        "units": [point.unit for point in shown],
        "values": [rounded(point.value) for point in shown],
    }
