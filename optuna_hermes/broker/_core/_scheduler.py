"""Scheduler: asks the policy, reserves, yields, evicts and grants. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core._broker_state import (
    BrokerState,
    Lease,
    Reservation,
    Slot,
    counted_joules,
)
from optuna_hermes.broker._core._events import LimitTrials, SaveMemory
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Grant, Prepare, Resize, Yield
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.model import Assignment, TierName

SWITCH_SHARE = 60
"""A slice lasts at least this many times what bringing its trial back costs.

That is 1.7 %: with what leaving costs, and switches that take longer than usual, it is below 2 %.
"""

EXTENSION = 4.0
"""A slice is extended to the end of a unit that is over within this many slices."""


class Scheduler:
    """Moves devices between trials, as their policies decide."""

    def __init__(
        self, state: BrokerState, policy_runner: PolicyRunner, memory: MemoryManager
    ) -> None:
        self._state = state
        self._policy_runner = policy_runner
        self._memory = memory
        self._level = 0.0

    def schedule(self, turn: Turn) -> None:
        """Let the policies decide about every device that is free or whose slice is over.

        With several studies each decides within its fair share first, then about what is left.
        Nothing is decided while processes of an earlier broker may still come back. Where devices
        are powered down policies are asked too when there is nothing to assign: they may be woken.
        """
        if self._state.in_recovery:
            return
        self._drop_vain_reservations(turn.now)
        studies = [s for s in self._state.studies_at_work() if s.outage_since is None]
        self._join(studies, turn.now)
        if len(studies) > 1:
            self._decide_within_shares(turn, studies)
        self._decide_the_rest(turn, studies)
        self._reserve_for_bound_trials()
        self.fill(turn)
        self._note_idle(studies, turn.now)
        self._set_up(turn, studies)

    def reported(self, turn: Turn, lease: Lease) -> bool:
        """Decide, and return True, if a trial's report is the one nearest to its slice's end.

        So a decision has the newest value, and no short unit is cut in two.
        """
        study, trial = self._state.studies[lease.study], self._state.trial_of(lease)
        # After its last unit a trial ends by itself.
        if trial is None or trial.units_left == 0 or lease.yielding:
            return False
        unit = study.unit_seconds(trial) / len(lease.devices)
        if not study.has_time_for(trial, turn.now):  # for its next unit
            self.ask_to_yield(turn, lease)
            return True
        # Slices of a study whose trials may have several devices end together.
        if lease.deadline - turn.now > unit / 2 or study.is_elastic:
            return False
        lease.deadline = turn.now
        self.schedule(turn)
        return True

    def extend(self, turn: Turn) -> None:
        """Extend the slices that are over to the ends of short units."""
        for lease in self._state.leases():
            study, trial = self._state.studies[lease.study], self._state.trial_of(lease)
            over = lease.deadline <= turn.now and not (lease.yielding or lease.extended)
            if trial is None or not over or study.is_elastic:
                continue
            had = trial.device_seconds + lease.device_seconds(turn.now) - trial.curve.seconds
            left = (study.unit_seconds(trial) - had) / len(lease.devices)
            if 0.0 < left <= EXTENSION * study.spec.slice_seconds:
                # With a margin, for units vary; one that takes longer still is cut in two.
                lease.deadline, lease.extended = turn.now + 1.5 * left, True

    def fill(self, turn: Turn) -> None:
        """Grant all reserved devices that are empty, as far as there are processes."""
        reserved = [(each, self._state.slots_of(each)) for each in self._state.reservations()]
        # First, so that the device that such a trial leaves is not granted before it has left.
        for reservation, slots in reserved:
            self._send_over_disk(turn, reservation, slots)
        for reservation, slots in reserved:
            if all(not slot.lease and self._memory.usable(slot) for slot in slots):
                self._grant_next(turn, reservation, slots)
        for study in self._state.studies.values():
            if study.outage_since is None:
                self._free_processes(turn, study)

    def ask_to_yield(self, turn: Turn, lease: Lease, *, to_disk: bool = False) -> None:
        """Revoke a lease, once; ``to_disk`` if its trial cannot stay on its devices."""
        if lease.yielding:
            return
        trial = self._state.trial_of(lease)
        lease.yielding = "disk"
        if trial is not None:
            if not to_disk and not self._goes_over_disk(trial):
                slots = self._state.slots_of(lease)
                lease.yielding = self._memory.tier_to_leave(turn, slots, trial)
            trial.ask(lease.yielding, turn.now)
        # The watchdog waits for the answer from here on.
        lease.last_progress = turn.now
        # Without a database no other trial could be granted the device. A study that drains grants
        # none, and who is asked in an outage has to leave.
        study = self._state.studies[lease.study]
        waits = not study.draining and study.outage_since is None
        message = Yield(epoch=lease.epoch, tier=lease.yielding)
        turn.send(lease.connection, message, database=lease.study if waits else None)

    # -- deciding ------------------------------------------------------------------------------

    def _drop_vain_reservations(self, now: float) -> None:
        """Cancel the reservations of empty devices that cannot be granted, or not in time.

        And those of new trials, where others have begun as many meanwhile as there shall be.
        """
        for reservation in self._state.reservations():
            study = self._state.studies[reservation.study]
            if reservation.number is None and self._state.promises_too_many(study):
                self._state.unreserve(reservation)
                continue
            empty = [slot for slot in self._state.slots_of(reservation) if not slot.lease]
            usable = all(self._is_open_to(reservation, slot) for slot in empty)
            late = self._is_late(reservation, now)
            if empty and (not usable or late or self._is_hopeless(reservation)):
                self._state.unreserve(reservation)

    def _join(self, studies: Sequence[Study], now: float) -> None:
        """Let studies that come, or come back, begin level with the one that has had least.

        What the others had before is not made up for, also while none of them is at work.
        """
        least = min((self._had(s, now) for s in studies if s.at_work), default=0.0)
        self._level = max(self._level, least)
        for study in studies:
            if not study.at_work:
                study.turn_seconds += max(0.0, self._level - self._had(study, now))
        for study in self._state.studies.values():
            study.at_work = any(each is study for each in studies)

    def _decide_within_shares(self, turn: Turn, studies: Sequence[Study]) -> None:
        """Let each study decide about so many devices that it has its share of all."""
        share = max(1, len(self._state.slots) // len(studies))
        for study in self._in_turn(studies, turn.now):
            quota = max(0, share - self._n_devices(study, turn.now))
            slots = sorted(self._undecided(turn.now), key=partial(_slot_order, study=study))
            if within := _without_partial_leases(slots[:quota]):
                self._decide(turn, study, within)

    def _decide_the_rest(self, turn: Turn, studies: Sequence[Study]) -> None:
        """Let each study decide about all devices that are left, and whether others are woken."""
        for study in self._in_turn(studies, turn.now):
            slots = self._undecided(turn.now)
            if slots or self._state.unpowered:
                self._decide(turn, study, slots)

    def _in_turn(self, studies: Sequence[Study], now: float) -> list[Study]:
        """The studies by their number of devices, and those of one number by device time."""
        return sorted(studies, key=lambda s: (self._n_devices(s, now), self._had(s, now)))

    def _had(self, study: Study, now: float) -> float:
        """Device time that counts when studies take turns."""
        held = (lease.device_seconds(now) for lease in self._state.leases_of(study))
        return study.turn_seconds + sum(held)

    def _n_devices(self, study: Study, now: float) -> int:
        """Number of a study's devices that are not up for decision, and are not another's next."""
        held = (
            slot.reservation or slot.lease
            for slot in self._state.slots.values()
            if slot.reservation or not self._is_undecided(slot, now)
        )
        return sum(1 for each in held if each and each.study == study.spec.key)

    def _note_idle(self, studies: Sequence[Study], now: float) -> None:
        """Note since when devices without a lease have been of use to a study."""
        wanted = any(map(self._state.needs_device, studies))
        for slot in self._state.slots.values():
            if not (wanted and slot.lease is None and self._memory.usable(slot)):
                slot.idle_since = None
            elif slot.idle_since is None:
                slot.idle_since = now

    def _undecided(self, now: float) -> list[Slot]:
        """The slots that a policy may be asked about now."""
        return [slot for slot in self._state.slots.values() if self._is_undecided(slot, now)]

    def _is_undecided(self, slot: Slot, now: float) -> bool:
        """True if a policy may be asked about this device now, with all others of its lease."""
        lease = slot.lease
        together = [slot] if lease is None else self._state.slots_of(lease)
        if any(x.reservation or not x.device.healthy or x.recovering is not None for x in together):
            return False
        if lease is None:
            return self._memory.usable(slot) and self._memory.bound_trial(slot) is None
        return self._is_up(lease, now) and not self._keeps_others_off(lease, together)

    def _is_up(self, lease: Lease, now: float) -> bool:
        """True if the slice of a trial is over, and it was not asked to leave yet."""
        study, trial = self._state.studies[lease.study], self._state.trial_of(lease)
        if trial is None or study.outage_since is not None or lease.yielding:
            return False
        # Before its first batch a loop would leave with nothing trained; others say of none.
        begins = study.sets_up if lease.from_tier is None else trial.can_store
        return lease.deadline <= now and (lease.training or not begins or study.is_elastic)

    def _keeps_others_off(self, lease: Lease, slots: Sequence[Slot]) -> bool:
        """True if nobody else could use its devices while its trial's process lives."""
        trial = self._state.trial_of(lease)
        stays = trial is not None and lease.training and not trial.can_store
        return stays and any(map(self._memory.is_exclusive, slots))

    def _decide(self, turn: Turn, study: Study, slots: list[Slot]) -> None:
        decide = partial(self._policy_runner.decide, study, slots, turn.now)
        if study.is_elastic:
            from optuna_hermes.broker._core._elastic import worthwhile  # few studies are elastic

            decision = worthwhile(decide, study, partial(self._slice, study, "disk"))
        else:
            decision = decide()
        if decision.memory != study.memory:
            study.memory = decision.memory
            turn.add(SaveMemory(study=study.spec.key, memory=study.saved_memory))
        if not (study.draining or study.problem):  # else its policy was not asked
            study.powered_down = frozenset(decision.powered_down)
        open_ = {slot.device.id: slot for slot in slots}
        for assignment in decision.assignments:
            given = [open_[id_] for id_ in assignment.devices]
            lease = given[0].lease
            if lease and _keeps(study, lease, assignment):
                self._renew(study, lease, assignment.slice_seconds, turn.now)
                _resize(turn, study, lease, assignment.batch_size)
                for id_ in lease.devices:
                    del open_[id_]
            else:
                self._reserve(study, given, assignment)
        for slot in open_.values():
            # Another study's trial yields only to a reservation, an own one if not chosen.
            if slot.lease and (slot.reservation or slot.lease.study == study.spec.key):
                self.ask_to_yield(turn, slot.lease)

    def _renew(self, study: Study, lease: Lease, seconds: float | None, now: float) -> None:
        """Begin another slice of a lease; no cost of bringing its trial back counts any more."""
        lease.slice_started, lease.prefetched, lease.extended = now, False, False
        lease.deadline = self._end(study, None, seconds, now)

    def _reserve(self, study: Study, slots: Sequence[Slot], assignment: Assignment) -> None:
        is_new = assignment.trial not in study.trials
        reservation = Reservation(
            study=study.spec.key,
            number=None if is_new else assignment.trial,
            slice_seconds=assignment.slice_seconds,
            batch_size=assignment.batch_size,
            listed_number=assignment.trial if is_new else None,
        )
        for slot in slots:
            slot.reservation = reservation

    def _is_open_to(self, reservation: Reservation, slot: Slot) -> bool:
        """True if an empty device may be granted to who it is reserved for."""
        bound = self._memory.bound_trial(slot)
        own = bound is None or bound is self._state.trial_of(reservation)
        return own and self._memory.usable(slot)

    def _reserve_for_bound_trials(self) -> None:
        """Reserve devices that one process at most may use for the trials that cannot leave."""
        for slot in self._state.slots.values():
            bound = None if slot.lease or slot.reservation else self._memory.bound_trial(slot)
            if bound is None or not self._memory.usable(slot):
                continue
            study = self._state.studies[bound.study]
            slots = [self._state.slots[id_] for id_ in bound.devices if id_ in self._state.slots]
            free = not any(each.lease or each.reservation for each in slots)
            if free and study.can_begin(bound) and self._state.needs_device(study):
                devices = tuple(each.device.id for each in slots)
                self._reserve(study, slots, Assignment(trial=bound.number, devices=devices))

    def _end(self, study: Study, tier: TierName | None, seconds: float | None, now: float) -> float:
        """End of a slice that begins now.

        Slices of a study whose trials may have several devices end together, for else its policy
        would hardly ever see more than one of them free. A slice that begins in between ends with
        the others if half of it fits until then, or a slice later. All are as long as for a trial
        that comes from disk, since a trial that changes its number does.
        """
        if not study.is_elastic:
            return now + self._slice(study, tier, seconds)
        length = self._slice(study, "disk", seconds)
        ends = (
            lease.deadline
            for lease in self._state.leases_of(study)
            if lease.deadline > now and not lease.yielding
        )
        left = min(ends, default=now + length) - now
        if left > 1.5 * length:
            left = length
        return now + left + (length if left < length / 2 else 0.0)

    def _slice(self, study: Study, tier: TierName | None, seconds: float | None) -> float:
        least = study.spec.slice_seconds if seconds is None else seconds
        return max(least, SWITCH_SHARE * study.cost(tier))

    # -- moving --------------------------------------------------------------------------------

    def _is_late(self, reservation: Reservation, now: float) -> bool:
        """True if no time is left for what was reserved: its device was given up only now."""
        study, trial = self._state.studies[reservation.study], self._state.trial_of(reservation)
        return not (
            study.has_time_to_open(now) if trial is None else study.has_time_for(trial, now)
        )

    def _is_hopeless(self, reservation: Reservation) -> bool:
        """True if no process will come for a reservation."""
        study = self._state.studies[reservation.study]
        if not self._state.needs_process(reservation):
            return False
        trial = self._state.trial_of(reservation)
        if (
            trial is not None
            and trial.connection is not None
            and not (trial.can_store or trial.requested_tier)
        ):
            return True
        if self._available_processes(study) > 0:
            return False
        if _worker_for(self._state, study, trial) is not None:
            return False
        return not any(
            trial.can_store and trial.connection is not None for trial in study.trials.values()
        )

    def _goes_over_disk(self, trial: LiveTrial) -> bool:
        """True if a trial has a reservation for devices that its process cannot use."""
        reserved = self._state.reserved(trial.study)
        own = next((each for each in reserved if each.number == trial.number), None)
        return trial.can_store and own is not None and not trial.suits(self._state.slots_of(own))

    def _send_over_disk(self, turn: Turn, reservation: Reservation, slots: Sequence[Slot]) -> None:
        """Evict a parked trial to disk if its process cannot use the devices reserved for it."""
        trial = self._state.trial_of(reservation)
        if trial is None or trial.state != "parked" or trial.requested_tier or trial.suits(slots):
            return
        if trial.can_store:
            self._memory.move(turn, trial, "disk")

    def _set_up(self, turn: Turn, studies: Sequence[Study]) -> None:
        """Let processes that nothing else needs set up trials before there are devices."""
        for study in studies:
            if study.sets_up:
                from optuna_hermes.broker._core._set_up import set_up_next  # on CPU slots only

                # One that is set up is as good as a process in reserve, which is then made anew.
                spare = self._available_processes(study) - self._needed(study)
                set_up_next(turn, study, self._policy_runner, spare)

    def _available_processes(self, study: Study) -> int:
        """Number of processes that will wait for a trial without an eviction for that."""
        leaving = sum(1 for trial in study.trials.values() if trial.requested_tier == "disk")
        leaving += sum(1 for each in study.workers if self._state.clients[each].leaving)
        return len(study.idle_workers) + leaving + max(0, study.max_alive - len(study.workers))

    def _needed(self, study: Study) -> int:
        """Number of processes that a study's reservations wait for."""
        return sum(map(self._state.needs_process, self._state.reserved(study.spec.key)))

    def _free_processes(self, turn: Turn, study: Study) -> None:
        """Evict parked trials to disk, so that a process is ready when a device is."""
        needed = self._needed(study)
        stored = any(trial.state == "stored" for trial in study.trials.values())
        if stored or self._state.may_open(study).any:
            needed += len(self._state.slots)  # one in reserve for each device
        self._memory.store_wanted_last(turn, study, needed - self._available_processes(study))

    def _grant_next(self, turn: Turn, reservation: Reservation, slots: Sequence[Slot]) -> None:
        study = self._state.studies[reservation.study]
        trial = self._state.trial_of(reservation)
        if trial is not None and (
            trial.state == "running" or trial.requested_tier or not trial.suits(slots)
        ):
            return  # it has still to leave where it is, or is on its way back
        connection = trial.connection if trial else None
        if connection is None:
            connection = _worker_for(self._state, study, trial)
        # A list, not a generator: trials in the way are asked now on every slot, also behind one
        # that is not ready.
        if connection is None or not all([self._memory.make_room(turn, slot) for slot in slots]):
            return
        # Both look at the reservation, which ends here.
        alone = all(self._memory.grants_alone(slot, turn.now) for slot in slots)
        for slot in slots:
            self._memory.warn(turn, slot)
        for slot in slots:
            slot.reservation = None
        lease = self._lease(turn, study, slots, trial, connection, reservation.slice_seconds)
        # One that is about to create a trial has been told which one.
        lease.listed_number = reservation.listed_number if lease.creation_names is None else None
        grant = Grant(
            epoch=lease.epoch,
            devices=lease.devices,
            shown=self._shown(slots),
            alone=alone,
            number=lease.number,
            trial_id=trial.trial_id if trial else None,
            checkpoints=tuple(reversed(trial.checkpoints)) if trial else (),
            device_seconds=trial.device_seconds if trial else 0.0,
            lost=lease.lost_creations,
            listed_number=lease.listed_number,
            batch_size=reservation.batch_size,
        )
        turn.send(connection, grant)

    def _shown(self, slots: Sequence[Slot]) -> tuple[tuple[str, str], ...]:
        own = [slot.device.shown_by for slot in slots if slot.device.shown_by]
        every = {s.device.shown_by[0] for s in self._state.slots.values() if s.device.shown_by}
        hidden = sorted(every - {variable for variable, _ in own})
        return (*own, *((variable, "") for variable in hidden))

    def _lease(
        self,
        turn: Turn,
        study: Study,
        slots: Sequence[Slot],
        trial: LiveTrial | None,
        connection: int,
        slice_seconds: float | None,
    ) -> Lease:
        self._state.epoch += 1
        tier = trial.tier if trial else None
        claimed = turn.claim(trial) if trial else None
        from_idle, client = connection in study.idle_workers, self._state.clients[connection]
        creation_names, client.creation_names = client.creation_names, None
        if from_idle:
            study.idle_workers.remove(connection)
        lost_creations = creation_names or ()
        if trial is None and study.lost_creations and not creation_names:
            lost_creations = study.lost_creations.pop()
        lease = Lease(
            epoch=self._state.epoch,
            study=study.spec.key,
            number=trial.number if trial else None,
            devices=tuple(slot.device.id for slot in slots),
            connection=connection,
            started=turn.now,
            slice_started=turn.now,
            deadline=self._end(study, tier, slice_seconds, turn.now),
            from_tier=tier,
            last_progress=turn.now,
            previous_epoch=trial.epoch if trial else 0,
            from_idle_worker=from_idle,
            creation_names=creation_names,
            lost_creations=lost_creations,
            claimed=claimed,
            energy_joules=counted_joules(slots),
        )
        for slot in slots:
            if slot.idle_since is not None:
                study.add_overhead("idle", turn.now - slot.idle_since)
            slot.lease, slot.idle_since = lease, None
        if trial is None and study.broker is not None:
            turn.add(LimitTrials(study=lease.study, limit=study.most_known))
        turn.add(
            LeaseRecord(
                study=lease.study,
                epoch=lease.epoch,
                number=lease.number,
                devices=tuple(f"{self._state.host}/{id_}" for id_ in lease.devices),
                host=self._state.host,
                started=turn.wall,
                owner=study.broker,
            )
        )
        if trial is not None:
            came_from = trial.host
            trial.start(lease, self._state.host)
            trial.slices += 1
            turn.save(trial)
            _event_log.granted(turn, trial, lease, came_from)
        return lease

    # -- looking ahead -------------------------------------------------------------------------

    def look_ahead_at(self, lease: Lease) -> float:
        """Time to look ahead: as long before the slice's end as bringing a trial back takes."""
        study = self._state.studies[lease.study]
        waits = study.outage_since is not None
        if waits or lease.prefetched or lease.yielding or lease.number is None:
            return math.inf
        # The tier of the next trial is not known yet: the slower way back counts.
        cost = max(study.cost("host"), study.cost("disk"))
        lead = min(cost, (lease.deadline - lease.slice_started) / 2)
        if lead <= 0 or not any(trial.tier in ("host", "disk") for trial in study.trials.values()):
            return math.inf
        return lease.deadline - lead

    def look_ahead(self, turn: Turn) -> None:
        """Bring the next trial nearer where it is time to: a guess, for nothing is reserved."""
        if self._state.in_recovery:
            return
        for lease in self._state.leases():
            if self.look_ahead_at(lease) <= turn.now < lease.deadline:
                lease.prefetched = True
                slots = self._state.slots_of(lease)
                self._prefetch(turn, self._state.studies[lease.study], slots)

    def _prefetch(self, turn: Turn, study: Study, slots: Sequence[Slot]) -> None:
        decision = self._policy_runner.decide(study, slots, turn.now)
        number = next((a.trial for a in decision.assignments), None)
        trial = None if number is None else study.trials.get(number)
        if trial is None or trial.requested_tier is not None:
            return
        if trial.tier == "disk" and trial.connection is None:
            self._prepare(turn, study, trial)
        elif trial.tier == "host" and self._memory.fits_beside(slots[0], trial):
            self._memory.move(turn, trial, "resident")

    def _prepare(self, turn: Turn, study: Study, trial: LiveTrial) -> None:
        """Let a worker that waits read a checkpoint; it gets that trial if it is free then."""
        connection = _worker_for(self._state, study, trial)
        if connection is None or self._state.clients[connection].prepared == trial.number:
            return
        self._state.clients[connection].prepared = trial.number
        message = Prepare(number=trial.number, checkpoints=tuple(reversed(trial.checkpoints)))
        turn.send(connection, message)


