"""Actors of a launch on Ray: one on each node runs ``optimize``, another one looks after them.

A node that is lost is replaced by Ray if there is another one; the study goes on meanwhile, for
the other hosts take over the trials of a host that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from optuna_hermes._surroundings import GRACE_VARIABLE, HOST_VARIABLE
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.errors import ExitStatus

SHOWN_LINES = 1000
"""Last lines of a host's output that are kept."""

_ANSWER_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_FINAL = frozenset({ExitStatus.DONE, ExitStatus.BAD_INPUT, ExitStatus.NOTHING_SUCCEEDED})
"""Statuses after which no other host has anything left to do, or would do better."""
_STATES: Mapping[int, str] = {ExitStatus.DONE: "done", ExitStatus.SUSPENDED: "suspended"}


class RayHost:
    """Runs ``optimize`` on its node, in a process of its own.

    Args:
        name: of the host in the study's ledger.
        arguments: of ``optimize``.
        folder: in which it runs, if the node has it.
        environment: added to that of the node.
        grace_seconds: from the signal to suspend to the end.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        grace_seconds: int,
    ) -> None:
        self._command = [sys.executable, "-m", "optuna_hermes", "optimize", *arguments]
        self._folder = folder if Path(folder).is_dir() else None
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False
        # A node of Ray may share its machine with others: each host has a broker of its own.
        runtime = tempfile.mkdtemp(prefix="optuna-hermes-")
        self._environment = {
            **os.environ,
            **environment,
            RUNTIME_DIR_VARIABLE: runtime,
            HOST_VARIABLE: name,
            GRACE_VARIABLE: str(grace_seconds),
        }

    async def run(self) -> tuple[int, list[str]]:
        """Run it to its end; return its exit status and the last lines of its output."""
        if not self._stopped:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._lines.append(line.decode(errors="replace").rstrip("\n"))
            await self._process.wait()
        status = ExitStatus.SUSPENDED if self._process is None else self._process.returncode
        return int(status or 0), list(self._lines)

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

    It needs no processor, and stays when all have ended, so that it can be asked.

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
        self._ended: dict[int, tuple[int, list[str]]] = {}
        self._group: Any = None
        self._actors: list[Any] = []
        self._count = hosts
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False

    async def begin(self) -> None:
        """Start the hosts, as soon as there are nodes for them."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        self._group = placement_group(
            [self._resources] * self._count, strategy="STRICT_SPREAD", name=self._name
        )
        actors = ray.remote(RayHost)
        for index in range(self._count):
            place = PlacementGroupSchedulingStrategy(self._group, index)
            self._actors.append(
                actors.options(
                    num_cpus=self._resources["CPU"],
                    num_gpus=self._resources.get("GPU", 0.0),
                    max_restarts=-1,
                    max_task_retries=-1,
                    scheduling_strategy=place,
                ).remote(name=f"{self._name}-{index}", **self._others)
            )
        runs = [asyncio.ensure_future(self._follow(index)) for index in range(self._count)]
        for run in asyncio.as_completed(runs):
            await run
            if any(status in _FINAL for status, _ in self._ended.values()):
                await self._end_waiting()
        remove_placement_group(self._group)

    async def _follow(self, index: int) -> None:
        try:
            self._ended[index] = await self._actors[index].run.remote()
        except ray.exceptions.RayActorError as error:
            self._ended.setdefault(index, (ExitStatus.FAILED, [str(error)]))
        ray.kill(self._actors[index])

    async def _end_waiting(self) -> None:
        for index in range(self._count):
            if index not in self._ended and await self._asked(index, "place") is None:
                self._ended[index] = (ExitStatus.SUSPENDED, [])
                ray.kill(self._actors[index])

    async def _asked(self, index: int, question: str) -> Any:
        """A host's answer, None from one that has no node."""
        if index >= len(self._actors):
            return None
        try:
            asked = getattr(self._actors[index], question).remote()
            return await asyncio.wait_for(asked, _ANSWER_SECONDS)
        except (asyncio.TimeoutError, ray.exceptions.RayActorError):
            return None

    async def hosts(self) -> list[dict[str, str]]:
        """The fields of each ``Host``."""
        return [await self._host(index) for index in range(self._count)]

    async def _host(self, index: int) -> dict[str, str]:
        name = f"{self._name}-{index}"
        if index in self._ended:
            status, _ = self._ended[index]
            state = _STATES.get(status, "failed")
            return {"name": name, "state": state, "detail": f"exit status {status}"}
        node = await self._asked(index, "place")
        if node is None:
            return {"name": name, "state": "waiting", "detail": "for a node"}
        return {"name": name, "state": "stopping" if self._stopped else "running", "node": node}

    async def logs(self) -> list[str]:
        """Last lines of all hosts."""
        lines = []
        for index in range(self._count):
            found = self._ended[index][1] if index in self._ended else None
            if found is None:
                found = await self._asked(index, "logs") or []
            lines += [f"{self._name}-{index}: {line}" for line in found]
        return lines

    async def stop(self) -> None:
        """Have every host suspend its trials and end, and start none again."""
        self._stopped = True
        for index in range(self._count):
            if index not in self._ended:
                await self._asked(index, "stop")
        await self._end_waiting()


def _end_with_parent() -> None:
    """Have this process sent SIGTERM when the actor is killed: then it suspends its trials."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
