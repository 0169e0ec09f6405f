"""The runtime directory and its socket belong to one user alone, whatever others put there."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import connect, connect_or_start
from optuna_hermes.broker._holders import boot, started
from optuna_hermes.errors import BrokerConflictError

SET_IT = r"set OPTUNA_HERMES_RUNTIME_DIR to a folder of your own\."

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def folder(runtime_dir: Path) -> Path:
    """A runtime directory that was used before."""
    return election.runtime_dir()


def refused(words: str, call: Callable[[], object] = election.runtime_dir) -> None:
    with pytest.raises(BrokerConflictError, match=words):
        call()


def viewer() -> object:
    return connect("viewer")


# -- the folder


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    """The message says how to close it."""
    folder.chmod(0o750)
    refused(f"{folder} must be closed to others but has mode 0750: run `chmod go-rwx {folder}`")
    refused("closed to others", viewer)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    """A link could lead to a folder that someone else prepared."""
    folder.rmdir()
    folder.symlink_to(tmp_path)
    refused(f"must be a directory but is a symbolic link: remove it, or {SET_IT}")
    folder.unlink()
    folder.symlink_to(tmp_path / "nowhere")
    refused("is a symbolic link")
    folder.unlink()
    folder.mkdir()


def test_a_file_in_place_of_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is anything else that is no folder, also further up."""
    folder.rmdir()
    folder.touch()
    refused(f"{folder} must be a directory but is a file: remove it, or {SET_IT}")
    monkeypatch.setenv(election.RUNTIME_DIR_VARIABLE, str(folder / "below"))
    refused(f"{folder}/below cannot be used .{folder}: File exists.: {SET_IT}")
    folder.unlink()
    folder.mkdir()


@as_root
def test_a_folder_of_someone_else_is_refused(folder: Path) -> None:
    """Whoever was first in the folder for temporary files gains nothing by it."""
    os.chown(folder, 65534, 65534)
    refused(rf"must belong to you \(uid 0\) but belongs to uid 65534: {SET_IT}")
    os.chown(folder, 0, 0)


def test_a_folder_that_anyone_could_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder above that all may write to must be sticky, as the one for temporary files is."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv(election.RUNTIME_DIR_VARIABLE, str(shared / "deep" / "run"))
    shared.chmod(0o777)
    way_out = rf"run `chmod \+t {shared}`, or {SET_IT}"
    refused(f"could be replaced by anyone, for {shared} has mode 0777: {way_out}")
    shared.chmod(0o1777)
    assert election.runtime_dir() == shared / "deep" / "run"


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the system's, the way out ours."""
    monkeypatch.setenv(election.RUNTIME_DIR_VARIABLE, "/proc/hermes/run")
    refused(f"/proc/hermes/run cannot be used ./proc/hermes: No such file or directory.: {SET_IT}")


