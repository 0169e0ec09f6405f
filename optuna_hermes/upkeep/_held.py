"""Which trials a live process answers for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_hermes import _optuna as private


def held_trials(status: Mapping[str, Any] | None, study: private.Study) -> frozenset[int]:
    """The unfinished trials of a study that a live process answers for.

    Args:
        status: what this host's broker tells, None if there is no broker.
        study: the study.
    """
    entries = [] if status is None else status["studies"]
    key = private.known_key(study)
    entry = next((each for each in entries if each["key"] == key), None)
    if entry is None:
        return frozenset()
    if entry["driver_pid"] is not None:  # it may carry on with any of them at any moment
        trials = study.get_trials(deepcopy=False)
        return frozenset(t.number for t in trials if not t.state.is_finished())
    return frozenset(r["trial"] for r in entry["runs"] if r["state"] in ("running", "parked"))
