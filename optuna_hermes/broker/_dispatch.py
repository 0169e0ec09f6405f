"""Who gets a device next: asks the policy, reserves, yields, evicts and grants. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from optuna_hermes.broker import _residency as residency
from optuna_hermes.broker._book import Book, Lease, Run, Slot, Study, Want, view
from optuna_hermes.broker._events import Command, SaveMemory, Send
from optuna_hermes.broker._protocol import Evict, Grant, Yield
from optuna_hermes.ledger._base import LeaseRecord
from optuna_hermes.model import Assignment, Decision, Device, RunView, Snapshot, TierName, Unstarted

SWITCH_SHARE = 50
"""A slice lasts at least this many times what bringing its run back costs: 2 % overhead."""


class Dispatcher:
    """Moves devices between runs of a ``Book``; every method adds commands to ``out``."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def schedule(self, now: float, out: list[Command]) -> None:
        """Let the policies decide about every device that is free or whose slice is over.

        With several studies each decides within its fair share first, then about what is left.
        """
        studies = [s for s in self._book.studies.values() if s.wants_device or self._holds(s)]
        for shared in (True, False) if len(studies) > 1 else (False,):
            for study in sorted(studies, key=lambda s: (self._held(s, now), s.spent_seconds)):
                open_ = [slot for slot in self._book.slots.values() if _undecided(slot, now)]
                if shared:
                    share = max(1, len(self._book.slots) // len(studies))
                    quota = max(0, share - self._held(study, now))
                    open_ = sorted(open_, key=lambda slot: _rank(slot, study))[:quota]
                if open_:
                    self._decide(study, open_, now, out)
        self.fill(now, out)

    def fill(self, now: float, out: list[Command]) -> None:
        """Grant every reserved device that is empty, as far as there are processes."""
        for slot in self._book.slots.values():
            if slot.next and not slot.lease:
                self._grant_next(slot, now, out)
        for study in self._book.studies.values():
            self._make_room(study, out)

    def ask_to_yield(self, slot: Slot, now: float, out: list[Command]) -> None:
        """Revoke the lease of a slot, once."""
        lease = slot.lease
        if lease is None or lease.yielding:
            return
        lease.yielding = self._tier(slot, lease)
        lease.last_progress = now
        out.append(
            Send(
                connection=lease.connection,
                message=Yield(epoch=lease.epoch, tier=lease.yielding),
            )
        )

    def evict(self, run: Run, out: list[Command]) -> None:
        """Send a parked run to disk."""
        if run.connection is None or run.evicting or not run.stores:
            return
        run.evicting = True
        out.append(Send(connection=run.connection, message=Evict(epoch=run.epoch)))

    # -- deciding ------------------------------------------------------------------------------

    def _holds(self, study: Study) -> bool:
        return any(s.lease and s.lease.study == study.spec.key for s in self._book.slots.values())

    def _held(self, study: Study, now: float) -> int:
        """Devices of a study that are not up for decision."""
        key = study.spec.key
        return sum(
            1
            for slot in self._book.slots.values()
            if (slot.next and slot.next.study == key)
            or (slot.lease and slot.lease.study == key and not _undecided(slot, now))
        )

    def _decide(self, study: Study, slots: list[Slot], now: float, out: list[Command]) -> None:
        snapshot = self.snapshot(study, slots, now)
        decision = _ask(study, snapshot)
        if decision.memory != study.memory:
            study.memory = decision.memory
            out.append(SaveMemory(study=study.spec.key, memory=decision.memory))
        open_ = {slot.device.id: slot for slot in slots}
        for assignment in decision.assignments:
            slot = open_.pop(assignment.devices[0], None)
            if slot is not None:
                self._assign(study, slot, assignment, now, out)
        for slot in open_.values():
            if slot.lease and slot.lease.study == study.spec.key:
                self.ask_to_yield(slot, now, out)

    def snapshot(self, study: Study, slots: list[Slot], now: float) -> Snapshot:
        """What the policy of ``study`` sees when it decides about ``slots``."""
        open_ids = {slot.device.id for slot in slots}
        up = {
            slot.lease.number for slot in slots if slot.lease and slot.lease.study == study.spec.key
        }
        wanted = {want.number for want in self._book.reserved(study.spec.key)}
        seats = self._seats(study)
        views: list[RunView] = []
        finished: list[RunView] = []
        for run in study.runs.values():
            seen = view(
                run,
                cost=study.cost(run.tier),
                bound=self._bound(run),
                up_for_decision=run.number in up,
                reserved=run.number in wanted
                or not study.can_run(run)
                or (run.connection is None and seats == 0),
            )
            (views if run.live else finished).append(seen)
        return Snapshot(
            now=now,
            seed=study.spec.seed,
            devices=tuple(
                _with_free(slot, slot.device.id in open_ids) for slot in self._book.slots.values()
            ),
            runs=tuple(views),
            finished=tuple(finished),
            unstarted=_at_most(study.may_open, seats),
            memory=study.memory,
        )

    def _seats(self, study: Study) -> int:
        """Processes that stored runs and new trials could get, others going to disk for them.

        Only what is there counts: a device is not kept for a worker that may never come.
        """
        may_leave = sum(1 for r in study.runs.values() if r.stores and r.connection is not None)
        taken = sum(_wants_process(study, w) for w in self._book.reserved(study.spec.key))
        return max(0, len(study.idle) + may_leave - taken)

    def _bound(self, run: Run) -> bool:
        """A run that still holds a GPU's memory can go on only there."""
        slot = self._book.slots.get(run.device or "")
        return run.connection is not None and slot is not None and slot.device.kind == "gpu"

    def _assign(
        self, study: Study, slot: Slot, assignment: Assignment, now: float, out: list[Command]
    ) -> None:
        lease = slot.lease
        if lease and lease.study == study.spec.key and lease.number == assignment.run:
            lease.deadline = now + self._slice(study, None, assignment.slice_seconds)
            return  # what bringing it back cost is paid
        if assignment.run is None and study.unstarted is not None:
            study.unstarted -= 1
        slot.next = Want(
            study=study.spec.key, number=assignment.run, slice_seconds=assignment.slice_seconds
        )
        self.ask_to_yield(slot, now, out)

    def _slice(self, study: Study, tier: TierName | None, wish: float | None) -> float:
        least = study.spec.slice_seconds if wish is None else wish
        return max(least, SWITCH_SHARE * study.cost(tier))

    # -- moving --------------------------------------------------------------------------------

    def _tier(self, slot: Slot, lease: Lease) -> TierName:
        run = self._book.run_of(lease)
        if run is None:
            return "disk"
        study = self._book.studies[lease.study]
        known = [r.held_bytes for r in study.runs.values() if r.held_bytes is not None]
        return residency.tier_for(
            run, slot.device, draining=study.draining, next_bytes=max(known, default=None)
        )

    def _make_room(self, study: Study, out: list[Command]) -> None:
        """Send parked runs to disk, so that a process is ready when a device is."""
        wants = self._book.reserved(study.spec.key)
        needed = sum(1 for want in wants if _wants_process(study, want))
        if study.may_open.any or any(run.state == "stored" for run in study.runs.values()):
            needed += len(self._book.slots)  # one in reserve for each device
        leaving = sum(1 for run in study.runs.values() if run.evicting)
        coming = len(study.idle) + leaving + max(0, study.max_alive - len(study.workers))
        for run in residency.to_evict(study.parked, needed=needed, coming=coming):
            self.evict(run, out)

    def _grant_next(self, slot: Slot, now: float, out: list[Command]) -> None:
        want = slot.next
        assert want is not None
        study = self._book.studies[want.study]
        run = None if want.number is None else study.runs[want.number]
        if run is not None and (run.state == "running" or run.evicting):
            return  # it has still to leave where it is
        if run is not None and run.connection is not None:
            connection = run.connection
        elif study.idle:
            connection = study.idle.pop(0)
        else:
            return
        slot.next = None
        self._grant(study, slot, run, connection, want.slice_seconds, now, out)

    def _grant(
        self,
        study: Study,
        slot: Slot,
        run: Run | None,
        connection: int,
        slice_seconds: float | None,
        now: float,
        out: list[Command],
    ) -> None:
        self._book.epoch += 1
        tier = run.tier if run else None
        lease = Lease(
            epoch=self._book.epoch,
            study=study.spec.key,
            number=run.number if run else None,
            device=slot.device.id,
            connection=connection,
            started=now,
            deadline=now + self._slice(study, tier, slice_seconds),
            from_tier=tier,
            last_progress=now,
        )
        if slot.empty_since is not None:
            study.overhead_seconds += now - slot.empty_since
        slot.lease, slot.empty_since = lease, None
        wall = now + self._book.wall_offset
        out.append(
            LeaseRecord(
                study=lease.study,
                epoch=lease.epoch,
                number=lease.number,
                devices=(f"{self._book.host}/{slot.device.id}",),
                host=self._book.host,
                started=wall,
            )
        )
        if run is not None:
            run.state, run.tier, run.waiting_since = "running", None, None
            run.connection, run.device, run.epoch = connection, slot.device.id, lease.epoch
            run.slices += 1
            out.append(self._book.record(run, now))
        out.append(Send(connection=connection, message=_grant_message(lease, run)))


def _ask(study: Study, snapshot: Snapshot) -> Decision:
    """The policy's decision; none if it breaks its contract, which ends its study only."""
    if study.draining or study.problem:
        return Decision(memory=study.memory)
    try:
        decision = study.policy.decide(snapshot)
        _check(decision, snapshot)
    except Exception as error:  # a policy is the user's code: it may not end the broker
        study.problem = f"Policy {study.spec.policy!r} raised {error!r}."
        return Decision(memory=study.memory)
    return decision


def _check(decision: Decision, snapshot: Snapshot) -> None:
    waiting = {r.number for r in snapshot.runs if r.state in ("pending", "parked", "stored")}
    free = {device.id for device in snapshot.devices if device.free}
    runs = Counter(a.run for a in decision.assignments if a.run is not None)
    devices = Counter(id_ for a in decision.assignments for id_ in a.devices)
    wrong = [
        *(f"run {run}" for run, n in runs.items() if n > 1 or run not in waiting),
        *(f"device {id_}" for id_, n in devices.items() if n > 1 or id_ not in free),
    ]
    if wrong:
        raise ValueError(
            "a policy assigns waiting runs and free devices, each once at most, but got "
            + ", ".join(wrong)
        )


def _grant_message(lease: Lease, run: Run | None) -> Grant:
    return Grant(
        epoch=lease.epoch,
        devices=(lease.device,),
        number=run.number if run else None,
        trial_id=run.trial_id if run else None,
        checkpoints=tuple(reversed(run.checkpoints)) if run else (),
        device_seconds=run.device_seconds if run else 0.0,
    )


def _wants_process(study: Study, want: Want) -> bool:
    return want.number is None or study.runs[want.number].connection is None


def _at_most(unstarted: Unstarted, seats: int) -> Unstarted:
    count = seats if unstarted.count is None else min(seats, unstarted.count)
    return Unstarted(count=count, fixed=unstarted.fixed)


def _undecided(slot: Slot, now: float) -> bool:
    """Whether a policy may be asked about this device now."""
    if slot.next or not slot.device.healthy:
        return False
    if slot.lease is None:
        return slot.device.free
    lease = slot.lease
    return lease.deadline <= now and not lease.yielding and lease.number is not None


def _rank(slot: Slot, study: Study) -> tuple[int, int, str]:
    """The study's own devices first, then empty ones, then those of others."""
    if slot.lease is None:
        return (1, len(slot.device.id), slot.device.id)
    own = slot.lease.study == study.spec.key
    return (0 if own else 2, len(slot.device.id), slot.device.id)


def _with_free(slot: Slot, free: bool) -> Device:
    return replace(slot.device, free=free)
