"""The values that are shown of a broker's status, or of a ledger's history; pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
class DeviceLine:
    """A device, and its holder if it has one.

    Args:
        state: of its holder, or the reason why it has none, in words.
        key: of the holder's study, empty if there is no holder.
        trial: number of the holder, None for a new trial.
        epoch: of the lease, 0 if there is none.
        since_seconds: time since the grant of the lease.
        left_seconds: rest of its slice.
        joules: its energy counter, None if it has none.
        counted: time of the counter's last known change, in Unix time.
    """

    id: str
    state: str
    key: str = ""
    trial: int | None = None
    epoch: int = 0
    since_seconds: float = 0.0
    left_seconds: float = 0.0
    slice_seconds: float = 0.0
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    joules: float | None = None
    counted: float = 0.0
    watts: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A host and a study at one moment.

    Args:
        at: Unix time.
        host: this host's name, empty if there is no broker.
        key: of the study, empty if there is none.
        studies: the keys of all studies of the broker.
        policy: empty if no broker serves the study.
        memory: bytes of devices that trials and their processes have, by the trials' numbers.
        counts: the number of trials in each state, without states that have none.
        trials: their device time has that of their present leases, ``device`` all of their devices;
            of very many a broker lists some.
        best: the trial with the best value ever reported, and that value.
        overhead_fraction: of device time, None if no broker counts it.
        read_only: the reason why no overrides are possible now; empty if they are.
        problem: the study's problem, in words; empty if it has none.
    """

    at: float
    host: str = ""
    key: str = ""
    study: str = ""
    studies: tuple[str, ...] = ()
    policy: str = ""
    maximize: bool = False
    devices: tuple[DeviceLine, ...] = ()
    memory: Mapping[int, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    trials: tuple[TrialRow, ...] = ()
    best: tuple[int, float] | None = None
    device_seconds: float = 0.0
    watt_hours: float | None = None
    overhead_fraction: float | None = None
    read_only: str = ""
    problem: str = ""


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
    known = {} if before is None else {each.id: each for each in before.devices}
    found = map(_device, broker.devices)
    devices = tuple(_with_power(device, known.get(device.id), at) for device in found)
    study = broker.study(key) or next(iter(broker.studies), None)
    if study is None:
        return Picture(at=at, host=broker.host, devices=devices)
    held: dict[int | None, list[DeviceLine]] = {}
    for device in devices:
        if device.key == study.key:
            held.setdefault(device.trial, []).append(device)
    return Picture(
        at=at,
        host=broker.host,
        key=study.key,
        study=study.name,
        studies=tuple(each.key for each in broker.studies),
        policy=study.policy,
        maximize=study.maximize,
        devices=devices,
        memory=_memory(broker.devices, study.key),
        counts=_counts(structs.asdict(study.counts)),
        trials=tuple(_trial(row, held.get(row.number, [])) for row in study.trials),
        best=None if study.best is None else (study.best.trial, study.best.value),
        device_seconds=study.device_seconds,
        watt_hours=study.watt_hours,
        overhead_fraction=study.overhead_fraction,
        problem=_problem(study),
    )


def _device(device: DeviceStatus) -> DeviceLine:
    holder = device.holder
    line = DeviceLine(
        id=device.id,
        state=formats.idle(device),
        memory_bytes=device.memory_bytes,
        memory_free_bytes=device.memory_free_bytes,
        joules=device.energy_joules,
    )
    if holder is None:
        return line
    return replace(
        line,
        state=holder.state,
        key=holder.key,
        trial=holder.trial,
        epoch=holder.epoch,
        since_seconds=holder.since_seconds,
        left_seconds=holder.left_seconds,
        slice_seconds=holder.slice_seconds,
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


def _with_power(device: DeviceLine, before: DeviceLine | None, at: float) -> DeviceLine:
    """A device with its power, from its energy counter's last two changes."""
    if device.joules is None or before is None or before.joules is None:
        return replace(device, counted=at)
    # Between two changes, not two pictures: the broker reads counters less often.
    spent, seconds = device.joules - before.joules, at - before.counted
    if spent <= 0 or seconds <= 0:
        return replace(device, counted=before.counted, watts=before.watts)
    return replace(device, counted=at, watts=spent / seconds)


def _trial(row: TrialRow, held: Sequence[DeviceLine]) -> TrialRow:
    # The broker counts device time when a lease ends: on the screen it grows while it lasts.
    trains = sum(device.since_seconds for device in held)
    return structs.replace(
        row,
        device_seconds=row.device_seconds + trains,
        device=" ".join(device.id for device in held) or None,
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


def picture_of_history(history: StudyHistory, study: str, at: float, read_only: str) -> Picture:
    """The picture of a study that this host's broker does not serve, from its ledger."""
    trials = tuple(_trial_of_history(trial) for trial in history.trials)
    best = best_so_far(history)[-1:]
    return Picture(
        at=at,
        key=history.key,
        study=study,
        studies=(history.key,),
        maximize=history.maximize,
        counts=_counts(Counter(trial.state for trial in history.trials)),
        trials=trials,
        best=(best[0].trial, best[0].value) if best else None,
        device_seconds=history.device_seconds,
        watt_hours=history.watt_hours,
        read_only=read_only,
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
