"""The contract of every policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from optuna_hermes.model import Assignment, Decision, Device, RunView, Snapshot


class Policy(ABC):
    """A pure function from a ``Snapshot`` to a ``Decision``.

    The same snapshot gives the same decision, whatever the order of its runs: no clock, no I/O,
    no global random numbers, no state on the object. What has to last goes into
    ``Decision.memory``. The broker and the simulator call the same object.
    """

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign the free devices of ``snapshot``.

        Args:
            snapshot: devices, runs and trials that may still be created.

        Returns:
            Assignments of free devices only, to runs that are ``pending``, ``parked`` or
            ``stored`` (or to new trials, ``run=None``), no device and no run twice, and no run
            on a device that its ``bound_to`` excludes.
        """


def free_devices(snapshot: Snapshot) -> list[Device]:
    """The devices a policy may assign now, in the order of their ids on their hosts."""
    free = [device for device in snapshot.devices if device.free and device.healthy]
    return sorted(free, key=lambda device: (device.host, len(device.id), device.id))


def candidates(snapshot: Snapshot) -> list[RunView]:
    """The runs that could use a free device now, in the order of their numbers."""
    free = {device.id for device in free_devices(snapshot)}
    waiting = [
        run
        for run in snapshot.runs
        if run.state in ("pending", "parked", "stored")
        and not (run.bound_to and free.isdisjoint(run.bound_to))
    ]
    return sorted(waiting, key=lambda run: run.number)


def unopened(snapshot: Snapshot) -> list[RunView | None]:
    """What can still be opened: ``pending`` runs by number, then new trials as ``None``.

    There are never more new trials than free devices: nobody could take them.
    """
    pending = [run for run in candidates(snapshot) if run.state == "pending"]
    bound = len(free_devices(snapshot))
    count = snapshot.unstarted.count
    return [*pending, *[None] * (bound if count is None else max(0, min(count, bound)))]


def opened(snapshot: Snapshot) -> list[RunView]:
    """The runs that wait and have had a device before, in the order of their numbers."""
    return [run for run in candidates(snapshot) if run.state != "pending"]


def place(snapshot: Snapshot, order: Iterable[RunView | None]) -> tuple[Assignment, ...]:
    """Give the free devices to the runs of ``order``, best first.

    A run is passed over only if it fits nowhere, however those before it are moved about. A run
    that sits on a free device gets that one where it can: moving costs time and wins nothing.
    ``None`` in ``order`` stands for a trial that is not created yet.

    Args:
        snapshot: the devices.
        order: runs, best first; read only as far as there are devices.

    Returns:
        One assignment for each run that found as many devices as it wants, best first.
    """
    free = [device.id for device in free_devices(snapshot)]
    chosen: list[RunView | None] = []
    seats: dict[str, int] = {}
    for run in order if free else ():
        tried = _seats([*chosen, run], free)
        if tried is None:
            continue
        chosen.append(run)
        seats = tried
        if len(seats) == len(free):
            break
    return tuple(
        Assignment(
            run=None if run is None else run.number,
            devices=tuple(id_ for id_ in free if seats.get(id_) == index),
        )
        for index, run in enumerate(chosen)
    )


def _seats(runs: Sequence[RunView | None], free: Sequence[str]) -> dict[str, int] | None:
    """Devices for all of ``runs`` (device -> index of its run), None if they do not all fit."""
    fits = [[id_ for id_ in free if _fits(run, id_)] for run in runs]
    seats: dict[str, int] = {}
    for index, run in enumerate(runs):
        if run is not None and run.device in fits[index]:
            seats.setdefault(run.device, index)
    for index, run in enumerate(runs):
        wanted = 1 if run is None else run.devices_wanted
        for _ in range(wanted - list(seats.values()).count(index)):
            if not _augment(index, fits, seats, set()):
                return None
    return seats


def _fits(run: RunView | None, device: str) -> bool:
    return run is None or not run.bound_to or device in run.bound_to


def _augment(
    index: int, fits: Sequence[Sequence[str]], seats: dict[str, int], seen: set[str]
) -> bool:
    """One more device for a run, others moved if they must be (an augmenting path)."""
    for device in sorted(fits[index], key=seats.__contains__):
        if device in seen or seats.get(device) == index:
            continue
        seen.add(device)
        if device not in seats or _augment(seats[device], fits, seats, seen):
            seats[device] = index
            return True
    return False
