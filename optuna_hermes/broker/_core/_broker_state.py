"""State of the broker: leases, device slots, studies and clients, with queries on them.

Plain mutable records without a clock; the event handler and the modules that it uses change them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._protocol import Params, StudyChanged
from optuna_hermes.broker._served_process import RecoveringProcess
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import Device, TierName, TrialView, Unstarted

PowerState = Literal["on", "going", "off", "coming"]

CONTEXT_BYTES = 600 << 20
"""Memory that a process takes of a GPU beside what its trial holds, before it was measured."""


@dataclass(kw_only=True)
class Lease:
    """Lease that is out: one object, shared by the slots of its devices.

    Args:
        number: None until a new trial has begun.
        devices: one or more.
        started: when it was granted; ``slice_started`` when it was renewed last.
        from_tier: where its trial came from.
        yielding: the tier by which it was asked to leave.
        prefetched: the prefetch for the end of this slice is done.
        extended: this slice lasts until its trial's unit is over.
        begun: its holder, which had no trial before, has said which one it has.
        training: its first batch has begun.
        reported: it has reported since.
        uncommitted: it is not in the ledger yet, whose database is away: its grant is not sent.
        previous_epoch: the epoch of its trial's lease before this one.
        adopted: it was granted by an earlier broker.
        from_idle_worker: its holder had no trial before.
        creation_names: see ``Client``; of a holder that was about to create a trial at the grant.
        lost_creations: the names under which one process may have created a trial, and died
            before it said so; this one's holder looks for that trial before it creates another.
        listed_number: the listed trial for its holder, None for the first one that waits.
        refused: its holder has found a trial that it may not have.
        claimed: the row of its trial, which had no owner before; None if it was this broker's.
        energy_joules: what the counters of its devices said in all when it was granted, None if
            one has none.
    """

    epoch: int
    study: str
    number: int | None
    devices: tuple[str, ...]
    connection: int
    started: float
    slice_started: float
    deadline: float
    from_tier: TierName | None
    yielding: TierName | None = None
    last_progress: float = 0.0
    prefetched: bool = False
    extended: bool = False
    begun: bool = False
    training: bool = False
    reported: bool = False
    uncommitted: bool = False
    previous_epoch: int = 0
    adopted: bool = False
    from_idle_worker: bool = False
    creation_names: tuple[str, ...] | None = None
    listed_number: int | None = None
    lost_creations: tuple[str, ...] = ()
    refused: bool = False
    claimed: TrialRecord | None = field(default=None, repr=False)
    energy_joules: float | None = None

    @property
    def device(self) -> str:
        return self.devices[0]

    def device_seconds(self, end: float) -> float:
        """Device time from its beginning to ``end``."""
        return (end - self.started) * len(self.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Reservation of devices for a trial, or for a new trial (``number`` None).

    One object, shared by the slots of the devices. ``listed_number`` is the new trial's number if
    it is a listed one.
    """

    study: str
    number: int | None
    slice_seconds: float | None
    batch_size: int | None = None
    listed_number: int | None = None


@dataclass(kw_only=True)
class Slot:
    """Device with its lease and its reservation.

    Until ``settles_at`` a reading may still show memory that a trial has left. The process
    ``recovering`` has it from an earlier broker, and no other gets it.

    Args:
        context_bytes: what a process was measured to take of it beside what its trial holds, None
            before the first time.
        idle_since: since when it has had no lease although a study could use it, else None.
        power: see ``_device_changes``; memory and processes of a device are known while it is on.
        unwanted: no policy has a use for it, as of when one was asked last.
        power_retry_at: its power is left as it is until then.
        power_problem: why it could not be woken, empty if it could.
    """

    device: Device
    lease: Lease | None = None
    reservation: Reservation | None = None
    idle_since: float | None = None
    settles_at: float = 0.0
    context_bytes: int | None = None
    recovering: int | None = None
    power: PowerState = "on"
    unwanted: bool = False
    power_retry_at: float = 0.0
    power_problem: str = ""


