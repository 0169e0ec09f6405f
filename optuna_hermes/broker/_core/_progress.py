"""Messages of a trial that holds a lease: units, checkpoints, its beginning. Pure."""

from __future__ import annotations

import math

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _retries as retries
from optuna_hermes.broker._core._admission import KEPT_CHECKPOINTS, admit_trial
from optuna_hermes.broker._core._broker_state import BrokerState, Lease
from optuna_hermes.broker._core._events import DropCheckpoint, NameLease
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.ledger._records import CheckpointRecord, ReportRecord
from optuna_hermes.model import BatchSizes, Checkpoint, OverheadKind, moving_average


def begin(turn: Turn, lease: Lease, message: wire.Begin) -> None:
    """Bind a lease to the trial, new or stored, that its holder has found."""
    if lease.number not in (None, message.number):
        return
    study = turn.state.studies[lease.study]
    is_new = message.number not in study.trials
    # A worker that found a trial itself begins anew; a driver may have adopted it meanwhile.
    anew = lease.number is None and not lease.adopted
    trial = admit_begun(turn, study, lease.connection, message, anew=anew)
    if trial is None:
        lease.refused = True
        return
    turn.claim(trial)
    trial.start(lease, turn.state.host)
    lease.begun = True
    if is_new:
        _event_log.admitted(turn, trial)
    if lease.number is None:
        lease.number = message.number
        trial.slices += 1
        turn.add(NameLease(study=lease.study, epoch=lease.epoch, number=trial.number))
    turn.save(trial)


def admit_begun(
    turn: Turn, study: Study, connection: int, message: wire.Begin, *, anew: bool
) -> LiveTrial | None:
    """Admit the trial that a worker begins; None, and the worker is killed, if it is not for it.

    A trial that may go on, elsewhere or from a checkpoint, is not begun ``anew``.
    """
    trial = admit_trial(study, message.number, message.trial_id, turn.now)
    listed = study.listed.pop(trial.number, None)
    if listed is not None and not trial.params:
        trial.params = dict(listed.params)
    free = trial.connection in (None, connection) and not study.is_elsewhere(trial)
    if trial.live and free and not (anew and (trial.recovering or trial.checkpoints)):
        return trial
    # On SQLite two workers may take one trial from Optuna's queue: the first one has it.
    why = "another process has trial {}" if trial.live else "trial {} is over"
    pid, reason = turn.state.clients[connection].pid, why.format(trial.number)
    turn.kill(connection, pid, reason)
    _event_log.killed(turn, trial, pid, reason)
    return None


def training(
    state: BrokerState, lease: Lease, trial: LiveTrial, message: wire.FirstBatch, now: float
) -> None:
    """Note the first batch since the grant: all of the trial is on its device.

    Its process keeps the host memory where it has waited.
    """
    trial.can_store = message.can_store
    trial.params = message.params or trial.params
    if lease.training:
        return
    lease.training = True
    study = state.studies[lease.study]
    # Only now it is known that this objective waits for its device at its first batch.
    waits = message.can_store and not message.late
    study.sets_up = study.sets_up or (study.spec.sets_up and waits)
    retries.trained(study, trial.number)
    kind: OverheadKind = "opening"
    if lease.from_tier == "disk":
        study.failed_reads = 0
    if lease.from_tier is not None:
        kind = "resuming"
        study.measure(lease.from_tier, now - lease.started)
        study.switches += 1
    elif not (trial.units or lease.adopted or message.late):
        study.opening_seconds = moving_average(study.opening_seconds, now - lease.started)
    if not message.late:  # else most of it was training
        study.add_overhead(kind, lease.device_seconds(now))
    if message.can_store and not (lease.yielding or study.is_elastic):
        # What it took to come here may be longer than the slice, in which it would train nothing.
        lease.deadline = max(lease.deadline, now + study.spec.slice_seconds / 2)


def report(turn: Turn, lease: Lease, trial: LiveTrial, message: wire.Report) -> None:
    """Add a unit; one that is reported late may be known."""
    if message.age_seconds and has_reported(trial, message):
        return
    _event_log.went_back(turn, lease, trial, message)
    lease.reported = True
    trial.units_left, trial.params = message.units_left, message.params or trial.params
    then = turn.now - message.age_seconds
    add_report(turn, trial, max(0.0, lease.device_seconds(then)), message)


def has_reported(trial: LiveTrial, message: wire.Report) -> bool:
    """True if a unit is known with this value."""
    place = message.unit - 1
    if place >= trial.curve.units or trial.curve.steps[place] != message.step:
        return False
    known = trial.curve.values[place]
    return known == message.value or (math.isnan(known) and math.isnan(message.value))


def add_report(turn: Turn, trial: LiveTrial, held: float, message: wire.Report) -> None:
    """Add a report to curve and ledger, unless the trial is another host's by now.

    ``held`` is the device time of its lease until then.
    """
    study = turn.state.studies[trial.study]
    if study.is_elsewhere(trial):
        return
    seconds = trial.device_seconds + held
    trial.units += 1
    trial.curve = trial.curve.with_report(message.unit, message.step, message.value, seconds)
    further = message.unit > trial.furthest
    # A repeated one, or the first one after a loss, may count what was lost: better than nothing.
    if (further and not trial.losses) or not study.mean_unit_seconds:
        unit_seconds = trial.curve.last_unit_seconds
        study.mean_unit_seconds = moving_average(study.mean_unit_seconds, unit_seconds)
    if further:  # earlier losses of processes did not keep the trial from going on
        trial.furthest, trial.losses, trial.lost_at = message.unit, 0, None
    turn.add(
        ReportRecord(
            study=trial.study,
            number=trial.number,
            unit=message.unit,
            step=message.step,
            value=message.value,
            device_seconds=seconds,
            at=turn.wall - message.age_seconds,
        )
    )


def sizes_reported(turn: Turn, trial: LiveTrial, sizes: BatchSizes) -> None:
    """Take the sizes of a trial's batches, with an event if the current one has changed."""
    if not sizes.valid:
        return
    if trial.sizes is not None and trial.sizes.now != sizes.now:
        _event_log.resized(turn, trial, trial.sizes.now, sizes.now)
    trial.take_sizes(sizes)


def keep(turn: Turn, trial: LiveTrial, checkpoint: Checkpoint) -> None:
    """Add a checkpoint to the ledger, unless it is there, and drop those that it replaces.

    Of a trial that is another host's by now none is added: that host's checkpoints count.
    """
    known = any(each.path == checkpoint.path for each in trial.checkpoints)
    if known or turn.state.studies[trial.study].is_elsewhere(trial):
        return
    for old in trial.checkpoints[: 1 - KEPT_CHECKPOINTS]:
        turn.add(DropCheckpoint(study=trial.study, number=trial.number, path=old.path))
    trial.keep([*trial.checkpoints[1 - KEPT_CHECKPOINTS :], checkpoint])
    turn.add(
        CheckpointRecord(
            study=trial.study,
            number=trial.number,
            checkpoint=checkpoint,
            at=turn.wall,
        )
    )
