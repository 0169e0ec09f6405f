"""Trials as arrays, of which few change between two decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.curves import CurveTable, Floats, Places, grown
from optuna_hermes.model import TrialView

Flags = NDArray[np.bool_]


class TrialTable:
    """Table of trials, so that each is turned into numbers once; ``curves`` has their curves.

    Example:
        >>> table = TrialTable()
        >>> rows = table.rows([TrialView(number=7, state="parked")])
        >>> table.numbers[rows].tolist(), table.waits[rows].tolist(), table.units[rows].tolist()
        ([7], [True], [0])
    """

    # To look through the objects of thousands of trials takes most of a decision, and a snapshot
    # has the same ones again for those that have not changed: they are known by identity.

    def __init__(self) -> None:
        self.curves = CurveTable()
        self._forget()

    def rows(self, trials: Sequence[TrialView]) -> Places:
        """Return the rows of trials."""
        known = list(map(self._known.get, map(id, trials)))
        if None in known:
            new = [place for place, row in enumerate(known) if row is None]
            if len(self._trials) + len(new) > grown(len(trials)):
                return self._made_anew(trials)
            reported = [trials[place].curve for place in new if trials[place].curve.values]
            self._add([trials[place] for place in new], self.curves.more_rows(reported))
            for place in new:
                known[place] = self._known[id(trials[place])]
        rows = np.array(known, dtype=np.int64)
        if self.curves.is_wasteful(int(self.units[rows].sum())):
            return self._made_anew(trials)
        return rows

    def _made_anew(self, trials: Sequence[TrialView]) -> Places:
        self._forget()
        self._add(trials, self.curves.rows([each.curve for each in trials if each.curve.values]))
        return np.arange(len(trials))

    def _forget(self) -> None:
        self._known: dict[int, int] = {}
        self._trials: list[TrialView] = []  # as long as they are kept no other has their identity
        self.numbers: Places = np.zeros(0, dtype=np.int64)
        """Number [row]."""
        self.waits: Flags = np.zeros(0, dtype=np.bool_)
        """True if it has begun and can go on [row]."""
        self.begun: Flags = np.zeros(0, dtype=np.bool_)
        """True if it has begun [row]."""
        self.done: Flags = np.zeros(0, dtype=np.bool_)
        """True if it was trained to its end [row]."""
        self.bound: Flags = np.zeros(0, dtype=np.bool_)
        """True if it can go on on some devices only [row]."""
        self.left: Floats = np.zeros(0)
        """Units until its end, NaN if not known [row]."""
        self.starts: Places = np.zeros(0, dtype=np.int64)
        """Place of its first value in ``curves`` [row]."""
        self.units: Places = np.zeros(0, dtype=np.int64)
        """Units [row]."""
        self.seconds: Floats = np.zeros(0)
        """Device time [row], as it was reported last."""
        self._needed: Floats = np.zeros(0)
        self._finals: Floats = np.zeros(0)

    def ends(self) -> tuple[Floats, Floats]:
        """Return seconds until its end, infinite if not known, and the expected last value [row].

        Most studies have no budget, and nobody asks.
        """
        new = self._trials[len(self._finals) :]
        self._needed = _extended(self._needed, [seconds_to_end(each) for each in new])
        self._finals = _extended(self._finals, [_final(each) for each in new])
        return self._needed, self._finals

    def _add(self, trials: Sequence[TrialView], curve_rows: Places) -> None:
        """Add trials; ``curve_rows`` are of those that have reported."""
        reported = np.array([bool(each.curve.values) for each in trials], dtype=np.bool_)
        starts, units = np.zeros((2, len(trials)), dtype=np.int64)
        seconds = np.zeros(len(trials))
        starts[reported] = self.curves.starts[curve_rows]
        units[reported] = self.curves.units[curve_rows]
        seconds[reported] = self.curves.seconds[curve_rows]
        states = [each.state for each in trials]
        self.numbers = _extended(self.numbers, [each.number for each in trials])
        self.waits = _extended(self.waits, [each in ("parked", "stored") for each in states])
        self.begun = _extended(self.begun, [each != "pending" for each in states])
        self.done = _extended(self.done, [each == "done" for each in states])
        self.bound = _extended(self.bound, [bool(each.bound_to) for each in trials])
        self.left = _extended(self.left, [each.units_left for each in trials])  # None becomes NaN
        self.starts = _extended(self.starts, starts)
        self.units = _extended(self.units, units)
        self.seconds = _extended(self.seconds, seconds)
        for row, each in enumerate(trials, len(self._trials)):
            self._known[id(each)] = row
        self._trials += trials


def _extended(column: NDArray[Any], values: Any) -> NDArray[Any]:
    """A column with more values, of its own type also where there are none."""
    return np.append(column, np.asarray(values, dtype=column.dtype))


def seconds_to_end(trial: TrialView, reserve: float = 0.0) -> float:
    """Time until its end, and for a share of its whole training; infinite if not known."""
    units, left = trial.curve.units, trial.units_left
    if left is None or not units:
        return math.inf
    used = trial.curve.device_seconds
    # Its opening is in the first unit only.
    pace = (used[-1] - used[0]) / (units - 1) if units > 1 else used[0]
    # Device time passes on all of its devices at once.
    n_devices = len(trial.current_devices) or trial.devices_wanted
    return (left + reserve * (units + left)) * pace / n_devices


def _final(trial: TrialView) -> float:
    """Its last value, if it falls on as in its last half with the logarithm of its age."""
    units = trial.curve.units
    if not units or not math.isfinite(trial.curve.values[-1]):
        return math.inf
    last = trial.curve.values[-1]
    fall = trial.curve.values[-1 - units // 2] - last
    if not 0 < fall < math.inf:
        return last
    past = math.log(units / (units - units // 2))
    return last - fall * math.log1p((trial.units_left or 0) / units) / past
