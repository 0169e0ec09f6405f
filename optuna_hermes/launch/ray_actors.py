"""Actors of a launch on Ray: one on each node runs ``optimize``, another one looks after them.

A node that is lost is replaced by Ray if there is another one; the study goes on meanwhile, for
the other hosts take over the trials of a host that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from optuna_hermes._job_environment import GRACE_VARIABLE, HOST_VARIABLE
from optuna_hermes._parent import end_with_parent
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.errors import ExitStatus
from optuna_hermes.launch._base import at_work

SHOWN_LINES = 1000
"""Last lines of a host's output that are kept."""

_ANSWER_SECONDS = 5.0
_KEPT_IN = "optuna-hermes"
"""Namespace of launches in Ray's store of keys and values, where Ray Serve has its state, too."""
_POLL_SECONDS = 0.05
_PIECE_BYTES = 65536
_FINAL = frozenset({ExitStatus.DONE, ExitStatus.BAD_INPUT, ExitStatus.NOTHING_SUCCEEDED})
"""Statuses after which no other host has anything left to do, or would do better."""
_STATES: Mapping[int, str] = {ExitStatus.DONE: "done", ExitStatus.SUSPENDED: "suspended"}
_ENDED = frozenset({*_STATES.values(), "failed"})


def start(
    *, address: str, namespace: str, name: str, arguments: Sequence[str], **others: Any
) -> str | None:
    """Start a launch's hosts in a cluster of Ray, and return at once: None, or why they were not.

    The storage, and ``$PGPASSWORD`` if there is one, are in the environment. ``arguments`` are
    those of ``optimize``, ``others`` those of ``Supervisor``.
    """
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    if not _kill_ended(name):
        return str(at_work(name, " where it was launched"))
    internal_kv._internal_kv_del(name, namespace=_KEPT_IN)
    supervisor = (
        ray.remote(Supervisor)
        .options(name=name, lifetime="detached", num_cpus=0, max_restarts=-1)
        .remote(
            name=name,
            arguments=arguments,
            environment={
                each: os.environ[each]
                for each in ("OPTUNA_STORAGE", "PGPASSWORD")
                if each in os.environ
            },
            **others,
        )
    )
    ray.get(supervisor.begin.remote())
    return None


def _kill_ended(name: str) -> bool:
    """End the supervisor of an earlier launch of this name; False if one of its hosts is at work.

    It stays after its hosts, so that it can be asked.
    """
    try:
        supervisor = ray.get_actor(name)
    except ValueError:  # there is none
        return True
    try:
        hosts = ray.get(supervisor.hosts.remote())
    except ray.exceptions.RayActorError:  # it has died
        return True
    if not all(host["state"] in _ENDED for host in hosts):
        return False
    ray.kill(supervisor)
    while name in ray.util.list_named_actors():  # its name is free once Ray has seen to it
        time.sleep(_POLL_SECONDS)
    return True


class RayHost:
    """Runs ``optimize`` on its node, in a process of its own.

    Args:
        name: of the host in the study's ledger: that of the launch, and a number.
        arguments: of ``optimize``.
        folder: in which it runs, if the node has it.
        environment: added to that of the node.
        grace_seconds: from the signal to suspend to the end.
        cpus: that Ray has assigned to it.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        grace_seconds: int,
        cpus: int,
    ) -> None:
        self._command = [sys.executable, "-m", "optuna_hermes", "optimize", *arguments]
        self._folder = folder if Path(folder).is_dir() else None
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._launch, self._stopped = name.rpartition("-")[0], False
        own = dict(os.environ)
        if own.get("OMP_NUM_THREADS") == str(cpus):  # set by Ray, where the node has no value
            del own["OMP_NUM_THREADS"]  # else each trial would compute with so many
        self._environment = {
            **own,
            **environment,
            RUNTIME_DIR_VARIABLE: _runtime_dir(name),
            HOST_VARIABLE: name,
            GRACE_VARIABLE: str(grace_seconds),
        }

    async def run(self) -> tuple[int, list[str]]:
        """Run it to its end; return its exit status and the last lines of its output."""
        # Ray may have started this actor anew: the one before was told to stop.
        self._stopped = self._stopped or _kept(self._launch).get("stopped", False)
        if not self._stopped:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # It suspends its trials when the actor is killed.
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
            if self._stopped:  # while it was being created
                await self.stop()
            assert self._process.stdout is not None
            await self._read(self._process.stdout)
            await self._process.wait()
            await self._end_broker()
        status = None if self._process is None else self._process.returncode
        if status is None or (self._stopped and status == -signal.SIGTERM):  # it had not begun
            status = ExitStatus.SUSPENDED
        return int(status), list(self._lines)

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Keep the last lines of its output, each as a terminal would show it in the end."""
        rest = b""
        while piece := await output.read(_PIECE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            self._lines += (_shown(line) for line in lines)
            rest = rest[-_PIECE_BYTES:]  # a progress bar may write no newline for hours
        if rest:
            self._lines.append(_shown(rest))

    async def _end_broker(self) -> None:
        """End this host's broker: while it waits for clients it keeps GPUs from the next launch."""
        ending = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "optuna_hermes", "broker", "--stop"),
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await ending.wait()

    async def place(self) -> str:
        """The node that it is on."""
        return str(ray.util.get_node_ip_address())

    async def logs(self) -> list[str]:
        """The last lines of its output."""
        return list(self._lines)

    async def stop(self) -> None:
        """Have it suspend its trials and end."""
        self._stopped = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