@dataclass(kw_only=True)
class Client:
    """Connection of a client. A worker serves one study, and one trial at a time.

    Args:
        role: as in ``Hello``.
        prepared: the trial whose checkpoint it has read ahead of time.
        creation_names: the names under which it is about to create a trial without a device,
            None if it is not; empty if the trial that it has found is another's.
        listed_number: the listed trial that it is about to take for that.
        dismissed: why it was sent away, before its trial had begun or for its study's problem;
            empty if it was not.
        leaving: the devices whose memory it still has, after it said that it leaves, since
            ``silent_from``.
        silent_from: since when it has been leaving, or creating a trial, without a lease.
        started: when its process did, as its kernel counts.
        hung: it was sent SIGKILL because it hung.
        worked_at: when it was last seen to work while it was silent.
        idle_since: since when it was seen to be silent and idle, None if it was not.
        stopped_since: since when it was seen to be stopped, None if it was not.
        described: parameters of the trials of studies that it is about to open.
        finishes: trials that it is about to close, by study and number.
        watches: it is to be told of the next change of the study that it drives.
        last_status: what it was told last of that study, without what changes by itself.
    """

    pid: int
    role: str
    started: int = 0
    study: str | None = None
    prepared: int | None = None
    creation_names: tuple[str, ...] | None = None
    listed_number: int | None = None
    dismissed: str = ""
    leaving: tuple[str, ...] = ()
    silent_from: float = 0.0
    hung: bool = False
    worked_at: float = -math.inf
    idle_since: float | None = None
    stopped_since: float | None = None
    described: dict[str, dict[int, Params]] = field(default_factory=dict)
    finishes: set[tuple[str, int]] = field(default_factory=set)
    watches: bool = False
    last_status: StudyChanged | None = None


