"""A broker's messages when it starts, and its log while it serves."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes import _parent
from optuna_hermes.broker import _election as election
from optuna_hermes.broker._client import _starting
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import Kill, OutageBegan, OutageEnded, WritesFailed
from optuna_hermes.broker._devices import _nvml
from optuna_hermes.broker._devices import _source as _devices
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.broker._server import _ledgers, _server, _succession
from optuna_hermes.broker._server import _readings as readings
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.broker._server._server import Server
from optuna_hermes.errors import BrokerError
from optuna_hermes.model import Device
from support.devices import FakeDevices

# -- the start ---------------------------------------------------------------------------------


def test_a_runtime_directory_whose_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has few bytes: the variable that shortens it is named."""
    path = tmp_path / ("x" * 90)
    monkeypatch.setenv(election.RUNTIME_DIR_VARIABLE, str(path))
    with pytest.raises(BrokerError) as error:
        election.runtime_dir()
    assert str(error.value) == (
        f"The socket's path may have {election._MAX_SOCKET_PATH} bytes but {path}/broker.sock is "
        "longer: set OPTUNA_HERMES_RUNTIME_DIR to a short path."
    )


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (
            "exec sleep 30",
            r"^The broker did not listen within 0 s: see {0}/broker.log and .*err\.$",
        ),
        ("exit 1", r"^The broker has ended \(it said nothing\): look into {0}/broker.log\.$"),
        ("echo Killed >&2; exit 9", r"^The broker has ended \(Killed\): look into {0}/broker.log"),
    ],
    ids=["slow", "silent", "with words"],
)
def test_a_broker_that_does_not_start(
    python: str, words: str, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says where its last words are."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(stand_in))
    monkeypatch.setattr(_starting, "START_SECONDS", 0.3)
    with pytest.raises(BrokerError, match=words.format(runtime_dir)):
        _starting.start(runtime_dir, "cpu:1")


def test_a_broker_finds_the_package_where_its_client_has_it(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that a script has put into ``sys.path``: nothing else leads to it."""
    (tmp_path / "optuna_hermes" / "broker").mkdir(parents=True)
    (tmp_path / "optuna_hermes" / "__init__.py").touch()
    (tmp_path / "optuna_hermes" / "broker" / "__init__.py").touch()
    main = tmp_path / "optuna_hermes" / "broker" / "__main__.py"
    main.write_text("main = lambda: 'error: found'\n")
    monkeypatch.setattr(_parent, "__file__", str(tmp_path / "optuna_hermes" / "_parent.py"))
    alone = tmp_path / "python"  # one that has no packages of its own
    alone.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    alone.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(alone))
    with pytest.raises(BrokerError, match=r"^found$"):
        _starting.start(runtime_dir, "cpu:1")


def test_a_broker_that_another_process_has_been_starting_for_long(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for it says so, and where to look."""
    monkeypatch.setattr(_starting, "TURN_SECONDS", 0.1)
    with (
        election.lock(runtime_dir / "start.lock", timeout=0),
        pytest.raises(BrokerError) as error,
    ):
        _starting.connect_or_start("plain", "cpu:1")
    assert str(error.value) == (
        "Another process has been starting a broker for 0 s: see "
        f"{runtime_dir}/broker.log and {runtime_dir}/broker.err."
    )


def test_gpus_that_lie_idle_are_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``auto`` says what it means and why, where a driver is installed and does not work."""

    def broken() -> Any:
        raise _nvml.NoDriverError("load the driver with `modprobe nvidia`", installed=True)

    monkeypatch.setattr(_nvml, "driver", broken)
    count = _devices.DEFAULT_CPU_SLOTS
    assert len(_devices.parse_devices("auto")) == count
    assert caplog.messages == [
        f"auto means cpu:{count} here: load the driver with `modprobe nvidia`"
    ]


# -- the log -----------------------------------------------------------------------------------


class Loop:
    """A server whose loop does not run: what it logs is looked at."""

    def __init__(self, directory: Path) -> None:
        source = FakeDevices([Device(id="cpu:0", free=True)])
        self.server = Server(directory, devices="any", source=source, host="h", idle_seconds=None)
        self.server._ledgers = Ledgers(lambda news: None, lambda call: None)
        self.server._set_timer = lambda now: None  # type: ignore[method-assign]


@pytest.fixture
def server(runtime_dir: Path) -> Server:
    return Loop(runtime_dir).server


def test_what_a_broker_logs_of_its_ledgers(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that is away, one that refuses, and one that is back."""
    caplog.set_level(logging.INFO)
    server._on_outcome(OutageBegan(studies=("s",), reason="No route to host."))
    server._on_outcome(WritesFailed(study="s", reason="no such table"))
    server._on_outcome(OutageEnded(studies=("s",)))
    assert caplog.messages == [
        "a database is away, what is to be written waits: No route to host.",
        "the ledger refused: no such table",
        "the database is back",
    ]
    assert _ledgers._SILENT == (
        "It is there but does not answer: look whether it hangs, or who has locked it."
    )


def test_what_a_broker_logs_of_a_kill(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the process that it kills, and the reason."""
    killed: list[int] = []
    monkeypatch.setattr(_server, "kill", killed.append)
    server._carry_out([Kill(connection=1, pid=77)])
    assert caplog.messages == ["SIGKILL to process 77: it did not answer in time"]
    assert killed == [77]


def test_a_runtime_directory_that_is_full(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the next broker will not know the holders is said, and where room is needed."""
    (runtime_dir / "holders.json.partial").mkdir()
    holder = ServedProcess(
        pid=7, started=1, role="worker", study="s", number=0, epoch=1, devices=("cpu:0",)
    )
    monkeypatch.setattr(_succession, "holders", lambda state: (holder,))
    _succession.Succession(runtime_dir, BrokerState(host="here"), lambda event: None).remember()
    (message,) = caplog.messages
    assert message.startswith(
        f"the next broker will not know who has a device, so make room in {runtime_dir}: [Errno 21]"
    )


def test_an_xid_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the device that it came from, in words."""
    source = FakeDevices([Device(id="GPU-0", kind="gpu", free=True)])
    read = readings.Readings(source, source.poll())
    source.report("GPU-0", 79)
    polled = [asyncio.run(read.read(())) for _ in range(2)]
    assert [len(each.xids) for each in polled] == [1, 0]
    assert caplog.messages == ["GPU-0: XID 79 (fallen off the bus) was reported"]
    read.close()


def test_records_that_are_lost_are_counted(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is ended while a database is away says what brings most of them back."""
    monkeypatch.setattr(Ledgers, "close", lambda ledgers, seconds: 3)

    async def serve() -> None:
        await server.serve(server._stop.set)

    asyncio.run(serve())
    assert caplog.messages == [
        "3 records did not reach the ledger: bring the database back before `optimize` is run "
        "again; live trials send theirs again"
    ]
