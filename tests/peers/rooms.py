"""Folders and a broker of this pytest process alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from optuna_hermes.broker import connect
from optuna_hermes.errors import BrokerError


def own_folder(config: pytest.Config) -> Path:
    """A folder for this process's broker, ledgers and studies; both end with it."""
    # Not below pytest's: the path of a Unix socket has to stay below 108 bytes.
    folder = tempfile.TemporaryDirectory(prefix="peers-", dir="/tmp", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(_end_broker)
    path = Path(folder.name)
    os.environ["OPTUNA_HERMES_RUNTIME_DIR"] = str(path / "run")
    os.environ["XDG_STATE_HOME"] = str(path / "state")
    return path


def _end_broker() -> None:
    try:
        connection = connect("viewer")
    except BrokerError:
        return
    broker = psutil.Process(connection.welcome.pid)
    connection.close()
    broker.terminate()
    with contextlib.suppress(psutil.TimeoutExpired):
        broker.wait(20.0)
