"""The driver's end of the nursery: asks for workers, hears of their ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from optuna_hermes import errors
from optuna_hermes._cgroups import usable_cpus
from optuna_hermes.errors import HermesError, ObjectiveError
from optuna_hermes.workers._guard import INSIDE_VARIABLE
from optuna_hermes.workers._nursery import command
from optuna_hermes.workers._objective import arguments
from optuna_hermes.workers._words import Starts, described
from optuna_hermes.workers._worker import Job

END_SECONDS = 10.0


class NotInTimeError(HermesError):
    """The objective's import takes longer than there is time."""


class Staff:
    """The workers of one call of ``optimize``, and the nursery they are forked from.

    Args:
        objective: as ``pack`` gives it.
        devices: as ``--devices``; CPU slots share the cores.
        until: when the nursery must be ready, by ``time.monotonic``.

    Raises:
        ObjectiveError: on entering, if the nursery cannot load the objective.
        NotInTimeError: on entering, if it has not until then.
    """

    def __init__(self, objective: bytes | str, devices: str, until: float = math.inf) -> None:
        self._until = until
        self._socket, end = socket.socketpair()
        self._alive: set[int] = set()
        self._statuses: dict[int, int] = {}
        self._said: set[str] = set()
        self.starts = Starts()
        self._asked = 0
        self._buffer = b""
        with end:
            self._process = subprocess.Popen(
                command("_nursery", end.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
                pass_fds=(end.fileno(),),
                env=_environment(devices),
            )
        # What this process can import, workers can.
        self._send((objective, sys.path, arguments(objective)))

    def __enter__(self) -> Staff:
        try:
            while not self._ready():
                pass
        except BaseException:
            self._process.kill()  # it may be in the midst of an import
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def employ(self, job: Job) -> None:
        """Say what workers will be for, once and before the first of them."""
        self._send(job)

    def keep(self, count: int) -> None:
        """Fork as many workers as are missing."""
        missing = count - len(self._alive) - self._asked
        if missing > 0:
            self._asked += missing
            with contextlib.suppress(ConnectionError):  # that it is gone is seen when it is read
                self._socket.sendall(b"f" * missing)

    @property
    def said(self) -> frozenset[str]:
        """The words of workers, each once."""
        return frozenset(self._said)

    def status_of(self, pid: int) -> int | None:
        """How a worker has ended: its exit status, or minus a signal; None if nobody knows."""
        return self._statuses.get(pid)

    def wait(self, seconds: float) -> None:
        """Wait for news of workers, or for ``seconds``."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if readable:
            self._read()

    def clear(self) -> None:
        """SIGKILL every worker, those who are being forked too, and wait until they are gone."""
        killed: set[int] = set()
        while self._alive or self._asked:
            for pid in self._alive - killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._read()

    def _send(self, payload: object) -> None:
        data = pickle.dumps(payload)
        self._socket.sendall(len(data).to_bytes(8, "big") + data)

    def _ready(self) -> bool:
        left = None if math.isinf(self._until) else max(0.0, self._until - time.monotonic())
        readable, _, _ = select.select([self._socket], [], [], left)
        if not readable:
            raise NotInTimeError("The objective was not imported in time.")
        for line in self._lines():
            if "error" in line:
                kind = getattr(errors, line["kind"], ObjectiveError)
                raise kind(line["error"])
            return True
        return False

    def _read(self) -> None:
        for line in self._lines():
            if "forked" in line:
                self._asked -= 1
                self._alive.add(line["forked"])
                self.starts.forked(line["forked"])
            elif "said" in line:
                self._said.add(line["said"])
                self.starts.said(line["worker"], line["said"], line["reason"])
            elif "exited" in line:
                self._alive.discard(line["exited"])
                self._statuses[line["exited"]] = line["status"]
                self.starts.exited(line["exited"], described(line["status"]))

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:  # it ended before it had read all
            data = b""
        if not data:
            raise HermesError(
                "The process that workers are forked from has ended: see above for the reason, "
                "then run the same command again."
            )
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return iter([json.loads(line) for line in lines])


def _environment(devices: str) -> dict[str, str]:
    """Threads for CPU slots: the cores are shared out, unless the user has said otherwise.

    Whether there is a GPU is asked without CUDA, which a fork could not use after that.
    A fit in several processes leaves its port behind here, where Lightning takes it for each next
    one: of two trials that are alive at once the second could not have it.
    """
    slots = devices.removeprefix("cpu:")
    share = max(1, usable_cpus() // int(slots)) if slots.isdigit() and int(slots) else 1
    own = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    asked = {"OMP_NUM_THREADS": str(share), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**asked, **own, INSIDE_VARIABLE: "1"}


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
