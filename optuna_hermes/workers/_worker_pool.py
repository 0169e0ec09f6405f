"""Worker pool: the driver's end of the fork server, which forks workers and reports their exits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from optuna_hermes import errors
from optuna_hermes._cgroups import usable_cpus
from optuna_hermes._parent import kill
from optuna_hermes.broker import INSIDE_VARIABLE, connect_or_start, end_idle
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE, runtime_dir
from optuna_hermes.errors import BrokerSilentError, HermesError, ObjectiveError, no_process
from optuna_hermes.policies import POLICIES, make_policy
from optuna_hermes.workers._forked import fork_server, has_fileno, why_new_python
from optuna_hermes.workers._objective import Objective, arguments, pack
from optuna_hermes.workers._output import open_closed_streams
from optuna_hermes.workers._processes import (
    ForkedProcess,
    command,
    kill_session,
    refuse_inside,
)
from optuna_hermes.workers._signals import LEFT_TO_DRIVER
from optuna_hermes.workers._starts import Starts
from optuna_hermes.workers._threads import THREADS_VARIABLE
from optuna_hermes.workers._words import KERNEL, NOTE, described

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.broker import Connection, WatchedStudy
    from optuna_hermes.workers._settings import OptimizeSettings
    from optuna_hermes.workers._worker import WorkerInput

END_SECONDS = 10.0

_KILLED_SECONDS = 60.0
"""Longest wait for the next killed worker to be gone: it may have much memory to give back."""

_STATUS_SECONDS = 2.0
"""Longest wait for the exit status of a fork server that has closed its socket."""

_LONGEST_WAIT_SECONDS = 1e6
"""Longest time that is waited at once: the system's own bound is 25 days."""


class ServerKilledError(HermesError):
    """A signal has ended the fork server, and all workers with it."""

    def __init__(self, ended: str) -> None:
        super().__init__(f"{ended}: run the same command again.")
        self.ended = ended


@contextlib.contextmanager
def start(
    objective: Objective | str,
    settings: OptimizeSettings,
    study_name: str,
    study: Study | None = None,
) -> Iterator[WorkerPool]:
    """Start the fork server, and beside it the broker, while the caller opens its database.

    Args:
        study: to be optimized; None if it is not loaded yet.

    Raises:
        InvalidInputError: the policy or the objective does not exist, or this process was itself
            started by ``optimize``.
        BrokerError: the runtime directory cannot be used.
    """
    refuse_inside()
    if settings.policy != next(iter(POLICIES)):  # the default needs nothing that may be missing
        make_policy(settings.policy)

    first: list[Connection] = []
    over = threading.Event()

    def look_while_silent(seconds: float) -> None:
        if over.is_set():
            raise BrokerSilentError("The call has ended.")

    def start_broker() -> None:
        # The driver's own connection will raise it again.
        with contextlib.suppress(HermesError, OSError):
            if settings.devices == "auto":
                end_idle(look_while_silent)
            first.append(
                connect_or_start("driver", settings.devices, settings.power, look_while_silent)
            )

    thread = threading.Thread(target=start_broker, name="hermes-broker-start", daemon=True)
    # First of all: what is started next could not be forked.
    new_python = why_new_python(objective, study)
    with WorkerPool(objective, study_name, settings.devices, new_python) as pool:
        try:
            thread.start()
        except RuntimeError as error:  # a limit of processes is one of threads
            raise no_process(error) from error
        try:
            yield pool
        finally:
            over.set()
            thread.join()  # a call that ends early leaves nothing behind that still starts
            for connection in first:  # else the broker would end while the objective is imported
                connection.close()


