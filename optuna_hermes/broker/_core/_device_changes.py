"""Devices that break, and devices that are powered down and up. Pure.

The power of a device is in one of four states: ``on``, ``going`` (its power-down command runs),
``off`` and ``coming`` (its power-up command runs). Only one that is ``on`` is granted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._scheduler import Scheduler
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._devices._xid import Xid
from optuna_hermes.model import Device

RETRY_SECONDS = 60.0
"""Time for which a device is left alone after a command for it has failed."""


class DeviceChanges:
    """Handles readings of the devices, and switches their power as the policies decide."""

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
            if device.healthy and not was.healthy:
                self._tell(turn, slot, "device back", "")
            elif not device.healthy and (was.healthy or device.lost > was.lost):
                self._tell(turn, slot, "device lost", device.problem)
            if not device.healthy:  # each time: a trial that was moving may have stayed
                self._leave(turn, slot)

    def reported(self, turn: Turn, heard: Iterable[Xid]) -> None:
        """Add an event for each XID that a trial has caused on its device."""
        for xid in heard:
            slot = self._state.slots.get(xid.device)
            trial = self._state.trial_of(slot.lease) if slot and slot.lease else None
            if trial is not None and xid.is_of_program:
                detail = {"device": xid.device, "xid": xid.code, "reason": f"{xid} was reported."}
                turn.log(trial.study, trial.number, "xid", detail)

    def _tell(self, turn: Turn, slot: Slot, kind: str, reason: str) -> None:
        """Add an event to each study that is served: it had this device, or could have got it."""
        holder = None if slot.lease is None else self._state.trial_of(slot.lease)
        detail = {"device": slot.device.id} | ({"reason": reason} if reason else {})
        for key in self._state.studies:
            number = holder.number if holder and holder.study == key else None
            turn.log(key, number, kind, detail)

    def _leave(self, turn: Turn, slot: Slot) -> None:
        if slot.reservation is not None:
            self._state.unreserve(slot.reservation)
        if slot.lease is not None:
            trial = self._state.trial_of(slot.lease)
            if trial is None or (not self._end(turn, slot, trial) and trial.stores):
                self._scheduler.ask_to_yield(turn, slot.lease, to_disk=True)
        for trial in self._state.parked_on(slot):
            if self._end(turn, slot, trial) or trial.asked or not trial.stores:
                continue
            self._memory.evict(turn, trial, "disk")

    def _end(self, turn: Turn, slot: Slot, trial: LiveTrial) -> bool:
        """Kill a worker from whose process nothing can be saved; True if it was killed.

        Its trial goes on elsewhere from its last checkpoint. Processes of users are left alone.
        """
        if trial.stores and (trial.tier == "host" or not slot.device.lost):
            return False
        reason = f"{slot.device.id} is broken and nothing of its trial could be saved"
        return turn.kill_worker(trial.connection, reason)

    # -- power ---------------------------------------------------------------------------------

    def expect_off(self, devices: Collection[str]) -> None:
        """Note devices that the broker before this one has powered down, or was about to."""
        for id_ in devices:
            if id_ in self._state.slots:
                self._state.slots[id_].power = "off"
                self._state.slots[id_].spare = True

    def switch_power(self, turn: Turn) -> None:
        """Power down what no policy wants, and wake what one does.

        A device goes only with nothing on it, none on the way to it, and no policy that wants
        it; it is woken as soon as one does. Where no study is served all stays as it is.
        """
        if not self._state.powers or self._state.recovering:
            return
        studies = self._state.studies_at_work()
        for id_, slot in self._state.slots.items():
            if studies:
                slot.spare = all(id_ in study.powered_down for study in studies)
            if turn.now < slot.power_retry_at:
                continue
            if slot.power == "on" and slot.spare and self._is_empty(slot):
                slot.power = "going"
                turn.add(SwitchPower(device=id_, up=False))
            elif slot.power == "off" and not slot.spare:
                slot.power = "coming"
                turn.add(SwitchPower(device=id_, up=True))

    def switched(self, turn: Turn, event: PowerSwitched) -> None:
        """Handle the end of a command; a device that did not go down is used as before."""
        slot = self._state.slots[event.device]
        # A failed command leaves the device as it was: up if it was to go down.
        is_up = event.up != bool(event.problem)
        slot.power = "on" if is_up else "off"
        slot.power_problem = event.problem if event.up else ""
        slot.power_retry_at = turn.now + RETRY_SECONDS if event.problem else 0.0
        if is_up:  # what was read of it is old
            slot.device = replace(slot.device, free=False)
        done, failed = ("powered up", "power-up") if event.up else ("powered down", "power-down")
        kind = f"{failed} failed" if event.problem else done
        detail = {"device": event.device, "seconds": event.seconds}
        if event.problem:
            detail["reason"] = event.problem
        for key in self._state.studies:
            turn.log(key, None, kind, detail)

    def _is_empty(self, slot: Slot) -> bool:
        """True if nothing is on a device, nor on its way there."""
        taken = slot.lease or slot.reservation or slot.awaited is not None
        leaving = any(slot.device.id in c.leaving for c in self._state.clients.values())
        works = slot.device.healthy and slot.device.free
        return works and not (taken or leaving or self._state.parked_on(slot))


def unpowered(state: BrokerState) -> tuple[str, ...]:
    """Devices that are not surely powered, as the next broker has to know them."""
    return tuple(id_ for id_, slot in state.slots.items() if slot.power != "on")
