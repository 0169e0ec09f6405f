"""Placement of a plan's trials on devices: those they have, or some that are side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.cluster.candidates import Candidate
from optuna_hermes.model import Assignment, Device, Snapshot, TrialView
from optuna_hermes.policies.base import holders, opened, place, unopened

Ints = NDArray[np.int64]

# Share of the time to the end of a trial that a change of its devices must win.
GATE = 0.1


def current_owners(
    snapshot: Snapshot, found: Sequence[Candidate], devices: Sequence[Device]
) -> Ints:
    """The index of the candidate whose slice has just ended on a device, -1 for none [device]."""
    place_of = {device.id: index for index, device in enumerate(devices)}
    holding = holders(snapshot)
    owner = np.full(len(devices), -1, dtype=np.int64)
    for index, each in enumerate(found):
        if each.trial is not None and each.trial.number in holding:
            current = each.trial.current_devices
            # If one of its devices is not free it has to move as a whole.
            if all(id_ in place_of for id_ in current):
                owner[[place_of[id_] for id_ in current]] = index
    return owner


def hosts_of(devices: Sequence[Device]) -> Ints:
    """The index of each device's host, from 0 [device]."""
    hosts = sorted({device.host for device in devices})
    return np.array([hosts.index(device.host) for device in devices], dtype=np.int64)


def side_by_side(counts: Ints, owner: Ints, host: Ints) -> Ints:
    """Owners of the devices, -1 for none [plan, device].

    A trial stays if it keeps its number of devices; others are side by side.

    Args:
        counts: devices of each trial [plan, trial], no more in all than there are.
        owner: index of the trial that is on a device now, -1 for none [device].
        host: to which host a device belongs [device].
    """
    n_trials, n_devices = counts.shape[1], len(owner)
    now = np.bincount(owner + 1, minlength=n_trials + 1)[1:]
    stays = (counts == now) & (counts > 0)
    pinned = np.where(owner >= 0, stays[:, owner], False)
    rest = np.where(stays, 0, counts)
    # Larger ones choose first: what is left between them suits a small one.
    order = np.argsort(-rest, axis=1, kind="stable")
    ends = np.take_along_axis(rest, order, axis=1).cumsum(axis=1)
    index = (ends[:, None, :] <= np.arange(n_devices)[None, :, None]).sum(axis=2)
    trial = np.take_along_axis(order, np.minimum(index, n_trials - 1), axis=1)
    found = np.full(pinned.shape, -1, dtype=np.int64)
    np.put_along_axis(
        found, _free_first(pinned, host), np.where(index < n_trials, trial, -1), axis=1
    )
    return np.where(pinned, owner, found)


def to_assignments(
    snapshot: Snapshot, found: Sequence[Candidate], devices: Sequence[Device], owner: Sequence[int]
) -> tuple[Assignment, ...]:
    """A plan as assignments; a trial bound to other devices gets as many of those.

    ``owner`` is the index in ``found`` of the trial that has a device, -1 for none [device].
    """
    given: dict[int, list[str]] = {}
    for device, index in zip(devices, owner, strict=True):
        if index >= 0:
            given.setdefault(index, []).append(device.id)
    plan = [(found[index], tuple(ids)) for index, ids in sorted(given.items())]
    bound = [(each.trial.bound_to, ids) for each, ids in plan if each.trial]
    if all(not ours or set(ours).issuperset(ids) for ours, ids in bound):
        return tuple(Assignment(trial=each.number, devices=ids) for each, ids in plan)
    return place(
        snapshot,
        [each.trial and replace(each.trial, devices_wanted=len(ids)) for each, ids in plan],
    )


def assign_leftovers(
    snapshot: Snapshot,
    chosen: Sequence[Assignment],
    may_have: Callable[[TrialView | None], bool] = lambda trial: True,
) -> tuple[Assignment, ...]:
    """Assign devices that a plan leaves free to other trials that may, in the order of arrival."""
    taken = {id_ for each in chosen for id_ in each.devices}
    devices = tuple(
        replace(device, free=device.free and device.id not in taken) for device in snapshot.devices
    )
    if not any(device.free for device in devices):
        return ()
    served = {each.trial for each in chosen}
    new = sum(each.trial is None for each in chosen)
    waiting = [*opened(snapshot), *unopened(snapshot)]
    order = [trial for trial in waiting if trial is not None and trial.number not in served]
    more = [None] * (sum(trial is None for trial in waiting) - new)
    allowed = [trial for trial in (*order, *more) if may_have(trial)]
    return place(replace(snapshot, devices=devices), allowed)


def _free_first(pinned: NDArray[np.bool_], host: Ints) -> Ints:
    """The devices in the order in which they are given out, by hosts with the most free first."""
    n_hosts, n_devices = int(host.max()) + 1, len(host)
    flat = (host + n_hosts * np.arange(len(pinned))[:, None]).ravel()
    free = np.bincount(flat, (~pinned).ravel(), len(pinned) * n_hosts)
    there = free.reshape(len(pinned), n_hosts)[:, host]
    key = np.where(pinned, np.inf, -there * n_devices + host)
    return np.argsort(key, axis=1, kind="stable")
