"""The contract of every policy, the order of openings, and the placement on devices."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from optuna_hermes.model import Assignment, Decision, Device, Snapshot, TrialStatus, TrialView

# The number of trials grows as the number of units in all to the power of 0.75: the more is known,
# the longer a trial is trained on average.
OPENING_POWER = 4 / 3

_number = attrgetter("number")
_bound_to = attrgetter("bound_to")


class Policy(ABC):
    """A pure function from a ``Snapshot`` to a ``Decision``.

    The same snapshot gives the same decision, in any order of its trials: no clock, no I/O,
    no global random numbers, and nothing kept on the object that a decision could depend on. State
    that has to last goes into ``Decision.memory``.
    """

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign the free devices of ``snapshot``.

        Returns:
            Assignments of free devices only, to trials that are ``pending``, ``parked`` or
            ``stored`` (or to new trials, ``trial=None``, as many as ``unstarted`` has), no device
            and no trial twice, and no trial on a device that its ``bound_to`` excludes.
        """


class Ranked(Policy):
    """Serves the waiting trials in the order of their ranks, then opens new trials.

    Args:
        backfill: whether those behind a trial that finds too few devices may have them.
    """

    def __init__(self, *, backfill: bool = True) -> None:
        self.backfill = backfill

    # Of nothing but the trial: so a simulator can keep a hundred thousand jobs in order, and show
    # a policy only the first ones of each size, as ``JobQueue`` does.
    @abstractmethod
    def rank(self, trial: TrialView) -> tuple[Any, ...] | None:
        """Sort key of a waiting trial, the smallest first.

        Of trials with equal keys those that have begun come first, then the lowest number.

        Returns:
            None where the key depends on the rest of the snapshot.
        """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign devices to the waiting trials, best first, then to new ones."""
        waiting = unopened(snapshot)
        new = [trial for trial in waiting if trial is None]
        trials = [*opened(snapshot), *(trial for trial in waiting if trial is not None)]
        trials.sort(key=lambda trial: self.rank(trial) or ())
        return Decision(assignments=place(snapshot, [*trials, *new], backfill=self.backfill))


def free_devices(snapshot: Snapshot) -> list[Device]:
    """The devices a policy may assign now, in the order of their ids on their hosts."""
    free = [device for device in snapshot.devices if device.free and device.healthy]
    return sorted(free, key=place_of) if len(free) > 1 else free


def _free_ids(snapshot: Snapshot) -> set[str]:
    return {device.id for device in snapshot.devices if device.free and device.healthy}


def unopened(snapshot: Snapshot) -> list[TrialView | None]:
    """The trials that can still be opened: ``pending`` ones by number, then None for new ones."""
    pending = _waiting(snapshot, ("pending",))
    count = snapshot.unstarted.count
    if count == 0:
        return [*pending]
    # More new trials than free devices could not start now.
    bound = sum(device.free and device.healthy for device in snapshot.devices)
    return [*pending, *[None] * (bound if count is None else max(0, min(count, bound)))]


def opened(snapshot: Snapshot) -> list[TrialView]:
    """The waiting trials that have had a device before, in the order of their numbers."""
    return _waiting(snapshot, ("parked", "stored"))


def holders(snapshot: Snapshot) -> frozenset[int]:
    """The trials whose slice has just ended on a device that is free: going on costs nothing."""
    free = _free_ids(snapshot)
    return frozenset(
        trial.number
        for trial in snapshot.trials
        if trial.waiting_since == snapshot.now and trial.device in free
    )


def with_openings(snapshot: Snapshot, ranked: Iterable[TrialView]) -> Iterator[TrialView | None]:
    """The order in which trials get devices, best first, with new trials opened in between.

    First come trials without a report. A fixed list is opened at once. Of a sampler that learns,
    trial ``m + 1`` is opened once the trials opened so far have had ``(m + 1) ** (4 / 3)`` units in
    all, or when no trial waits. The rule is this project's own.
    """
    new = deque(unopened(snapshot))
    # Their first unit is finished before any are compared.
    yield from (trial for trial in opened(snapshot) if not trial.curve.values)
    if new:
        known = [
            trial for trial in (*snapshot.trials, *snapshot.finished) if trial.state != "pending"
        ]
        units = math.inf if snapshot.unstarted.fixed else sum(trial.curve.units for trial in known)
        n_opened = len(known)
        while new and (n_opened + 1) ** OPENING_POWER <= units:
            yield new.popleft()
            n_opened += 1
    yield from (trial for trial in ranked if trial.curve.values)
    yield from new


def _waiting(snapshot: Snapshot, states: tuple[TrialStatus, ...]) -> list[TrialView]:
    """The trials in these states that could use a free device now, by number."""
    waiting = [trial for trial in snapshot.trials if trial.state in states]
    if any(map(_bound_to, waiting)):
        free = _free_ids(snapshot)
        waiting = [r for r in waiting if not (r.bound_to and free.isdisjoint(r.bound_to))]
    waiting.sort(key=_number)
    return waiting


def place(
    snapshot: Snapshot, order: Iterable[TrialView | None], *, backfill: bool = True
) -> tuple[Assignment, ...]:
    """Give the free devices to the trials of ``order``, best first.

    A trial is passed over only if it fits nowhere, even when those before it are moved. Devices of
    several hosts are given out by ``place_on_hosts``.

    Args:
        snapshot: the devices.
        order: trials, best first, None for new ones; read only as far as there are devices.
        backfill: whether those behind a trial that finds too few devices may have them. Without,
            devices are kept for it, unless it wants more than there are.

    Returns:
        One assignment for each trial that found as many devices as it wants, best first.
    """
    free = [device for device in snapshot.devices if device.free and device.healthy]
    if not free:
        return ()
    if any(device.host != free[0].host for device in snapshot.devices):
        from optuna_hermes.policies._hosts import place_on_hosts  # a broker has one host

        return place_on_hosts(snapshot, free, order, backfill=backfill)
    ids = [device.id for device in sorted(free, key=place_of)]
    # Most decisions are about one device, for which no trial has to move.
    if len(ids) == 1:
        return _place_one(snapshot, ids[0], order, backfill=backfill)
    return _place_several(snapshot, ids, order, backfill=backfill)


def _place_several(
    snapshot: Snapshot, free: list[str], order: Iterable[TrialView | None], *, backfill: bool
) -> tuple[Assignment, ...]:
    chosen: list[TrialView | None] = []
    fits: list[list[str]] = []
    matching: dict[str, int] = {}
    for trial in order:
        tried, wanted = dict(matching), _wanted(trial)
        bound = trial is not None and trial.bound_to
        fits.append([id_ for id_ in free if id_ in bound] if bound else free)
        if len(tried) + wanted <= len(free) and _match(len(chosen), wanted, fits, tried):
            chosen.append(trial)
            matching = tried
            if len(matching) == len(free):
                break
            continue
        fits.pop()
        if not backfill and _can_ever_fit(trial, snapshot):
            break
    devices: list[list[str]] = [[] for _ in chosen]
    matching = _matching(chosen, fits)
    for id_ in free:
        if id_ in matching:
            devices[matching[id_]].append(id_)
    return tuple(
        Assignment(trial=None if trial is None else trial.number, devices=tuple(ids))
        for trial, ids in zip(chosen, devices, strict=True)
    )


def _place_one(
    snapshot: Snapshot, device: str, order: Iterable[TrialView | None], *, backfill: bool
) -> tuple[Assignment, ...]:
    for trial in order:
        if trial is None:
            return (Assignment(trial=None, devices=(device,)),)
        if trial.devices_wanted == 1 and _fits(trial, device):
            return (Assignment(trial=trial.number, devices=(device,)),)
        if not backfill and _can_ever_fit(trial, snapshot):
            return ()
    return ()


def _can_ever_fit(trial: TrialView | None, snapshot: Snapshot) -> bool:
    usable = sum(device.healthy and _fits(trial, device.id) for device in snapshot.devices)
    return trial is None or trial.devices_wanted <= usable


def _matching(trials: Sequence[TrialView | None], fits: Sequence[list[str]]) -> dict[str, int]:
    """Devices for all of ``trials``, which fit (device -> index of its trial).

    A maximum matching of devices and trials, by augmenting paths from where they are parked.
    """
    matching: dict[str, int] = {}
    # Where they are parked, if they can: moving costs time and wins nothing.
    kept: Counter[int] = Counter()  # numbers of devices; others if they have to move
    for index, trial in enumerate(trials):
        for id_ in () if trial is None else trial.current_devices:
            if id_ in fits[index] and id_ not in matching and kept[index] < _wanted(trial):
                matching[id_] = index
                kept[index] += 1
    for index, trial in enumerate(trials):
        _match(index, _wanted(trial) - kept[index], fits, matching)
    return matching


def place_of(device: Device) -> tuple[str, int, str]:
    """Sort key of a device: its host, then its id, by number where ids end with one."""
    return device.host, len(device.id), device.id


def _wanted(trial: TrialView | None) -> int:
    return 1 if trial is None else trial.devices_wanted


def _fits(trial: TrialView | None, device: str) -> bool:
    return trial is None or not trial.bound_to or device in trial.bound_to


def _match(index: int, count: int, fits: Sequence[list[str]], matching: dict[str, int]) -> bool:
    """Match a trial with so many further devices; others of ``matching`` keep their number."""
    return all(_augment(index, fits, matching, set()) for _ in range(count))


def _augment(
    index: int, fits: Sequence[list[str]], matching: dict[str, int], seen: set[str]
) -> bool:
    # Free devices first: others are moved only where none is left.
    for device in fits[index]:
        if device not in matching:
            matching[device] = index
            return True
    for device in fits[index]:
        if device in seen or matching[device] == index:
            continue
        seen.add(device)
        if _augment(matching[device], fits, matching, seen):
            matching[device] = index
            return True
    return False