class Supervisor:
    """Starts the hosts of a launch, one on each node, and knows what became of them.

    It needs no processor, and stays when all have ended, so that it can be asked. One that Ray
    starts anew begins only those that had not ended, and none of a launch that was stopped.

    Args:
        name: of the launch.
        hosts: how many.
        resources: of each, in Ray's words.
        others: arguments of ``RayHost``.
    """

    def __init__(
        self, name: str, hosts: int, resources: Mapping[str, float], **others: Any
    ) -> None:
        self._name = name
        self._resources = dict(resources)
        self._others = others
        kept = _kept(name)
        self._stopped: bool = kept.get("stopped", False)
        self._ended: dict[int, tuple[int, list[str]]] = {
            int(index): (status, []) for index, status in kept.get("ended", {}).items()
        }
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._count = hosts
        self._watching: asyncio.Task[None] | None = None
        # Where Ray starts it anew, for its node is gone, nobody else does.
        ray.get_runtime_context().current_actor.begin.remote()

    async def begin(self) -> None:
        """Start the hosts, as soon as there are nodes for them."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(ValueError):  # there is none of a supervisor that is gone
            remove_placement_group(get_placement_group(self._name))
        if self._stopped:  # the hosts of a supervisor that is gone have ended with it
            for index in self._left():
                self._end(index, ExitStatus.SUSPENDED, [])
        left = self._left()
        if not left:
            return
        self._group = placement_group(
            [self._resources] * len(left), strategy="STRICT_SPREAD", name=self._name
        )
        actors = ray.remote(RayHost)
        for bundle, index in enumerate(left):
            place = PlacementGroupSchedulingStrategy(self._group, bundle)
            self._actors[index] = actors.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0.0),
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=place,
            ).remote(name=f"{self._name}-{index}", cpus=int(self._resources["CPU"]), **self._others)
        runs = [asyncio.ensure_future(self._follow(index)) for index in left]
        for run in asyncio.as_completed(runs):
            await run
            if any(status in _FINAL for status, _ in self._ended.values()):
                await self._end_waiting()
        remove_placement_group(self._group)

    async def _follow(self, index: int) -> None:
        try:
            self._end(index, *await self._actors[index].run.remote())
        except ray.exceptions.RayError as error:
            if index not in self._ended:
                self._end(index, ExitStatus.FAILED, [str(error)])
        ray.kill(self._actors[index])

    async def _end_waiting(self) -> None:
        left = self._left()
        for index, place in zip(left, await self._asked_all(left, "place"), strict=True):
            if place is None and index not in self._ended:
                self._end(index, ExitStatus.SUSPENDED, [])
                if index in self._actors:  # none has begun where `stop` comes before `begin`
                    ray.kill(self._actors[index])

    def _end(self, index: int, status: int, lines: list[str]) -> None:
        self._ended[index] = (status, lines)
        self._keep()

    def _keep(self) -> None:
        """Keep outside of this process what actors that Ray starts anew must not undo."""
        ended = {index: status for index, (status, _) in self._ended.items()}
        kept = json.dumps({"stopped": self._stopped, "ended": ended})
        internal_kv._internal_kv_put(self._name, kept, namespace=_KEPT_IN)

    def _left(self) -> list[int]:
        """The hosts that have not ended."""
        return [index for index in range(self._count) if index not in self._ended]

    async def _asked_all(self, hosts: Sequence[int], question: str) -> list[Any]:
        """The answers of hosts, asked all at once: each that has no node keeps one waiting."""
        return await asyncio.gather(*(self._asked(index, question) for index in hosts))

    async def _asked(self, index: int, question: str) -> Any:
        """A host's answer, None from one that has no node."""
        if index not in self._actors:
            return None
        try:
            asked = getattr(self._actors[index], question).remote()
            return await asyncio.wait_for(asked, _ANSWER_SECONDS)
        except (asyncio.TimeoutError, ray.exceptions.RayActorError):
            return None

    async def hosts(self) -> list[dict[str, str]]:
        """The fields of each ``Host``."""
        left = self._left()
        nodes = dict(zip(left, await self._asked_all(left, "place"), strict=True))
        return [self._host(index, nodes.get(index)) for index in range(self._count)]

    def _host(self, index: int, node: str | None) -> dict[str, str]:
        name = f"{self._name}-{index}"
        if index in self._ended:
            status, _ = self._ended[index]
            state = _STATES.get(status, "failed")
            return {"name": name, "state": state, "detail": f"exit status {status}"}
        if node is None:
            return {"name": name, "state": "waiting", "detail": "for a node"}
        return {"name": name, "state": "stopping" if self._stopped else "running", "node": node}

    async def logs(self) -> list[str]:
        """Last lines of all hosts."""
        left = self._left()
        found = dict(zip(left, await self._asked_all(left, "logs"), strict=True))
        found |= {index: lines for index, (_, lines) in self._ended.items()}
        return [
            f"{self._name}-{index}: {line}"
            for index in range(self._count)
            for line in found[index] or ()
        ]

    async def stop(self) -> None:
        """Have every host suspend its trials and end, and start none again."""
        self._stopped = True
        self._keep()
        await self._asked_all(self._left(), "stop")
        await self._end_waiting()


def _kept(launch: str) -> dict[str, Any]:
    """The values that the supervisor of a launch has kept outside of its process."""
    kept = internal_kv._internal_kv_get(launch, namespace=_KEPT_IN)
    return dict(json.loads(kept or "{}"))


def _runtime_dir(name: str) -> str:
    """The runtime directory of a host, which one that Ray starts anew on its node has again."""
    # A node of Ray may share its machine with others: each host has a broker of its own.
    place = f"{ray.get_runtime_context().get_node_id()} {name}"
    own = hashlib.sha256(place.encode()).hexdigest()[:12]  # the path of a socket must be short
    return str(Path(tempfile.gettempdir(), f"optuna-hermes-{os.getuid()}-{own}"))


def _shown(line: bytes) -> str:
    """The part of a line after its last carriage return, without those at its end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
