"""The values that are shown of a broker's status, or of a ledger's history; pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._curve_shape import shape_of
from optuna_hermes.model import Curve
from optuna_hermes.view import formats

if TYPE_CHECKING:
    from optuna_hermes.broker._protocol import BrokerStatus, DeviceStatus, StudyStatus, TrialRow
    from optuna_hermes.view.history import StudyHistory, TrialHistory

STATES = ("running", "parked", "stored", "pending", "done", "failed")
"""The states of a trial, in the order of its life cycle."""

ENDED = ("done", "failed")

ORDERS = ("trial", "value", "slope", "time", "state")
"""The sort keys of trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLine:
    """A trial.

    Args:
        state: as in ``model.TrialStatus``.
        override: see ``model.Override``.
        value: its last one, as the user knows it; None if there is none, or it is not finite.
        slope: recent change of the value per unit.
        curve: some of its values, in order; None for what is not finite.
        seconds: its device time, that of its present leases included.
        tier: of its state while it is suspended.
        device: ids of its devices while it trains.
    """

    number: int
    state: str
    override: str | None = None
    value: float | None = None
    slope: float | None = None
    curve: tuple[float | None, ...] = ()
    units: int = 0
    seconds: float = 0.0
    tier: str | None = None
    device: str | None = None
    slices: int = 0
    suspensions: int = 0
    watt_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLine:
    """A device, and its holder if it has one.

    Args:
        state: of its holder, or the reason why it has none, in words.
        study: name of the holder's study, empty if there is no holder.
        trial: number of the holder, None for a new trial.
        epoch: of the lease, 0 if there is none.
        since_seconds: time since the grant of the lease.
        left_seconds: rest of its slice.
        joules: its energy counter, None if it has none.
        counted: time of the counter's last known change, in Unix time.
    """

    id: str
    state: str
    study: str = ""
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
        best: the best trial and its value.
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
    trials: tuple[TrialLine, ...] = ()
    best: tuple[int, float] | None = None
    device_seconds: float = 0.0
    watt_hours: float | None = None
    read_only: str = ""
    problem: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """The number of trials in each state, without states that have none."""
        found = [trial.state for trial in self.trials]
        return {state: found.count(state) for state in STATES if state in found}


def ordered(
    trials: Iterable[TrialLine], by: str, *, maximize: bool = False, back: bool = False
) -> list[TrialLine]:
    """Trials in an order; those without a known sort key are last in both directions.

    Args:
        trials: in any order.
        by: one of ``ORDERS``: the best value, the steepest improvement, or the most device time
            is first.
        maximize: true if higher values are better.
        back: true for the reverse order.
    """
    sign = -1.0 if maximize else 1.0
    keys: dict[str, Callable[[TrialLine], float | None]] = {
        "trial": lambda trial: 0.0,
        "value": lambda trial: trial.value and sign * trial.value,
        "slope": lambda trial: trial.slope and sign * trial.slope,
        "time": lambda trial: -trial.seconds,
        "state": lambda trial: STATES.index(trial.state),
    }
    key = keys[by]
    lines = sorted(trials, key=lambda trial: (key(trial) or 0.0, trial.number), reverse=back)
    # Sorting keeps the order of equal ones: what is unknown goes to the end, and no more.
    return sorted(lines, key=lambda trial: key(trial) is None)


# -- a broker's status -------------------------------------------------------------------------


def picture_of(broker: BrokerStatus, key: str, at: float, before: Picture | None = None) -> Picture:
    """The picture of a broker's status.

    Args:
        broker: its status, with trials and curves.
        key: of the study to show; the first one is shown if this is not served.
        at: Unix time.
        before: the previous picture: power is measured between the two.
    """
    known = {} if before is None else {each.id: each for each in before.devices}
    found = map(_device, broker.devices)
    devices = tuple(_with_power(device, known.get(device.id), at) for device in found)
    study = broker.study(key) or next(iter(broker.studies), None)
    if study is None:
        return Picture(at=at, host=broker.host, devices=devices)
    held: dict[int | None, list[DeviceLine]] = {}
    for device in devices:
        if device.study == study.name:
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
        trials=tuple(_trial(row, held.get(row.number, [])) for row in study.trials),
        best=None if study.best is None else (study.best.trial, study.best.value),
        device_seconds=study.device_seconds,
        watt_hours=study.watt_hours,
        problem=_problem(study),
    )


