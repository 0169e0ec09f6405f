"""``python -m optuna_hermes.broker --devices cpu:2``: a broker without the CLI's imports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from optuna_hermes._job_environment import host_name, seconds_of
from optuna_hermes.broker import _election as election
from optuna_hermes.broker._devices._source import Devices, absolute, parse_devices
from optuna_hermes.broker._server._logs import start_logging
from optuna_hermes.broker._server._malloc import give_back_large_blocks
from optuna_hermes.broker._server._server import OF_JOBS, Server
from optuna_hermes.errors import BrokerConflictError, HermesError, InvalidInputError

if TYPE_CHECKING:
    from optuna_hermes.broker._power_commands import PowerCommands

IDLE_SECONDS = 30.0
IDLE_VARIABLE = "OPTUNA_HERMES_BROKER_IDLE_SECONDS"
METRICS_VARIABLE = "OPTUNA_HERMES_METRICS"
"""The option of ``optuna-hermes broker``, for brokers that clients start."""
SWITCH_SECONDS = 0.0005
"""Longest time that a thread keeps the interpreter: grants wait for the thread that writes."""

log = logging.getLogger("optuna_hermes.broker")


def run_broker(
    devices: str,
    *,
    idle_seconds: float | None,
    metrics: str | None = None,
    power: PowerCommands | None = None,
    ready: Callable[[], None] = lambda: None,
    background: bool = False,
) -> None:
    """Run as the broker of this host and user until it is time to end.

    Args:
        devices: the devices to own, as ``--devices``.
        idle_seconds, metrics, power, background: as for ``Server``.
        ready: called once clients can connect.

    Raises:
        DeviceSpecError: there is no such device.
        BrokerConflictError: another broker is at work.
        InvalidInputError: figures cannot be served, and it is not in the background.
    """
    _raise_handle_limit()
    # Before NumPy is loaded. Its matrices are small here, and the cores are for the trials.
    os.environ["OMP_NUM_THREADS"] = "1"
    give_back_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    directory = election.runtime_dir()
    host = host_name()
    devices = absolute(devices)
    slots = parse_devices(devices)
    source = Devices(slots, host, named=devices != "auto")
    runtime_lock = election.RuntimeLock(directory, devices)
    claims: list[socket.socket] = []
    try:
        # CPU slots are no one thing that two could hold, and are not locked.
        gpus = [slot.id for slot in slots if slot.kind != "cpu"]
        if gpus:
            from optuna_hermes.broker._devices._claims import claim_devices

            claims = claim_devices(gpus)
        server = Server(
            directory,
            devices=devices,
            source=source,
            host=host,
            idle_seconds=idle_seconds,
            metrics=metrics,
            power=power,
            background=background,
            lock=runtime_lock,
        )
        gc.collect()
        gc.freeze()  # what was imported lives as long as the broker: looking at it delays grants
        asyncio.run(server.serve(ready))
    finally:
        runtime_lock.release()
        for claim in claims:
            claim.close()
        source.close()


def main() -> int:
    """Run a broker that ends when idle, and logs to stderr.

    With ``--background`` it logs to a file, and this returns once clients can connect.
    """
    parser = argparse.ArgumentParser(prog="python -m optuna_hermes.broker")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--power-down-command")
    parser.add_argument("--power-up-command")
    arguments = parser.parse_args()
    text = os.environ.get(IDLE_VARIABLE)
    idle = IDLE_SECONDS if text is None else seconds_of(text)
    if not idle >= 0:
        problem = f"{IDLE_VARIABLE} must be a number of seconds but got {text!r}."
        print(f"error: {problem}", file=sys.stderr)
        return election.EXIT_BAD_INPUT
    commands = arguments.power_down_command, arguments.power_up_command
    if arguments.background:
        return _in_background(arguments.devices, commands, idle)
    start_logging()
    return _run(arguments.devices, commands, idle)


def _run(
    devices: str,
    commands: tuple[str | None, str | None],
    idle_seconds: float,
    say: int | None = None,
) -> int:
    ready = (lambda: None) if say is None else partial(_say, say)
    try:
        power = None
        if commands != (None, None):
            # Only with a policy that powers devices down.
            from optuna_hermes.broker._power_commands import power_commands

            power = power_commands(*commands)
        run_broker(
            devices,
            idle_seconds=idle_seconds,
            power=power,
            metrics=os.environ.get(METRICS_VARIABLE) or None,
            ready=ready,
            background=say is not None,
        )
    except HermesError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, BrokerConflictError):
            locked = isinstance(error, election.RuntimeLockedError)
            return election.EXIT_LOCKED if locked else election.EXIT_CONFLICT
        return election.EXIT_BAD_INPUT if isinstance(error, InvalidInputError) else 1
    return 0


def _in_background(
    devices: str, commands: tuple[str | None, str | None], idle_seconds: float
) -> int:
    """Fork a child that serves in a session of its own; return once clients can connect."""
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.setsid()
        for number in OF_JOBS:
            signal.signal(number, signal.SIG_IGN)  # until its loop deals with them
        status = 1
        try:
            faulthandler.enable()
            start_logging(file=election.log_path(election.runtime_dir()))
            status = _run(devices, commands, idle_seconds, say)
        except BaseException:
            log.critical(
                "the broker crashed, please report it: the next one goes on", exc_info=True
            )
            traceback.print_exc()
        finally:
            logging.shutdown()
            os._exit(status)
    os.close(say)
    # The child sends a byte once it listens. Without one it has ended: its status says why.
    if os.read(said, 1):
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _raise_handle_limit() -> None:
    """Let this process have as many connections as it may: each client takes two handles."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # the kernel's own limit may be lower still
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(main())
