"""The trials as the web page shows them, and values for its JSON; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna_hermes.view._history import StudyHistory, TrialHistory

Json = dict[str, Any]

DIGITS = 6
"""Significant digits of values: more than a screen has pixels."""

OVER = ("done", "failed")
LIVE = ("running", "parked")


def rounded(value: float | None) -> float | None:
    """A value for JSON, rounded; None for NaN and infinity, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def shown_trials(
    history: StudyHistory | None, entry: Mapping[str, Any] | None, wishes: Mapping[int, str]
) -> Json:
    """Every trial by its number: the broker's data where it has them, else the ledger's.

    Args:
        history: from the ledger.
        entry: the study's entry in the broker's status.
        wishes: overrides by trial, as the ledger has them.
    """
    told = {run["trial"]: run for run in entry.get("trials", ())} if entry else {}
    known = {trial.number: trial for trial in history.trials} if history else {}
    return {
        str(number): _trial(known.get(number), told.get(number), wishes.get(number))
        for number in sorted({*told, *known})
    }


def _trial(known: TrialHistory | None, told: Mapping[str, Any] | None, wish: str | None) -> Json:
    found: Json = {}
    if known is not None:
        found = _of_ledger(known, wish)
    if told is not None and found.get("state") not in OVER:
        found |= {
            "state": told["state"],
            "tier": told["tier"],
            "device": told["device"],
            "units": told["units"],
            "value": rounded(told["value"]),
            "slices": told["slices"],
            "suspensions": told["suspensions"],
            "device_seconds": round(told["device_seconds"], 2),
            "watt_hours": rounded(told["watt_hours"]),
            "wish": told.get("wish"),
        }
    return found


def _of_ledger(known: TrialHistory, wish: str | None) -> Json:
    run, last = known.run, known.points[-1] if known.points else None
    return {
        "state": known.state,
        "tier": run.tier if known.state in LIVE else None,
        "device": None,
        "host": run.host,
        "units": last.unit if last else 0,
        "value": rounded(last.value) if last else None,
        "slices": run.slices,
        "suspensions": run.suspensions,
        "device_seconds": round(run.device_seconds, 2),
        "watt_hours": rounded(run.watt_hours),
        "wish": None if known.state in OVER else wish,
    }
