"""A real broker process: its lock, its socket, and what it does when clients misbehave."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from optuna_hermes.broker import (
    Connection,
    OpenStudy,
    StudySpec,
    WatchedStudy,
    connect,
    connect_if_any,
    connect_or_start,
    end_idle,
)
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import _starting
from optuna_hermes.broker._devices._claims import claim_devices
from optuna_hermes.errors import BrokerConflictError, BrokerError, DeviceSpecError
from optuna_hermes.ledger import open_ledger


@pytest.fixture
def broker(runtime_dir: Path) -> Connection:  # type: ignore[misc]
    """A connection to a broker of two CPU slots that was started for it."""
    connection = connect_or_start("driver", "cpu:2")
    yield connection
    connection.close()


def spec(tmp_path: Path, key: str = "s", **fields: Any) -> StudySpec:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    return StudySpec(key=key, name=key, ledger_url=url, **fields)


def raw(runtime_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(runtime_dir / "broker.sock"))
    sock.settimeout(10)
    return sock


def test_the_runtime_directory_is_for_its_user_alone(broker: Connection, runtime_dir: Path) -> None:
    """The folder has mode 0700 and the socket 0600."""
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((runtime_dir / "broker.sock").stat().st_mode) == 0o600


def test_the_broker_tells_its_devices(broker: Connection) -> None:
    """Its welcome names the devices it owns."""
    assert broker.welcome.device_ids == ("cpu:0", "cpu:1")


def test_a_running_broker_is_used_again(broker: Connection) -> None:
    """A second client with ``auto`` or the same devices meets the same process."""
    for devices in ("auto", "cpu:2"):
        other = connect_or_start("viewer", devices)
        assert other.welcome.pid == broker.welcome.pid
        other.close()


def test_other_devices_are_refused_while_it_is_used(broker: Connection) -> None:
    """Two brokers for one host cannot be: the message names the process and what to do."""
    with pytest.raises(BrokerConflictError) as error:
        connect_or_start("viewer", "cpu:3")
    assert str(error.value) == (
        f"A broker (process {broker.welcome.pid}) is at work with devices 'cpu:2' but 'cpu:3' was "
        "asked for: name the devices 'auto' to take it as it is, wait until it is idle, or give "
        "this one another OPTUNA_HERMES_RUNTIME_DIR."
    )


def test_threads_that_begin_at_once_are_not_in_each_other_s_way(runtime_dir: Path) -> None:
    """None is taken for one that uses the broker, which is idle and has other devices."""
    connect_or_start("viewer", "cpu:2").close()
    with ThreadPoolExecutor(12) as pool:
        found = [pool.submit(connect_or_start, "plain", "cpu:3") for _ in range(12)]
    connections = [each.result() for each in found]
    assert {len(each.welcome.device_ids) for each in connections} == {3}
    for each in connections:
        each.close()


def test_the_next_broker_has_the_devices_of_the_one_before(runtime_dir: Path) -> None:
    """A call that took a running broker as it was goes on as on that one's devices."""
    connect_or_start("viewer", "cpu:3").close()
    first = connect_or_start("driver")
    os.kill(first.welcome.pid, signal.SIGKILL)
    with pytest.raises(BrokerError):
        first.receive()
    first.close()
    second = connect_or_start("driver", as_before=first.welcome)
    assert second.welcome.device_ids == ("cpu:0", "cpu:1", "cpu:2")
    second.close()


def test_an_idle_broker_makes_way_for_other_devices(runtime_dir: Path) -> None:
    """A request for other devices replaces the broker when nobody is connected."""
    first = connect_or_start("viewer", "cpu:2")
    first.close()
    second = connect_or_start("viewer", "cpu:3")
    assert len(second.welcome.device_ids) == 3
    second.close()


