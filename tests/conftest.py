"""Fixtures of all levels: a runtime directory of the test's own, and the CLI as a real process."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from hypothesis import settings

from optuna_hermes.workers._start_method import fork_by_default
from support.databases import DatabaseServer, mariadb_server, postgres_server

# A shell ignores Ctrl-C in what it starts in the background, and so would all that is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)

T = TypeVar("T")

RUNTIME_DIR = "OPTUNA_HERMES_RUNTIME_DIR"

# Small matrices on few cores: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in workers: what a loader starts has what a test defines, and imports no torch.
fork_by_default()

# A loaded machine is no failure, and a failure must be one that can be repeated.
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")


def pytest_collection_finish() -> None:
    """Freeze what all tests have imported, as a fork server does before it forks workers.

    Each epoch of a training searches the objects of its process for loaders.
    """
    gc.collect()
    gc.freeze()


def _wait_for(
    condition: Callable[[], T], deadline_seconds: float = 30.0, message: str | None = None
) -> T:
    deadline = time.monotonic() + deadline_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            what = message or getattr(condition, "__name__", "condition")
            pytest.fail(f"Not within {deadline_seconds} s: {what}.")
        time.sleep(0.01)


def _alive(process: psutil.Process) -> bool:
    """True if the process still runs; a zombie that its parent has not reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: psutil.Process, grace_seconds: float = 10.0) -> None:
    """SIGTERM, then SIGKILL, and reap it where it is a child of ours."""
    # Whose child it is not may stay a zombie for a while: that is no business of ours.
    ours = process.pid in {child.pid for child in psutil.Process().children()}
    with contextlib.suppress(psutil.NoSuchProcess):
        if _alive(process):
            process.terminate()
        deadline = time.monotonic() + grace_seconds
        while _alive(process) and time.monotonic() < deadline:
            time.sleep(0.01)
        if _alive(process):
            process.kill()
            _wait_for(lambda: not _alive(process), message=f"{process} is gone")
        if ours:
            process.wait()


def _broker(runtime_dir: Path) -> psutil.Process | None:
    """The process that says it is the broker of ``runtime_dir``."""
    try:
        pid = json.loads((runtime_dir / "broker.json").read_text())["pid"]
        return psutil.Process(pid)
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def _strays(runtime_dir: Path) -> list[psutil.Process]:
    """Processes of this package that were started for ``runtime_dir`` and are still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get(RUNTIME_DIR) == str(runtime_dir)
            named = any("optuna_hermes" in part for part in process.cmdline())
            if ours and named and process.pid != os.getpid() and _alive(process):
                found.append(process)
    return found


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    """``wait_for(condition, deadline_seconds=30, message=None)``: the first true value, or fail."""
    return _wait_for


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test alone; whatever serves it at the end is ended."""
    # Not tmp_path: the path of a Unix socket has to stay below 108 bytes.
    path = Path(tempfile.mkdtemp(prefix="hermes-", dir="/tmp"))
    monkeypatch.setenv(RUNTIME_DIR, str(path))
    yield path
    if any(path.iterdir()):
        broker = _broker(path)
        if broker:
            _end(broker)
        for process in _strays(path):
            _end(process)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    """A study database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def take_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``take_away(path)``: neither it nor what is in it can be looked at, as on a lost mount."""

    def take(path: Path) -> None:
        def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
            def refuse(place: Any = ".", *words: Any, **options: Any) -> Any:
                if f"{place}/".startswith(f"{path}/"):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(place))
                return call(place, *words, **options)

            return refuse

        for owner, names in (
            (os, ("stat", "scandir", "listdir")),
            (Path, ("stat", "iterdir", "read_text")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))

    return take


@pytest.fixture(scope="session")
def _postgres() -> Iterator[DatabaseServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres(_postgres: DatabaseServer) -> DatabaseServer:
    """The server of PostgreSQL, for tests that need several databases."""
    return _postgres


@pytest.fixture
def postgres_url(_postgres: DatabaseServer) -> Iterator[str]:
    """An empty database of PostgreSQL."""
    with _postgres.database() as url:
        yield url


@pytest.fixture(scope="session")
def _mariadb() -> Iterator[DatabaseServer]:
    with mariadb_server() as server:
        yield server


@pytest.fixture
def mariadb_url(_mariadb: DatabaseServer) -> Iterator[str]:
    """An empty database of MariaDB."""
    with _mariadb.database() as url:
        yield url


@dataclass(frozen=True, kw_only=True)
class RunningCli:
    """``optuna-hermes`` in a process group of its own; what it prints goes to files."""

    process: subprocess.Popen[bytes]
    stdout_path: Path
    stderr_path: Path

    @property
    def stdout(self) -> str:
        """Output printed until now."""
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        """Standard error printed until now."""
        return self.stderr_path.read_text()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, deadline_seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the process itself."""
        code = self.process.wait(deadline_seconds)
        return subprocess.CompletedProcess(self.process.args, code, self.stdout, self.stderr)

    def kill(self) -> None:
        """SIGKILL the group and wait until nothing of it runs."""
        self.send(signal.SIGKILL)
        self.process.wait(10.0)
        _wait_for(lambda: not self._members(), message=f"the group of {self.process.args} is gone")

    def _members(self) -> list[psutil.Process]:
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                # Workers are in a group of their own, and end with the driver.
                if os.getsid(process.pid) == self.process.pid and _alive(process):
                    members.append(process)
        return members


@pytest.fixture
def start_cli(runtime_dir: Path, tmp_path: Path) -> Iterator[Callable[..., RunningCli]]:
    """``start_cli(*args, cwd=, env=)`` starts ``optuna-hermes`` and returns a ``RunningCli``."""
    started: list[RunningCli] = []

    def start(
        *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> RunningCli:
        out = tmp_path / f"cli-{len(started)}.out"
        err = tmp_path / f"cli-{len(started)}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "optuna_hermes", *map(str, args)],
                cwd=cwd or tmp_path,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        running = RunningCli(process=process, stdout_path=out, stderr_path=err)
        started.append(running)
        return running

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def cli(
    start_cli: Callable[..., RunningCli],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``cli(*args, deadline_seconds=120, cwd=, env=)`` runs ``optuna-hermes`` to its end."""

    def run(
        *args: object, deadline_seconds: float = 120.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return start_cli(*args, **options).wait(deadline_seconds)

    return run
