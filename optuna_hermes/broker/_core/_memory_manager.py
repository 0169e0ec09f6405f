"""Memory manager: trials that leave a device's memory, and when the next may have it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial, TrialKey
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Move
from optuna_hermes.model import TierName

MEMORY_MARGIN = 1.2
"""Factor by which free memory must exceed what a trial still needs."""

STRANGE_BYTES = 2 << 30
"""Memory that unknown processes may take where none is listed: the driver, a desktop.

Each process of a trial may take as much more as it is expected to take beside the trial.
"""

CONTEXT_SHARE = 8
"""A process is not expected to take more than this part of a small GPU, or of a slice of one."""

SETTLE_SECONDS = 5.0
"""Time in which memory that a trial has left has to show as free; then the wait is over."""


class MemoryManager:
    """Moves suspended trials between tiers.

    Args:
        wanted_last: orders trials, from the one that will be wanted last to the first.
    """

    def __init__(
        self,
        state: BrokerState,
        wanted_last: Callable[[Iterable[LiveTrial], float], list[LiveTrial]],
    ) -> None:
        self._state = state
        self._wanted_last = wanted_last

    def tier_to_leave(self, turn: Turn, slots: Iterable[Slot], trial: LiveTrial) -> TierName:
        """Tier by which ``trial`` leaves its devices; others that have to go are asked now."""
        if self._state.studies[trial.study].draining:
            # Its process ends with the study: only a checkpoint remains.
            return "disk" if trial.can_store else "resident"
        tier: TierName = "resident"
        for slot in slots:
            tiers = self._moves(slot, [trial], turn.now)
            goal = tiers.pop(trial.key, tier)
            tier = tier if tier == "disk" else goal
            self._evict_all(turn, tiers)
        return tier

    def usable(self, slot: Slot) -> bool:
        """True if an empty device works, and no stranger is on it as far as that can be known."""
        works = slot.power == "on" and slot.device.healthy and slot.device.free
        return works and not self.problem(slot)

    def problem(self, slot: Slot) -> str:
        """Reason why a device without a lease cannot be granted, in words; empty if it can."""
        if slot.power_problem:
            return slot.power_problem
        strange = self._unexplained_bytes(slot) if slot.device.unlisted and not slot.lease else 0
        if slot.device.problem or strange <= 0 or strange <= self._tolerated_bytes(slot):
            return slot.device.problem
        return (
            f"{size(strange)} of its memory are taken by processes that cannot be listed here: "
            "find them where they can, and wait for them or end them"
        )

    def is_exclusive(self, slot: Slot) -> bool:
        """True if a device is for one process at most, and there are several that may want it."""
        if not slot.device.exclusive:
            return False
        roles = ("worker", "plain")
        return len({each.pid for each in self._state.clients.values() if each.role in roles}) > 1

    def bound_trial(self, slot: Slot) -> LiveTrial | None:
        """The parked trial that alone can use a device until it ends, None if there is none.

        Where one process at most may use a device, that is who cannot leave its process.
        """
        if not self.is_exclusive(slot):
            return None
        parked = self._state.parked_on(slot)
        return next((each for each in parked if not (each.can_store or each.requested_tier)), None)

    def make_room(self, turn: Turn, slot: Slot) -> bool:
        """True if an empty device can be granted to its reservation.

        If not, trials that can make room are asked to. A device whose memory does not suffice is
        granted all the same when none is left that could, see ``warn``.
        """
        study, trial = self._next(slot)
        if self.is_exclusive(slot) and not self._is_alone(slot, study, trial):
            self._evict_all(turn, self._moves(slot, [], turn.now))
            return False  # its process could not use the device
        alone = trial is not None and trial.alone
        # The memory of CPU slots is not read, so there is nothing to wait for.
        if slot.device.kind == "cpu" and not alone:
            return True
        if any(each.requested_tier == "resident" for each in self._state.parked_on(slot)):
            return False  # its memory is on its way in
        room = fits(self.free_bytes(slot), self._missing(slot, study, trial))
        sure = slot.device.memory_free_bytes is not None or not self._state.leaving(slot)
        enough = self._is_alone(slot, study, trial) if alone else room and sure
        if enough and room is not False:
            return True
        if self._is_moving(slot) or self._is_settling(slot, study, trial, turn.now):
            return False
        tiers = self._moves(slot, [], turn.now)
        if tiers:
            self._evict_all(turn, tiers)
            return False
        return True

    def grants_alone(self, slot: Slot, now: float) -> bool:
        """``Grant.alone`` of the next grant; a trial that outgrew its memory has one chance."""
        study, trial = self._next(slot)
        if trial is not None and trial.alone:
            return True
        # A GPU's driver gives memory back some time after its process has ended.
        settled = slot.device.kind == "cpu" or now >= slot.settles_at
        return settled and self._is_alone(slot, study, trial)

    def fits_beside(self, slot: Slot, trial: LiveTrial) -> bool:
        """True if ``trial`` can come back to its GPU while another trains there."""
        holder = self._state.trial_of(slot.lease)
        if trial.alone or holder is None or holder.alone or self._is_moving(slot):
            return False
        if self.is_exclusive(slot) or trial.devices != (slot.device.id,):
            return False
        missing = self._missing(slot, self._state.studies[trial.study], trial)
        return bool(fits(self.free_bytes(slot), missing))

    def move(self, turn: Turn, trial: LiveTrial, tier: TierName) -> None:
        """Ask a parked trial, which has no open request, to go to another tier."""
        assert trial.connection is not None
        trial.ask(tier, turn.now)
        turn.send(trial.connection, Move(epoch=trial.epoch, tier=tier))

    def store_wanted_last(self, turn: Turn, study: Study, count: int) -> None:
        """Store up to ``count`` parked trials without a reservation: those wanted last."""
        if count <= 0:
            return
        wanted = {reservation.number for reservation in self._state.reserved(study.spec.key)}
        parked = [trial for trial in study.parked if trial.number not in wanted]
        for trial in self._wanted_last(parked, turn.now)[:count]:
            self.move(turn, trial, "disk")

    def expect_free_memory(self, devices: Iterable[str], now: float) -> None:
        """Note that a process has left the memory of devices, or is gone."""
        for id_ in devices:
            if id_ in self._state.slots:
                self._state.slots[id_].settles_at = now + SETTLE_SECONDS
        # There may be room again for trials that found none.
        for trial in self._state.trials():
            trial.waits_for_memory = False

    def expect_exit(self, trial: LiveTrial, now: float) -> None:
        """Note that a trial's process ends, or will: until then it has its memory."""
        client = self._state.client_of(trial.connection)
        if client is not None:
            client.leaving, client.silent_from = trial.devices, now
        self.expect_free_memory(trial.devices, now)

    def shares(self, slot: Slot, trial: LiveTrial) -> bool:
        return bool(self._others(slot, self._state.studies[trial.study], trial))

    def free_bytes(self, slot: Slot) -> int | None:
        """Free memory of a GPU as it is read, else its memory without what trials there report."""
        free = slot.device.memory_free_bytes
        return self._unclaimed(slot) if free is None else free

    def known_free_bytes(self, slot: Slot) -> float:
        """Free memory for comparisons: infinite if it is not known."""
        free = self.free_bytes(slot)
        return math.inf if free is None else free

    def measure_contexts(self, slot: Slot) -> None:
        """Measure what processes take of a GPU beside what their trials hold.

        To be called with a reading that was made after they said so.
        """
        measured = [self.context_of(slot, trial) for trial in self._state.parked_on(slot)]
        found = [each for each in measured if each is not None]
        if found:
            slot.context_bytes = max(found)

    def context_of(self, slot: Slot, trial: LiveTrial) -> int | None:
        """Bytes that a parked trial's process takes of a GPU beside the trial, None if not known.

        That is the process's context, the code of its kernels, and what libraries keep.
        """
        pid = self._state.pid_of(trial.connection)
        listed = dict(slot.device.processes).get(pid or 0)
        # While it moves, or another trial of its process trains, what it has said does not hold.
        if listed is None or trial.held_bytes is None or trial.requested_tier:
            return None
        if [self._state.pid_of(each.connection) for each in self._with_memory(slot)].count(pid) > 1:
            return None
        return max(0, listed - trial.held_bytes)

    def process_bytes(self, slot: Slot, trial: LiveTrial) -> int | None:
        """Bytes that a process takes of a device beside its trial's; None if it is not there.

        Of several trials of one process, as with ``n_jobs``, it is the first one's.
        """
        if slot.device.kind == "cpu" or slot.device.id not in trial.devices:
            return None
        pid = self._state.pid_of(trial.connection)
        its = (
            each for each in self._with_memory(slot) if self._state.pid_of(each.connection) == pid
        )
        if next(its, trial) is not trial:
            return 0
        found = self.context_of(slot, trial)
        return self._context(slot) if found is None else found

    # -- who goes ------------------------------------------------------------------------------

    def _next(self, slot: Slot) -> tuple[Study, LiveTrial | None]:
        assert slot.reservation is not None
        study = self._state.studies[slot.reservation.study]
        return study, self._state.trial_of(slot.reservation)

    def _moves(
        self, slot: Slot, leaving: Sequence[LiveTrial], now: float
    ) -> dict[TrialKey, TierName]:
        """Tiers to which trials go for the reservation of ``slot``, with those that leave it."""
        if slot.reservation is None:
            return {}
        study, trial = self._next(slot)
        others = [*leaving, *self._others(slot, study, trial)]
        host_room = self._state.host_budget_bytes - self._state.host_used_bytes
        alone = (trial is not None and trial.alone) or self.is_exclusive(slot)
        short = self._shortage(slot, study, trial) if slot.device.kind == "gpu" else 0
        if not alone and short <= 0:
            return {}
        # Hosts of CPU slots, and of GPUs with room for all trials, never come here.
        from optuna_hermes.broker._core import _residency as residency

        if alone:
            return residency.clear(self._movable(others), host_room)
        here = [each for each in others if each.tier != "host"]
        in_host = [each for each in self._state.trials() if each.tier == "host"]
        free = self._movable(self._wanted_last([*here, *in_host], now))
        # Processes do not end for the margin's sake.
        spare = (MEMORY_MARGIN - 1) * (self._missing(slot, study, trial) or 0)
        taken = partial(self.process_bytes, slot)
        return residency.make_room(short, free, host_room, taken, spare_bytes=spare)

    def _movable(self, trials: Iterable[LiveTrial]) -> list[LiveTrial]:
        """Those that have no open request, and no reservation either."""
        wanted = {(each.study, each.number) for each in self._state.reservations()}
        return [
            trial for trial in trials if trial.requested_tier is None and trial.key not in wanted
        ]

    def _evict_all(self, turn: Turn, tiers: dict[TrialKey, TierName]) -> None:
        for (study, number), tier in tiers.items():
            self.move(turn, self._state.studies[study].trials[number], tier)

    # -- who is there --------------------------------------------------------------------------

    def _others(self, slot: Slot, study: Study, trial: LiveTrial | None) -> list[LiveTrial]:
        """The parked trials, but ``trial``, whose processes have memory of a device.

        The memory of a CPU slot is a matter between the trials of one study.
        """
        parked = [each for each in self._state.parked_on(slot) if each is not trial]
        if slot.device.kind == "gpu":
            return parked
        return [each for each in parked if each.study == study.spec.key]

    def _with_memory(self, slot: Slot) -> list[LiveTrial]:
        """The trials whose processes have memory of a device: parked ones and its holder."""
        holder = self._state.trial_of(slot.lease)
        return self._state.parked_on(slot) + ([holder] if holder else [])

    def _is_alone(self, slot: Slot, study: Study, trial: LiveTrial | None) -> bool:
        return not self._others(slot, study, trial) and not self._state.leaving(slot)

    def _is_moving(self, slot: Slot) -> bool:
        """True if a trial is making room, here or in host memory for those that are here."""
        here = any(each.requested_tier for each in self._state.parked_on(slot))
        return here or any(
            r.tier == "host" and r.requested_tier == "disk" for r in self._state.trials()
        )

    def _is_settling(self, slot: Slot, study: Study, trial: LiveTrial | None, now: float) -> bool:
        """True if memory that a process left may still become free, and would suffice."""
        missing, free = self._missing(slot, study, trial), self.free_bytes(slot)
        if now >= slot.settles_at or _less(self._unclaimed(slot), missing):
            return False
        return bool(self._state.leaving(slot)) or _less(free, missing)

    # -- bytes ---------------------------------------------------------------------------------

    def _missing(self, slot: Slot, study: Study, trial: LiveTrial | None) -> int | None:
        """Bytes that the next trial needs beside what it and its process have on the device."""
        need = study.need_of(trial)
        if need is None or slot.device.kind == "cpu":
            return need
        if trial is not None and slot.device.id in trial.devices:
            return max(0, need - (trial.held_bytes or 0))
        pid = None if trial is None else self._state.pid_of(trial.connection)
        there = {self._state.pid_of(each.connection) for each in self._with_memory(slot)}
        return need + (0 if pid is not None and pid in there else self._context(slot))

    def _context(self, slot: Slot) -> int:
        """Bytes that a process takes of a GPU beside its trial, measured here or on another GPU."""
        if slot.context_bytes is not None:
            return slot.context_bytes
        measured = (each.context_bytes for each in self._state.slots.values())
        known = [each for each in measured if each is not None]
        if known:
            return max(known)
        total, usual = slot.device.memory_bytes, self._state.context_bytes
        return usual if total is None else min(usual, total // CONTEXT_SHARE)

    def _shortage(self, slot: Slot, study: Study, trial: LiveTrial | None) -> float:
        """Bytes that have to become free beside what is becoming free; infinite if unknown."""
        free, missing = self.free_bytes(slot), self._missing(slot, study, trial)
        if free is None or missing is None:
            return math.inf
        going = [r for r in self._state.parked_on(slot) if r.evicting]
        coming = sum(trial.takes_bytes or 0 for trial in going if trial.tier != "host")
        coming += sum(self._context(slot) for trial in going if trial.requested_tier == "disk")
        return MEMORY_MARGIN * missing - free - coming

    def _unclaimed(self, slot: Slot) -> int | None:
        """A GPU's memory without what trials report to hold there, and their processes take."""
        there = self._with_memory(slot)
        contexts = sum(self.process_bytes(slot, each) or 0 for each in there)
        taken = [(r.held_bytes or 0) if r.tier == "host" else r.takes_bytes for r in there]
        known = [each for each in taken if each is not None]
        if slot.device.memory_bytes is None or len(known) < len(taken):
            return None
        return slot.device.memory_bytes - sum(known) - contexts

    def _unexplained_bytes(self, slot: Slot) -> int:
        """Bytes that are taken and that no trial reports to hold; 0 if that is not known."""
        free, unclaimed = slot.device.memory_free_bytes, self._unclaimed(slot)
        if free is None or unclaimed is None:
            return 0
        return unclaimed - free - self._context(slot) * len(self._state.leaving(slot))

    def _tolerated_bytes(self, slot: Slot) -> int:
        """Bytes that may be taken and reported by no trial, since contexts are not measured."""
        processes = {self._state.pid_of(each.connection) for each in self._with_memory(slot)}
        return STRANGE_BYTES + self._context(slot) * len(processes)

    def warn(self, turn: Turn, slot: Slot) -> None:
        """Add an event if a device is granted whose memory does not suffice for its reservation."""
        study, trial = self._next(slot)
        free, missing = self.free_bytes(slot), self._missing(slot, study, trial)
        if not _less(free, missing):
            return
        name = "A new trial" if trial is None else f"Trial {trial.number}"
        reason = (
            f"{name} gets {slot.device.id} though it needs {size(missing)} more and {size(free)} "
            "are free: no other trial is left that could make room."
        )
        number = None if trial is None else trial.number
        detail = {"device": slot.device.id, "reason": reason}
        turn.log(study.spec.key, number, "no room", detail)


def fits(free_bytes: int | None, missing_bytes: int | None) -> bool | None:
    """True if what a trial still needs fits into what is free; None if either is unknown."""
    if free_bytes is None or missing_bytes is None:
        return None
    return free_bytes >= MEMORY_MARGIN * missing_bytes


def size(count: int | None) -> str:
    """Number of bytes in words."""
    return "an unknown number of bytes" if count is None else f"{count / 1024**3:.2f} GiB"


def _less(count: int | None, than: int | None) -> bool:
    """True if both numbers are known, and the first is less."""
    return count is not None and than is not None and count < than
