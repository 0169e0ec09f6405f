"""Event log: the events of each trial, for the ledger. Nothing waits for their writing. Pure."""

from __future__ import annotations

from typing import Any, TypeGuard

from optuna_hermes.broker._core._broker_state import Lease
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Ended, Report
from optuna_hermes.ledger._records import EventRecord
from optuna_hermes.model import TierName

ROUTINE = frozenset({"granted", "suspended", "evicted", "moved", "batch size"})
"""Events of every slice: they are in a trial's event log, but not in the broker's log."""

POWER = frozenset({"powered down", "powered up", "power-down failed", "power-up failed"})
"""Events that are logged once for all studies, by the module that runs the commands."""

_OF_GRANTS = frozenset({"carried on", "granted"})

_ORDER: tuple[TierName, ...] = ("resident", "host", "disk")


def admitted(turn: Turn, trial: LiveTrial) -> None:
    """Log that the broker sees a trial for the first time."""
    detail = {} if trial.device is None else {"device": trial.device, "epoch": trial.epoch}
    turn.log(trial.study, trial.number, "admitted", detail)


def granted(turn: Turn, trial: LiveTrial, lease: Lease, came_from: str | None) -> None:
    """Log that a trial has a device again, maybe on another host than before."""
    host = turn.state.host
    if came_from not in (None, host):
        turn.log(trial.study, trial.number, "carried on", {"host": host, "from": came_from})
    grant: dict[str, Any] = {"device": lease.device, "from": lease.from_tier, "epoch": lease.epoch}
    if len(lease.devices) > 1:
        grant["devices"] = list(lease.devices)
    turn.log(trial.study, trial.number, "granted", grant)


def is_of_grant(record: object) -> TypeGuard[EventRecord]:
    """True for an event of ``granted``, which is true only once the lease is committed."""
    return isinstance(record, EventRecord) and record.kind in _OF_GRANTS


def suspended(turn: Turn, trial: LiveTrial, tier: TierName) -> None:
    detail = {"tier": tier, "device": trial.device, "units": trial.curve.units}
    turn.log(trial.study, trial.number, "suspended", detail)


def resized(turn: Turn, trial: LiveTrial, before: int, size: int) -> None:
    detail = {"from": before, "to": size, "device": trial.device, "units": trial.curve.units}
    turn.log(trial.study, trial.number, "batch size", detail)


def moved(turn: Turn, trial: LiveTrial, tier: TierName) -> None:
    """Log that a parked trial changes its tier, as ``evicted`` if the new one is lower."""
    before = trial.tier
    if before is None or before == tier:
        return
    kind = "evicted" if _ORDER.index(tier) > _ORDER.index(before) else "moved"
    detail = {"tier": tier, "from": before, "device": trial.device}
    turn.log(trial.study, trial.number, kind, detail)


def went_back(turn: Turn, lease: Lease, trial: LiveTrial, message: Report) -> None:
    """Log that a trial from disk reports a known unit again: it took an older checkpoint."""
    newest = trial.checkpoints[-1] if trial.checkpoints else None
    if lease.reported or lease.from_tier != "disk" or newest is None:
        return
    if message.unit <= newest.units:
        detail = {"path": newest.path, "units": newest.units, "went_back_to": message.unit - 1}
        turn.log(trial.study, trial.number, "checkpoint unreadable", detail)


def killed(turn: Turn, trial: LiveTrial | None, pid: int, reason: str) -> None:
    if trial is not None:
        detail = {"pid": pid, "device": trial.device, "reason": reason}
        turn.log(trial.study, trial.number, "killed", detail)


def lost(turn: Turn, trial: LiveTrial) -> None:
    """Log that the process of a trial is gone without notice, while the trial still has it."""
    detail = {"device": trial.device, "units": trial.curve.units}
    turn.log(trial.study, trial.number, "process lost", detail)


def ended(turn: Turn, trial: LiveTrial, message: Ended) -> None:
    """Log that a trial is over, ``failed`` if its own code raised."""
    if message.state == "failed":
        detail = {} if message.error is None else {"error": message.error}
        turn.log(trial.study, trial.number, "failed", detail)
    else:
        turn.log(trial.study, trial.number, "finished", {"units": trial.curve.units})
