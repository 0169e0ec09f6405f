"""Pictures of ``top`` from a broker's status or from a ledger's history; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker._core._shape import shape_of
from optuna_hermes.model import Curve
from optuna_hermes.view import _words as words
from optuna_hermes.view._top._picture import DeviceLine, Picture, TrialLine

if TYPE_CHECKING:
    from optuna_hermes.view._history import StudyHistory, TrialHistory


def picture_of(
    document: Mapping[str, Any], key: str, at: float, before: Picture | None = None
) -> Picture:
    """The picture of a broker's status.

    Args:
        document: its status, with runs and curves.
        key: of the study to show; the first one is shown if this is not served.
        at: wall clock seconds (Unix time).
        before: the previous picture: power is measured between the two.
    """
    known = {} if before is None else {each.id: each for each in before.devices}
    found = (_device(each, words.idle(each)) for each in document["devices"])
    devices = tuple(_with_power(device, known.get(device.id), at) for device in found)
    entries = {str(entry["key"]): entry for entry in document["studies"]}
    entry = entries.get(key) or next(iter(entries.values()), None)
    if entry is None:
        return Picture(at=at, host=document["host"], devices=devices)
    held: dict[int | None, list[DeviceLine]] = {}
    for device in devices:
        if device.study == entry["name"]:
            held.setdefault(device.trial, []).append(device)
    best = entry["best"]
    return Picture(
        at=at,
        host=document["host"],
        key=entry["key"],
        study=entry["name"],
        studies=tuple(entries),
        policy=entry["policy"],
        maximize=entry["maximize"],
        devices=devices,
        trials=tuple(_trial(run, held.get(run["trial"], [])) for run in entry["trials"]),
        best=None if best is None or best["value"] is None else (best["trial"], best["value"]),
        device_seconds=entry["device_seconds"],
        watt_hours=entry["watt_hours"],
        problem=_problem(entry),
    )


def picture_of_history(history: StudyHistory, study: str, at: float, read_only: str) -> Picture:
    """The picture of a study that this host's broker does not serve, from its ledger.

    Args:
        history: of the study.
        study: its name.
        at: wall clock seconds (Unix time).
        read_only: the reason why no overrides are possible.
    """
    trials = tuple(_remembered(trial) for trial in history.trials)
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


def _device(entry: Mapping[str, Any], idle: str) -> DeviceLine:
    holder = entry["holder"]
    fields = {
        "id": entry["id"],
        "memory_bytes": entry["memory_bytes"],
        "memory_free_bytes": entry["memory_free_bytes"],
        "joules": entry["energy_joules"],
    }
    if holder is None:
        return DeviceLine(**fields, state=entry["problem"] or idle)
    seconds = {name: holder[name] for name in ("since_seconds", "left_seconds", "slice_seconds")}
    return DeviceLine(
        **fields,
        **seconds,
        state=holder["state"],
        study=holder["study"],
        trial=holder["trial"],
        epoch=holder["epoch"],
    )


def _with_power(device: DeviceLine, before: DeviceLine | None, at: float) -> DeviceLine:
    """A device with its power, from its energy counter's last two changes."""
    if device.joules is None or before is None or before.joules is None:
        return replace(device, counted=at)
    spent, seconds = device.joules - before.joules, at - before.counted
    if spent <= 0 or seconds <= 0:
        return replace(device, counted=before.counted, watts=before.watts)
    return replace(device, counted=at, watts=spent / seconds)


def _trial(run: Mapping[str, Any], held: Sequence[DeviceLine]) -> TrialLine:
    trains = sum(device.since_seconds for device in held)
    return TrialLine(
        number=run["trial"],
        state=run["state"],
        wish=run["wish"],
        value=run["value"],
        slope=run.get("slope"),
        curve=tuple(run.get("curve", ())),
        units=run["units"],
        seconds=run["device_seconds"] + trains,
        tier=run["tier"],
        device=" ".join(device.id for device in held) or None,
        slices=run["slices"],
        suspensions=run["suspensions"],
        watt_hours=run["watt_hours"],
    )


def _remembered(trial: TrialHistory) -> TrialLine:
    values = tuple(point.value for point in trial.points)
    zeros = (0.0,) * len(values)
    shape = shape_of(Curve(steps=(0,) * len(values), values=values, device_seconds=zeros))
    last = values[-1] if values and math.isfinite(values[-1]) else None
    return TrialLine(
        number=trial.number,
        state=trial.state,
        wish=trial.wish,
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


def _problem(entry: Mapping[str, Any]) -> str:
    if entry["problem"]:
        return str(entry["problem"])
    if entry["away_seconds"] is not None:
        return "The database does not answer: training goes on."
    if entry["draining"]:
        return "The study is being suspended."
    return ""
