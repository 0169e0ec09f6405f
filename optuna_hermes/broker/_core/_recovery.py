"""Recovery after a broker's death: processes that are awaited, until they go on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import ProcessExpected
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._holder import RecoveringProcess

RECOVERY_SECONDS = 10.0
"""Time without any grant while a process has not come back yet."""


class Recovery:
    """Waits for the processes of an earlier broker, ``RECOVERY_SECONDS`` long."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def expect(self, event: ProcessExpected, now: float) -> None:
        """Await a process that lives and may have a device, or a trial in its memory."""
        holder = event.holder
        self._state.awaited[event.connection] = RecoveringProcess(
            holder=holder, until=now + RECOVERY_SECONDS
        )
        # Another study's ledger may know of earlier epochs only.
        self._state.epoch = max(self._state.epoch, holder.epoch)
        for id_ in holder.devices:
            if id_ in self._state.slots:
                self._state.slots[id_].awaited = event.connection

    def wakeups(self) -> Iterator[float]:
        """Times at which a process has been awaited for long enough."""
        return (each.until for each in self._state.awaited.values() if not each.late)

    def restart_timeouts(self, now: float) -> None:
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
        for each in self.of(pid).values():
            each.met = True

    def lost(self, turn: Turn, pid: int) -> None:
        """Note that a process has hung up; it may have had no time to report what it has."""
        if any(client.pid == pid for client in self._state.clients.values()):
            return
        for connection, each in self.of(pid).items():
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

    def release_ungranted(self, turn: Turn, pid: int, *, study: str = "", number: int = -1) -> None:
        """Release what a process had that waits for a lease: its grant never reached it.

        Args:
            pid: its process; a worker serves one trial.
            study: with ``number`` says of which trial a process that serves several speaks.
            number: see ``study``.
        """
        for connection, each in self.of(pid).items():
            holder = each.holder
            if holder.role == "worker" or (holder.study, holder.number) == (study, number):
                self._let_go(turn, connection, each)

    # -- inside --------------------------------------------------------------------------------

    def of(self, pid: int) -> dict[int, RecoveringProcess]:
        """Entries of a process that is awaited, by connections."""
        awaited = self._state.awaited.items()
        return {connection: each for connection, each in awaited if each.holder.pid == pid}

    def _kill(self, turn: Turn, connection: int, each: RecoveringProcess) -> None:
        if each.holder.role == "worker" and not each.met:
            reason = "it did not come back to the new broker"
            turn.kill(connection, each.holder.pid, reason)

    def _let_go(self, turn: Turn, connection: int, each: RecoveringProcess) -> None:
        self.settle(turn, connection, each)
        study = self._state.studies.get(each.holder.study)
        trial = study.trials.get(each.holder.number or 0) if study else None
        if trial is not None and each.holder.number is not None:
            turn.give_back(trial)

    def settle(self, turn: Turn, connection: int, each: RecoveringProcess) -> None:
        """End the wait for a process that is gone, or has reported: an orphaned lease is over."""
        del self._state.awaited[connection]
        holder = each.holder
        for slot in self._state.slots.values():
            if slot.awaited == connection:
                slot.awaited = None
        study = self._state.studies.get(holder.study)
        if study is None:
            return
        lease = study.unclaimed_leases.pop(holder.epoch, None)
        if lease is not None:
            turn.end_lease(lease)
        trial = None if holder.number is None else study.trials.get(holder.number)
        if trial is not None:
            trial.awaited = False