@dataclass(kw_only=True)
class BrokerState:
    """Everything a broker knows, in memory.

    Args:
        instance: this broker and its successors, as other hosts know them: no others ever had this
            name.
        wall_offset: wall clock minus the monotonic clock, in seconds.
        host_budget_bytes: host memory that trials may take for what they move off their devices.
        context_bytes: what a process takes of a GPU beside what its trial holds, where that was
            never measured.
        recovering: by the connections under which their ends are reported.
        early: workers that are ready for a study that is not open yet, by its key.
        n_set_ups: number of the last trial that was set up without a device. Each broker of an
            instance begins at another one, since these numbers are in the names of creations.
    """

    host: str
    instance: str = ""
    wall_offset: float = 0.0
    host_budget_bytes: int = 0
    context_bytes: int = CONTEXT_BYTES
    epoch: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    studies: dict[str, Study] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)
    recovering: dict[int, RecoveringProcess] = field(default_factory=dict)
    early: dict[str, list[int]] = field(default_factory=dict)
    n_set_ups: int = 0

    @property
    def processes(self) -> set[tuple[int, str]]:
        """Connected processes and their roles; one may have several connections."""
        return {(client.pid, client.role) for client in self.clients.values()}

    @property
    def needed(self) -> bool:
        """True if any client needs this broker; viewers do not."""
        return any(client.role != "viewer" for client in self.clients.values())

    @property
    def in_recovery(self) -> bool:
        """True if processes of an earlier broker may still come back."""
        return any(not each.late for each in self.recovering.values())

    @property
    def unpowered(self) -> list[str]:
        """Devices that are powered down, or on their way there or back."""
        return [id_ for id_, slot in self.slots.items() if slot.power != "on"]

    def expect_off(self, devices: Collection[str]) -> None:
        """Take these devices for powered down: the broker before this one left them so."""
        for id_ in self.slots.keys() & devices:
            self.slots[id_].power, self.slots[id_].unwanted = "off", True

    def holds(self, connection: int) -> bool:
        """True if a client has a device, or a trial in its memory."""
        leased = any(lease.connection == connection for lease in self.leases())
        return leased or any(trial.connection == connection for trial in self.trials())

    def leases(self) -> list[Lease]:
        """The leases that are out, each once."""
        # By identity: leases are not hashable, and two reservations may be equal.
        return list({id(s.lease): s.lease for s in self.slots.values() if s.lease}.values())

    def leases_of(self, study: Study) -> list[Lease]:
        return [lease for lease in self.leases() if lease.study == study.spec.key]

    def count_begun(self, study: Study) -> int:
        """Number of new trials that are about to begin under a lease, or to be set up."""
        begun = sum(lease.number is None for lease in self.leases_of(study))
        return begun + sum(bool(self.clients[each].creation_names) for each in study.workers)

    def count_promised(self, study: Study) -> int:
        """Number of new trials that are about to begin, or have a reservation for that."""
        reserved = sum(each.number is None for each in self.reserved(study.spec.key))
        return reserved + self.count_begun(study)

    def may_open(self, study: Study) -> Unstarted:
        """Trials that may still be created, beside those that are promised or begin elsewhere."""
        count = 0 if study.driver is None else self._room(study)
        if count:  # to count what is promised takes longer
            count -= self.count_promised(study)
        return Unstarted(count=None if count is None else max(0, count), fixed=study.fixed)

    def promises_too_many(self, study: Study) -> bool:
        """True if others have begun trials meanwhile, so that not all can be that are promised."""
        room = self._room(study)
        return room is not None and room < self.count_promised(study)

    def _room(self, study: Study) -> int | None:
        """Number of trials that may come beside those that are known here, None for no bound."""
        most = study.most_known
        return None if most is None else most - len(study.trials) - study.opening_elsewhere

    def needs_device(self, study: Study) -> bool:
        """True if anything of a study could use a device."""
        if study.draining or study.outage_since is not None:
            return False
        return self.may_open(study).any or any(map(study.can_begin, study.trials.values()))

    def all_held(self, study: Study) -> bool:
        """True if nothing of a study can be trained before a hold is released."""
        live = [trial for trial in study.trials.values() if trial.live]
        new = self.may_open(study).any or self.count_promised(study)
        return bool(live) and not new and all(study.override_of(x) == "held" for x in live)

    def listed(self, study: Study) -> dict[int, TrialView]:
        """The listed trials of a study that nobody has taken, or is about to."""
        if not study.listed:
            return {}
        taken = {each.listed_number for each in self.reserved(study.spec.key)}
        taken |= {lease.listed_number for lease in self.leases_of(study) if lease.number is None}
        taken |= {
            self.clients[each].listed_number
            for each in study.workers
            if self.clients[each].creation_names
        }
        left = ((number, each) for number, each in study.listed.items() if number not in taken)
        return {number: each for number, each in left if number not in study.trials}

    def client_of(self, connection: int | None) -> Client | None:
        """The client of a connection; None if there is none, or it is gone."""
        return None if connection is None else self.clients.get(connection)

    def pid_of(self, connection: int | None) -> int | None:
        """The process of a connection; None if there is none, or it is gone."""
        client = self.client_of(connection)
        return None if client is None else client.pid

    def leaving(self, slot: Slot) -> list[Client]:
        """Clients that announced their end, and still have memory of a device."""
        return [each for each in self.clients.values() if slot.device.id in each.leaving]

    def reservations(self) -> list[Reservation]:
        """The reservations, each once."""
        found = (slot.reservation for slot in self.slots.values())
        return list({id(each): each for each in found if each}.values())

    def slots_of(self, right: Lease | Reservation) -> list[Slot]:
        """The slots of a lease or of a reservation."""
        return [s for s in self.slots.values() if right is s.lease or right is s.reservation]

    def lease(self, epoch: int) -> Lease | None:
        """The lease of this epoch; None if it is over."""
        leases = (slot.lease for slot in self.slots.values())
        return next((each for each in leases if each and each.epoch == epoch), None)

    def trial_of(self, right: Lease | Reservation | None) -> LiveTrial | None:
        """The trial of a lease or reservation; None without one, or before a new trial begins."""
        if right is None or right.number is None:
            return None
        return self.studies[right.study].trials[right.number]

    @property
    def host_used_bytes(self) -> int:
        """Bytes of the host budget that are taken, or promised."""
        return sum(trial.host_claim_bytes for trial in self.trials())

    def trials(self) -> Iterator[LiveTrial]:
        """Every trial of every study."""
        for study in self.studies.values():
            yield from study.trials.values()

    def parked_on(self, slot: Slot) -> list[LiveTrial]:
        """Trials whose processes are parked on a device, in its memory or in the host's."""
        return [r for r in self.trials() if r.state == "parked" and slot.device.id in r.devices]

    def reserved(self, study: str) -> list[Reservation]:
        return [reservation for reservation in self.reservations() if reservation.study == study]

    def studies_at_work(self) -> list[Study]:
        """The studies that need a device, or have one, or were promised one."""
        have = {lease.study for lease in self.leases()}
        have |= {reservation.study for reservation in self.reservations()}
        return [s for s in self.studies.values() if self.needs_device(s) or s.spec.key in have]

    def needs_process(self, reservation: Reservation) -> bool:
        """True if a worker that waits is needed for a reservation."""
        trial = self.trial_of(reservation)
        if trial is None or trial.connection is None:
            return True
        return not trial.suits(self.slots_of(reservation))

    def unreserve(self, reservation: Reservation) -> None:
        """Cancel a reservation."""
        for slot in self.slots_of(reservation):
            slot.reservation = None

    def cancel_reservations(self, study: Study, *, only_impossible: bool = False) -> None:
        """Cancel the reservations of a study, or only those that cannot be granted."""
        for reservation in self.reserved(study.spec.key):
            trial = self.trial_of(reservation)
            possible = study.driver is not None if trial is None else study.can_begin(trial)
            if not (only_impossible and possible):
                self.unreserve(reservation)


def counted_joules(slots: Iterable[Slot]) -> float | None:
    """Sum of the devices' energy counters, None if one has none."""
    return _sum(slot.device.energy_joules for slot in slots)


def taken_joules(slots: Sequence[Slot], lease: Lease, now: float) -> float | None:
    """Energy that devices have taken since their lease began, None if it is not known.

    It is the difference of their counters. If one is missing, or began anew, it is the rated power
    of the devices for as long as the lease has lasted, which is more than they took.
    """
    counted, before = counted_joules(slots), lease.energy_joules
    if counted is not None and before is not None and counted >= before:
        return counted - before
    watts = _sum(slot.device.power_watts for slot in slots)
    return None if watts is None else watts * (now - lease.started)


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return sum(each or 0.0 for each in known) if known and None not in known else None