def _keeps(study: Study, lease: Lease, assignment: Assignment) -> bool:
    same = lease.study == study.spec.key and lease.number == assignment.trial
    return same and set(lease.devices) == set(assignment.devices)


def _without_partial_leases(slots: Sequence[Slot]) -> list[Slot]:
    """Slots without those of leases that have further devices elsewhere."""
    found = Counter(slot.lease.epoch for slot in slots if slot.lease)
    return [s for s in slots if s.lease is None or found[s.lease.epoch] == len(s.lease.devices)]


def _resize(turn: Turn, study: Study, lease: Lease, batch_size: int | None) -> None:
    """Send a trial that keeps its device another batch size, if it is another one."""
    sizes = study.trials[lease.number].sizes if lease.number is not None else None
    if batch_size is not None and sizes is not None and sizes.now != batch_size:
        message = Resize(epoch=lease.epoch, batch_size=batch_size)
        turn.send(lease.connection, message)


def _slot_order(slot: Slot, study: Study) -> tuple[int, int, str]:
    """Sort key: the study's own devices first, then empty ones, then those of others."""
    place = 1 if slot.lease is None else 0 if slot.lease.study == study.spec.key else 2
    return place, len(slot.device.id), slot.device.id


def _worker_for(state: BrokerState, study: Study, trial: LiveTrial | None) -> int | None:
    """Best worker: one that is creating a trial, or has prepared for this one, or for none."""
    if trial is None:
        clients = ((each, state.clients[each]) for each in study.workers)
        found = [each for each, client in clients if client.creation_names and not client.dismissed]
        if found:
            return min(found)

    def distance(connection: int) -> int:
        prepared = state.clients[connection].prepared
        if prepared is None:
            return 1
        return 0 if trial is not None and prepared == trial.number else 2

    return min(study.idle_workers, key=distance, default=None)
