"""The values that are shown of a broker's status, or of a ledger's history; pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from msgspec import structs

from optuna_hermes.broker._core._curve_shape import shape_of
from optuna_hermes.broker._protocol import TrialRow
from optuna_hermes.ledger import outage_phrase
from optuna_hermes.model import Curve, Override, TrialStatus
from optuna_hermes.view import formats
from optuna_hermes.view.history import StudyHistory, TrialHistory, best_so_far

if TYPE_CHECKING:
    from optuna_hermes.broker._protocol import BrokerStatus, DeviceStatus, StudyStatus

ENDED = ("done", "failed")
ORDERS = ("trial", "value", "slope", "time", "state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """The power of a device, from its energy counter's last two changes."""

    joules: float  # the counter
    counted: float  # Unix time of its last known change
    watts: float | None = None  # None until it has changed twice


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A host and a study at one moment."""

    at: float  # Unix time
    host: str = ""  # this host's name, empty if there is no broker
    key: str = ""  # of the study, empty if there is none
    study: str = ""
    studies: tuple[str, ...] = ()  # the keys of all studies of the broker
    policy: str = ""  # empty if no broker serves the study
    maximize: bool = False
    devices: tuple[DeviceStatus, ...] = ()
    power: Mapping[str, Power] = field(default_factory=dict)  # of devices with an energy counter
    # Bytes of devices that trials and their processes have, by the trials' numbers.
    memory: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # of trials, by states that some have
    # Their device time has that of their present leases, ``device`` all of their devices; of very
    # many a broker lists some.
    trials: tuple[TrialRow, ...] = ()
    best: tuple[int, float] | None = None  # the trial with the best value ever, and that value
    device_seconds: float = 0.0
    watt_hours: float | None = None
    overhead_fraction: float | None = None  # of device time, None if no broker counts it
    read_only: str = ""  # why no overrides are possible now; empty if they are
    problem: str = ""  # of the study, in words; empty if it has none


def ordered(
    trials: Iterable[TrialRow], by: str, *, maximize: bool = False, back: bool = False
) -> list[TrialRow]:
    """Trials in one of ``ORDERS``: the best value, steepest improvement, most device time first."""
    sign = -1.0 if maximize else 1.0
    keys: dict[str, Callable[[TrialRow], float | None]] = {
        "trial": lambda trial: 0.0,
        "value": lambda trial: trial.value and sign * trial.value,
        "slope": lambda trial: trial.slope and sign * trial.slope,
        "time": lambda trial: -trial.device_seconds,
        "state": lambda trial: formats.STATES.index(trial.state),
    }
    key = keys[by]
    lines = sorted(trials, key=lambda trial: (key(trial) or 0.0, trial.number), reverse=back)
    # In both directions, so after the reversal. Sorting keeps the order of equal ones: what is
    # unknown goes to the end, and no more.
    return sorted(lines, key=lambda trial: key(trial) is None)


# -- a broker's status -------------------------------------------------------------------------


def picture_of(broker: BrokerStatus, key: str, at: float, before: Picture | None = None) -> Picture:
    """The picture of a broker's status, with the study ``key``, or else the first one.

    Power is measured between the picture ``before`` and this one.
    """
    power = _power(broker.devices, {} if before is None else before.power, at)
    study = broker.study(key) or next(iter(broker.studies), None)
    if study is None:
        return Picture(at=at, host=broker.host, devices=broker.devices, power=power)
    return Picture(
        at=at,
        host=broker.host,
        key=study.key,
        study=study.name,
        studies=tuple(each.key for each in broker.studies),
        policy=study.policy,
        maximize=study.maximize,
        devices=broker.devices,
        power=power,
        memory=_memory(broker.devices, study.key),
        counts=_counts(structs.asdict(study.counts)),
        trials=_trials(study, broker.devices),
        best=None if study.best is None else (study.best.trial, study.best.value),
        device_seconds=study.device_seconds,
        watt_hours=study.watt_hours,
        overhead_fraction=study.overhead_fraction,
        problem=_problem(study),
    )


def _memory(devices: Iterable[DeviceStatus], key: str) -> dict[int, int]:
    """Bytes that trials of a study and their processes have, as far as they are known."""
    found: dict[int, int] = {}
    for device in devices:
        for each in device.residents:
            if each.key == key and each.held_bytes is not None:
                taken = each.held_bytes + (each.process_bytes or 0)
                found[each.trial] = found.get(each.trial, 0) + taken
    return found


def _power(
    devices: Iterable[DeviceStatus], before: Mapping[str, Power], at: float
) -> dict[str, Power]:
    return {
        device.id: _counted(device.energy_joules, before.get(device.id), at)
        for device in devices
        if device.energy_joules is not None
    }


def _counted(joules: float, before: Power | None, at: float) -> Power:
    if before is None:
        return Power(joules=joules, counted=at)
    # Between two changes, not two pictures: the broker reads counters less often.
    spent, seconds = joules - before.joules, at - before.counted
    if spent <= 0 or seconds <= 0:
        return replace(before, joules=joules)
    return Power(joules=joules, counted=at, watts=spent / seconds)


def _trials(study: StudyStatus, devices: Iterable[DeviceStatus]) -> tuple[TrialRow, ...]:
    held: dict[int | None, dict[str, float]] = {}
    for device in devices:
        if device.holder is not None and device.holder.key == study.key:
            held.setdefault(device.holder.trial, {})[device.id] = device.holder.since_seconds
    # The broker counts device time when a lease ends: on the screen it grows while it lasts.
    return tuple(
        structs.replace(
            row,
            device_seconds=row.device_seconds + sum(held.get(row.number, {}).values()),
            device=" ".join(held.get(row.number, {})) or None,
        )
        for row in study.trials
    )


def _counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {state: counts[state] for state in formats.STATES if counts.get(state)}


def _problem(study: StudyStatus) -> str:
    if study.problem:
        return study.problem
    if study.outage_seconds is not None:
        return f"The database {outage_phrase(study.outage_reason)}: training goes on."
    if study.draining:
        return "The study is being suspended."
    return ""


# -- a ledger's history -------------------------------------------------------------------------


def picture_of_history(history: StudyHistory, study: str) -> Picture:
    """The picture of a study that this host's broker does not serve, from its ledger.

    ``at`` and ``read_only`` are for the caller to set.
    """
    trials = tuple(_trial_of_history(trial) for trial in history.trials)
    best = best_so_far(history)[-1:]
    return Picture(
        at=0.0,
        key=history.key,
        study=study,
        studies=(history.key,),
        maximize=history.maximize,
        counts=_counts(Counter(trial.state for trial in history.trials)),
        trials=trials,
        best=(best[0].trial, best[0].value) if best else None,
        device_seconds=history.device_seconds,
        watt_hours=history.watt_hours,
    )


def _trial_of_history(trial: TrialHistory) -> TrialRow:
    record = trial.record
    values = tuple(point.value for point in trial.points)
    # The shape is of values alone: steps and times do not count.
    zeros = (0.0,) * len(values)
    shape = shape_of(Curve(steps=(0,) * len(values), values=values, device_seconds=zeros))
    last = values[-1] if values and math.isfinite(values[-1]) else None
    return TrialRow(
        number=trial.number,
        state=cast(TrialStatus, trial.state),
        override=cast(Override | None, trial.override),
        tier="disk" if trial.state == "stored" else None,
        held_bytes=None,
        host_bytes=0,
        device=None,
        units=len(values),
        units_trained=record.units,
        value=last,
        slices=record.slices,
        suspensions=record.suspensions,
        device_seconds=record.device_seconds,
        watt_hours=record.watt_hours,
        curve=shape.values,
        slope=shape.slope,
    )
