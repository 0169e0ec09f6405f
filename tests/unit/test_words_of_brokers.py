"""A broker's messages about problems, to people and to its clients."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optuna_hermes.broker import Connection
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import _starting
from optuna_hermes.broker._client._connection import connect
from optuna_hermes.broker._client._starting import connect_or_start
from optuna_hermes.broker._core._events import Kill, ProcessExpected, StudyRead
from optuna_hermes.broker._core._memory_manager import size
from optuna_hermes.broker._core._recovery import RECOVERY_SECONDS
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.broker._server import _ledgers
from optuna_hermes.broker._server._ledgers import Ledgers
from optuna_hermes.errors import BrokerError, LedgerError, ProtocolError
from optuna_hermes.ledger import EventRecord, HostRecord, LeaseRecord, TrialRecord
from optuna_hermes.model import Assignment, Decision, Device, Elastic, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.policies.decisions import check
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger

OTHER = "the other end is of another version, or no part of optuna-hermes: end it."
SPEC = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="round-robin")


def begin(broker: FakeBroker, worker: int, number: int = 0, *, can_store: bool = True) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
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
    assert refused(broker, driver) == "A driver says Drain of its own study only: open it first."


def test_a_trial_that_is_trained_already() -> None:
    """The second process reads who has it."""
    broker = FakeBroker(devices=1)
    first, second = broker.plain(0), broker.connect("plain")
    broker.register(second, 0)
    assert refused(broker, second) == (
        f"Trial 0 is trained by process {first} already: end that one first."
    )


def test_a_trial_that_is_trained_on_another_host() -> None:
    """A process that asks for it here reads where it is."""
    broker = FakeBroker(devices=1)
    asks = broker.connect("plain")
    far = TrialRecord(
        study="s", number=0, trial_id=0, state="running", slices=1, host="far", owner="f1"
    )
    event = StudyRead(
        connection=asks,
        message=wire.Register(study=SPEC, number=0, trial_id=0),
        shared=True,
        trials=(far,),
        hosts=(HostRecord(name="far", instance="f1"),),
    )
    broker.apply(event)
    assert refused(broker, asks) == "Trial 0 is trained on another host (far): end it there first."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 1}, "Its lease (epoch 1) is of trial 0."),
        ({"devices": ("cpu:1",)}, "Its lease (epoch 1) is not for device cpu:1."),
        ({"epoch": 9}, "Its lease (epoch 9) is over."),
    ],
)
def test_what_does_not_agree_with_the_ledger(change: dict[str, Any], words: str) -> None:
    """A process that comes back with another's lease reads what is wrong, and what to ask for."""
    broker = FakeBroker(devices=2)
    broker.driver(policy="round-robin")
    pid = broker.worker()
    said = {"number": 0, "trial_id": 0, "devices": ("cpu:0",), "training": True} | change
    said = {"epoch": begin(broker, pid)} | said
    after = broker.successor()
    worker = after.resume(pid, wire.Reattach(study=SPEC, **said))
    assert refused(after, worker) == f"{words} Ask for another lease, or end."
    assert reasons_of_kills(after) == [words]


def test_what_another_process_has() -> None:
    """Two that come back with one trial, or with one device: the second reads what is taken."""
    ledger = MemoryLedger()
    broker = FakeBroker(devices=1, ledger=ledger)
    for number, epoch in enumerate((1, 2)):
        record = LeaseRecord(
            study="s", epoch=epoch, number=number, devices=("h/cpu:0",), host="h", started=0.0
        )
        ledger.commit_lease(record)
        trial = TrialRecord(study="s", number=number, trial_id=number, state="running")
        ledger.save_trial(trial)
        holder = ServedProcess(
            pid=70 + number,
            started=1,
            role="worker",
            study="s",
            number=number,
            epoch=epoch,
            devices=() if number else ("cpu:0",),
        )
        broker.apply(ProcessExpected(connection=-1 - number, holder=holder))

    def resume(pid: int, number: int, epoch: int) -> int:
        said = wire.Reattach(
            study=SPEC,
            epoch=epoch,
            number=number,
            trial_id=number,
            devices=("cpu:0",),
            training=True,
        )
        return broker.resume(pid, said)

    resume(70, 0, 1)
    ask = "Ask for another lease, or end."
    assert refused(broker, resume(99, 0, 1)) == f"Another process has trial 0. {ask}"
    assert refused(broker, resume(71, 1, 2)) == f"Another process has device cpu:0. {ask}"


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
    assert reasons_of_kills(broker) == ["GPU-0 is broken and nothing of its trial could be saved"]


