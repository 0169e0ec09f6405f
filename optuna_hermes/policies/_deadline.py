"""Trials to be finished before the budget of their study is spent."""

from __future__ import annotations

import math

from optuna_hermes.model import Snapshot, TrialView

_SLACK = 1.6
"""Since units may come to take longer, and a device is free only now and then."""


def due(snapshot: Snapshot) -> list[TrialView]:
    """The waiting trials that must go on now to end within the budget, best first.

    Of the trials that can still end, and lower than any that is finished, as many are wanted as
    there are devices: those that are expected to end lowest. Each is due once no more time is left
    than 1.6 times what it needs. The rule is this project's own.

    Returns:
        Nothing where no budget is known.
    """
    n_devices = max(1, sum(device.healthy for device in snapshot.devices))
    seconds = snapshot.left.on_each(n_devices)
    if not seconds < math.inf:
        return []
    ended = (trial for trial in snapshot.finished if trial.state == "done" and trial.curve.values)
    bound = min((_last(trial) for trial in ended), default=math.inf)
    found: list[tuple[float, int, float, TrialView]] = []
    for trial in snapshot.trials:
        needed = _seconds_left(trial)
        if needed is not None and needed <= seconds:
            final = _final(trial)
            if final < bound:
                found.append((final, trial.number, needed, trial))
    best = sorted(found, key=lambda each: each[:2])[:n_devices]
    return [
        trial
        for _, _, needed, trial in best
        if trial.state in ("parked", "stored") and seconds <= _SLACK * needed
    ]


def _seconds_left(trial: TrialView) -> float | None:
    """Device time until its end, at the pace until now; None if that is not known."""
    units, left = trial.curve.units, trial.units_left
    if not units or left is None:
        return None
    used = trial.curve.device_seconds
    # Its opening is in the first unit only.
    pace = (used[-1] - used[0]) / (units - 1) if units > 1 else used[0]
    return left * pace if 0 <= pace < math.inf else None


def _final(trial: TrialView) -> float:
    """Its last value, if it falls on as in its last half with the logarithm of its age."""
    last, units = _last(trial), trial.curve.units
    fall = trial.curve.values[-1 - units // 2] - last
    if not 0 < fall < math.inf:
        return last
    return last - fall * math.log1p((trial.units_left or 0) / units)


def _last(trial: TrialView) -> float:
    last = trial.curve.values[-1]
    return last if math.isfinite(last) else math.inf
