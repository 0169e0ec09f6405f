"""Event log: the events of each run, for the ledger. Nothing waits for their writing. Pure."""

from __future__ import annotations

from typing import Any

from optuna_hermes.broker._core._book import Book, Lease
from optuna_hermes.broker._core._run import LiveTrial
from optuna_hermes.broker._protocol import Ended, Report
from optuna_hermes.ledger._base import EventRecord
from optuna_hermes.model import TierName, Wish

ROUTINE = frozenset({"granted", "suspended", "evicted", "moved", "batch size"})
"""Events of every slice: they are in a trial's event log, but not in the broker's log."""

POWER = frozenset({"powered down", "powered up", "power-down failed", "power-up failed"})
"""Events that are logged once for all studies, by the module that runs the commands."""

_ORDER: tuple[TierName, ...] = ("resident", "host", "disk")


def admitted(book: Book, run: LiveTrial, now: float) -> EventRecord:
    """Event: a run has come into the ``Book`` for the first time."""
    detail = {} if run.device is None else {"device": run.device, "epoch": run.epoch}
    return book.event(run.study, run.number, "admitted", detail, now)


def granted(
    book: Book, run: LiveTrial, lease: Lease, came_from: str | None, now: float
) -> list[EventRecord]:
    """Events: a run has a device again, maybe on another host than before."""
    events = []
    if came_from not in (None, book.host):
        detail = {"host": book.host, "from": came_from}
        events.append(book.event(run.study, run.number, "carried on", detail, now))
    grant: dict[str, Any] = {
        "device": lease.device,
        "from": lease.from_tier,
        "epoch": lease.epoch,
    }
    if len(lease.devices) > 1:
        grant["devices"] = list(lease.devices)
    events.append(book.event(run.study, run.number, "granted", grant, now))
    return events


def resumed(book: Book, run: LiveTrial, now: float) -> EventRecord:
    """Event: a run goes on, or waits on, with another broker than before."""
    detail = {"device": run.device, "epoch": run.epoch, "state": run.state}
    return book.event(run.study, run.number, "resumed", detail, now)


def suspended(book: Book, run: LiveTrial, tier: TierName, now: float) -> EventRecord:
    """Event: a run has given its device back."""
    detail = {"tier": tier, "device": run.device, "units": run.curve.units}
    return book.event(run.study, run.number, "suspended", detail, now)


def resized(book: Book, run: LiveTrial, before: int, size: int, now: float) -> EventRecord:
    """Event: the batches of a run have another size from here on."""
    detail = {"from": before, "to": size, "device": run.device, "units": run.curve.units}
    return book.event(run.study, run.number, "batch size", detail, now)


def moved(book: Book, run: LiveTrial, tier: TierName, now: float) -> list[EventRecord]:
    """Event: a parked run is in another tier than before, ``evicted`` if that is a lower one."""
    before = run.tier
    if before is None or before == tier:
        return []
    kind = "evicted" if _ORDER.index(tier) > _ORDER.index(before) else "moved"
    detail = {"tier": tier, "from": before, "device": run.device}
    return [book.event(run.study, run.number, kind, detail, now)]


def went_back(
    book: Book, lease: Lease, run: LiveTrial, message: Report, now: float
) -> list[EventRecord]:
    """Event: a run from disk reports a known unit again, so it took an older checkpoint."""
    newest = run.checkpoints[-1] if run.checkpoints else None
    if lease.reported or lease.from_tier != "disk" or newest is None:
        return []
    if message.unit > newest.units:
        return []
    detail = {"path": newest.path, "units": newest.units, "went_back_to": message.unit - 1}
    return [book.event(run.study, run.number, "checkpoint unreadable", detail, now)]


def killed(
    book: Book, run: LiveTrial | None, pid: int, reason: str, now: float
) -> list[EventRecord]:
    """Event: the process of a run is sent SIGKILL."""
    if run is None:
        return []
    detail = {"pid": pid, "device": run.device, "reason": reason}
    return [book.event(run.study, run.number, "killed", detail, now)]


def lost(book: Book, run: LiveTrial, now: float) -> EventRecord:
    """Event: the process of a run is gone without notice; made while the run still has it."""
    detail = {"device": run.device, "units": run.curve.units}
    return book.event(run.study, run.number, "process lost", detail, now)


def ended(book: Book, run: LiveTrial, message: Ended, now: float) -> EventRecord:
    """Event: a run is over, ``failed`` if its own code raised."""
    if message.state == "failed":
        detail = {} if message.error is None else {"error": message.error}
        return book.event(run.study, run.number, "failed", detail, now)
    return book.event(run.study, run.number, "finished", {"units": run.curve.units}, now)


def wished(
    book: Book, run: LiveTrial, before: Wish | None, wish: Wish | None, now: float
) -> EventRecord:
    """Event: the override of a run has changed."""
    kind = f"no longer {before}" if wish is None else wish
    return book.event(run.study, run.number, kind, {}, now)
