"""The hosts of one virtual cluster, their free devices, and the progress of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optuna_hermes.cluster.jobs import Job, Placement, SoFar
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Device, TrialView


@dataclass(kw_only=True)
class Progress:
    """The state of a job that is not over.

    Args:
        job: the job.
        view: the job as policies see it.
        done: progress at ``since``.
        since: time of ``done``.
        begins: time at which training goes on: later than ``since`` while it restarts.
        rate: progress per second from then on.
        until: progress up to which ``rate`` holds.
        devices: its devices.
        hosts: its last hosts, with the number of devices on each.
        batch_size: its last batch size.
        trained: placements and batch sizes that it has trained with.
        stretches: device seconds at the end of each stretch of constant speed.
        lease: number of grants, changes of speed and ends of slices; events planned under an
            earlier number are void.
    """

    job: Job
    view: TrialView
    done: float = 0.0
    since: float = 0.0
    begins: float = 0.0
    rate: float = 0.0
    until: float = 0.0
    devices: tuple[str, ...] = ()
    hosts: tuple[tuple[str, int], ...] = ()
    batch_size: int | None = None
    trained: set[tuple[Placement, int | None]] = field(default_factory=set)
    stretches: list[float] = field(default_factory=list)
    lease: int = 0
    started: float | None = None
    run_seconds: float = 0.0
    device_seconds: float = 0.0
    restarts: int = 0

    @property
    def placement(self) -> Placement:
        """Numbers of its devices on each host, the largest first."""
        return tuple(sorted((count for _, count in self.hosts), reverse=True))

    @property
    def so_far(self) -> SoFar:
        """Its progress, as a policy may know it."""
        return SoFar(
            done=self.done,
            batch_size=self.batch_size,
            trained=frozenset(self.trained),
            stretches=tuple(self.stretches),
        )

    def advance(self, now: float) -> None:
        """Account for the time and progress up to ``now``."""
        seconds = now - self.since
        if now > max(self.since, self.begins):
            self.trained.add((self.placement, self.batch_size))
        self.run_seconds += seconds
        self.device_seconds += seconds * len(self.devices)
        self.done += self.rate * max(0.0, now - max(self.since, self.begins))
        self.since = now


class Hosts:
    """The devices of a group.

    Args:
        group: its name; None where there is only one.
        sizes: devices of each host.

    Raises:
        InvalidInputError: there is no host, or one without a device.
    """

    def __init__(self, group: str | None, sizes: Sequence[int]) -> None:
        if not sizes or min(sizes) < 1:
            raise InvalidInputError(
                f"A group must have a host, each of a device at least, but got {list(sizes)}."
            )
        prefix = "" if group is None else f"{group}/"
        ids = [
            (f"{prefix}{host}:{device}", f"{prefix}{host}")
            for host, size in enumerate(sizes)
            for device in range(size)
        ]
        # Views are built once: a decision then costs no objects per device.
        self._faces = {
            id_: tuple(Device(id=id_, host=host, kind="gpu", free=free) for free in (False, True))
            for id_, host in ids
        }
        self._index = {id_: index for index, (id_, _) in enumerate(ids)}
        self._shown = [self._faces[id_][True] for id_, _ in ids]
        self.n_free = len(ids)

    def __len__(self) -> int:
        return len(self._shown)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices as a policy sees them."""
        return tuple(self._shown)

    def where(self, devices: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """The number of these devices on each host, in the order of the hosts."""
        counts: dict[str, int] = {}
        for id_ in devices:
            host = self._faces[id_][True].host
            counts[host] = counts.get(host, 0) + 1
        return tuple(sorted(counts.items()))

    def take(self, devices: Sequence[str]) -> None:
        """Mark devices as taken by a job.

        Raises:
            ValueError: one of them is not free, or unknown.
        """
        for id_ in devices:
            index = self._index.get(id_, -1)
            if index < 0 or not self._shown[index].free:
                raise ValueError(f"A policy may assign devices that are free but got {id_!r}.")
            self._shown[index] = self._faces[id_][False]
        self.n_free -= len(devices)

    def give_back(self, devices: Sequence[str]) -> None:
        """Mark devices as free."""
        for id_ in devices:
            self._shown[self._index[id_]] = self._faces[id_][True]
        self.n_free += len(devices)
