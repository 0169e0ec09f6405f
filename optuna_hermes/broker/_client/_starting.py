"""Start of a broker by the client that needs one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import filelock

from optuna_hermes._parent import python_command
from optuna_hermes.broker import _election as election
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client._connection import (
    CONNECT_SECONDS,
    POLL_SECONDS,
    Connection,
    OnSilence,
    connect,
    connect_if_any,
)
from optuna_hermes.broker._devices._visible import VISIBLE_VARIABLE, hidden, is_gpu
from optuna_hermes.broker._privacy import open_private
from optuna_hermes.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerSilentError,
    DeviceSpecError,
    no_process,
)

if TYPE_CHECKING:
    from optuna_hermes.broker._power_commands import PowerCommands

STORAGE_VARIABLE = "OPTUNA_STORAGE"
"""May hold a password."""

START_SECONDS = 60.0
"""Time in which a broker has to open its socket: a busy machine imports slowly."""

TURN_SECONDS = START_SECONDS + 5.0
"""Time for which a client waits for another one that starts a broker."""

_QUIT_TRIES = 10
"""Times that a broker may say that it is in use: others are connected for a moment, to look."""

_MAX_WORDS_BYTES = 1_000_000


def connect_or_start(
    role: str,
    devices: str = "auto",
    power: PowerCommands | None = None,
    on_silence: OnSilence | None = None,
    *,
    as_before: wire.Welcome | None = None,
) -> Connection:
    """Connect to the broker, after starting one if there is none.

    Args:
        role: what this client is.
        devices: the devices it must own; ``auto`` takes a running broker as it is, unless this
            process may see none of its GPUs.
        power: the commands with which it must power devices down and up; None takes a running
            broker as it is.
        on_silence: as that of ``Connection``.
        as_before: what the broker has said that this client had. If it is gone, one is started with
            its devices and commands, as far as no others were asked for.

    Raises:
        DeviceSpecError: there are no such devices.
        BrokerConflictError: a broker with other devices or commands is at work, or the runtime
            directory cannot be written.
        BrokerError: none could be started.
        HermesError: the system starts no process.
    """
    if devices != "auto":
        # Slow to import, and most only ask.
        from optuna_hermes.broker._devices._source import absolute, parse_devices

        devices = absolute(devices)
        parse_devices(devices)
    texts: tuple[str, ...] = () if power is None else power.texts
    start_with = devices, texts
    if as_before is not None:
        start_with = as_before.devices if devices == "auto" else devices, texts or as_before.power
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = connect(role, on_silence)
        except (BrokerConflictError, BrokerSilentError):
            raise
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            _start_one(*start_with)
            time.sleep(POLL_SECONDS)  # its socket may be the dying one of an older broker
            continue
        difference = _difference(connection.welcome, devices, texts)
        if difference is None:
            return connection
        # Others may find the same at this moment: none of them is to be taken for one that uses it.
        connection.close()
        _make_way(connection.welcome.pid, difference, on_silence)


def _difference(has: wire.Welcome, devices: str, texts: tuple[str, ...]) -> str | None:
    """The difference of a broker from the wanted one, and what to do about it; None without one."""
    if devices not in ("auto", has.devices):
        return (
            f"devices {has.devices!r} but {devices!r} was asked for: name the devices 'auto' to "
            "take it as it is"
        )
    if devices == "auto" and hidden(has.device_ids):
        return "GPUs that CUDA_VISIBLE_DEVICES does not show here: name others"
    if texts not in ((), has.power):
        return "other power commands: leave these out"
    return None


def end_idle(on_silence: OnSilence | None = None) -> None:
    """End the broker if no process needs it and a client has started it with other devices.

    Else a call that names no devices would have those of an earlier one, named by its option or by
    its ``CUDA_VISIBLE_DEVICES``. ``on_silence`` is as for ``Connection``.
    """
    with contextlib.suppress(BrokerError):  # there is none, or it is in use
        connection = connect("viewer", on_silence)
        connection.close()
        if with_other_devices(connection.welcome):
            _make_way(connection.welcome.pid, "other devices", on_silence)


def with_other_devices(welcome: wire.Welcome) -> bool:
    """True if a client has started the broker with other devices than ``auto`` is here."""
    if not welcome.background or welcome.devices != "auto":
        return welcome.background
    has_gpus = any(map(is_gpu, welcome.device_ids))
    return has_gpus and welcome.visible != os.environ.get(VISIBLE_VARIABLE)


def _start_one(devices: str, power: Sequence[str]) -> None:
    """Start a broker, unless another client has done so in the meantime."""
    directory = election.runtime_dir()
    try:
        with election.lock(directory / "start.lock", timeout=TURN_SECONDS):
            if not (election.socket_path(directory).exists() and election.holder_card(directory)):
                start(directory, devices, power)
    except filelock.Timeout as error:
        raise BrokerError(
            f"Another process has been starting a broker for {TURN_SECONDS:.0f} s: see "
            f"{election.log_path(directory)} and {words_path(directory)}."
        ) from error
    except OSError as error:  # its disk is full, or read-only
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_process(error) from error
        raise BrokerConflictError(
            f"The directory {directory} cannot be used ({error.strerror}): {election.WAY_OUT}."
        ) from error


def _make_way(pid: int, difference: str, on_silence: OnSilence | None) -> None:
    """End a broker that differs from the wanted one, if it is not in use; wait until it is gone."""
    tries = 0
    while _is_in_use(pid, on_silence):
        tries += 1
        if tries == _QUIT_TRIES:
            raise BrokerConflictError(
                f"A broker (process {pid}) is at work with {difference}, wait until it is idle, or "
                f"give this one another {election.RUNTIME_DIR_VARIABLE}."
            )
        time.sleep(POLL_SECONDS)
    directory = election.runtime_dir()
    deadline = time.monotonic() + CONNECT_SECONDS
    while (election.holder_card(directory) or {}).get("pid") == pid:
        if time.monotonic() > deadline:
            raise BrokerError(
                f"The idle broker (process {pid}) does not end: end it with `kill -9 {pid}`."
            )
        time.sleep(POLL_SECONDS)


def _is_in_use(pid: int, on_silence: OnSilence | None) -> bool:
    """Ask a broker to end, as a viewer, which it does not count; True if it refuses."""
    connection = connect_if_any("viewer", on_silence)
    if connection is None:
        return False
    with contextlib.closing(connection), contextlib.suppress(BrokerError):
        if connection.welcome.pid == pid:
            connection.send(wire.Quit())
            return isinstance(connection.receive(), wire.Refused)  # it hangs up when it agrees
    return False


def start(directory: Path, devices: str, power: Sequence[str] = ()) -> None:
    """Start a broker in the background; wait until it listens, or sees another that holds the lock.

    ``power`` are the commands that power devices down and up, or nothing.

    Raises:
        DeviceSpecError: it does not know the devices.
        BrokerConflictError: the devices are another broker's, or a file is not this user's alone.
        BrokerError: it ended for another reason; the message is its own.
        HermesError: the system starts no process.
        OSError: the directory cannot be written.
    """
    options = ("--background", "--devices", devices)
    command = python_command("optuna_hermes.broker.__main__", *options)
    for option, text in zip(("--power-down-command", "--power-up-command"), power, strict=False):
        command += [option, text]
    with _open_words(directory) as words:
        begin = words.tell()
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd="/",
                env=_environment(directory),
                timeout=START_SECONDS,
                check=False,
            ).returncode
        except OSError as error:
            raise no_process(error) from error
        except subprocess.TimeoutExpired as error:
            raise BrokerError(
                f"The broker did not listen within {START_SECONDS:.0f} s: see "
                f"{election.log_path(directory)} and {words_path(directory)}."
            ) from error
    if status not in (0, election.EXIT_LOCKED):
        kind = {
            election.EXIT_BAD_INPUT: DeviceSpecError,
            election.EXIT_CONFLICT: BrokerConflictError,
        }
        raise kind.get(status, BrokerError)(_last_words(directory, begin))


def _last_words(directory: Path, begin: int) -> str:
    words = words_path(directory).read_bytes()[begin:].decode(errors="replace").strip()
    if not words:
        words = "it said nothing"
        with words_path(directory).open("a") as file:  # refused if there was no room for any
            file.write(f"{words}\n")
    last = words.splitlines()[-1]
    if last.startswith("error: "):
        return last.removeprefix("error: ")
    return f"The broker has ended ({last}): look into {election.log_path(directory)}."


def _environment(directory: Path) -> dict[str, str]:
    """Environment of a broker: without the database of a study, which it outlives."""
    given = {**os.environ, election.RUNTIME_DIR_VARIABLE: str(directory)}
    given.pop(STORAGE_VARIABLE, None)
    return given


def words_path(directory: Path) -> Path:
    """Path of its other output: why it could not start, or how it crashed."""
    return directory / "broker.err"


def _open_words(directory: Path) -> BinaryIO:
    """Open the other output of brokers, to append to it; it is emptied when it is too long.

    Raises:
        BrokerConflictError: it, or the log, is not this user's alone.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    # The broker opens its log by name.
    os.close(open_private(election.log_path(directory), flags, election.WAY_OUT))
    words = os.fdopen(open_private(words_path(directory), flags, election.WAY_OUT), "ab")
    if words.tell() > _MAX_WORDS_BYTES:
        words.truncate(0)
        words.seek(0)
    return words
