"""User's commands that power a device down and up, and the file that outlives their broker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from optuna_hermes.broker._privacy import read_private, write_private
from optuna_hermes.errors import BrokerConflictError, InvalidInputError
from optuna_hermes.policies import ENERGY, POLICIES

DEVICE = "{device}"
"""Placeholder of the device's id in a command."""

POWER_SECONDS = 600.0
"""A command that takes longer is killed, and has failed: a host may take minutes to boot."""

MAX_OUTPUT_BYTES = 4096
"""Bytes of a command's output that are logged, from its end."""

_WAY_OUT = "remove it"

log = logging.getLogger("optuna_hermes.broker")


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerCommands:
    """Commands, as words: no shell reads them.

    Args:
        down: powers a device down.
        up: powers it up; its device can be used when it has ended with status 0.
    """

    down: tuple[str, ...]
    up: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, str]:
        """Both commands as text, as ``power_commands`` reads them."""
        return shlex.join(self.down), shlex.join(self.up)


def commands_for(policy: str, down: str | None, up: str | None) -> PowerCommands | None:
    """Return the commands, None if neither is given.

    Raises:
        InvalidInputError: they make no sense, or this policy would never have them run.
    """
    commands = power_commands(down, up)
    if commands is not None and policy in POLICIES:
        raise InvalidInputError(
            f"--power-down-command needs a policy that powers devices down but got {policy!r}: "
            f"use --policy {ENERGY}{policy}."
        )
    return commands


def power_commands(down: str | None, up: str | None) -> PowerCommands | None:
    """Read ``--power-down-command`` and ``--power-up-command``; None if neither is given.

    Raises:
        InvalidInputError: one of them is missing, cannot be run, or names no device.
    """
    if down is None and up is None:
        return None
    if down is None or up is None:
        given, missing = ("up", "down") if down is None else ("down", "up")
        raise InvalidInputError(
            f"A device that is powered down must be powered up again but got "
            f"--power-{given}-command alone: add --power-{missing}-command."
        )
    return PowerCommands(
        down=_words("--power-down-command", down), up=_words("--power-up-command", up)
    )


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{option} must be words as a shell reads them but got {text!r} ({error}): mend it."
        ) from error
    if not any(DEVICE in word for word in words[1:]):
        raise InvalidInputError(
            f"{option} must be a program and its arguments, {DEVICE} among them where the device's "
            f"id belongs, but got {text!r}."
        )
    program = shutil.which(words[0])
    if program is None:
        raise InvalidInputError(
            f"{option} must begin with a program but {words[0]!r} is none: give its whole path."
        )
    return (os.path.abspath(program), *words[1:])


def run(words: Collection[str], device: str, seconds: float = POWER_SECONDS) -> str:
    """Run a command for a device, and log its output.

    Returns:
        The reason if it failed, in one line; else empty.
    """
    command = [word.replace(DEVICE, device) for word in words]
    shown = shlex.join(command)
    # A file: a process that a command leaves behind may hold a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            return f"`{shown}` cannot be run: {error.strerror}"
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"`{shown}` did not end within {seconds:g} s"
        lines = _last_lines(output.fileno())
    for line in lines:
        log.info("%s: %s", shown, line)
    if status == 0:
        return ""
    how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
    return f"`{shown}` {how}: {lines[-1]}" if lines else f"`{shown}` {how}"


def start(words: Collection[str], device: str, ended: Callable[[str, float], None]) -> None:
    """Run a command in a thread of its own; ``ended`` gets what ``run`` returns and the seconds."""

    def work() -> None:
        begin = time.monotonic()
        problem = run(words, device)
        ended(problem, time.monotonic() - begin)

    # No thread of a pool: a broker that ends would wait for it.
    threading.Thread(target=work, name=f"hermes-power-{device}", daemon=True).start()


def remember(directory: Path, unpowered: Collection[str]) -> None:
    """Save which devices are not surely powered, for the next broker; without any, no file.

    Raises:
        OSError: the file system refused.
    """
    path = _path(directory)
    if unpowered:
        write_private(path, json.dumps(sorted(unpowered)))
    else:
        path.unlink(missing_ok=True)


def recall(directory: Path) -> tuple[str, ...]:
    """Devices that an earlier broker has left without power, or may have."""
    try:
        known = json.loads(read_private(_path(directory), _WAY_OUT))
    except (OSError, ValueError, BrokerConflictError):
        return ()
    return tuple(str(id_) for id_ in known) if isinstance(known, list) else ()


def _path(directory: Path) -> Path:
    return directory / "unpowered.json"


def _last_lines(handle: int) -> list[str]:
    size = os.fstat(handle).st_size
    said = os.pread(handle, MAX_OUTPUT_BYTES, max(0, size - MAX_OUTPUT_BYTES))
    lines = said.decode(errors="replace").splitlines()
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines if line.strip()]
