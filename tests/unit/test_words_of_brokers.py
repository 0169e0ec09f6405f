"""What a broker says to people and to its clients when something is wrong, and what to do then."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker import Connection, _client, _devices, _ledgers, _server
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import _readings as readings
from optuna_hermes.broker._client import connect, connect_or_start
from optuna_hermes.broker._events import Kill, LedgerAway, WritesFailed
from optuna_hermes.broker._holder import Holder
from optuna_hermes.broker._ledgers import Ledgers
from optuna_hermes.broker._memory import size
from optuna_hermes.broker._recovery import RECOVERY_SECONDS
from optuna_hermes.broker._server import Server
from optuna_hermes.broker._xid import Xid
from optuna_hermes.errors import BrokerError, LedgerError, ProtocolError
from optuna_hermes.ledger import EventRecord
from optuna_hermes.model import Device
from optuna_hermes.testing import FakeBroker, FakeDevices

OTHER = "the other end is of another version, or no part of optuna-hermes: end it."
SPEC = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")


def begin(broker: FakeBroker, worker: int, number: int = 0, *, stores: bool = True) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.Training(epoch=epoch, stores=stores))
    return epoch


def refused(broker: FakeBroker, connection: int) -> str:
    return str(broker.last(connection, "Refused").reason)


def reasons_of_kills(broker: FakeBroker) -> list[str]:
    return [each.reason for each in broker.log if isinstance(each, Kill)]


# -- frames ------------------------------------------------------------------------------------


def test_frames_that_are_none() -> None:
    """Each says what it should be, what it is, and whose process is to be ended."""
    with pytest.raises(ProtocolError) as too_long:
        wire.frame(wire.Refused(reason="x" * wire.MAX_FRAME_BYTES))
    assert str(too_long.value).startswith(f"A frame holds {wire.MAX_FRAME_BYTES} bytes at most but")
    assert str(too_long.value).endswith(": say less at once.")
    with pytest.raises(ProtocolError) as empty:
        wire.body_length(bytes(4))
    assert str(empty.value) == (
        f"A frame holds 1 to {wire.MAX_FRAME_BYTES} bytes but announces 0: {OTHER}"
    )
    for decode, whose in ((wire.decode_from_client, "client"), (wire.decode_from_broker, "broker")):
        with pytest.raises(ProtocolError) as rubbish:
            decode(b"\xc1")
        assert str(rubbish.value).startswith(f"Not a {whose}'s message (")
        assert str(rubbish.value).endswith(f"): {OTHER}")


# -- refusals ----------------------------------------------------------------------------------


def test_clients_that_say_what_is_not_theirs() -> None:
    """They read who may say it, or what to do first."""
    broker = FakeBroker(devices=1)
    broker.driver()
    viewer, driver = broker.connect("viewer"), broker.connect("driver")
    broker.say(viewer, wire.Ready(study="s"))
    assert refused(broker, viewer) == "Ready is said by a worker, not by a viewer: connect as one."
    broker.say(driver, wire.Drain(study="s"))
    assert refused(broker, driver) == "A driver drains its own study only: open that one first."


def test_a_trial_that_is_trained_already() -> None:
    """The second process reads who has it."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0), broker.connect("run")
    broker.register(second, 0)
    assert refused(broker, second) == (
        f"Trial 0 is trained by process {first} already: end that one first."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 1}, "Its lease (epoch 1) is of trial 0."),
        ({"device": "cpu:1"}, "Its lease (epoch 1) is not for device cpu:1."),
        ({"epoch": 9}, "Its lease (epoch 9) is over."),
    ],
)
def test_what_does_not_agree_with_the_ledger(change: dict[str, Any], words: str) -> None:
    """Who comes back with another's lease reads what is wrong with it, and what to ask for."""
    broker = FakeBroker(devices=2)
    broker.driver(policy="round-robin")
    pid = broker.worker()
    said = {"epoch": begin(broker, pid), "number": 0, "trial_id": 0, "device": "cpu:0"} | change
    after = broker.successor()
    worker = after.resume(pid, wire.Resume(study=SPEC, training=True, **said))
    assert refused(after, worker) == f"{words} Ask for another lease, or end."
    assert reasons_of_kills(after) == [words]


