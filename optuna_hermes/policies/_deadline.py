"""The trial to be finished before the budget of its study is spent."""

from __future__ import annotations

import math

from optuna_hermes.model import Snapshot, TrialView

_RESERVE = 0.25
"""Of a whole training: units may come to take longer, and a device is free only now and then."""


def due(snapshot: Snapshot) -> TrialView | None:
    """The trial that must go on now to end within the budget, None if there is none.

    Of the trials that can still end it is the one that is expected to end lowest, and lower than
    any that has ended. It is due once no more time is left than it needs and a quarter of its
    training takes. The rule is this project's own.
    """
    seconds = snapshot.left.on_each(sum(device.healthy for device in snapshot.devices))
    if not seconds < math.inf:
        return None
    ended = (trial for trial in snapshot.finished if trial.state == "done" and trial.curve.values)
    bound = min((_last(trial) for trial in ended), default=math.inf)
    can_end = (
        (_final(trial), trial.number, trial)
        for trial in snapshot.trials
        if trial.curve.units and _seconds_for(trial) <= seconds
    )
    final, _, best = min(can_end, key=lambda each: each[:2], default=(math.inf, 0, None))
    if best is None or final >= bound or best.state not in ("parked", "stored"):
        return None
    # As it trains on, both sides fall alike: once due it is due to its end.
    return best if seconds <= _seconds_for(best, _RESERVE) else None


def _seconds_for(trial: TrialView, reserve: float = 0.0) -> float:
    """Time until its end, and for a share of its whole training; infinite if not known."""
    units, left = trial.curve.units, trial.units_left
    if left is None:
        return math.inf
    used = trial.curve.device_seconds
    # Its opening is in the first unit only.
    pace = (used[-1] - used[0]) / (units - 1) if units > 1 else used[0]
    # Device time passes on all of its devices at once.
    n_devices = len(trial.current_devices) or trial.devices_wanted
    return (left + reserve * (units + left)) * pace / n_devices


def _final(trial: TrialView) -> float:
    """Its last value, if it falls on as in its last half with the logarithm of its age."""
    last, units = _last(trial), trial.curve.units
    fall = trial.curve.values[-1 - units // 2] - last
    if not 0 < fall < math.inf:
        return last
    past = math.log(units / (units - units // 2))
    return last - fall * math.log1p((trial.units_left or 0) / units) / past


def _last(trial: TrialView) -> float:
    last = trial.curve.values[-1]
    return last if math.isfinite(last) else math.inf
