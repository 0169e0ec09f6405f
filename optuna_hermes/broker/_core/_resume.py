"""Processes that go on under a new broker: what they had is compared with the ledger. Pure."""

from __future__ import annotations

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._recovery import Recovery
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._holder import ServedProcess
from optuna_hermes.broker._protocol import Begin, Resume
from optuna_hermes.ledger._records import LeaseRecord


def resume(
    recovery: Recovery, turn: Turn, study: Study, connection: int, message: Resume
) -> str | None:
    """Let a process go on with what it has from an earlier broker.

    Returns:
        The reason if it may not, None if it goes on; the caller handles its ``parked``.
    """
    state, lease = turn.state, study.unclaimed_leases.pop(message.epoch, None)
    pid = state.clients[connection].pid
    known, counted = False, None
    for awaited, each in recovery.of(pid).items():
        if _is_about(message, each.holder):
            known = True
            same_lease = each.holder.epoch == message.epoch
            counted = each.holder.energy_joules if same_lease else None
            recovery.settle(turn, awaited, each)
    trial = None if message.number is None else study.trials.get(message.number)
    if trial is not None and lease is None and _is_on_disk(trial, message):
        _acknowledge(turn, connection, message)  # it only wanted to hear this, and leaves
        return None
    slots = _slots(state, message)
    leased = any(slot.lease for slot in slots)
    if trial is not None and lease is not None and message.parked and leased:
        turn.end_lease(lease)  # it has stopped, another one trains
        lease, known = None, True
    problem = _problem(state, study, trial, lease, message, known)
    if problem is not None:
        if lease is not None:
            turn.end_lease(lease)
        if trial is not None and known:
            _hear(turn, trial, message)
            if not trial.live:  # its driver was faster to say so
                trial.device_seconds = max(trial.device_seconds, message.device_seconds)
            turn.save(trial)  # with the units it had not told of
        over = trial is not None and not trial.live and message.ended
        return None if over else problem  # it waits only until this is in the ledger
    if lease is not None:
        _adopt(turn, study, lease, connection, message, counted)
    else:
        assert trial is not None
        trial.come_back(connection, message.epoch, message.devices, turn.now)
    if message.number is not None:
        trial = study.trials[message.number]
        trial.units_left, trial.params = message.units_left, message.params or trial.params
        # The last leases that ended may not have reached the ledger.
        had = message.device_seconds - (0.0 if lease is None else _leased_seconds(message))
        trial.device_seconds = max(trial.device_seconds, had)
        trial.needs(message.need_bytes)
        if message.sizes and message.sizes.valid:
            trial.take_sizes(message.sizes)
        else:
            trial.sizes = None
        _hear(turn, trial, message)
        detail = {"device": trial.device, "epoch": trial.epoch, "state": trial.state}
        turn.log(trial.study, trial.number, "resumed", detail)
        _acknowledge(turn, connection, message)
    return None


def _problem(
    state: BrokerState,
    study: Study,
    trial: LiveTrial | None,
    lease: LeaseRecord | None,
    message: Resume,
    known: bool,
) -> str | None:
    """Reason why the report of a process disagrees with what is known; None if it agrees."""
    if trial is None and message.parked is not None:
        return "A trial that is parked has a number."
    if trial is not None and not trial.live:
        return f"Trial {trial.number} has ended."
    if trial is not None and (trial.connection is not None or study.is_elsewhere(trial)):
        return f"Another process has trial {trial.number}."
    if lease is None:
        waits = known and trial is not None and message.parked is not None
        return None if waits else f"Its lease (epoch {message.epoch}) is over."
    if lease.number not in (None, message.number):
        return f"Its lease (epoch {message.epoch}) is of trial {lease.number}."
    slots, words = _slots(state, message), ", ".join(message.devices)
    granted = tuple(f"{state.host}/{id_}" for id_ in message.devices)
    if len(slots) < len(message.devices) or lease.devices != granted:
        return f"Its lease (epoch {message.epoch}) is not for device {words}."
    taken = message.parked is None and any(_is_taken(state, slot) for slot in slots)
    if taken or any(slot.lease for slot in slots):
        return f"Another process has device {words}."
    return None


def _slots(state: BrokerState, message: Resume) -> list[Slot]:
    slots = state.slots
    return [slots[id_] for id_ in message.devices if id_ in slots]


def _is_taken(state: BrokerState, slot: Slot) -> bool:
    """True if a process that is awaited has a device; not if that lease never was."""
    if slot.awaited is None:
        return False
    holder = state.awaited[slot.awaited].holder
    study = state.studies.get(holder.study)
    return study is None or holder.epoch in study.unclaimed_leases


def _adopt(
    turn: Turn,
    study: Study,
    record: LeaseRecord,
    connection: int,
    message: Resume,
    counted: float | None,
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
        energy_joules=counted,
    )
    for slot in _slots(turn.state, message):
        slot.lease = lease
    study.turn_seconds -= lease.device_seconds(turn.now)  # of the turns under an earlier broker
    if lease.number is None:
        study.leave_unstarted(-1)
    if message.number is None:
        return
    trial_id = message.trial_id or 0
    begin = Begin(epoch=lease.epoch, number=message.number, trial_id=trial_id)
    progress.begin(turn, lease, begin)
    trial = study.trials[message.number]
    trial.stores = message.stores
    if message.asked is not None and message.parked is None:
        lease.yielding = message.asked
        trial.ask(message.asked, turn.now)


def _hear(turn: Turn, trial: LiveTrial, message: Resume) -> None:
    """Take in the last reports and checkpoints of a process, as far as they are new."""
    for report in message.reports:
        if not progress.has_reported(trial, report):
            held = max(0.0, _leased_seconds(message) - report.age_seconds * len(message.devices))
            progress.add_report(turn, trial, held, report)
    for checkpoint in message.checkpoints:
        progress.keep(turn, trial, checkpoint)


def _is_about(message: Resume, holder: ServedProcess) -> bool:
    """True if a process reports on the lease or trial for which it is awaited.

    The epoch is an older one if its last grant never reached it.
    """
    same = (holder.study, holder.number) == (message.study.key, message.number)
    return holder.epoch == message.epoch or (same and message.number is not None)


def _leased_seconds(message: Resume) -> float:
    return message.held_seconds * len(message.devices)


def _is_on_disk(trial: LiveTrial, message: Resume) -> bool:
    """True if a process has left its trial on disk, and the ledger knows where."""
    stored = None if message.parked is None else message.parked.checkpoint
    return stored is not None and any(each.path == stored.path for each in trial.checkpoints)


def _acknowledge(turn: Turn, connection: int, message: Resume) -> None:
    for checkpoint in message.checkpoints:
        turn.send(connection, wire.CheckpointAck(path=checkpoint.path))