def test_an_idle_broker_of_named_devices_ends_for_a_call_that_names_none(
    runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """Unless it is in use, or a person has started it."""

    def is_ended() -> bool:
        end_idle()
        return election.holder_card(runtime_dir) is None

    assert is_ended()
    first = connect_or_start("driver", "cpu:1")
    assert not is_ended()
    assert first.ask_status().studies == ()
    first.close()
    wait_for(is_ended)
    command = [sys.executable, "-m", "optuna_hermes.broker", "--devices", "cpu:1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as started:
        wait_for(lambda: connect_if_any("viewer")).close()
        assert not is_ended()
        started.terminate()


def test_unknown_devices_start_no_broker(runtime_dir: Path) -> None:
    """A bad specification is said in one line, and nothing is left running."""
    with pytest.raises(DeviceSpecError, match="cpu:0"):
        connect_or_start("viewer", "cpu:0")
    with pytest.raises(BrokerError, match="optuna-hermes broker"):
        connect("viewer")


def test_the_second_broker_is_turned_away(broker: Connection) -> None:
    """The lock is held by one process; the other ends and says who holds it."""
    second = subprocess.run(
        [sys.executable, "-m", "optuna_hermes.broker", "--devices", "cpu:2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == election.EXIT_LOCKED
    assert f"process {broker.welcome.pid}" in second.stderr


def test_it_ends_when_nobody_needs_it(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]
) -> None:
    """Without clients it ends by itself, and leaves neither socket nor card behind."""
    monkeypatch.setenv("OPTUNA_HERMES_BROKER_IDLE_SECONDS", "0.2")
    connection = connect_or_start("viewer", "cpu:1")
    process = psutil.Process(connection.welcome.pid)
    connection.close()
    wait_for(lambda: not process.is_running())
    assert not (runtime_dir / "broker.sock").exists()
    assert not (runtime_dir / "broker.json").exists()


def test_sigterm_ends_it_in_order(
    broker: Connection, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """After SIGTERM it serves whom it has, and takes the socket away when they have left."""
    os.kill(broker.welcome.pid, signal.SIGTERM)
    assert broker.ask_status().studies == ()
    broker.close()
    wait_for(lambda: not (runtime_dir / "broker.sock").exists())


def test_a_killed_broker_is_replaced(runtime_dir: Path) -> None:
    """After SIGKILL the left-over socket is nobody's, and the next client starts another."""
    first = connect_or_start("viewer", "cpu:1")
    os.kill(first.welcome.pid, signal.SIGKILL)
    with pytest.raises(BrokerError):
        first.receive()
    first.close()
    second = connect_or_start("viewer", "cpu:1")
    assert second.welcome.pid != first.welcome.pid
    second.close()


def test_a_runtime_directory_that_is_removed_comes_again(
    broker: Connection, runtime_dir: Path, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """As by a logout: before that, and after it, no other broker starts in its place."""
    broker.send(OpenStudy(study=spec(tmp_path), limit=1, max_alive=1))
    worker = connect("worker")
    worker.send(wire.Ready(study="s"))
    assert isinstance(worker.receive(), wire.Grant)
    kept = ("broker.json", "holders.json", "instance")
    before = [(runtime_dir / name).read_text() for name in kept]
    os.kill(broker.welcome.pid, signal.SIGSTOP)
    shutil.rmtree(runtime_dir)
    command = [sys.executable, "-m", "optuna_hermes.broker", "--devices", "cpu:2"]
    assert subprocess.run(command, check=False).returncode == election.EXIT_LOCKED
    os.kill(broker.welcome.pid, signal.SIGCONT)
    other = connect_or_start("viewer", "cpu:2")
    assert other.welcome.pid == broker.welcome.pid
    assert len(other.ask_status().studies) == 1
    wait_for((runtime_dir / "holders.json").exists)
    assert [(runtime_dir / name).read_text() for name in kept] == before
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    (runtime_dir / "broker.sock").unlink()
    wait_for(lambda: connect_if_any("viewer")).close()
    assert subprocess.run(command, check=False).returncode == election.EXIT_LOCKED
    other.close()
    worker.close()


def test_an_idle_broker_ends_with_its_runtime_directory(
    runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """It makes none again that nobody needs."""
    connection = connect_or_start("viewer", "cpu:1")
    process = psutil.Process(connection.welcome.pid)
    shutil.rmtree(runtime_dir)
    connection.close()
    wait_for(lambda: not process.is_running())
    assert not runtime_dir.exists()
    runtime_dir.mkdir()


def test_another_user_cannot_take_the_name_of_a_runtime_directory(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in the kernel are everybody's: one that a stranger has counts for nothing."""
    name = election._take_name(runtime_dir)
    assert name is not None
    with name:
        with pytest.raises(election.RuntimeLockedError):
            election.RuntimeLock(runtime_dir, "cpu:1")
        monkeypatch.setattr(election, "peer", lambda sock: (1, os.getuid() + 1))
        election.RuntimeLock(runtime_dir, "cpu:1").release()


def test_it_ends_though_a_viewer_does_not_read(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]
) -> None:
    """As one that is stopped: else it would keep the lock, and listen no more."""
    monkeypatch.setenv("OPTUNA_HERMES_BROKER_IDLE_SECONDS", "0.2")
    viewer = connect_or_start("viewer", "cpu:1")
    process = psutil.Process(viewer.welcome.pid)
    viewer._socket.settimeout(0.5)
    with contextlib.suppress(BrokerError):  # both buffers are full, or it has ended
        while True:
            viewer.send(wire.GetStatus(trials=True, curves=True))
    wait_for(lambda: not process.is_running())
    viewer.close()


BAD_FRAMES = {
    "empty": b"\x00\x00\x00\x00",
    "huge": b"\xff\xff\xff\xff" + b"x" * 100,
    "no msgpack": struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    "unknown type": struct.pack(">I", 9) + b"\x81\xa4type\xa2Hi",
    "nested": struct.pack(">I", 1000) + b"\x91" * 1000,
}


def test_a_bad_frame_closes_its_own_connection_only(broker: Connection, runtime_dir: Path) -> None:
    """Whoever sends rubbish is hung up on; others do not notice."""
    for name, frame in BAD_FRAMES.items():
        with raw(runtime_dir) as sock:
            sock.sendall(frame)
            assert sock.recv(100) == b"", name
        assert broker.ask_status().devices, name


def test_an_older_client_is_refused_with_a_reason(broker: Connection, runtime_dir: Path) -> None:
    """Another version of the protocol is answered, not guessed at."""
    with raw(runtime_dir) as sock:
        sock.sendall(wire.frame(wire.Hello(version=wire.VERSION + 1, role="viewer")))
        length = wire.body_length(sock.recv(wire.HEADER_BYTES))
        answer = wire.decode_from_broker(sock.recv(length))
    assert isinstance(answer, wire.Refused)
    assert answer.reason == (
        "This broker is of another version: when its studies have ended, "
        f"`kill {broker.welcome.pid}`."
    )


def test_a_driver_is_told_without_asking(broker: Connection, tmp_path: Path) -> None:
    """A worker that comes, and the broker's end, wake a driver that watches its study."""
    study = spec(tmp_path)
    broker.send(OpenStudy(study=study, limit=1, max_alive=1))
    watched = WatchedStudy(broker, "s")
    assert watched.status()[0].workers.alive == 0
    worker = connect("worker")
    worker.send(wire.Ready(study="s"))
    while watched.status()[0].workers.alive == 0:
        assert select.select([watched], [], [], 10)[0]
        watched.receive_change()
    worker.close()
    os.kill(broker.welcome.pid, signal.SIGKILL)
    with pytest.raises(BrokerError, match="is gone"):
        hear_all(watched)


def test_a_file_that_was_deleted_and_made_again_is_another_ledger(
    broker: Connection, tmp_path: Path
) -> None:
    """A study is granted devices by the new file, while the broker has the old one open."""
    broker.send(OpenStudy(study=spec(tmp_path, "old"), limit=1, max_alive=1))
    broker.ask_status()
    file = tmp_path / "ledger.db"
    file.unlink()
    with closing(sqlite3.connect(file)) as optuna:
        optuna.execute("CREATE TABLE studies (study_id INTEGER)")
    study = spec(tmp_path, "new")
    with closing(connect("driver")) as driver, closing(connect("worker")) as worker:
        driver.send(OpenStudy(study=study, limit=1, max_alive=1))
        driver.ask_status()
        worker.send(wire.Ready(study="new"))
        assert isinstance(worker.receive(), wire.Grant)
    with closing(open_ledger(study.ledger_url)) as ledger:
        assert [lease.study for lease in ledger.load_leases()] == ["new"]


def hear_all(watched: WatchedStudy) -> None:
    """Hear changes until none comes for ten seconds."""
    while select.select([watched], [], [], 10)[0]:
        watched.receive_change()


def test_an_unknown_policy_is_refused(broker: Connection, tmp_path: Path) -> None:
    """A driver learns at once that the broker has no such policy."""
    study = spec(tmp_path, policy="astrology")
    broker.send(OpenStudy(study=study, limit=1, max_alive=1))
    with pytest.raises(BrokerConflictError, match="astrology"):
        broker.ask_status()


def test_the_end_of_a_client_is_seen_though_its_child_holds_the_socket(
    broker: Connection, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """A data loader inherits its parent's socket; the parent's death is seen all the same."""
    broker.send(OpenStudy(study=spec(tmp_path), limit=1, max_alive=1))
    broker.ask_status()
    url = spec(tmp_path).ledger_url
    script = (
        "import os, signal\n"
        "from optuna_hermes.broker import TrialSession, connect\n"
        "from optuna_hermes.broker._protocol import Ready\n"
        "from optuna_hermes.broker import StudySpec\n"
        f"study = StudySpec(key='s', name='s', ledger_url={url!r})\n"
        "ask, join = Ready(study='s'), lambda: connect('worker')\n"
        "TrialSession(join(), study, ask, reconnect=join).wait_for_grant()\n"
        "if os.fork() == 0: signal.pause()\n"
        "print('granted', flush=True); signal.pause()\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "granted\n"
    child = psutil.Process(worker.pid).children()[0]
    assert broker.ask_status().devices[0].holder.pid == worker.pid
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_for(lambda: broker.ask_status().devices[0].holder is None, 5)
    assert child.is_running()
    child.kill()


CLAIM = "from optuna_hermes.broker._devices._claims import claim_devices; claim_devices(['GPU-1'])"


def test_a_gpu_has_one_broker_whatever_the_runtime_directory(tmp_path: Path) -> None:
    """The lock of a GPU is the host's, not that of a folder for temporary files."""
    claims = claim_devices(["GPU-1"])
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    second = [sys.executable, "-c", CLAIM]
    refused = subprocess.run(second, env=env, capture_output=True, text=True, check=False)
    assert (
        f"Device GPU-1 belongs to another broker of this host (process {os.getpid()} of "
        f"{pwd.getpwuid(os.getuid()).pw_name}): end that one with `optuna-hermes broker --stop`, "
        "or leave the device out."
    ) in refused.stderr
    for claim in claims:
        claim.close()
    assert subprocess.run(second, env=env, check=False).returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_a_gpu_has_one_broker_whoever_its_user_is() -> None:
    """Another user of the host is told who has it."""
    claims = claim_devices(["GPU-1"])
    # All is imported before: the other user may not be allowed to read what is imported.
    nobody = f"import os; os.setuid({pwd.getpwnam('nobody').pw_uid}); "
    script = CLAIM.replace("; ", f"; {nobody}")
    refused = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    for claim in claims:
        claim.close()
    assert f"(process {os.getpid()} of root)" in refused.stderr


def test_a_gpu_is_free_again_when_its_broker_is_killed() -> None:
    """The kernel keeps the lock for as long as the process lives, and no longer."""
    script = CLAIM.replace("; ", "; claims = ") + "; print('has', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"has\n"
    with pytest.raises(BrokerConflictError, match=f"process {holder.pid}"):
        claim_devices(["GPU-1"])
    holder.kill()
    holder.communicate()
    for claim in claim_devices(["GPU-1"]):
        claim.close()


def test_a_crash_is_told_and_logged(runtime_dir: Path) -> None:
    """The error that ends a broker in the background is in its log, and its client tells it."""
    (runtime_dir / "broker.sock").mkdir()  # no broker can open its socket there
    with pytest.raises(BrokerError, match=r"Error: .*broker\.sock"):
        _starting.start(runtime_dir, "cpu:1")
    log = election.log_path(runtime_dir).read_text()
    assert "CRITICAL the broker crashed, please report it: the next one goes on" in log
    assert "Traceback" in log


def test_a_broker_that_cannot_serve_its_figures_serves_its_clients(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable holds for all brokers of a host, of which one can have the port: a warning."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = "{}:{}".format(*other.getsockname())
        monkeypatch.setenv("OPTUNA_HERMES_METRICS", place)
        connect_or_start("driver", "cpu:1").close()
    log = election.log_path(runtime_dir).read_text()
    assert "WARNING no figures are served: --metrics must be a free port of this host" in log


def test_words_of_earlier_brokers_do_not_pile_up(runtime_dir: Path) -> None:
    """Output that brokers print beside their logs is kept until it is too much."""
    words = _starting.words_path(runtime_dir)
    words.write_bytes(b"old\n" * 300_000)
    with pytest.raises(DeviceSpecError, match="cpu:N"):
        _starting.start(runtime_dir, "nonsense")
    assert words.stat().st_size < 1000


def test_a_broker_computes_with_one_thread(runtime_dir: Path) -> None:
    """The cores are for the trials, whatever number of threads they are told."""
    script = (
        "import os, signal, sys\n"
        "from optuna_hermes.broker.__main__ import run_broker\n"
        "def ready():\n"
        "    import scipy.linalg, threadpoolctl\n"
        "    print({each['num_threads'] for each in threadpoolctl.threadpool_info()})\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "run_broker('cpu:1', idle_seconds=None, ready=ready)\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=env, timeout=60)
    assert done.stdout == "{1}\n"


def _listens() -> bool:
    """The socket's file is there a moment before."""
    try:
        connect("viewer").close()
    except BrokerError:
        return False
    return True


@pytest.mark.usefixtures("runtime_dir")
def test_a_broker_may_have_more_clients_than_its_shell_allows(
    wait_for: Callable[..., Any],
) -> None:
    """It raises the limit of open files as far as it may: every client takes two."""
    command = f"ulimit -Sn 40; exec {sys.executable} -m optuna_hermes.broker --devices cpu:1"
    broker = subprocess.Popen(["bash", "-c", command], stderr=subprocess.DEVNULL)
    clients: list[Connection] = []
    try:
        wait_for(_listens)
        clients.extend(connect("viewer") for _ in range(40))
        assert psutil.Process(broker.pid).num_fds() > 80
    finally:
        for client in clients:
            client.close()
        broker.terminate()
        broker.wait(30)
