"""Devices that break, and that work again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._scheduler import Scheduler
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.model import Device

if TYPE_CHECKING:
    from optuna_hermes.broker._devices._xid import Xid


class DeviceChanges:
    """Handles readings of the devices."""

    def __init__(self, state: BrokerState, memory: MemoryManager, scheduler: Scheduler) -> None:
        self._state = state
        self._memory = memory
        self._scheduler = scheduler

    def polled(self, turn: Turn, devices: Sequence[Device]) -> None:
        """Take in a reading. Trials that can go on elsewhere leave a broken device."""
        for device in devices:
            slot = self._state.slots.get(device.id)
            if slot is None or slot.power != "on":  # it has no power, and is not lost
                continue
            was, slot.device = slot.device, device
            if device.processes:
                self._memory.measure_contexts(slot)
            if device.healthy and not was.healthy:
                self._tell(turn, slot, "device back", "")
            elif not device.healthy and (was.healthy or device.lost > was.lost):
                self._tell(turn, slot, "device lost", device.problem)
            if not device.healthy:  # each time: a trial that was moving may have stayed
                self._leave(turn, slot)

    def reported(self, turn: Turn, xids: Iterable[Xid]) -> None:
        """Add an event for each XID that a trial has caused on its device."""
        for xid in xids:
            slot = self._state.slots.get(xid.device)
            trial = self._state.trial_of(slot.lease) if slot else None
            if trial is not None and xid.is_of_program:
                detail = {"device": xid.device, "xid": xid.code, "reason": f"{xid} was reported."}
                turn.log(trial.study, trial.number, "xid", detail)

    def _tell(self, turn: Turn, slot: Slot, kind: str, reason: str) -> None:
        """Add an event to each study that is served: it had this device, or could have got it."""
        holder = self._state.trial_of(slot.lease)
        detail = {"device": slot.device.id} | ({"reason": reason} if reason else {})
        for key in self._state.studies:
            number = holder.number if holder and holder.study == key else None
            turn.log(key, number, kind, detail)

    def _leave(self, turn: Turn, slot: Slot) -> None:
        if slot.reservation is not None:
            self._state.unreserve(slot.reservation)
        if slot.lease is not None:
            trial = self._state.trial_of(slot.lease)
            if trial is None or (not self._end(turn, slot, trial) and trial.can_store):
                self._scheduler.ask_to_yield(turn, slot.lease, to_disk=True)
        for trial in self._state.parked_on(slot):
            if self._end(turn, slot, trial) or trial.requested_tier or not trial.can_store:
                continue
            self._memory.move(turn, trial, "disk")

    def _end(self, turn: Turn, slot: Slot, trial: LiveTrial) -> bool:
        """Kill a worker from whose process nothing can be saved; True if it was killed.

        Its trial goes on elsewhere from its last checkpoint. Processes of users are left alone.
        """
        if trial.can_store and (trial.tier == "host" or not slot.device.lost):
            return False
        reason = f"{slot.device.id} is broken and nothing of its trial could be saved"
        return turn.kill_worker(trial.connection, reason)
