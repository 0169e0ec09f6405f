"""Ray: each host is an actor on a node of its own, and one more actor looks after them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from optuna_hermes._programs import ask
from optuna_hermes.errors import LaunchError
from optuna_hermes.launch._base import Host, Launch, Launcher
from optuna_hermes.launch._job import Job

NAMESPACE = "optuna-hermes"
_ANSWER_SECONDS = 30.0

_CODE = '''\
"""Start {name!r} on {hosts} nodes of Ray."""

import sys

from optuna_hermes.launch.ray_actors import start

problem = start(
    address={address!r},
    namespace={namespace!r},
    name={name!r},
    hosts={hosts!r},
    resources={resources!r},
    arguments={arguments!r},
    folder={folder!r},
    grace_seconds={grace!r},
)
sys.exit(problem)
'''


class Ray(Launcher):
    """Asks a cluster of Ray; new jobs are for that at ``address``, as ``ray.init`` takes it."""

    name = "ray"

    def __init__(self, *, address: str = "auto") -> None:
        self._address = address

    def render(self, job: Job) -> str:
        resources = {"CPU": float(job.cpus or 1), **({"GPU": float(job.gpus)} if job.gpus else {})}
        return _CODE.format(
            name=job.name,
            address=self._address,
            namespace=NAMESPACE,
            arguments=job.command,
            folder=os.getcwd(),
            hosts=job.hosts,
            resources=resources,
            grace=job.grace_seconds,
        )

    def start(self, job: Job) -> Launch:
        with _cluster(self._address) as ray:  # so that what is missing is said in words of its own
            # Later "auto" may be another one, and this job's would train on.
            found = ray.get_runtime_context().gcs_address
        place = self._address
        if place == "auto":
            # From outside of the cluster `found` cannot be reached: it is an address within.
            outer = os.environ.get("RAY_ADDRESS", "")
            place = outer if "://" in outer else found
        # In a process of its own, as a user would run it: what is shown is what is started.
        look = f"ray list actors --filter name={job.name}"
        ask([sys.executable, "-"], self.render(job), job.environment, look=look)
        return Launch(launcher=self.name, name=job.name, id=job.name, place=place)

    def hosts(self, launch: Launch) -> tuple[Host, ...]:
        return tuple(Host(**each) for each in _asked(launch, "hosts"))

    def stop(self, launch: Launch) -> None:
        _asked(launch, "stop")

    def logs(self, launch: Launch) -> Iterator[str]:
        yield from _asked(launch, "logs")


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, with this process connected to the cluster."""
    try:
        import ray
    except ModuleNotFoundError:
        raise LaunchError(
            "Ray is not installed here: run `pip install 'optuna-hermes[ray]'`."
        ) from None
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(
            f"The cluster of Ray at {address!r} cannot be reached ({error}): run this on one of "
            "its nodes, or give --address."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _asked(launch: Launch, method: str) -> Any:
    """The answer of the launch's supervisor to a call; empty where there is none."""
    with _cluster(launch.place) as ray:
        try:
            supervisor = ray.get_actor(launch.id)
        except ValueError:
            return ()
        try:
            return ray.get(getattr(supervisor, method).remote(), timeout=_ANSWER_SECONDS)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise LaunchError(
                f"The job's supervisor in Ray does not answer ({type(error).__name__}): try again "
                "when its node is back."
            ) from None
