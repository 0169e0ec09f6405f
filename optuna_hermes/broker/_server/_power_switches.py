"""User's commands that power devices down and up, run for a broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._power_commands import DEVICE, PowerCommands
from optuna_hermes.broker._privacy import read_private, write_private
from optuna_hermes.broker._server._processes import soon
from optuna_hermes.broker._server._succession import unpowered_path
from optuna_hermes.errors import BrokerConflictError

POWER_SECONDS = 600.0
"""A command that takes longer is killed, and has failed: a host may take minutes to boot."""

MAX_OUTPUT_BYTES = 4096
"""Bytes of a command's output that are logged, from its end."""

_WAY_OUT = "remove it"

_NO_POWER = "wake them, or start the broker with --power-down-command and --power-up-command"

log = logging.getLogger("optuna_hermes.broker")


def left_unpowered(directory: Path, power: PowerCommands | None) -> tuple[str, ...]:
    """Devices that the broker before this one has powered down, as far as they can be woken."""
    try:
        known = json.loads(read_private(unpowered_path(directory), _WAY_OUT))
    except (OSError, ValueError, BrokerConflictError):
        return ()
    left = tuple(map(str, known)) if isinstance(known, list) else ()
    if power is None and left:
        log.warning("%s may be without power, %s", ", ".join(left), _NO_POWER)
        return ()
    return left


class PowerSwitches:
    """Runs power commands, and reports their ends.

    Args:
        directory: where the devices to wake are saved for the next broker.
        switched: called when one has ended, before a device is used that it has woken.
    """

    def __init__(
        self,
        directory: Path,
        state: BrokerState,
        power: PowerCommands,
        switched: Callable[[PowerSwitched], None],
    ) -> None:
        self._directory = directory
        self._state = state
        self._power = power
        self._tell = switched

    def switch(self, command: SwitchPower) -> None:
        """Run the user's command, once the device is saved for the next broker."""
        self.save()
        words = self._power.up if command.up else self._power.down
        loop = asyncio.get_running_loop()

        def work() -> None:
            begin = time.monotonic()
            try:
                problem = run(words, command.device)
            except OSError as error:  # no room for its output, or no descriptor
                problem = f"the command cannot be run: {error.strerror}"
            seconds = time.monotonic() - begin
            event = PowerSwitched(
                device=command.device, up=command.up, seconds=seconds, problem=problem
            )
            soon(loop, partial(self._switched, event))

        # No thread of a pool: a broker that ends would wait for it.
        threading.Thread(target=work, name=f"hermes-power-{command.device}", daemon=True).start()

    def _switched(self, event: PowerSwitched) -> None:
        way = "up" if event.up else "down"
        if event.problem:
            log.error("%s was not powered %s: %s", event.device, way, event.problem)
        else:
            log.info("%s is powered %s after %.1f s", event.device, way, event.seconds)
        self._tell(event)
        self.save()

    def save(self) -> None:
        """Save which devices the next broker has to wake before it grants them, if any."""
        path, unpowered = unpowered_path(self._directory), self._state.unpowered
        try:
            if unpowered:
                write_private(path, json.dumps(sorted(unpowered)))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.error(
                "the next broker will not know what is powered down, so make room in %s: %s",
                self._directory,
                error,
            )


def run(words: Collection[str], device: str, seconds: float = POWER_SECONDS) -> str:
    """Run a command for a device, and log its output; return why it failed, in one line, or ""."""
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


def _last_lines(handle: int) -> list[str]:
    size = os.fstat(handle).st_size
    said = os.pread(handle, MAX_OUTPUT_BYTES, max(0, size - MAX_OUTPUT_BYTES))
    lines = said.decode(errors="replace").splitlines()
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines if line.strip()]
