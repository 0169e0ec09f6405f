"""The state of one group of hosts: its devices, and its jobs that wait or train."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from optuna_hermes.cluster.jobs import ClusterJob, JobProgress, Placement
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Device, TrialView
from optuna_hermes.policies import Policy, Qssf, Ranked
from optuna_hermes.policies.decisions import named


@dataclass(kw_only=True)
class JobState(JobProgress):
    """The state of a job that is not over."""

    job: ClusterJob
    view: TrialView  # the job as policies see it
    since: float = 0.0  # time of ``done``
    begins: float = 0.0  # time at which training goes on: later than ``since`` while it restarts
    rate: float = 0.0  # progress per second from then on
    until: float = 0.0  # progress up to which ``rate`` holds
    devices: tuple[str, ...] = ()
    hosts: tuple[tuple[str, int], ...] = ()  # its last hosts, with the number of devices on each
    # Number of grants, changes of speed and ends of slices; events planned under an earlier number
    # are void.
    lease: int = 0
    started: float | None = None
    run_seconds: float = 0.0
    device_seconds: float = 0.0
    restarts: int = 0

    @property
    def placement(self) -> Placement:
        """Numbers of its devices on each host, the largest first."""
        return tuple(sorted((count for _, count in self.hosts), reverse=True))

    def advance(self, now: float) -> None:
        """Account for the time and progress up to ``now``."""
        seconds = now - self.since
        # A job that has only restarted has measured no speed.
        if now > max(self.since, self.begins):
            self.trained.add((self.placement, self.batch_size))
        self.run_seconds += seconds
        self.device_seconds += seconds * len(self.devices)
        self.done += self.rate * max(0.0, now - max(self.since, self.begins))
        self.since = now


class Hosts:
    """The devices of a group."""

    def __init__(self, group: str | None, sizes: Sequence[int]) -> None:
        if not sizes or min(sizes) < 1:
            raise InvalidInputError(
                f"A group must have a host, each of a device at least, but got {list(sizes)}."
            )
        prefix = "" if group is None else f"{group}/"
        # Views are built once: a decision then costs no objects per device.
        self._views = {
            id_: tuple(
                Device(id=id_, host=f"{prefix}{host}", kind="gpu", free=free)
                for free in (False, True)
            )
            for host, size in enumerate(sizes)
            for id_ in (f"{prefix}{host}:{device}" for device in range(size))
        }
        self._index = {id_: index for index, id_ in enumerate(self._views)}
        self._shown = [free for _, free in self._views.values()]
        self.n_free = len(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices as a policy sees them."""
        return tuple(self._shown)

    def hosts_of(self, devices: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """The number of these devices on each host, in the order of the hosts' names."""
        # Not a Counter, which takes four times as long for so few devices.
        counts: dict[str, int] = {}
        for id_ in devices:
            host = self._views[id_][True].host
            counts[host] = counts.get(host, 0) + 1
        return tuple(sorted(counts.items()))

    def take(self, devices: Sequence[str]) -> None:
        """Mark devices as taken by a job."""
        for id_ in devices:
            self._shown[self._index[id_]] = self._views[id_][False]
        self.n_free -= len(devices)

    def release(self, devices: Sequence[str]) -> None:
        """Mark devices as free."""
        for id_ in devices:
            self._shown[self._index[id_]] = self._views[id_][True]
        self.n_free += len(devices)


_Rank: TypeAlias = tuple[tuple[Any, ...], bool, int]
"""A policy's rank of a job, True for one that has not begun, and the job's number."""


class JobQueue:
    """Views of waiting jobs, and the part of them that a policy has to see."""

    def __init__(self, policy: Policy) -> None:
        # Kept in the order of a ranked policy: 100,000 jobs are too many to sort at each decision.
        # One with a ``decide`` of its own may look at the others, too.
        by_rank = type(policy).decide in (Ranked.decide, Qssf.decide)
        self._policy = policy if by_rank and isinstance(policy, Ranked) else None
        self._views: dict[int, TrialView] = {}
        self._ranks: dict[int, _Rank] = {}
        self._by_size: dict[int, list[_Rank]] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, number: int) -> bool:
        return number in self._views

    @property
    def is_ranked(self) -> bool:
        """True if the first jobs of each size are enough for a decision."""
        return self._policy is not None

    def add(self, view: TrialView) -> None:
        """Add a waiting job, or replace its view."""
        if view.number in self._views:
            self.remove(view.number)
        self._views[view.number] = view
        if self._policy is None:
            return
        with named(self._policy):
            own = self._policy.rank(view)
            # Such a job does not fit by its rank and size alone: show all jobs from now on.
            if own is None or view.elastic is not None or view.bound_to:
                self._policy = None
                return
            # Jobs of equal rank stand as ``Ranked`` puts them.
            rank = own, view.state == "pending", view.number
            insort(self._by_size.setdefault(view.devices_wanted, []), rank)
        self._ranks[view.number] = rank

    def remove(self, number: int) -> TrialView:
        """Remove a job that no longer waits."""
        view = self._views.pop(number)
        if self._policy is not None:
            rank, size = self._ranks.pop(number), self._by_size[view.devices_wanted]
            del size[bisect_left(size, rank)]
        return view

    def shown(self, n_free: int) -> tuple[TrialView, ...]:
        """The jobs that a decision about ``n_free`` devices may depend on."""
        if self._policy is None:
            return tuple(self._views.values())
        # A ranked policy takes devices for one job after the other. Of jobs of one size none fits
        # after one that did not, so it needs as many of them as can be served, and one more.
        return tuple(
            self._views[number]
            for wanted, ranks in self._by_size.items()
            for _, _, number in ranks[: n_free // wanted + 1]
        )
