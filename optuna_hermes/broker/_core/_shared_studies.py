"""Study that several hosts share: trials of others, free trials, and hosts that are gone. Pure.

Which host carries a trial on is settled by claims in the ledger; this decides which to try for, and
what to leave to others.
"""

from __future__ import annotations

from collections.abc import Collection

from optuna_hermes.broker._core._admission import count_opening_elsewhere, known_trials
from optuna_hermes.broker._core._borrowing import (
    give_away,
    promised,
    soon,
    wanted_elsewhere,
)
from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._events import ClaimConflict, ForgetBroker, Refreshed
from optuna_hermes.broker._core._lease_ends import LeaseEnds
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Refused
from optuna_hermes.ledger._records import DEAD_SECONDS, HostRecord, TrialRecord

REFRESH_SECONDS = 3.0
"""Interval at which a broker notes that it lives, and reads what others have done."""

_COMING_SECONDS = 3 * REFRESH_SECONDS
"""Time until a trial is here that another host is asked for: both have to look."""

_FRESH_SECONDS = 4 * REFRESH_SECONDS
"""Time for which the presence of a broker counts."""

_GAP_SECONDS = DEAD_SECONDS / 2
"""Time without a look at other hosts after which live ones may look dead.

They could not write in it either, and may have been silent for as long before it.
"""


