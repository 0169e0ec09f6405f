"""Event log: the events of each trial, for the ledger. Nothing waits for their writing. Pure."""

from __future__ import annotations

from typing import Any

from optuna_hermes.broker._core._broker_state import BrokerState, Lease
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._protocol import Ended, Report
from optuna_hermes.ledger._base import EventRecord
from optuna_hermes.model import TierName, Wish

ROUTINE = frozenset({"granted", "suspended", "evicted", "moved", "batch size"})
"""Events of every slice: they are in a trial's event log, but not in the broker's log."""

POWER = frozenset({"powered down", "powered up", "power-down failed", "power-up failed"})
"""Events that are logged once for all studies, by the module that runs the commands."""

_ORDER: tuple[TierName, ...] = ("resident", "host", "disk")


def admitted(state: BrokerState, trial: LiveTrial, now: float) -> EventRecord:
    """Event: a trial has come into the ``BrokerState`` for the first time."""
    detail = {} if trial.device is None else {"device": trial.device, "epoch": trial.epoch}
    return state.event(trial.study, trial.number, "admitted", detail, now)


def granted(
    state: BrokerState, trial: LiveTrial, lease: Lease, came_from: str | None, now: float
) -> list[EventRecord]:
    """Events: a trial has a device again, maybe on another host than before."""
    events = []
    if came_from not in (None, state.host):
        detail = {"host": state.host, "from": came_from}
        events.append(state.event(trial.study, trial.number, "carried on", detail, now))
    grant: dict[str, Any] = {
        "device": lease.device,
        "from": lease.from_tier,
        "epoch": lease.epoch,
    }
    if len(lease.devices) > 1:
        grant["devices"] = list(lease.devices)
    events.append(state.event(trial.study, trial.number, "granted", grant, now))
    return events


def resumed(state: BrokerState, trial: LiveTrial, now: float) -> EventRecord:
    """Event: a trial goes on, or waits on, with another broker than before."""
    detail = {"device": trial.device, "epoch": trial.epoch, "state": trial.state}
    return state.event(trial.study, trial.number, "resumed", detail, now)


def suspended(state: BrokerState, trial: LiveTrial, tier: TierName, now: float) -> EventRecord:
    """Event: a trial has given its device back."""
    detail = {"tier": tier, "device": trial.device, "units": trial.curve.units}
    return state.event(trial.study, trial.number, "suspended", detail, now)


def resized(
    state: BrokerState, trial: LiveTrial, before: int, size: int, now: float
) -> EventRecord:
    """Event: the batches of a trial have another size from here on."""
    detail = {"from": before, "to": size, "device": trial.device, "units": trial.curve.units}
    return state.event(trial.study, trial.number, "batch size", detail, now)


def moved(state: BrokerState, trial: LiveTrial, tier: TierName, now: float) -> list[EventRecord]:
    """Event: a parked trial is in another tier than before, ``evicted`` if that is a lower one."""
    before = trial.tier
    if before is None or before == tier:
        return []
    kind = "evicted" if _ORDER.index(tier) > _ORDER.index(before) else "moved"
    detail = {"tier": tier, "from": before, "device": trial.device}
    return [state.event(trial.study, trial.number, kind, detail, now)]


def went_back(
    state: BrokerState, lease: Lease, trial: LiveTrial, message: Report, now: float
) -> list[EventRecord]:
    """Event: a trial from disk reports a known unit again, so it took an older checkpoint."""
    newest = trial.checkpoints[-1] if trial.checkpoints else None
    if lease.reported or lease.from_tier != "disk" or newest is None:
        return []
    if message.unit > newest.units:
        return []
    detail = {"path": newest.path, "units": newest.units, "went_back_to": message.unit - 1}
    return [state.event(trial.study, trial.number, "checkpoint unreadable", detail, now)]


def killed(
    state: BrokerState, trial: LiveTrial | None, pid: int, reason: str, now: float
) -> list[EventRecord]:
    """Event: the process of a trial is sent SIGKILL."""
    if trial is None:
        return []
    detail = {"pid": pid, "device": trial.device, "reason": reason}
    return [state.event(trial.study, trial.number, "killed", detail, now)]


def lost(state: BrokerState, trial: LiveTrial, now: float) -> EventRecord:
    """Event: the process of a trial is gone without notice; made while the trial still has it."""
    detail = {"device": trial.device, "units": trial.curve.units}
    return state.event(trial.study, trial.number, "process lost", detail, now)


def ended(state: BrokerState, trial: LiveTrial, message: Ended, now: float) -> EventRecord:
    """Event: a trial is over, ``failed`` if its own code raised."""
    if message.state == "failed":
        detail = {} if message.error is None else {"error": message.error}
        return state.event(trial.study, trial.number, "failed", detail, now)
    return state.event(trial.study, trial.number, "finished", {"units": trial.curve.units}, now)


def wished(
    state: BrokerState, trial: LiveTrial, before: Wish | None, wish: Wish | None, now: float
) -> EventRecord:
    """Event: the override of a trial has changed."""
    kind = f"no longer {before}" if wish is None else wish
    return state.event(trial.study, trial.number, kind, {}, now)
