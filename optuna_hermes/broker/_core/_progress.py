"""What a run says while it holds a lease, written into the book. Pure."""

from __future__ import annotations

import math

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _story as story
from optuna_hermes.broker._core._admission import KEPT_CHECKPOINTS, admit_run
from optuna_hermes.broker._core._book import Book, Lease
from optuna_hermes.broker._core._events import Command, DropCheckpoint, Kill, NameLease, Send
from optuna_hermes.broker._core._rows import claim, save
from optuna_hermes.broker._core._run import Run
from optuna_hermes.broker._core._study import Study
from optuna_hermes.ledger._base import CheckpointRecord, ReportRecord
from optuna_hermes.model import Curve, Speed


def begin(book: Book, lease: Lease, message: wire.Begin, now: float, out: list[Command]) -> None:
    """The lease of a new trial, or of a stored run, has found its trial."""
    if lease.number not in (None, message.number):
        return
    study = book.studies[lease.study]
    is_new = message.number not in study.runs
    run = admit_run(study, message.number, message.trial_id, now)
    if not run.live or _is_taken(study, run, lease):
        lease.refused = True
        # On SQLite two workers may take one trial from Optuna's queue: the first one has it.
        pid = book.clients[lease.connection].pid
        what = "another process trains" if run.live else "nobody has to train"
        reason = f"{what} trial {run.number} any more"
        out.append(Kill(connection=lease.connection, pid=pid, reason=reason))
        out.extend(story.killed(book, run, pid, reason, now))
        return
    claim(book, run, out)
    run.state, run.tier, run.waiting_since = "running", None, None
    run.epoch, run.connection = lease.epoch, lease.connection
    run.sits_on(lease.devices)
    run.host = book.host
    if is_new:
        out.append(story.admitted(book, run, now))
    if lease.number is None:
        lease.number = message.number
        run.slices += 1
        counted = study.was_counted(run.number) if lease.adopted else not is_new
        if counted and study.unstarted is not None:
            study.unstarted += 1  # its driver knew of it, so it is not one of those left
        out.append(NameLease(study=lease.study, epoch=lease.epoch, number=run.number))
    save(book, run, now, out)


def _is_taken(study: Study, run: Run, lease: Lease) -> bool:
    """Whether a run is not for the holder of a lease that begins it."""
    if run.connection not in (None, lease.connection) or study.is_elsewhere(run):
        return True
    # Who finds a trial by itself begins anew, though a driver may have adopted it meanwhile.
    found = lease.number is None and not lease.adopted
    return found and (run.awaited or bool(run.checkpoints))


def training(book: Book, lease: Lease, run: Run, message: wire.Training, now: float) -> None:
    """The first batch since the grant begins: all of the run is on its device."""
    run.stores, run.host_bytes = message.stores, 0
    run.params = message.params or run.params
    if lease.training:
        return
    lease.training = True
    if lease.from_tier is not None:
        study = book.studies[lease.study]
        study.measure(lease.from_tier, now - lease.started)
        study.overhead_seconds += lease.device_seconds(now)
        study.switches += 1


def report(
    book: Book, lease: Lease, run: Run, message: wire.Report, now: float, out: list[Command]
) -> None:
    """A unit more; one that is told late may be known."""
    if message.age_seconds and has_reported(run, message):
        return
    out.extend(story.went_back(book, lease, run, message, now))
    lease.reported = True
    run.units_left, run.params = message.units_left, message.params or run.params
    then = now - message.age_seconds
    add_report(book, run, max(0.0, lease.device_seconds(then)), message, now, out)


def has_reported(run: Run, message: wire.Report) -> bool:
    """Whether a unit is known with this value."""
    place = message.unit - 1
    if place >= run.curve.units or run.curve.steps[place] != message.step:
        return False
    known = run.curve.values[place]
    return known == message.value or (math.isnan(known) and math.isnan(message.value))


def add_report(
    book: Book, run: Run, held: float, message: wire.Report, now: float, out: list[Command]
) -> None:
    """Put a report into curve and ledger; its lease had given so much device time by then."""
    then = now - message.age_seconds
    seconds = run.device_seconds + held
    run.units += 1
    if message.unit > run.furthest:
        run.furthest, run.losses = message.unit, 0
    run.curve = _with_report(run.curve, message.unit, message.step, message.value, seconds)
    out.append(
        ReportRecord(
            study=run.study,
            number=run.number,
            unit=message.unit,
            step=message.step,
            value=message.value,
            device_seconds=seconds,
            at=then + book.wall_offset,
        )
    )


def stretches(
    book: Book, run: Run, message: wire.Stretches, now: float, out: list[Command]
) -> None:
    """The sizes of its batches, and maybe another one than before."""
    sizes = message.sizes
    if not sizes.valid:
        return
    if run.sizes is not None and run.sizes.now != sizes.now:
        out.append(story.resized(book, run, run.sizes.now, sizes.now, now))
    take_sizes(run, sizes)


def take_sizes(run: Run, sizes: wire.BatchSizes) -> None:
    """What a run says of its batches; what was measured on other numbers of devices still holds."""
    run.sizes = sizes
    here = len(run.devices)
    speeds = [each for each in run.speeds if each.devices != here]
    speeds += (
        Speed(devices=here, batch_size=size, step_seconds=seconds)
        for size, seconds in sizes.seconds.items()
        if seconds > 0
    )
    run.speeds = tuple(sorted(speeds, key=lambda each: (each.devices, each.batch_size)))


def saved(
    book: Book, connection: int, run: Run, message: wire.Saved, now: float, out: list[Command]
) -> None:
    """A checkpoint more; the run is told once the ledger has it."""
    keep(book, run, message.checkpoint, now, out)
    save(book, run, now, out)
    kept = wire.Kept(path=message.checkpoint.path)
    out.append(Send(connection=connection, message=kept))


def keep(
    book: Book, run: Run, checkpoint: wire.SavedCheckpoint, now: float, out: list[Command]
) -> None:
    """Put a checkpoint into the ledger, unless it is there, and forget those that it replaces."""
    if any(each.path == checkpoint.path for each in run.checkpoints):
        return
    for old in run.checkpoints[: 1 - KEPT_CHECKPOINTS]:
        out.append(DropCheckpoint(study=run.study, path=old.path))
    run.checkpoints = [*run.checkpoints[1 - KEPT_CHECKPOINTS :], checkpoint]
    out.append(
        CheckpointRecord(
            study=run.study,
            number=run.number,
            path=checkpoint.path,
            units=checkpoint.units,
            size_bytes=checkpoint.size_bytes,
            sha256=checkpoint.sha256,
            at=now + book.wall_offset,
        )
    )


def _with_report(curve: Curve, unit: int, step: int, value: float, seconds: float) -> Curve:
    """The curve with ``unit`` (from 1) reported; a unit that is trained again takes its place."""
    keep = unit - 1
    return Curve(
        steps=(*curve.steps[:keep], step),
        values=(*curve.values[:keep], value),
        device_seconds=(*curve.device_seconds[:keep], seconds),
    )
