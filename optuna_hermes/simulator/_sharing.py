"""Simulated hosts that share a study: what each knows, which trials it has, and what it asks for.

As in brokers of several hosts: a host's policy chooses among the trials of its own and those that
are stored and nobody's. Every few seconds a host reads what has changed, and says which trials that
are parked elsewhere its policy would rather train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        there: those of others, as they would be if they were stored.
        read: how many changes of the study it has read.
        asked_for: trials that it has asked for.
        promised: trials that others have asked for.
    """

    name: str
    devices: tuple[Device, ...]
    policy: Policy
    memory: Any = None
    shown: dict[int, TrialView] = field(default_factory=dict)
    there: dict[int, TrialView] = field(default_factory=dict)
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
        self._of: dict[str | None, set[int]] = {name: set() for name in (None, *by_host)}
        self._changes: list[int] = []
        self._seen: dict[int, tuple[TrialView, TrialView, TrialView]] = {}

    def update(self, number: int) -> None:
        """Take in that a trial has changed, which its own host knows at once."""
        self._changes.append(number)
        owner = self._owners.get(number)
        if owner is not None:
            self._show(self.hosts[owner], number)

    def take(self, host: HostView, number: int) -> bool:
        """Take a new trial, one's own, or one that is nobody's; False if another host has it."""
        host.asked_for -= {number}
        owner = self._owners.get(number, host.name)
        if owner not in (None, host.name):
            self.traffic.lost += 1
            self._show(host, number)
            return False
        self.traffic.claims += owner is None
        self._give(number, host.name)
        return True

    def is_of(self, host: str, number: int) -> bool:
        """True if a trial belongs to a host."""
        return self._owners.get(number) == host

    def is_taken_over(self, host: HostView, number: int) -> bool:
        """True if it is nobody's, so that taking it is a claim."""
        return self._owners.get(number, host.name) is None

    def free(self, number: int) -> None:
        """Give up a trial that is stored: any host may take it."""
        self._give(number, None)
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

    def to_store(self, host: HostView, idle: Mapping[str, int]) -> list[int]:
        """The parked trials of a host that others ask for, and those that idle ones could train.

        Args:
            host: the host.
            idle: how many devices of each host have nothing to train.
        """
        own = self._of[host.name]
        going = sorted(n for n in own & host.promised if self._trials.state_of(n) == "parked")
        missing = sum(idle.values()) - len(self._of[None]) - len(going)
        if missing > 0 and not idle.get(host.name):
            views = [host.shown[number] for number in own - host.promised if number in host.shown]
            rest = [view for view in views if view.state == "parked"]
            rest.sort(key=lambda view: (view.waiting_since or 0.0, view.number))
            going += [view.number for view in rest[:missing]]
        return going

    def ask(
        self,
        host: HostView,
        free: Sequence[Device],
        decide: Callable[[HostView, Sequence[Device], Sequence[TrialView]], Decision],
    ) -> None:
        """Note which trials of other hosts a host would train on devices that are free soon."""
        host.asked_for = frozenset(self._wanted(host, free, decide))

    def _wanted(
        self,
        host: HostView,
        free: Sequence[Device],
        decide: Callable[[HostView, Sequence[Device], Sequence[TrialView]], Decision],
    ) -> set[int]:
        if not (self.sharing.asks and free):
            return set()
        theirs = {n for n in host.there if self._owners[n] is not None and self._is_parked(n)}
        coming = {n for n in host.asked_for if self._owners[n] is None and not self._is_parked(n)}
        theirs = (theirs | coming) - host.promised
        if not theirs:
            return set()
        on_free = {device.id for device in free}
        views = [
            host.there.get(number, view)
            if number in theirs
            else _parked(view)
            if view.device in on_free and number in self._of[host.name]
            else view
            for number, view in host.shown.items()
        ]
        return theirs & {each.trial for each in decide(host, free, views).assignments}

    def _is_parked(self, number: int) -> bool:
        return self._trials.state_of(number) == "parked"

    def _give(self, number: int, owner: str | None) -> None:
        self._of[self._owners.get(number)].discard(number)
        self._of[owner].add(number)
        self._owners[number] = owner

    def _promised(self, host: HostView) -> frozenset[int]:
        """Trials that others have asked for; the first by name gets one that several ask for."""
        found: set[int] = set()
        for each in self.hosts.values():
            if not each.asked_for:
                continue
            if each.name < host.name:
                found |= each.asked_for
            elif each is not host:
                found |= each.asked_for - host.asked_for
        return frozenset(found)

    def _show(self, host: HostView, number: int) -> None:
        view = self._trials.view_of(number)
        owner = self._owners.get(number)
        host.there.pop(number, None)
        if view is None:
            host.shown.pop(number, None)
        elif owner == host.name or (owner is None and number not in host.promised):
            host.shown[number] = view
        else:
            host.shown[number], host.there[number] = self._of_others(view)

    def _of_others(self, view: TrialView) -> tuple[TrialView, TrialView]:
        """Another host's trial as a host sees it, and as it would if that were stored."""
        if view.number not in self._seen or self._seen[view.number][0] is not view:
            stored = replace(view, state="stored", tier="disk", device=None, waiting_since=0.0)
            self._seen[view.number] = (view, _running(view), stored)
        return self._seen[view.number][1:]


def _running(view: TrialView) -> TrialView:
    return replace(view, state="running", waiting_since=None)


def _parked(view: TrialView) -> TrialView:
    return replace(view, state="parked", waiting_since=0.0) if view.state == "running" else view
