"""Status of a broker, as plain JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core._broker_state import BrokerState, Slot, taken_joules
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.model import Override

if TYPE_CHECKING:
    from optuna_hermes.broker._core._curve_shape import Shape
    from optuna_hermes.curves import CurveCache

JOULES_PER_WATT_HOUR = 3600.0

MAX_LISTED = 5_000
"""Trials of a study up to which all are listed; beyond, those that have a process."""


def document(
    state: BrokerState,
    now: float,
    *,
    problems: Mapping[str, str],
    trials: bool,
    shapes: CurveCache[Shape] | None = None,
) -> dict[str, Any]:
    """Return the devices with their holders, and the studies with their trials.

    Args:
        state: the broker's state.
        now: seconds of the broker's clock.
        problems: why a device cannot be granted, by its id; empty if it can.
        trials: whether to list every trial of every study.
        shapes: of the curves of the trials that are listed; None leaves them out.
    """
    studies = [_study(study, state, now, trials=trials) for study in state.studies.values()]
    if trials and shapes is not None:
        _add_shapes(studies, state, shapes)
    return {
        "host": state.host,
        "host_memory": {
            "used_bytes": state.host_used_bytes,
            "budget_bytes": state.host_budget_bytes,
        },
        "awaited": sorted({each.holder.pid for each in state.awaited.values()}),
        "devices": [
            _device(slot, state, now) | {"problem": problems[id_]}
            for id_, slot in state.slots.items()
        ],
        "studies": studies,
    }


def _add_shapes(
    studies: list[dict[str, Any]], state: BrokerState, shapes: CurveCache[Shape]
) -> None:
    listed = [
        (shown, state.studies[entry["key"]]) for entry in studies for shown in entry["trials"]
    ]
    found = shapes.each(study.trials[shown["trial"]].curve for shown, study in listed)
    for (shown, study), shape in zip(listed, found, strict=True):
        is_turned = study.spec.maximize
        # None (not finite) has no sign to turn.
        shown["curve"] = [v and -v for v in shape.values] if is_turned else list(shape.values)
        shown["slope"] = None if shape.slope is None else _shown(shape.slope, study)


def _device(slot: Slot, state: BrokerState, now: float) -> dict[str, Any]:
    device = slot.device
    holder = None
    if slot.lease is not None:
        lease = slot.lease
        holder = {
            "study": state.studies[lease.study].spec.name,
            "trial": lease.number,
            "state": "yielding" if lease.yielding else "running",
            "pid": state.pid_of(lease.connection),
            "epoch": lease.epoch,
            "since_seconds": now - lease.started,
            "left_seconds": max(0.0, lease.deadline - now),
            "slice_seconds": lease.deadline - lease.slice_started,
        }
    return {
        "id": device.id,
        "kind": device.kind,
        "healthy": device.healthy,
        "memory_bytes": device.memory_bytes,
        "memory_free_bytes": device.memory_free_bytes,
        "power": slot.power,
        "power_watts": device.power_watts,
        "energy_joules": device.energy_joules,
        "holder": holder,
    }


def _study(study: Study, state: BrokerState, now: float, *, trials: bool) -> dict[str, Any]:
    leases = state.leases_of(study)
    held = sum(lease.device_seconds(now) for lease in leases)
    shown: dict[str, Any] = {
        "key": study.spec.key,
        "name": study.spec.name,
        "policy": study.spec.policy,
        "maximize": study.spec.maximize,
        "policy_folders": list(study.spec.folders),
        "driver_pid": state.pid_of(study.driver),
        "draining": study.draining,
        "problem": study.problem,
        "away_seconds": None if study.away_since is None else now - study.away_since,
        "away_reason": "" if study.away_since is None else study.away_reason,
        "held": _wanted(study, "held"),
        "boosted": _wanted(study, "boosted"),
        "finishing": _wanted(study, "finishing"),
        "all_held": study.all_held,
        "no_room": sorted(trial.number for trial in study.trials.values() if trial.stranded),
        "finished": finished(study, state),
        "unstarted": study.unstarted,
        "workers": {"alive": len(study.workers), "idle": len(study.idle)},
        "counts": _counts(study),
        "lost": list(failures.losses_shown(study)),
        "failures": failures.shown(study.failures),
        "device_seconds": held + sum(trial.device_seconds for trial in study.trials.values()),
        "watt_hours": _watt_hours(_joules(study, state, now)),
        "held_seconds": held,
        "spent_seconds": held + study.spent_seconds,
        "overhead_seconds": study.overhead_seconds,
        "switches": study.switches,
        "best": _best(study),
    }
    if trials:
        shown["trials"] = [_run(trial, study) for trial in _listed(study)]
    return shown


def _wanted(study: Study, override: Override) -> list[int]:
    trials = (
        study.trials.get(number) for number, each in study.overrides.items() if each == override
    )
    return sorted(trial.number for trial in trials if trial is not None and trial.live)


def _joules(study: Study, state: BrokerState, now: float) -> float | None:
    """Energy that all trials took, those that train now included; None if none of it is known."""
    known = [trial.energy_joules for trial in study.trials.values()]
    for lease in state.leases_of(study):
        known.append(taken_joules(state.slots_of(lease), lease, now))
    found = [joules for joules in known if joules is not None]
    return sum(found) if found else None


def _watt_hours(joules: float | None) -> float | None:
    return None if joules is None else joules / JOULES_PER_WATT_HOUR


def _listed(study: Study) -> list[LiveTrial]:
    """Every trial; of a study with very many those that have a process: a frame is bounded."""
    ordered = sorted(study.trials.values(), key=lambda trial: trial.number)
    return [r for r in ordered if len(ordered) <= MAX_LISTED or r.connection is not None]


def finished(study: Study, state: BrokerState) -> bool:
    """True if nothing of the study needs a process any more.

    When it is drained that is when every process could be freed; otherwise when every trial is done
    and no trial may still be created.
    """
    key = study.spec.key
    leases = (slot.lease or slot.reservation for slot in state.slots.values())
    if any(each and each.study == key for each in leases):
        return False
    if study.draining:
        alive = (trial for trial in study.trials.values() if trial.connection is not None)
        return not any(trial.stores for trial in alive)
    if study.coming:  # another host begins a trial, which has no row yet
        return False
    return not study.may_open.any and not any(trial.live for trial in study.trials.values())


def _counts(study: Study) -> dict[str, int]:
    tally = dict.fromkeys(("pending", "running", "parked", "stored", "done", "failed"), 0)
    for trial in study.trials.values():
        tally[trial.state] += 1
    return tally


def _best(study: Study) -> dict[str, Any] | None:
    """The best value that was ever reported: it only gets better."""
    lowest = [(_lowest(trial.curve.values), trial.number) for trial in study.trials.values()]
    value, number = min(lowest, default=(math.inf, 0))
    return {"trial": number, "value": _shown(value, study)} if math.isfinite(value) else None


def _lowest(values: tuple[float, ...]) -> float:
    """The lowest finite value, infinite if there is none."""
    low = min(values, default=math.inf)
    # min() returns a NaN that comes first: no value compares as less.
    return low if math.isfinite(low) else min(filter(math.isfinite, values), default=math.inf)


def _shown(value: float, study: Study) -> float | None:
    """Value as its user knows it, None if not finite: JSON has no NaN."""
    if not math.isfinite(value):
        return None
    return -value if study.spec.maximize else value


def _run(trial: LiveTrial, study: Study) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state,
        "override": study.override_of(trial),
        "tier": trial.tier,
        "held_bytes": trial.held_bytes,
        "host_bytes": trial.host_bytes,
        "device": trial.device if trial.state == "running" else None,
        "units": trial.curve.units,
        "units_trained": trial.units,
        "value": _shown(trial.curve.values[-1], study) if trial.curve.units else None,
        "slices": trial.slices,
        "suspensions": trial.suspensions,
        "device_seconds": trial.device_seconds,
        "watt_hours": _watt_hours(trial.energy_joules),
    }
