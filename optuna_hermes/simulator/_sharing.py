"""Simulated hosts that share a study: what each knows, which trials it has, and what it asks for.

As in brokers of several hosts: a host's policy chooses among the trials of its own and those that
are stored and nobody's. Every few seconds a host reads what has changed, and says which trials that
are parked elsewhere its policy would rather train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Device, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.simulator._trials import OpenedTrials
from optuna_hermes.simulator._values import check_finite


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The times of hosts that share a study, and whether they ask each other for trials.

    Args:
        refresh_seconds: how often a host reads what others have done; a broker's is 3 s.
        claim_seconds: device time of taking over a trial that another host had, beside that of
            loading it from disk.
        store_seconds: time in which a host stores a trial for another one.
        asks: whether a host asks for trials that are parked on others.
    """

    refresh_seconds: float = 3.0
    claim_seconds: float = 0.0
    store_seconds: float = 0.0
    asks: bool = True

    def __post_init__(self) -> None:
        check_finite(self)
        if self.refresh_seconds == 0:
            raise InvalidInputError("refresh_seconds must be above 0 but got 0.")


@dataclass(kw_only=True)
class HostView:
    """A host, as its broker sees the study.

    Args:
        name: the host's name.
        devices: its devices.
        policy: its policy.
        memory: of that policy.
        shown: the trials that it knows, as its policy sees them: those of others as running.
        read: how many changes of the study it has read.
        asked_for: trials that it has asked for.
        promised: trials that others have asked for.
    """

    name: str
    devices: tuple[Device, ...]
    policy: Policy
    memory: Any = None
    shown: dict[int, TrialView] = field(default_factory=dict)
    read: int = 0
    asked_for: frozenset[int] = frozenset()
    promised: frozenset[int] = frozenset()


@dataclass(kw_only=True)
class Traffic:
    """Counts of the questions that hosts have asked their database.

    Args:
        looks: looks at the number of the last change.
        reads: looks that found something new, and read it.
        claims: trials that were taken over.
        lost: claims of trials that another host had taken before.
    """

    looks: int = 0
    reads: int = 0
    claims: int = 0
    lost: int = 0


class SharedStudy:
    """The owners of trials, and what each host knows of them."""

    def __init__(
        self, policy: Policy, devices: Iterable[Device], sharing: Sharing, trials: OpenedTrials
    ) -> None:
        by_host: dict[str, list[Device]] = {}
        for device in devices:
            by_host.setdefault(device.host, []).append(device)
        self.sharing = sharing
        self.hosts = {
            name: HostView(name=name, devices=tuple(own), policy=copy.deepcopy(policy))
            for name, own in by_host.items()
        }
        self.traffic = Traffic()
        self._trials = trials
        self._owners: dict[int, str | None] = {}
        self._changes: list[int] = []

    def update(self, number: int) -> None:
        """Take in that a trial has changed, which its own host knows at once."""
        self._changes.append(number)
        owner = self._owners.get(number)
        if owner is not None:
            self._show(self.hosts[owner], number)

    def take(self, host: HostView, number: int) -> bool:
        """Take a new trial, one's own, or one that is nobody's; False if another host has it."""
        host.asked_for -= {number}
        owner = self._owners.setdefault(number, host.name)
        if owner is None:
            self.traffic.claims += 1
            self._owners[number] = owner = host.name
        if owner == host.name:
            return True
        self.traffic.lost += 1
        host.shown[number] = _running(host.shown[number])
        return False

    def is_of(self, host: str, number: int) -> bool:
        """True if a trial belongs to a host."""
        return self._owners.get(number) == host

    def is_taken_over(self, host: HostView, number: int) -> bool:
        """True if it is nobody's, so that taking it is a claim."""
        return self._owners.get(number, host.name) is None

    def free(self, number: int) -> None:
        """Give up a trial that is stored: any host may take it."""
        self._owners[number] = None
        self.update(number)
        for host in self.hosts.values():
            if number in host.shown and host.shown[number].state != "running":
                self._show(host, number)

    def look(self, host: HostView) -> None:
        """Read what has changed since this host has looked last."""
        self.traffic.looks += 1
        changed = set(self._changes[host.read :])
        host.read = len(self._changes)
        if changed:
            self.traffic.reads += 1
        before, host.promised = host.promised, self._promised(host)
        for number in sorted(changed | (before ^ host.promised)):
            self._show(host, number)

    def to_store(self, host: HostView, n_idle: Callable[[HostView], int]) -> Iterator[int]:
        """The parked trials of a host that others ask for, and those that idle ones could train."""
        own = [view for view in self._own(host) if view.state == "parked"]
        going = [view.number for view in own if view.number in host.promised]
        idle = sum(n_idle(each) for each in self.hosts.values() if each is not host)
        missing = idle - sum(owner is None for owner in self._owners.values()) - len(going)
        if missing > 0 and n_idle(host) == 0:
            rest = sorted(own, key=lambda view: view.waiting_since or 0.0)
            going += [view.number for view in rest if view.number not in host.promised][:missing]
        yield from going

    def ask(
        self,
        host: HostView,
        free: Sequence[Device],
        decide: Callable[[HostView, Sequence[Device], Sequence[TrialView]], Decision],
    ) -> None:
        """Note which trials of other hosts a host would train on devices that are free soon."""
        if not self.sharing.asks:
            return
        theirs = {number for number in host.shown if self._is_there(host, number)} - host.promised
        views = [
            replace(view, state="stored", tier="disk", device=None, waiting_since=0.0)
            if number in theirs
            else _parked(view)
            if self.is_of(host.name, number) and view.device in {device.id for device in free}
            else view
            for number, view in host.shown.items()
        ]
        chosen: set[int | None] = set()
        if theirs and free:
            chosen = {each.trial for each in decide(host, free, views).assignments}
        host.asked_for = frozenset(theirs & chosen)

    def _is_there(self, host: HostView, number: int) -> bool:
        owner, state = self._owners.get(number), self._trials.state_of(number)
        if owner is None:
            return state == "stored" and number in host.asked_for
        return owner != host.name and state == "parked"

    def _promised(self, host: HostView) -> frozenset[int]:
        """Trials that others have asked for; the first by name gets one that several ask for."""
        found: set[int] = set()
        for each in self.hosts.values():
            if each.name < host.name:
                found |= each.asked_for
            elif each is not host:
                found |= each.asked_for - host.asked_for
        return frozenset(found)

    def _own(self, host: HostView) -> list[TrialView]:
        return [v for number, v in host.shown.items() if self._owners.get(number) == host.name]

    def _show(self, host: HostView, number: int) -> None:
        view = self._trials.view_of(number)
        owner = self._owners.get(number)
        if view is None:
            host.shown.pop(number, None)
        elif owner == host.name or (owner is None and number not in host.promised):
            host.shown[number] = view
        else:
            host.shown[number] = _running(view)


def _running(view: TrialView) -> TrialView:
    return replace(view, state="running", waiting_since=None)


def _parked(view: TrialView) -> TrialView:
    return replace(view, state="parked", waiting_since=0.0) if view.state == "running" else view
