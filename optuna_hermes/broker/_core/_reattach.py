"""Reports of processes to a new broker: each is checked against the ledger. Pure."""

from __future__ import annotations

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._lease_ends import LeaseEnds
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._recovery import Recovery
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Begin, Reattach
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.ledger._records import LeaseRecord


def reattach(
    recovery: Recovery,
    ends: LeaseEnds,
    turn: Turn,
    study: Study,
    connection: int,
    message: Reattach,
) -> str | None:
    """Let a process go on with what it has from an earlier broker.

    Returns:
        Reason of a refusal. A process whose trial is on disk, or over, is not refused: it leaves
        once the ledger has what it says.
    """
    state, lease = turn.state, study.unclaimed_leases.pop(message.epoch, None)
    holder = recovery.reattached(turn, state.clients[connection].pid, message)
    known = holder is not None
    trial = None if message.number is None else study.trials.get(message.number)
    if trial is not None and lease is None and _is_on_disk(trial, message):
        _acknowledge(turn, connection, message)
        return None
    leased = any(slot.lease for slot in _slots(state, message))
    if trial is not None and lease is not None and message.parked and leased:
        turn.end_lease(lease)  # it has stopped, another one trains
        lease, known = None, True
    reason = _refusal(state, study, trial, lease, message, known)
    if reason is not None:
        if lease is not None:
            turn.end_lease(lease)
        if trial is not None and known:
            _take_reports(turn, trial, message)
            if not trial.live:  # its driver was faster to say so
                trial.device_seconds = max(trial.device_seconds, message.device_seconds)
        if trial is not None:
            trial.count_reported()
            if known:
                turn.save(trial)  # with the units it had not told of
        over = trial is not None and not trial.live and message.ended
        return None if over else reason
    if lease is not None:
        _adopt(turn, study, lease, connection, message, holder)
    elif trial is not None:
        trial.come_back(connection, message.epoch, message.devices, turn.now)
    if message.number is not None:
        trial = study.trials[message.number]
        _restore(turn, trial, message, 0.0 if lease is None else _leased_seconds(message))
        _acknowledge(turn, connection, message)
        if message.parked is not None:
            ends.parked(turn, connection, message.parked)
        if message.requested_tier is not None and trial.connection is not None:
            trial.ask(message.requested_tier, turn.now)
    return None


def _refusal(
    state: BrokerState,
    study: Study,
    trial: LiveTrial | None,
    lease: LeaseRecord | None,
    message: Reattach,
    known: bool,
) -> str | None:
    """Reason why the report of a process disagrees with what is known; None if it agrees."""
    if trial is None and message.parked is not None:
        return "A trial that is parked has a number."
    if trial is not None and not trial.live:
        return f"Trial {trial.number} has ended."
    if trial is not None and (trial.connection is not None or study.is_elsewhere(trial)):
        return f"Another process has trial {trial.number}."
    slots, words = _slots(state, message), ", ".join(message.devices)
    if lease is None:
        if not known or trial is None or message.parked is None:
            return f"Its lease (epoch {message.epoch}) is over."
        # One on a GPU never leaves it but over disk: another GPU would wait for it in vain.
        has_gpus = any(slot.device.kind == "gpu" for slot in state.slots.values())
        missing = len(slots) < len(message.devices) and has_gpus
        stays = missing and not message.parked.can_store
        return f"Its trial can go on only on {words}, which is in use no more." if stays else None
    if lease.number not in (None, message.number):
        return f"Its lease (epoch {message.epoch}) is of trial {lease.number}."
    granted = tuple(f"{state.host}/{id_}" for id_ in message.devices)
    if len(slots) < len(message.devices) or lease.devices != granted:
        return f"Its lease (epoch {message.epoch}) is not for device {words}."
    taken = message.parked is None and any(_is_taken(state, slot) for slot in slots)
    if taken or any(slot.lease for slot in slots):
        return f"Another process has device {words}."
    return None


def _slots(state: BrokerState, message: Reattach) -> list[Slot]:
    slots = state.slots
    return [slots[id_] for id_ in message.devices if id_ in slots]


def _is_taken(state: BrokerState, slot: Slot) -> bool:
    """True if a process that is recovering has a device; not if that lease never was."""
    if slot.recovering is None:
        return False
    holder = state.recovering[slot.recovering].holder
    study = state.studies.get(holder.study)
    return study is None or holder.epoch in study.unclaimed_leases


def _adopt(
    turn: Turn,
    study: Study,
    record: LeaseRecord,
    connection: int,
    message: Reattach,
    holder: ServedProcess | None,
) -> None:
    """Continue a lease of an earlier broker under its old epoch, for a slice from now."""
    lease = Lease(
        epoch=record.epoch,
        study=study.spec.key,
        number=record.number,
        devices=message.devices,
        connection=connection,
        started=turn.now - message.held_seconds,
        slice_started=turn.now,
        deadline=turn.now + study.spec.slice_seconds,
        from_tier=None,
        last_progress=turn.now,
        training=message.training,
        adopted=True,
        reported=bool(message.reports),
        energy_joules=holder.energy_joules if holder and holder.epoch == record.epoch else None,
    )
    for slot in _slots(turn.state, message):
        slot.lease = lease
    study.turn_seconds -= lease.device_seconds(turn.now)  # of the turns under an earlier broker
    if message.number is None:
        return
    trial_id = message.trial_id or 0
    begin = Begin(epoch=lease.epoch, number=message.number, trial_id=trial_id)
    progress.begin(turn, lease, begin)
    study.trials[message.number].can_store = message.can_store
    lease.yielding = message.requested_tier


def _restore(turn: Turn, trial: LiveTrial, message: Reattach, leased_seconds: float) -> None:
    """Take what a process says of its trial, which has had its lease for ``leased_seconds``."""
    trial.units_left, trial.params = message.units_left, message.params or trial.params
    # The last leases that ended may not have reached the ledger.
    trial.device_seconds = max(trial.device_seconds, message.device_seconds - leased_seconds)
    trial.needs(message.need_bytes)
    trial.sizes = None
    if message.sizes and message.sizes.valid:
        trial.take_sizes(message.sizes)
    _take_reports(turn, trial, message)
    detail = {"device": trial.device, "epoch": trial.epoch, "state": trial.state}
    turn.log(trial.study, trial.number, "reattached", detail)


def _take_reports(turn: Turn, trial: LiveTrial, message: Reattach) -> None:
    """Take the last reports and checkpoints of a process, as far as they are new."""
    for report in message.reports:
        if not progress.has_reported(trial, report):
            held = max(0.0, _leased_seconds(message) - report.age_seconds * len(message.devices))
            progress.add_report(turn, trial, held, report)
    for checkpoint in message.checkpoints:
        progress.keep(turn, trial, checkpoint)


def _leased_seconds(message: Reattach) -> float:
    return message.held_seconds * len(message.devices)


def _is_on_disk(trial: LiveTrial, message: Reattach) -> bool:
    """True if a process has left its trial on disk, and the ledger knows where."""
    stored = None if message.parked is None else message.parked.checkpoint
    return stored is not None and any(each.path == stored.path for each in trial.checkpoints)


def _acknowledge(turn: Turn, connection: int, message: Reattach) -> None:
    for checkpoint in message.checkpoints:
        turn.send(connection, wire.CheckpointAck(path=checkpoint.path))