@as_root
@pytest.mark.parametrize(
    ("options", "reason"), [("size=4k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_folder_that_cannot_be_written_is_named(folder: Path, options: str, reason: str) -> None:
    """A broker that has no room for its own words has told nobody what was wrong."""
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        if options != "ro":
            (folder / "other").write_bytes(bytes(4096))
        refused(
            rf"^The directory {folder} cannot be used \({reason}\): {SET_IT}",
            lambda: connect_or_start("driver", "cpu:1"),
        )
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# -- what lies in it


@pytest.mark.parametrize("name", ["broker.lock", "start.lock", "broker.log", "broker.err"])
def test_links_to_files_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    """The target of a link in the folder is not written, and the client that starts says so."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / name).symlink_to(precious)
    refused(
        f"{folder / name} must be a file but is a symbolic link: remove it, or {SET_IT}",
        lambda: connect_or_start("viewer", "cpu:1"),
    )
    assert precious.read_text() == "mine"
    (folder / name).unlink()


def test_a_card_that_is_a_link_is_not_believed(folder: Path, tmp_path: Path) -> None:
    """Whoever reads it sees none, and the broker that takes the lock replaces it."""
    card = folder / "broker.json"
    forged = json.dumps(election._card("cpu:1"))
    (tmp_path / "card").write_text(forged)
    card.symlink_to(tmp_path / "card")
    assert election.holder_card(folder) is None
    runtime_lock = election.RuntimeLock(folder, "cpu:1")
    assert (tmp_path / "card").read_text() == forged
    assert (election.holder_card(folder) or {})["pid"] == os.getpid()
    runtime_lock.release()


@pytest.mark.parametrize(
    "wrong", [{"started": 1}, {"boot": "an earlier one"}, {"started": None, "boot": None}]
)
def test_a_card_of_a_process_that_is_another_one_now_is_not_believed(
    folder: Path, wrong: dict[str, object]
) -> None:
    """A broker that is killed leaves it and its socket, also to the next boot: another starts."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(election.socket_path(folder)))
    election.socket_path(folder).chmod(0o600)
    other = subprocess.Popen(["sleep", "600"])
    try:
        card = {"pid": other.pid, "started": started(other.pid), "boot": boot()}
        (folder / "broker.json").write_text(json.dumps(card))
        assert election.holder_card(folder) == card
        (folder / "broker.json").write_text(json.dumps(card | wrong))
        assert election.holder_card(folder) is None
        connect_or_start("viewer", "cpu:1").close()
    finally:
        other.kill()
        other.wait()


def test_a_link_to_a_socket_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A socket elsewhere that is linked to is nobody's broker."""
    (folder / "broker.sock").symlink_to(tmp_path / "elsewhere")
    refused(f"broker.sock must be a socket but is a symbolic link: remove it, or {SET_IT}", viewer)
    (folder / "broker.sock").unlink()


def test_a_socket_that_others_may_use_is_refused(folder: Path) -> None:
    """Its mode counts though the folder is closed: it is checked again at every connect."""
    connect_or_start("viewer", "cpu:1").close()
    (folder / "broker.sock").chmod(0o666)
    refused(f"mode 0666: run `chmod go-rwx {folder / 'broker.sock'}`", viewer)
    (folder / "broker.sock").chmod(0o600)
    connect("viewer").close()


def test_everything_in_it_is_closed_to_others(folder: Path, tmp_path: Path) -> None:
    """Locks, card, log and socket are readable by their user only."""
    with FileLock(tmp_path / "any.lock"):
        pass
    stays = {"start.lock"} if (tmp_path / "any.lock").exists() else set()  # as filelock has it
    connect_or_start("viewer", "cpu:1").close()
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}
    assert set(modes) >= stays | {
        "broker.lock",
        "broker.log",
        "broker.err",
        "broker.json",
        "broker.sock",
    }
    assert set(modes.values()) == {0o600}


# -- a second user


@pytest.fixture
def as_nobody() -> Iterator[Callable[[Callable[[], int]], int]]:
    """Runs a function in a process of another user; returns its process id."""
    started: list[int] = []

    def run(call: Callable[[], int]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                user = pwd.getpwnam("nobody")
                os.setgroups([])
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
                status = call()
            finally:
                os._exit(status)
        started.append(pid)
        return pid

    yield run
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@as_root
def test_the_broker_hangs_up_on_another_user(
    folder: Path, as_nobody: Callable[[Callable[[], int]], int]
) -> None:
    """Were its folder open for once, the kernel's word on who calls still keeps others out."""
    ours = connect_or_start("viewer", "cpu:1")
    path = folder / "broker.sock"
    _open_up(folder)
    path.chmod(0o666)

    def call() -> int:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        sock.settimeout(20)
        try:
            sock.sendall(wire.frame(wire.Hello(version=wire.VERSION, role="viewer")))
            return len(sock.recv(100))
        except (BrokenPipeError, ConnectionResetError):
            return 0

    _, status = os.waitpid(as_nobody(call), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    told = "of uid 65534 was turned away: a broker serves its own user, so start one there"
    assert told in election.log_path(folder).read_text()
    assert ours.ask_status().devices
    ours.close()


@as_root
def test_a_client_hangs_up_on_the_broker_of_another_user(
    folder: Path,
    as_nobody: Callable[[Callable[[], int]], int],
    wait_for: Callable[..., None],
) -> None:
    """A socket that someone else listens on is refused by its owner, or else by who answers."""
    path = folder / "broker.sock"
    _open_up(folder)

    def listen() -> int:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(path))
        os.chmod(path, 0o600)
        sock.listen()
        signal.pause()
        return 0

    as_nobody(listen)
    wait_for(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o600)
    folder.chmod(0o700)
    refused(rf"{path} must belong to you \(uid 0\) but belongs to uid 65534: {SET_IT}", viewer)
    os.chown(path, 0, 0)
    words = rf"The broker at {path} must run as you \(uid 0\) but runs as uid 65534: {SET_IT}"
    wait_for(lambda: _listens(path))
    refused(words, viewer)
    path.unlink()


def _listens(path: Path) -> bool:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
    except ConnectionRefusedError:
        return False
    finally:
        sock.close()
    return True


def _open_up(folder: Path) -> None:
    folder.chmod(0o777 | stat.S_ISVTX)
    for each in folder.parents:
        mode = each.stat().st_mode
        if not mode & stat.S_IXOTH:
            each.chmod(mode | stat.S_IXOTH)
