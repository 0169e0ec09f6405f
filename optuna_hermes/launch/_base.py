"""The contract of launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from optuna_hermes.errors import LaunchError
from optuna_hermes.launch._job import Job

HostState = Literal["waiting", "running", "stopping", "done", "suspended", "failed", "gone"]
_AT_WORK = frozenset({"waiting", "running", "stopping"})


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a launch, as its engine knows it.

    Args:
        name: of the task, pod or actor.
        state: what it does.
        node: where it runs, empty if nowhere.
        detail: what the engine says about it, in its own words.
    """

    name: str
    state: HostState
    node: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A job that was started.

    Args:
        launcher: the name of the launcher.
        name: of the job.
        id: by which the engine knows it.
        folder: of its log files, where the engine writes files.
        place: of the engine: a cluster's address or name, or its context and namespace, empty for
            the usual one.
    """

    launcher: str
    name: str
    id: str
    folder: str = ""
    place: str = ""


class Launcher(ABC):
    """Starts a job on the hosts of an engine.

    Its methods, but for ``render``, raise ``LaunchError`` where the engine cannot be asked or
    refuses.
    """

    name: str

    @abstractmethod
    def render(self, job: Job) -> str:
        """The script or manifest that starts a job: what ``start`` hands to the engine."""

    @abstractmethod
    def start(self, job: Job) -> Launch:
        """Start a job, and return at once."""

    @abstractmethod
    def hosts(self, launch: Launch) -> tuple[Host, ...]:
        """The hosts of a launch; none if the engine has forgotten it."""

    def is_at_work(self, launch: Launch) -> bool:
        """True until all hosts of a launch have ended, or the engine has forgotten it."""
        return any(host.state in _AT_WORK for host in self.hosts(launch))

    @abstractmethod
    def stop(self, launch: Launch) -> None:
        """Have every host suspend its trials and end, and start none again; return at once."""

    @abstractmethod
    def logs(self, launch: Launch) -> Iterator[str]:
        """The hosts' output, line by line, each with the host's name before it."""


def at_work(name: str, where: str = "") -> LaunchError:
    """The error of a second job of this name; ``where`` the first can be ended, if not here."""
    return LaunchError(
        f"A job {name!r} is at work: end it first by `optuna-hermes launch stop {name}`{where}, or "
        "start another one by --name."
    )
