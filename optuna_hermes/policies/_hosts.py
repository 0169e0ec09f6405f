"""Consolidated placement over several hosts: a trial's devices lie on as few hosts as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from optuna_hermes.model import Assignment, Device, Snapshot, TrialView


def place_on_hosts(
    snapshot: Snapshot,
    free: Sequence[Device],
    order: Iterable[TrialView | None],
    *,
    backfill: bool,
) -> tuple[Assignment, ...]:
    """Give devices of several hosts to the trials of ``order``, best first.

    A trial that fits on one host gets one: the host it is on, if a device of its own is free there
    and it fits, otherwise the one with the fewest free devices. A larger one gets whole hosts, the
    largest first and of equal ones those it is on, and its rest on one more. No trial is moved to
    make room. This is the consolidated placement of Hu et al., "Helios", SC 2021, but for the
    preference of the hosts that a trial is on.
    """
    hosts = _Hosts(snapshot, free)
    found: list[Assignment] = []
    for trial in order:
        devices = hosts.take(trial)
        if devices:
            found.append(Assignment(trial=trial.number if trial else None, devices=devices))
            if not hosts.n_free:
                break
        elif not backfill and hosts.can_ever_hold(trial):
            break
    return tuple(found)


class _Hosts:
    """The free devices of each host. Derived tables are lazy: clusters may have many hosts."""

    def __init__(self, snapshot: Snapshot, free: Sequence[Device]) -> None:
        self._snapshot = snapshot
        self._devices = free
        self._free: dict[str, list[str]] = {}
        for device in free:
            self._free.setdefault(device.host, []).append(device.id)
        self.n_free = len(free)

    def take(self, trial: TrialView | None) -> tuple[str, ...]:
        wanted = 1 if trial is None else trial.devices_wanted
        if wanted > self.n_free:
            return ()
        free = self._usable(trial)
        own = () if trial is None else trial.current_devices
        own_hosts = Counter(self._host_of[id_] for id_ in own if id_ in self._host_of)
        hosts = self._whole(wanted, free, own_hosts)
        rest = wanted - sum(len(free[host]) for host in hosts)
        if rest:
            others = {host: ids for host, ids in free.items() if host not in hosts}
            host = self._best(rest, others, own_hosts)
            if host is None:
                return ()
            hosts.append(host)
        # Its own first on each host, since those beyond the wanted number are left out.
        ids = [
            id_
            for host in hosts
            for id_ in sorted(free[host], key=lambda each: (each not in own, len(each), each))
        ]
        return self._remove(ids[:wanted], hosts)

    def can_ever_hold(self, trial: TrialView | None) -> bool:
        everything = [device for device in self._snapshot.devices if device.healthy]
        return bool(_Hosts(self._snapshot, everything).take(trial))

    @cached_property
    def _sizes(self) -> Counter[str]:
        return Counter(device.host for device in self._snapshot.devices if device.healthy)

    @cached_property
    def _host_of(self) -> dict[str, str]:
        return {device.id: device.host for device in self._devices}

    def _usable(self, trial: TrialView | None) -> dict[str, list[str]]:
        if trial is None or not trial.bound_to:
            return self._free
        bound = {host: [i for i in ids if i in trial.bound_to] for host, ids in self._free.items()}
        return {host: ids for host, ids in bound.items() if ids}

    def _whole(self, wanted: int, free: dict[str, list[str]], own: Counter[str]) -> list[str]:
        hosts: list[str] = []
        # A trial that fits on one host takes a part of one, however many are empty.
        if wanted == 1 or wanted <= max(self._sizes.values()):
            return hosts
        for host in sorted(free, key=lambda each: (-len(free[each]), -own[each], each)):
            if len(free[host]) == self._sizes[host] <= wanted:
                hosts.append(host)
                wanted -= len(free[host])
        return hosts

    def _best(self, rest: int, free: dict[str, list[str]], own: Counter[str]) -> str | None:
        fitting = [host for host, ids in free.items() if len(ids) >= rest]
        return min(fitting, key=lambda host: (-own[host], len(free[host]), host), default=None)

    def _remove(self, ids: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
        gone = set(ids)
        for host in hosts:
            self._free[host] = [id_ for id_ in self._free[host] if id_ not in gone]
            if not self._free[host]:
                del self._free[host]
        self.n_free -= len(gone)
        return tuple(ids)