class Sharing:
    """Keeps shared studies in step with other hosts."""

    def __init__(
        self,
        state: BrokerState,
        policy_runner: PolicyRunner,
        memory: MemoryManager,
        ends: LeaseEnds,
    ) -> None:
        self._state = state
        self._policy_runner = policy_runner
        self._memory = memory
        self._ends = ends

    # -- this host, for the others -------------------------------------------------------------

    def presence(self, now: float) -> HostRecord:
        """Presence of this broker, for those of other hosts."""
        slots = [slot for slot in self._state.slots.values() if slot.device.healthy]
        idle = [slot for slot in slots if self._is_idle(slot)]
        wants: list[str] = []
        for key, study in self._state.studies.items():
            if idle and self._wants_more(study):
                wants.append(key)
            if study.broker is not None and study.driver is not None and not study.draining:
                own = soon(slots, key, now + _COMING_SECONDS)
                study.asked_for = wanted_elsewhere(study, self._policy_runner, own, now)
                wants += (f"{key}:{number}" for number in study.asked_for)  # see ``promised``
        return HostRecord(
            name=self._state.host,
            instance=self._state.instance,
            devices=tuple(slot.device.id for slot in slots),
            load=self._load(),
            wants=tuple(wants),
        )

    def _is_idle(self, slot: Slot) -> bool:
        return slot.lease is None and slot.reservation is None and self._memory.usable(slot)

    def _wants_more(self, study: Study) -> bool:
        """True if there could be more of a study here than there is."""
        served = study.broker is not None and study.driver is not None
        # Another host would leave it a trial that waits here for its next try.
        waits = any(_is_free(t) for t in study.trials.values() if t.number in study.retry_at)
        return served and not (study.draining or self._state.needs_device(study) or waits)

    def _load(self) -> float:
        """Share of its devices that a broker has in use, 1.0 if it has none."""
        slots = [slot for slot in self._state.slots.values() if slot.device.healthy]
        busy = sum(1 for slot in slots if slot.lease is not None or slot.reservation is not None)
        return busy / len(slots) if slots else 1.0

    # -- the others ----------------------------------------------------------------------------

    def refreshed(self, turn: Turn, event: Refreshed) -> None:
        """Take in what other hosts have done."""
        study = self._state.studies.get(event.study)
        if study is None or study.broker is None:
            return
        self._state.epoch = max(self._state.epoch, event.last_epoch)
        others = [host for host in event.hosts if host.instance != study.broker]
        alive = self._alive(turn, study, others, event)
        known = known_trials(self._state, event, turn.now)
        for record, new in zip(event.trials, known, strict=True):
            self._take_in(turn, study, record, new)
        for number in event.gone:
            trial = study.trials.get(number)
            if trial is not None and not (
                study.owns(trial) or trial.connection or trial.recovering
            ):
                self._remove(study, trial)
        for trial in study.trials.values():
            if study.is_elsewhere(trial) and trial.owner not in alive and trial.connection is None:
                # Its broker is gone, so any host may carry it on, from its last checkpoint.
                trial.owner, trial.waiting_since = None, turn.now
                if trial.live:
                    trial.leave_process()
        # Of a dead one, too, until they have ended: its driver adopts what they created only then.
        all_hosts = {host.instance for host in others}
        study.opening_elsewhere = count_opening_elsewhere(study, event.leases, all_hosts)
        fresh = [x for x in others if x.instance in alive and x.age_seconds < _FRESH_SECONDS]
        study.promised = promised(study, fresh, self._state.instance)
        self._look_at_the_idle(study, fresh)
        self._state.cancel_reservations(study, only_impossible=True)
        if not study.draining:
            reserved = {each.number for each in self._state.reserved(study.spec.key)}
            give_away(turn, study, self._memory, reserved)
            self._make_room(turn, study)

    def _remove(self, study: Study, trial: LiveTrial) -> None:
        """Remove a trial whose row is gone, and what is reserved for it."""
        for reservation in self._state.reserved(study.spec.key):
            if reservation.number == trial.number:
                self._state.unreserve(reservation)
        del study.trials[trial.number]

    def _alive(
        self, turn: Turn, study: Study, others: Collection[HostRecord], event: Refreshed
    ) -> set[str]:
        """Brokers of other hosts that live.

        After a long outage, or when the database's clock was set, all of them look silent: no sign
        of death until the database has been there since for as long as a dead broker is silent.
        """
        last, study.heartbeats = study.heartbeats, {}
        for host in others:
            study.heartbeats[host.instance] = turn.now - host.age_seconds
        # Then the last one, or a later one, seems to be earlier by more than reads can be late.
        least = {each: at - _GAP_SECONDS for each, at in last.items()}
        was_set = any(at < least.get(each, at) for each, at in study.heartbeats.items())
        if turn.now - study.refreshed_at > _GAP_SECONDS or was_set:
            study.watched_since = turn.now
        study.refreshed_at = turn.now
        sure = turn.now - study.watched_since >= DEAD_SECONDS
        dead = {host.instance for host in others if sure and host.age_seconds >= DEAD_SECONDS}
        for each in sorted(dead):
            turn.add(ForgetBroker(study=study.spec.key, instance=each))
        for lease in event.leases:
            creation_names = (str(lease.epoch),)
            if (
                lease.owner in dead
                and lease.number is None
                and creation_names not in study.lost_creations
            ):
                study.lost_creations.append(creation_names)  # its holder may have created a trial
        return {host.instance for host in others} - dead

    def _take_in(self, turn: Turn, study: Study, record: TrialRecord, new: LiveTrial) -> None:
        """Take in a row of another host, unless it was read before this broker wrote it."""
        trial = study.trials.get(record.number)
        if record.owner == study.broker and (trial is None or trial.owner != _ANOTHER):
            return
        if trial is not None:
            if _was_taken(study, trial, record):
                self._is_anothers(turn, trial)
            if study.owns(trial) or trial.connection or trial.recovering:
                return
            if trial.row is not None and record.slices < trial.row.slices:
                return
            new.params = trial.params
            new.curve = new.curve if new.curve.units else trial.curve
            new.waiting_since = turn.now if study.is_elsewhere(trial) else trial.waiting_since
        new.count_reported()
        if study.is_elsewhere(new):
            new.show_as(record.state)
        study.add(new)

    def _look_at_the_idle(self, study: Study, others: Collection[HostRecord]) -> None:
        """Note the hosts that have nothing to train of a study, though they could."""
        key, load = study.spec.key, self._load()
        idle = [host for host in others if key in host.wants]
        study.idle_elsewhere = sum(max(1, round(len(x.devices) * (1 - x.load))) for x in idle)
        study.defers = any(host.load < load for host in idle)

    def _make_room(self, turn: Turn, study: Study) -> None:
        """Store what would wait here longest, so that a host with nothing to do can take it."""
        free = sum(
            1
            for trial in study.trials.values()
            if _is_free(trial) or trial.requested_tier == "disk"
        )
        self._memory.store_wanted_last(turn, study, study.idle_elsewhere - free)

    # -- races ---------------------------------------------------------------------------------

    def claim_conflict(self, turn: Turn, event: ClaimConflict) -> None:
        """Undo what a claim conflict has voided; it is decided anew."""
        self._state.epoch = max(self._state.epoch, event.last_epoch)
        for lease in self._state.leases():
            if lease.epoch in event.epochs:
                self._ends.undo(turn, lease, refused=True)
        study = self._state.studies.get(event.study)
        if study is None:
            return
        for number in event.numbers:
            if number in study.trials:
                self._is_anothers(turn, study.trials[number])
        if event.full:  # others begin them all, until what they do is read
            left = self._state.may_open(study).count or 0
            study.opening_elsewhere = max(1, study.opening_elsewhere + left)

    def _is_anothers(self, turn: Turn, trial: LiveTrial) -> None:
        """Give up a trial that went to another host; a process for it here may not go on."""
        trial.owner = _ANOTHER  # who it is will be read
        if trial.connection is None:
            return
        reason = f"Another host has taken trial {trial.number} over: this one was silent for long."
        turn.send(trial.connection, Refused(reason=reason, taken=True))
        turn.kill_worker(trial.connection, reason)


_ANOTHER = "another broker"


def rows_of_others(study: Study) -> dict[int, TrialRecord | None]:
    """Trials that others may change, with their rows as they are known; None asks for the row."""
    trials = ((number, trial) for number, trial in study.trials.items() if not study.owns(trial))
    return {number: None if _is_unread(trial) else trial.row for number, trial in trials}


def _is_unread(trial: LiveTrial) -> bool:
    """True if the row of another host may have been read, but was not taken in."""
    return trial.owner == _ANOTHER or trial.connection is not None or trial.recovering


def _was_taken(study: Study, trial: LiveTrial, record: TrialRecord) -> bool:
    """True if another broker has had a trial since, though this one takes it for its own."""
    since = trial.row is not None and record.slices > trial.row.slices
    return study.owns(trial) and record.owner != study.broker and since


def _is_free(trial: LiveTrial) -> bool:
    """True if any host may carry it on."""
    return trial.owner is None and trial.state in ("pending", "stored") and not trial.in_process