def _device(device: DeviceStatus) -> DeviceLine:
    holder = device.holder
    line = DeviceLine(
        id=device.id,
        state=device.problem or formats.idle(device),
        memory_bytes=device.memory_bytes,
        memory_free_bytes=device.memory_free_bytes,
        joules=device.energy_joules,
    )
    if holder is None:
        return line
    return replace(
        line,
        state=holder.state,
        study=holder.study,
        trial=holder.trial,
        epoch=holder.epoch,
        since_seconds=holder.since_seconds,
        left_seconds=holder.left_seconds,
        slice_seconds=holder.slice_seconds,
    )


def _with_power(device: DeviceLine, before: DeviceLine | None, at: float) -> DeviceLine:
    """A device with its power, from its energy counter's last two changes."""
    if device.joules is None or before is None or before.joules is None:
        return replace(device, counted=at)
    # The broker reads counters less often than pictures are taken: between two changes.
    spent, seconds = device.joules - before.joules, at - before.counted
    if spent <= 0 or seconds <= 0:
        return replace(device, counted=before.counted, watts=before.watts)
    return replace(device, counted=at, watts=spent / seconds)


def _trial(row: TrialRow, held: Sequence[DeviceLine]) -> TrialLine:
    trains = sum(device.since_seconds for device in held)
    return TrialLine(
        number=row.number,
        state=row.state,
        override=row.override,
        value=row.value,
        slope=row.slope,
        curve=row.curve,
        units=row.units,
        seconds=row.device_seconds + trains,
        tier=row.tier,
        device=" ".join(device.id for device in held) or None,
        slices=row.slices,
        suspensions=row.suspensions,
        watt_hours=row.watt_hours,
    )


def _problem(study: StudyStatus) -> str:
    if study.problem:
        return study.problem
    if study.away_seconds is not None:
        return "The database does not answer: training goes on."
    if study.draining:
        return "The study is being suspended."
    return ""


# -- a ledger's history -------------------------------------------------------------------------


def picture_of_history(history: StudyHistory, study: str, at: float, read_only: str) -> Picture:
    """The picture of a study that this host's broker does not serve, from its ledger."""
    trials = tuple(_trial_of_history(trial) for trial in history.trials)
    known = [(trial.value, trial.number) for trial in trials if trial.value is not None]
    found = max(known) if history.maximize and known else min(known, default=None)
    return Picture(
        at=at,
        key=history.key,
        study=study,
        studies=(history.key,),
        maximize=history.maximize,
        trials=trials,
        best=None if found is None else (found[1], found[0]),
        device_seconds=history.device_seconds,
        watt_hours=history.watt_hours,
        read_only=read_only,
    )


def _trial_of_history(trial: TrialHistory) -> TrialLine:
    values = tuple(point.value for point in trial.points)
    zeros = (0.0,) * len(values)
    shape = shape_of(Curve(steps=(0,) * len(values), values=values, device_seconds=zeros))
    last = values[-1] if values and math.isfinite(values[-1]) else None
    return TrialLine(
        number=trial.number,
        state=trial.state,
        override=trial.override,
        value=last,
        slope=shape.slope,
        curve=shape.values,
        units=len(values),
        seconds=trial.run.device_seconds,
        tier="disk" if trial.state == "stored" else None,
        slices=trial.run.slices,
        suspensions=trial.run.suspensions,
        watt_hours=trial.run.watt_hours,
    )
