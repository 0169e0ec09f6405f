"""Recovery after a broker's death: processes that are recovering, until they go on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import ProcessExpected
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Reattach
from optuna_hermes.broker._served_process import RecoveringProcess, ServedProcess

RECOVERY_SECONDS = 10.0
"""Time without any grant while a process has not come back yet."""


class Recovery:
    """Waits for the processes of an earlier broker, ``RECOVERY_SECONDS`` long."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def expect(self, event: ProcessExpected, now: float) -> None:
        """Await a process that lives and may have a device, or a trial in its memory."""
        holder = event.holder
        process = RecoveringProcess(holder=holder, until=now + RECOVERY_SECONDS)
        self._state.recovering[event.connection] = process
        # Another study's ledger may know of earlier epochs only.
        self._state.epoch = max(self._state.epoch, holder.epoch)
        for id_ in holder.devices:
            if id_ in self._state.slots:
                self._state.slots[id_].recovering = event.connection

    def wakeups(self) -> Iterator[float]:
        """Times at which a process has been recovering for long enough."""
        return (each.until for each in self._state.recovering.values() if not each.late)

    def wait_longer(self, seconds: float) -> None:
        """Wait for so much longer: the broker was stopped, and messages are unread."""
        for each in self._state.recovering.values():
            each.until += seconds

    def end(self, turn: Turn) -> None:
        """Wait no longer for processes that had their time.

        A worker is killed, and what it has is free once it is gone. The process of a plain trial
        is its user's: what it has stays its own.
        """
        for connection, each in self._state.recovering.items():
            if not each.late and turn.now >= each.until:
                each.late = True
                self._kill(turn, connection, each)

    # -- processes that come, and go -----------------------------------------------------------

    def met(self, pid: int) -> None:
        """Note that a process has said hello; it reports what it has once its study is read."""
        for each in self._of(pid).values():
            each.met = True

    def reattached(self, turn: Turn, pid: int, message: Reattach) -> ServedProcess | None:
        """End the wait for a process that reports what it has, and return what was known of it."""
        holder = None
        for connection, each in self._of(pid).items():
            if _is_about(message, each.holder):
                holder = each.holder
                self._settle(turn, connection, each)
        return holder

    def lost(self, turn: Turn, pid: int) -> None:
        """Note that a process has hung up; it may have had no time to report what it has."""
        if any(client.pid == pid for client in self._state.clients.values()):
            return
        for connection, each in self._of(pid).items():
            each.met = False
            if each.ended:
                self._release(turn, connection, each)
            elif each.late:
                self._kill(turn, connection, each)

    def gone(self, turn: Turn, connection: int) -> None:
        """Handle the end of a process that is recovering."""
        each = self._state.recovering[connection]
        if each.met:
            # Its last messages may be unread: ``lost`` follows when its connection ends.
            each.ended = True
        else:
            self._release(turn, connection, each)

    def release_ungranted(self, turn: Turn, pid: int, *, study: str = "", number: int = -1) -> None:
        """Release what a process had that waits for a lease: its grant never reached it.

        A worker serves one trial; ``study`` and ``number`` say of which one another process speaks.
        """
        for connection, each in self._of(pid).items():
            holder = each.holder
            if holder.role == "worker" or (holder.study, holder.number) == (study, number):
                self._release(turn, connection, each)

    # -- inside --------------------------------------------------------------------------------

    def _of(self, pid: int) -> dict[int, RecoveringProcess]:
        """Entries of a process that is recovering, by connections."""
        recovering = self._state.recovering.items()
        return {connection: each for connection, each in recovering if each.holder.pid == pid}

    def _kill(self, turn: Turn, connection: int, process: RecoveringProcess) -> None:
        if process.holder.role == "worker" and not process.met:
            turn.kill(connection, process.holder.pid, "it did not come back to the new broker")

    def _release(self, turn: Turn, connection: int, process: RecoveringProcess) -> None:
        trial = self._settle(turn, connection, process)
        if trial is not None:
            trial.count_reported()
            turn.give_back(trial)

    def _settle(self, turn: Turn, connection: int, process: RecoveringProcess) -> LiveTrial | None:
        """End the wait for a process, and its lease if that is unclaimed; return its trial."""
        del self._state.recovering[connection]
        for slot in self._state.slots.values():
            if slot.recovering == connection:
                slot.recovering = None
        study = self._state.studies.get(process.holder.study)
        if study is None:
            return None
        lease = study.unclaimed_leases.pop(process.holder.epoch, None)
        if lease is not None:
            turn.end_lease(lease)
        trial = None if process.holder.number is None else study.trials.get(process.holder.number)
        if trial is not None:
            trial.recovering = False
        return trial


def _is_about(message: Reattach, holder: ServedProcess) -> bool:
    """True if a process reports on the lease or trial for which it is recovering.

    The epoch is an older one if its last grant never reached it.
    """
    same = (holder.study, holder.number) == (message.study.key, message.number)
    return holder.epoch == message.epoch or (same and message.number is not None)
