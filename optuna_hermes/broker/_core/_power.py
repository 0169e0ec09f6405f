"""Devices that are powered down while no policy wants them, and woken again. Pure.

The power of a device is in one of four states: ``on``, ``going`` (its power-down command runs),
``off`` and ``coming`` (its power-up command runs). Only one that is ``on`` is granted.
"""

from __future__ import annotations

from dataclasses import replace

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn

RETRY_SECONDS = 60.0
"""Time for which a device is left alone after a command for it has failed."""


class Power:
    """Switches the power of devices as the policies decide."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def wanted(self, study: Study) -> int:
        """Number of this host's devices that a study could use, with processes that come."""
        count = self._state.may_open(study).count
        if count is None:
            return len(self._state.slots)
        here = sum(
            trial.device_range[1]
            for trial in study.trials.values()
            if trial.live and not (study.is_elsewhere(trial) or study.is_barred(trial))
        )
        begins = (slot.lease or slot.reservation for slot in self._state.slots.values())
        new = {id(x) for x in begins if x and x.study == study.spec.key and x.number is None}
        return count + here + len(new)

    def held(self, study: Study) -> tuple[str, ...]:
        """Devices that a study has, or is about to have."""
        begins = ((id_, slot.lease or slot.reservation) for id_, slot in self._state.slots.items())
        return tuple(id_ for id_, each in begins if each and each.study == study.spec.key)

    def switch(self, turn: Turn) -> None:
        """Power down what no policy wants, and wake what one does.

        A device goes only with nothing on it, none on the way to it, and no policy that wants
        it; it is woken as soon as one does. Where no study is served all stays as it is.
        """
        if self._state.in_recovery:
            return
        studies = self._state.studies_at_work()
        for id_, slot in self._state.slots.items():
            if studies:
                slot.unwanted = all(id_ in study.powered_down for study in studies)
            if turn.now < slot.power_retry_at:
                continue
            if slot.power == "on" and slot.unwanted and self._is_empty(slot):
                slot.power = "going"
                turn.add(SwitchPower(device=id_, up=False))
            elif slot.power == "off" and not slot.unwanted:
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
        taken = slot.lease or slot.reservation or slot.recovering is not None
        works = slot.device.healthy and slot.device.free
        return works and not (taken or self._state.leaving(slot) or self._state.parked_on(slot))