def test_a_trial_that_outgrew_its_device() -> None:
    """Its event log says what it needs, and what was free, as far as that is known."""
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
    assert size(5 * 1024**3 // 2) == "2.50 GiB"


def test_a_policy_that_fails_says_how_to_go_on() -> None:
    """It is the user's code, or can be changed for another one."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.handler.state.studies["s"].policy = None  # type: ignore[assignment]
    broker.worker()
    problem = broker.handler.status(0.0).studies[0].problem
    assert problem.startswith("Policy 'fifo' raised AttributeError(")
    assert problem.endswith(
        ": mend it, or choose another with --policy, and run the same command again."
    )


def test_a_policy_that_would_end_the_broker_ends_its_study() -> None:
    """`sys.exit` is an error of the policy like any other."""

    class Leaving(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            raise SystemExit(3)

    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.handler.state.studies["s"].policy = Leaving()
    broker.worker()
    problem = broker.handler.status(0.0).studies[0].problem
    assert problem.startswith(f"Policy 'fifo' raised SystemExit(3) at {__file__}:")
    assert ": mend it" in problem


def test_a_policy_that_gives_what_is_not_there() -> None:
    """The wrong part of its decision is named."""

    class Generous(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision(assignments=(Assignment(trial=9, devices=("cpu:7",)),))

    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.handler.state.studies["s"].policy = Generous()
    broker.worker()
    assert broker.handler.status(0.0).studies[0].problem == (
        "Policy 'fifo' raised ValueError('a policy assigns waiting trials and free devices, each "
        "once at most, but got trial 9, device cpu:7'): mend it, or choose another with --policy, "
        "and run the same command again."
    )


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_a_policy_that_gives_a_slice_without_an_end(seconds: float) -> None:
    """No view could show when it ends."""

    class Endless(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            devices = tuple(device.id for device in snapshot.devices)
            assignment = Assignment(trial=None, devices=devices, slice_seconds=seconds)
            return Decision(assignments=(assignment,))

    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.handler.state.studies["s"].policy = Endless()
    broker.worker()
    problem = broker.handler.status(0.0).studies[0].problem
    assert f"a policy's slices last a finite number of seconds but got {seconds}" in problem


def test_a_policy_that_remembers_what_no_ledger_keeps() -> None:
    """Its study ends, and the broker does not."""

    class Learned(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision(memory={"weights": np.zeros(3)})

    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo")
    broker.handler.state.studies["s"].policy = Learned()
    broker.worker()
    assert "not JSON serializable" in broker.handler.status(0.0).studies[0].problem


def test_a_batch_size_is_an_int() -> None:
    """No message to a process could hold another number."""
    elastic = Elastic(batch_size=16, batch_sizes=(8, 32))
    trial = TrialView(number=0, state="parked", elastic=elastic)
    snapshot = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=(trial,))
    for odd in (np.int64(16), 16.5, True):
        assignment = Assignment(trial=0, devices=("cpu:0",), batch_size=odd)
        with pytest.raises(ValueError, match="ints within"):
            check(Decision(assignments=(assignment,)), snapshot)


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


WELCOME = wire.Welcome(pid=7, instance="i", devices="cpu:1", device_ids=("cpu:0",))


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
    """The error says that its log tells why, in reading and in writing."""
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
    """A process that only looks is told how one is started."""
    with pytest.raises(
        BrokerError, match=r"^No broker runs on this host: start one with `optuna-hermes broker`\.$"
    ):
        connect("viewer")


def test_an_idle_broker_that_does_not_make_way(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while it is left to its user, who reads how to end it."""
    monkeypatch.setattr(_starting, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(election, "holder_card", lambda directory: {"pid": 7})
    with Answers(WELCOME) as sock:
        connection = Connection(sock, "driver")
        monkeypatch.setattr(_starting, "connect", lambda role, on_silence: connection)
        with pytest.raises(BrokerError) as error:
            connect_or_start("driver", "cpu:2")
    assert str(error.value) == (
        "The idle broker (process 7) does not end: end it with `kill -9 7`."
    )