class WorkerPool:
    """The workers of one call of ``optimize``, and the fork server they are forked from.

    ``began`` is the time of its start by ``time.monotonic``; ``has_job`` is true once the fork
    server has been sent one.

    Args:
        devices: as ``--devices``; CPU slots share the cores.
        new_python: the reason why the fork server is a new Python; None if it is a fork of this
            process.
    """

    def __init__(
        self, objective: Objective | str, study_name: str, devices: str, new_python: str | None
    ) -> None:
        self.began = time.monotonic()
        self.new_python = new_python
        self._objective, self._study_name = objective, study_name
        self._packed = b"" if new_python is None else pack(objective, new_python)
        self._environment = _environment(devices)
        open_closed_streams()
        self._statuses: dict[int, int] = {}
        self.n_ended = 0
        """The number of workers that have ended."""
        self.said: set[str] = set()
        """The messages that workers have sent."""
        self._notes: dict[str, bool] = {}
        self.starts = Starts()
        self._process: ForkedProcess | subprocess.Popen[bytes]
        self._start_server()

    def _start_server(self) -> None:
        self._ready = self.has_job = False
        self._alive: set[int] = set()
        self._asked = 0
        self._buffer = b""
        self._socket, end = socket.socketpair()
        objective, environment = self._objective, self._environment
        with end:
            try:
                if self.new_python is None and not isinstance(objective, str):
                    self._process = fork_server(objective, end, self._socket, environment)
                    return
                # One that comes before it has left this process's group would end it.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_DRIVER)
                try:
                    self._process = subprocess.Popen(
                        command("_fork_server", end.fileno()),
                        stdin=subprocess.DEVNULL,
                        stdout=sys.stderr.fileno() if has_fileno(sys.stderr) else None,
                        pass_fds=(end.fileno(),),
                        env=environment,
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except OSError as error:
                self._socket.close()
                raise no_process(error) from error
        # With this process's sys.path, workers can import the same modules.
        self._send((self._packed, self._study_name, sys.path, arguments(self._packed)))

    def restart(self, study: Study) -> bool:
        """Start another fork server in the place of one that was killed, as its workers were.

        It is not started, and False returned, if this process can no longer be forked for it.
        """
        if self.new_python is None and why_new_python(self._objective, study) is not None:
            return False
        for pid in self._alive:
            kill_session(pid)  # else what it has started would train on
            self._statuses[pid] = -signal.SIGKILL
        self._socket.close()
        self._start_server()
        return True

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is KeyboardInterrupt:  # else those that train would have time to end by themselves
            for pid in self._alive:
                kill(pid)
        self._socket.close()  # the fork server reads its end, kills its workers and returns
        if not self._ready:
            self._process.kill()  # it may be in the midst of an import
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self, until: float = math.inf) -> bool:
        """Wait until the objective is loaded; False if not by ``until``, of ``time.monotonic``.

        Raises:
            ObjectiveError: it cannot be loaded.
        """
        while not self._ready:
            left = max(0.0, until - time.monotonic())
            if not wait([self._socket], min(left, _LONGEST_WAIT_SECONDS)):
                if left <= _LONGEST_WAIT_SECONDS:
                    return False
                continue
            for line in self._lines():
                if "error" in line:
                    kind = getattr(errors, line["kind"], ObjectiveError)
                    raise kind(line["error"])
                self._ready = True
        return True

    def configure(self, job: WorkerInput) -> None:
        """Send the job of all workers, once and before the first of them is forked."""
        self.has_job = True
        self._send(job)

    def scale_to(self, count: int) -> None:
        """Fork as many workers as are missing."""
        missing = count - len(self._alive) - self._asked
        if missing > 0:
            self._asked += missing
            with contextlib.suppress(ConnectionError):  # reading from the socket will raise
                self._socket.sendall(b"f" * missing)

    def new_notes(self) -> list[str]:
        """Lines for the user, each of them once."""
        new = [text for text, shown in self._notes.items() if not shown]
        self._notes.update(dict.fromkeys(new, True))
        return new

    def status_of(self, pid: int) -> int | None:
        """The exit status of a worker, or minus a signal; None while unknown."""
        return self._statuses.get(pid)

    def wait(self, seconds: float, other: WatchedStudy) -> bool:
        """Wait for a message of the fork server or another, or for ``seconds``; True if of that."""
        # Not select(), which knows no file descriptor above 1023: a new broker's may be any.
        readable = wait([self._socket, other.fileno()], seconds)
        if self._socket in readable:
            self._read()
        return other.fileno() in readable

    def kill_all(self) -> None:
        """SIGKILL every worker, those being forked too, and wait until they are gone.

        Raises:
            HermesError: the fork server does not answer, and was killed.
        """
        killed: set[int] = set()
        while self._alive or self._asked:
            for pid in self._alive - killed:
                killed.add(pid)
                kill(pid)
            if not wait([self._socket], _KILLED_SECONDS):
                self._process.kill()
                raise HermesError(
                    "The process that workers are forked from does not answer, so it was killed: "
                    "run the same command again."
                )
            self._read()

    def _send(self, payload: object) -> None:
        data = pickle.dumps(payload)
        with contextlib.suppress(ConnectionError):  # reading from the socket will raise
            self._socket.sendall(len(data).to_bytes(8, "big") + data)

    def _read(self) -> None:
        for line in self._lines():
            if "forked" in line:
                self._asked -= 1
                self._alive.add(line["forked"])
                self._statuses.pop(line["forked"], None)  # the kernel gives a number out again
                self.starts.forked(line["forked"])
            elif "unforked" in line:
                self._asked -= line["unforked"]
                self.starts.refused(line["reason"], alive=len(self._alive))
                self._note_refused(line["reason"])
            elif line.get("said") == NOTE:
                self._notes.setdefault(line["reason"], False)
            elif "said" in line:
                self.said.add(line["said"])
                self.starts.said(line["worker"], line["said"], line["reason"])
            elif "exited" in line:
                self._alive.discard(line["exited"])
                self._statuses[line["exited"]] = line["status"]
                self.n_ended += 1
                how, alive = described(line["status"]), len(self._alive)
                refused = self.starts.exited(line["exited"], how, alive=alive)
                if refused is not None:
                    self._note_refused(refused)

    def _note_refused(self, reason: str) -> None:
        self._notes.setdefault(
            f"The system refuses to start a worker ({reason}): it is tried again, and parked "
            "trials go to disk where others need their processes.",
            False,
        )

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:  # it ended before it had read all
            data = b""
        if not data:
            self._raise_ended()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return iter([json.loads(line) for line in lines])

    def _raise_ended(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):  # of its socket only
            self._process.wait(timeout=_STATUS_SECONDS)
        status = self._process.returncode
        how = "" if status is None else f" ({described(status, KERNEL)})"
        ended = f"The process that workers are forked from has ended{how}"
        if status is not None and status < 0:  # which has let it say nothing
            raise ServerKilledError(ended)
        raise HermesError(f"{ended}: see above for the reason, then run the same command again.")


def _environment(devices: str) -> dict[str, str]:
    """The environment of workers; CPU slots share the cores, unless the user has said how many.

    Raises:
        BrokerError: the runtime directory cannot be used.
    """
    slots = devices.removeprefix("cpu:")
    share = max(1, usable_cpus() // int(slots)) if slots.isdigit() and int(slots) else 1
    # A fit in several processes leaves its port behind: Lightning would take it for each next fit,
    # and of two trials that are alive at once the second could not bind it.
    own = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    asked = {
        THREADS_VARIABLE: str(share),
        # Torch looks for GPUs by NVML then: forks cannot use CUDA once it is initialised.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Else a set of texts, and a vocabulary made of it, has another order in the next process.
        "PYTHONHASHSEED": "0",
    }
    # Not looked for anew by each: an objective may set $TMPDIR.
    told = {INSIDE_VARIABLE: "1", RUNTIME_DIR_VARIABLE: str(runtime_dir())}
    return {**asked, **own, **told}