def test_a_worker_that_does_not_come_back_is_killed_for_that() -> None:
    """The log says why."""
    broker = FakeBroker(devices=1)
    broker.driver()
    begin(broker, broker.worker())
    after = broker.successor()
    after.driver()
    after.advance(RECOVERY_SECONDS + 1)
    assert reasons_of_kills(after) == ["it did not come back to the new broker"]


def test_a_worker_on_a_gpu_that_is_lost_is_killed_for_that() -> None:
    """The log names the device."""
    broker = FakeBroker(devices=[Device(id="GPU-0", kind="gpu", free=True)])
    broker.driver()
    begin(broker, broker.worker())
    broker.poll("GPU-0", healthy=False, lost=1, problem="it is gone")
    assert reasons_of_kills(broker) == ["GPU-0 is broken and nothing of its run could be saved"]


def test_a_run_that_outgrew_its_device() -> None:
    """Its story says what it needs, and what was free, as far as that is known."""
    broker = FakeBroker(devices=1)
    broker.driver()
    worker = broker.worker()
    epoch = begin(broker, worker)
    broker.say(worker, wire.Released(epoch=epoch, reason="no memory", outgrown=True))
    (event,) = [e for e in broker.log if isinstance(e, EventRecord) and "outgrew" in e.kind]
    assert event.detail["reason"] == (
        "Trial 0 outgrew its memory on cpu:0: it needs an unknown number of bytes there or more, "
        "and an unknown number of bytes were free."
    )
    assert size(2_500_000_000) == "2.50 GB"


def test_a_policy_that_fails_says_how_to_go_on() -> None:
    """It is the user's code, or can be changed for another one."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.state.book.studies["s"].policy = None  # type: ignore[assignment]
    broker.worker()
    problem = broker.state.status(0.0)["studies"][0]["problem"]
    assert problem.startswith("Policy 'fifo' raised AttributeError(")
    assert problem.endswith(
        ": mend it, or choose another with --policy, and run the same command again."
    )


# -- ledgers -----------------------------------------------------------------------------------


def test_one_database_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its study is refused, with when there will be room."""
    monkeypatch.setattr(_ledgers, "MOST_LEDGERS", 0)
    ledgers = Ledgers(lambda news: None, lambda call: None)
    with pytest.raises(LedgerError) as error:
        ledgers.read("s", "memory:", lambda ledger: None)
    assert str(error.value) == (
        "A broker serves 0 databases at most: start it again when its studies have ended."
    )


# -- clients -----------------------------------------------------------------------------------


class Answers:
    """A socket at whose other end a broker says what a test says, then hangs up."""

    def __init__(self, *messages: wire.FromBroker) -> None:
        self.ours, theirs = socket.socketpair()
        theirs.sendall(b"".join(wire.frame(message) for message in messages))
        theirs.shutdown(socket.SHUT_WR)
        self._theirs = theirs

    def __enter__(self) -> socket.socket:
        return self.ours

    def __exit__(self, *error: object) -> None:
        self.ours.close()
        self._theirs.close()


WELCOME = wire.Welcome(
    version=wire.VERSION, pid=7, host="h", instance="i", devices="cpu:1", device_ids=("cpu:0",)
)


def test_a_broker_that_speaks_out_of_turn() -> None:
    """It is of another version: where its process id is found is said."""
    end_it = "it is of another version, so end the process that broker.json names."
    with Answers(wire.Dismiss()) as sock, pytest.raises(ProtocolError) as error:
        Connection(sock, "viewer")
    assert str(error.value) == f"A broker says welcome first but said Dismiss(): {end_it}"
    with Answers(WELCOME, wire.Dismiss()) as sock:
        connection = Connection(sock, "viewer")
        with pytest.raises(ProtocolError) as error:
            connection.ask_status()
    assert str(error.value) == f"A status was asked for but Dismiss() came: {end_it}"


