"""``python -m optuna_hermes.broker --devices cpu:2``: a broker without the command line's weight."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys

from optuna_hermes.broker import _election as election
from optuna_hermes.broker._devices import Devices, parse_devices
from optuna_hermes.broker._server import Server
from optuna_hermes.errors import BrokerConflictError, HermesError, InvalidInputError

IDLE_SECONDS = 30.0
IDLE_VARIABLE = "OPTUNA_HERMES_BROKER_IDLE_SECONDS"


def run_broker(devices: str, *, idle_seconds: float | None) -> None:
    """Be the broker of this host and user until it is time to end.

    Args:
        devices: which devices to own, as ``--devices``.
        idle_seconds: end after this long without a client; None stays.

    Raises:
        DeviceSpecError: there is no such device.
        BrokerConflictError: another broker is at work.
    """
    directory = election.runtime_dir()
    host = socket.gethostname()
    source = Devices(parse_devices(devices), host)
    office = election.Office(directory, devices)
    try:
        server = Server(
            directory, devices=devices, source=source, host=host, idle_seconds=idle_seconds
        )
        asyncio.run(server.serve())
    finally:
        office.leave()
        source.close()


def main() -> int:
    """Run in the background: log to stderr, end when idle."""
    parser = argparse.ArgumentParser(prog="python -m optuna_hermes.broker")
    parser.add_argument("--devices", default="auto")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    idle = float(os.environ.get(IDLE_VARIABLE, IDLE_SECONDS))
    try:
        run_broker(arguments.devices, idle_seconds=idle)
    except HermesError as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, BrokerConflictError):
            return election.EXIT_IN_OFFICE
        return election.EXIT_BAD_INPUT if isinstance(error, InvalidInputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
