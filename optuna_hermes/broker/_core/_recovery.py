"""Recovery after a broker's death: processes that are awaited, and go on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._elastic import take_sizes
from optuna_hermes.broker._core._events import Expected
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._holder import Awaited, Holder
from optuna_hermes.broker._protocol import Begin, Resume
from optuna_hermes.ledger._records import LeaseRecord

RECOVERY_SECONDS = 10.0
"""Time without any grant while a process has not come back yet."""


class Recovery:
    """Waits for the processes of an earlier broker, ``RECOVERY_SECONDS`` long."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def expect(self, event: Expected, now: float) -> None:
        """Await a process that lives and may have a device, or a trial in its memory."""
        holder = event.holder
        self._state.awaited[event.connection] = Awaited(holder=holder, until=now + RECOVERY_SECONDS)
        # Another study's ledger may know of earlier epochs only.
        self._state.epoch = max(self._state.epoch, holder.epoch)
        for id_ in holder.devices:
            if id_ in self._state.slots:
                self._state.slots[id_].awaited = event.connection

    def wakeups(self) -> Iterator[float]:
        """Times at which a process has been awaited for long enough."""
        return (each.until for each in self._state.awaited.values() if not each.late)

    def begin_anew(self, now: float) -> None:
        """Begin the waiting times anew: the broker was stopped, and messages are unread."""
        for each in self._state.awaited.values():
            each.until = now + RECOVERY_SECONDS

    def end(self, turn: Turn) -> None:
        """Wait no longer for processes that had their time.

        A worker is killed, and what it has is free once it is gone. The process of a plain trial
        is its user's: what it has stays its own.
        """
        for connection, each in self._state.awaited.items():
            if not each.late and turn.now >= each.until:
                each.late = True
                self._kill(turn, connection, each)

    # -- processes that come, and go -----------------------------------------------------------

    def met(self, pid: int) -> None:
        """Note that a process has said hello; it reports what it has once its study is read."""
        for each in self._of(pid).values():
            each.met = True

    def lost(self, turn: Turn, pid: int) -> None:
        """Note that a process has hung up; it may have had no time to report what it has."""
        if any(client.pid == pid for client in self._state.clients.values()):
            return
        for connection, each in self._of(pid).items():
            each.met = False
            if each.ended:
                self._let_go(turn, connection, each)
            elif each.late:
                self._kill(turn, connection, each)

    def gone(self, turn: Turn, connection: int) -> None:
        """Handle the end of a process that is awaited."""
        each = self._state.awaited.get(connection)
        if each is not None and each.met:
            # Its last messages may be unread: ``lost`` follows when its connection ends.
            each.ended = True
        elif each is not None:
            self._let_go(turn, connection, each)

    def empty_handed(self, turn: Turn, pid: int, *, study: str = "", number: int = -1) -> None:
        """Release what a process had that waits for a lease: its grant never reached it.

        Args:
            pid: its process; a worker serves one trial.
            study: with ``number`` says of which trial a process that serves several speaks.
            number: see ``study``.
        """
        for connection, each in self._of(pid).items():
            holder = each.holder
            if holder.role == "worker" or (holder.study, holder.number) == (study, number):
                self._let_go(turn, connection, each)

    # -- going on ------------------------------------------------------------------------------

    def resume(self, turn: Turn, study: Study, connection: int, message: Resume) -> str | None:
        """Let a process go on with what it has from an earlier broker.

        Returns:
            The reason if it may not, None if it goes on; the caller handles its ``parked``.
        """
        lease = study.orphans.pop(message.epoch, None)
        pid = self._state.clients[connection].pid
        known, counted = False, None
        for awaited, each in self._of(pid).items():
            if _is_about(message, each.holder):
                known = True
                same_lease = each.holder.epoch == message.epoch
                counted = each.holder.energy_joules if same_lease else None
                self._settle(turn, awaited, each)
        trial = None if message.number is None else study.trials.get(message.number)
        if trial is not None and lease is None and _is_on_disk(trial, message):
            _acknowledge(turn, connection, message)  # it only wanted to hear this, and leaves
            return None
        slots = self._slots(message)
        leased = any(slot.lease for slot in slots)
        if trial is not None and lease is not None and message.parked and leased:
            turn.end_lease(lease)  # it has stopped, another one trains
            lease, known = None, True
        problem = self._problem(study, trial, lease, message, known)
        if problem is not None:
            if lease is not None:
                turn.end_lease(lease)
            if trial is not None and known:
                self._hear(turn, trial, message)
                turn.save(trial)  # with the units it had not told of
            return problem
        if lease is not None:
            self._adopt(turn, study, lease, connection, message, counted)
        else:
            assert trial is not None
            trial.come_back(connection, message.epoch, message.devices, turn.now)
        if message.number is not None:
            trial = study.trials[message.number]
            trial.units_left, trial.params = message.units_left, message.params or trial.params
            # The last leases that ended may not have reached the ledger.
            had = message.device_seconds - (0.0 if lease is None else _held(message))
            trial.device_seconds = max(trial.device_seconds, had)
            trial.needs(message.need_bytes)
            if message.sizes and message.sizes.valid:
                take_sizes(trial, message.sizes)
            else:
                trial.sizes = None
            self._hear(turn, trial, message)
            _event_log.resumed(turn, trial)
            _acknowledge(turn, connection, message)
        return None

    def _problem(
        self,
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
        slots, words = self._slots(message), ", ".join(message.devices)
        granted = tuple(f"{self._state.host}/{id_}" for id_ in message.devices)
        if len(slots) < len(message.devices) or lease.devices != granted:
            return f"Its lease (epoch {message.epoch}) is not for device {words}."
        taken = message.parked is None and any(map(self._is_taken, slots))
        if taken or any(slot.lease for slot in slots):
            return f"Another process has device {words}."
        return None

    def _slots(self, message: Resume) -> list[Slot]:
        slots = self._state.slots
        return [slots[id_] for id_ in message.devices if id_ in slots]

    def _is_taken(self, slot: Slot) -> bool:
        """True if a process that is awaited has a device; not if that lease never was."""
        if slot.awaited is None:
            return False
        holder = self._state.awaited[slot.awaited].holder
        study = self._state.studies.get(holder.study)
        return study is None or holder.epoch in study.orphans

    def _adopt(
        self,
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
        for slot in self._slots(message):
            slot.lease = lease
        if lease.number is None and study.unstarted is not None:
            study.unstarted -= 1
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

    def _hear(self, turn: Turn, trial: LiveTrial, message: Resume) -> None:
        """Take in the last reports and checkpoints of a process, as far as they are new."""
        for report in message.reports:
            if not progress.has_reported(trial, report):
                held = max(0.0, _held(message) - report.age_seconds * len(message.devices))
                progress.add_report(turn, trial, held, report)
        for checkpoint in message.checkpoints:
            progress.keep(turn, trial, checkpoint)

    # -- inside --------------------------------------------------------------------------------

    def _of(self, pid: int) -> dict[int, Awaited]:
        awaited = self._state.awaited.items()
        return {connection: each for connection, each in awaited if each.holder.pid == pid}

    def _kill(self, turn: Turn, connection: int, each: Awaited) -> None:
        if each.holder.role == "worker" and not each.met:
            reason = "it did not come back to the new broker"
            turn.kill(connection, each.holder.pid, reason)

    def _let_go(self, turn: Turn, connection: int, each: Awaited) -> None:
        self._settle(turn, connection, each)
        study = self._state.studies.get(each.holder.study)
        trial = study.trials.get(each.holder.number or 0) if study else None
        if trial is not None and each.holder.number is not None:
            turn.give_back(trial)

    def _settle(self, turn: Turn, connection: int, each: Awaited) -> None:
        """End the wait for a process that is gone, or has reported: an orphaned lease is over."""
        del self._state.awaited[connection]
        holder = each.holder
        for slot in self._state.slots.values():
            if slot.awaited == connection:
                slot.awaited = None
        study = self._state.studies.get(holder.study)
        if study is None:
            return
        lease = study.orphans.pop(holder.epoch, None)
        if lease is not None:
            turn.end_lease(lease)
        trial = None if holder.number is None else study.trials.get(holder.number)
        if trial is not None:
            trial.awaited = False


def holders(state: BrokerState) -> tuple[Holder, ...]:
    """Processes that the next broker has to wait for, if this one dies now."""
    leases = {lease.epoch: lease for lease in state.leases()}
    held: list[tuple[int, int | None, str, int | None]] = [
        (trial.epoch, trial.connection, trial.study, trial.number)
        for trial in state.trials()
        if trial.connection
    ]
    held += [(e, x.connection, x.study, None) for e, x in leases.items() if x.number is None]
    found = [each.holder for each in state.awaited.values()]
    for epoch, connection, study, number in held:
        client = state.clients.get(connection or 0)
        if client is not None and epoch:
            found.append(
                Holder(
                    pid=client.pid,
                    started=client.started,
                    role=client.role,
                    study=study,
                    number=number,
                    epoch=epoch,
                    device=leases[epoch].device if epoch in leases else None,
                    others=leases[epoch].devices[1:] if epoch in leases else (),
                    energy_joules=leases[epoch].energy_joules if epoch in leases else None,
                )
            )
    return tuple(found)


def _is_about(message: Resume, holder: Holder) -> bool:
    """True if a process reports on the lease or trial for which it is awaited.

    The epoch is an older one if its last grant never reached it.
    """
    same = (holder.study, holder.number) == (message.study.key, message.number)
    return holder.epoch == message.epoch or (same and message.number is not None)


def _held(message: Resume) -> float:
    return message.held_seconds * len(message.devices)


def _is_on_disk(trial: LiveTrial, message: Resume) -> bool:
    """True if a process has left its trial on disk, and the ledger knows where."""
    stored = None if message.parked is None else message.parked.checkpoint
    return stored is not None and any(each.path == stored.path for each in trial.checkpoints)


def _acknowledge(turn: Turn, connection: int, message: Resume) -> None:
    for checkpoint in message.checkpoints:
        turn.send(connection, wire.Kept(path=checkpoint.path))