def test_a_broker_that_is_gone() -> None:
    """Whether it is noticed in reading or in writing, its log tells why."""
    gone = r"^The broker is gone: look into broker\.log for the reason\.$"
    with Answers(WELCOME) as sock:
        connection = Connection(sock, "viewer")
        with pytest.raises(BrokerError, match=gone):
            connection.receive()
    with pytest.raises(BrokerError, match=gone):
        connection.send(wire.GetStatus())
    with pytest.raises(BrokerError, match=gone):
        connection.receive()


def test_no_broker(runtime_dir: Path) -> None:
    """Who only looks is told how one is started."""
    with pytest.raises(
        BrokerError, match=r"^No broker runs on this host: start one with `optuna-hermes broker`\.$"
    ):
        connect("viewer")


def test_an_idle_broker_that_does_not_make_way(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while it is left to its user, who reads how to end it."""
    monkeypatch.setattr(_client, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(election, "incumbent", lambda directory: {"pid": 7})
    with Answers(WELCOME) as sock:
        connection = Connection(sock, "driver")
        monkeypatch.setattr(_client, "connect", lambda role: connection)
        with pytest.raises(BrokerError) as error:
            connect_or_start("driver", "cpu:2")
    assert str(error.value) == (
        "The idle broker (process 7) does not end: end it with `kill -9 7`."
    )


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
    """Where its last words are is said."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(stand_in))
    monkeypatch.setattr(election, "START_SECONDS", 0.3)
    with pytest.raises(BrokerError, match=words.format(runtime_dir)):
        election.start(runtime_dir, "cpu:1")


def test_gpus_that_lie_idle_are_spoken_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a driver is installed and does not work, ``auto`` says what it means and why."""

    def broken() -> Any:
        raise _devices.nvml.NoDriverError("load the driver with `modprobe nvidia`", installed=True)

    monkeypatch.setattr(_devices.nvml, "driver", broken)
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
        self.server._wind_up = lambda now: None  # type: ignore[method-assign]


@pytest.fixture
def server(runtime_dir: Path) -> Server:
    return Loop(runtime_dir).server


def test_what_a_broker_logs_of_its_ledgers(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A database that is away, one that refuses, and one that is back."""
    caplog.set_level(logging.INFO)
    server._heard(LedgerAway(studies=("s",), reason="No route to host."))
    server._heard(WritesFailed(epochs=(), reason="no such table", study="s"))
    server._heard(_ledgers.LedgerBack(studies=("s",)))
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
    """Whom it kills, and why."""
    killed: list[int] = []
    monkeypatch.setattr(_server, "kill", killed.append)
    server._carry_out([Kill(connection=1, pid=77)])
    assert caplog.messages == ["SIGKILL to process 77: it did not answer in time"]
    assert killed == [77]


def test_a_runtime_directory_that_is_full(
    server: Server, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That the next broker will not know the holders is said, and where room is needed."""
    (runtime_dir / "holders.new").mkdir()
    holder = Holder(pid=7, started=1, role="worker", study="s", number=0, epoch=1, device="cpu:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_server, "holders", lambda book: (holder,))
        server._remember()
    (message,) = caplog.messages
    assert message.startswith(
        f"the next broker will not know who has a device, so make room in {runtime_dir}: [Errno 21]"
    )


def test_an_xid_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the device that it came from, in words."""
    source = FakeDevices([Device(id="GPU-0", kind="gpu", free=True)])
    read = readings.Readings(source)
    read._heard.put(Xid(device="GPU-0", code=79))
    assert len(list(read._reports())) == 1
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
        "again; runs that live say theirs again"
    ]
