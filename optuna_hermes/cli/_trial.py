"""The document of one trial, from Optuna's storage, the ledger and this host's broker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from optuna_hermes.cli._studies import study_and_ledger
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import LIVE_STATES

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.ledger import Ledger, TrialRecord
    from optuna_hermes.model import Curve


def trial_document(
    storage: str, name: str, number: int, broker: dict[str, Any] | None
) -> dict[str, Any]:
    """The figures and the event log of one trial, as plain JSON.

    Args:
        storage: Optuna's storage URL.
        name: the study's name.
        number: the trial's number.
        broker: status of this host's broker, None if there is none.

    Raises:
        InvalidInputError: the study has no such trial, or it was never suspended by this package.
        StorageError: as ``study_and_ledger``.
    """
    with study_and_ledger(storage, name) as (study, ledger):
        return _document(study, ledger, number, broker)


def _document(
    study: Study, ledger: Ledger, number: int, broker: dict[str, Any] | None
) -> dict[str, Any]:
    from optuna_hermes import _optuna
    from optuna_hermes._tables import ends_of
    from optuna_hermes.ledger import live_hosts
    from optuna_hermes.view import holds, serves, state_of

    key = _optuna.study_key(study)
    trials = _optuna.trial_states(study)
    run = next((run for run in ledger.load_trials(key) if run.number == number), None)
    if run is None:
        raise InvalidInputError(_unknown(study.study_name, number, len(trials), number in trials))
    checkpoints = ledger.load_checkpoints(key, number)
    served = serves(broker, key)
    ends = ends_of((each, state.name) for each, state in trials.items())
    alive = {host.instance for host in live_hosts(ledger)}
    held = holds(run, served=served, alive=alive)
    state = state_of(run, ends.get(number), held=held, stored=bool(checkpoints))
    curve = ledger.load_curves(key).get(number)
    return {
        "study": study.study_name,
        "trial": number,
        "state": state,
        "wish": ledger.load_wishes(key).get(number) if state in LIVE_STATES else None,
        "where": _where(run, state, _live(broker, key, number)),
        "params": _optuna.params_of_id(study, run.trial_id) if number in trials else {},
        "curve": _curve(curve, _optuna.sign(study)),
        "units_trained": run.units,
        "slices": run.slices,
        "suspensions": run.suspensions,
        "device_seconds": run.device_seconds,
        "watt_hours": run.watt_hours,
        "submitted": run.submitted,
        "updated": run.updated,
        "checkpoints": [
            {"path": each.path, "units": each.units, "size_bytes": each.size_bytes, "at": each.at}
            for each in checkpoints
        ],
        "events": [
            {"at": each.at, "kind": each.kind, "detail": each.detail}
            for each in ledger.load_events(key, number)
        ],
    }


def _unknown(name: str, number: int, count: int, is_trial: bool) -> str:
    if is_trial:
        return (
            f"Trial {number} of study {name!r} has no story, for it never had a device of this "
            "package's: see `optuna-hermes trials`."
        )
    numbers = f"0 to {count - 1}" if count else "none yet"
    return f"Study {name!r} has no trial {number} (there: {numbers}): name one of those."


def _live(broker: dict[str, Any] | None, key: str, number: int) -> dict[str, Any] | None:
    """The entry of a trial in the broker's status."""
    entries = [] if broker is None else broker["studies"]
    runs = (run for entry in entries if entry["key"] == key for run in entry.get("trials", []))
    return next((run for run in runs if run["trial"] == number), None)


def _where(run: TrialRecord, state: str, live: dict[str, Any] | None) -> dict[str, Any]:
    """Host, tier and device of a trial's state; no tier once it is over, or before it has any."""
    if state in ("done", "failed", "pending"):
        return {"host": run.host, "tier": None, "device": None}
    if state == "stored":
        return {"host": run.host, "tier": "disk", "device": None}
    known = live or {"tier": run.tier, "device": None}
    return {"host": run.host, "tier": known["tier"], "device": known["device"]}


def _curve(curve: Curve | None, sign: float) -> dict[str, Any]:
    if curve is None or not curve.units:
        return {"units": 0, "values": [], "steps": [], "best": None}
    values = [sign * value for value in curve.values]
    finite = [(sign * value, unit) for unit, value in enumerate(values, 1) if math.isfinite(value)]
    best = min(finite, default=None)
    return {
        "units": len(values),
        "values": values,
        "steps": list(curve.steps),
        "best": best and {"value": sign * best[0], "unit": best[1]},
    }
