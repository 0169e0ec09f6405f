"""``optuna-hermes broker``: in the foreground, and ended from outside."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from optuna_hermes.broker import connect

Cli = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def broker(start_cli: Callable[..., Any], runtime_dir: Path, wait_for: Callable[..., Any]) -> Any:
    """A broker with three slots, in the foreground, listening."""
    process = start_cli("broker", "--devices", "cpu:3")
    wait_for((runtime_dir / "broker.sock").exists)
    return process


def test_status_knows_the_broker_and_stop_ends_it(cli: Cli, broker: Any, runtime_dir: Path) -> None:
    """The broker is seen with its devices, ends when told to, and leaves no socket."""
    shown = json.loads(cli("status", "--json").stdout)
    assert [device["id"] for device in shown["broker"]["devices"]] == ["cpu:0", "cpu:1", "cpu:2"]
    assert shown["broker"]["studies"] == []
    stopped = cli("broker", "--stop")
    assert stopped.returncode == 0
    assert f"process {broker.process.pid}) has ended" in stopped.stderr
    assert broker.wait(30.0).returncode == 0
    assert not (runtime_dir / "broker.sock").exists()


def test_a_broker_in_use_is_not_stopped(cli: Cli, broker: Any) -> None:
    """While anyone trains ``--stop`` is refused with the reason."""
    connection = connect("driver")
    try:
        refused = cli("broker", "--stop")
    finally:
        connection.close()
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: The broker still serves 1 other process(es). Stop what uses it first; "
        "`optuna-hermes status` shows it.\n"
    )
    assert broker.process.poll() is None


def test_a_second_broker_is_refused(cli: Cli, broker: Any, runtime_dir: Path) -> None:
    """One host has one broker: another one is bad input, with what to do."""
    second = cli("broker", "--devices", "cpu:1")
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1] == (
        f"error: A broker (process {broker.process.pid}, devices 'cpu:3') owns {runtime_dir} "
        "already: use it, or end it with `optuna-hermes broker --stop`."
    )


def test_a_signal_ends_the_broker(broker: Any) -> None:
    """SIGTERM, as systemd sends it, is an orderly end."""
    broker.send(signal.SIGTERM)
    assert broker.wait(30.0).returncode == 0
    assert "Traceback" not in broker.stderr


def test_an_idle_broker_ends_when_it_was_told_to(
    start_cli: Callable[..., Any], runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """With ``--idle-seconds`` a broker that nobody uses ends by itself."""
    process = start_cli("broker", "--devices", "cpu:1", "--idle-seconds", "0.1")
    wait_for((runtime_dir / "broker.sock").exists)
    connect("viewer").close()  # one that nobody has used yet waits for longer
    assert process.wait(30.0).returncode == 0


def test_a_log_for_programs(
    start_cli: Callable[..., Any], runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """With ``--log-json`` every line on standard error is an object with time and level."""
    process = start_cli("broker", "--devices", "cpu:1", "--log-json")
    wait_for((runtime_dir / "broker.sock").exists)
    process.send(signal.SIGTERM)
    lines = process.wait(30.0).stderr.splitlines()
    said = [json.loads(line) for line in lines]
    assert [each["message"] for each in said] == ["listening, devices cpu:1", "ended"]
    assert all(each["level"] == "INFO" and each["time"].endswith("Z") for each in said)
