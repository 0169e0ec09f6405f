"""The trial to be finished before the budget of its study is spent."""

from __future__ import annotations

import math

import numpy as np

from optuna_hermes.curves import Places
from optuna_hermes.model import Snapshot, TrialView
from optuna_hermes.policies._trial_table import TrialTable, seconds_to_end

_RESERVE = 0.25
"""Of a whole training: units may come to take longer, and a device is free only now and then."""


def due(snapshot: Snapshot, table: TrialTable, rows: Places) -> TrialView | None:
    """The trial that must go on now to end within the budget, None if there is none.

    Of the trials that can still end it is the one that is expected to end lowest, and lower than
    any that has ended. It is due once no more time is left than it needs and a quarter of its
    training takes. The rule is this project's own.

    Args:
        snapshot: the trials.
        table: a table with them.
        rows: theirs in it, those of ``snapshot.finished`` last.
    """
    seconds = snapshot.left.on_each(sum(device.healthy for device in snapshot.devices))
    if not seconds < math.inf:
        return None
    live, over = np.split(rows, [len(snapshot.trials)])
    needed, finals = table.ends()
    can_end = np.flatnonzero(needed[live] <= seconds)
    if not len(can_end):
        return None
    lowest = can_end[np.lexsort((table.numbers[live[can_end]], finals[live[can_end]]))[0]]
    best, final = snapshot.trials[lowest], finals[live[lowest]]
    ended = over[table.done[over] & (table.units[over] > 0)]
    bound = table.curves.values[table.starts[ended] + table.units[ended] - 1].min(initial=math.inf)
    if final >= bound or best.state not in ("parked", "stored"):
        return None
    # As it trains on, both sides fall alike: once due it is due to its end.
    return best if seconds <= seconds_to_end(best, _RESERVE) else None
