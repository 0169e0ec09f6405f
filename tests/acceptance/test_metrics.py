"""``optuna-hermes broker --metrics``: figures of a broker that serves a study."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as families

LIGHT = Path(__file__).parent / "light.py"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = (sample for family in families(text) for sample in family.samples)
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def test_figures_of_a_study_that_runs(
    start_cli: Callable[..., Any],
    runtime_dir: Path,
    storage_url: str,
    wait_for: Callable[..., Any],
) -> None:
    """While trials train their broker counts them, and afterwards what they did."""
    port = free_port()
    start_cli("broker", "--devices", "cpu:2", "--metrics", port)
    wait_for((runtime_dir / "broker.sock").exists)
    words = ("optimize", f"{LIGHT}:objective", "--storage", storage_url, "--study-name", "digits")
    study = start_cli(*words, "--n-trials", 4)
    running = ("optuna_hermes_trials", frozenset({("study", "digits"), ("state", "running")}))
    wait_for(lambda: scrape(port).get(running), 60)
    seen = scrape(port)
    assert seen["optuna_hermes_clients", frozenset({("role", "driver")})] == 1
    assert seen["optuna_hermes_devices", frozenset({("state", "running")})] >= 1
    assert study.wait().returncode == 0
    after = scrape(port)
    assert after["optuna_hermes_reports_total", frozenset()] > 0
    assert after["optuna_hermes_decision_seconds_count", frozenset()] > 0
    assert after["optuna_hermes_ledger_write_seconds_count", frozenset()] > 0
    assert not any("sqlite" in str(labels) for _, labels in after)


def test_a_port_that_is_taken(
    cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Another program's port is bad input: one line, and what to do."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = cli("broker", "--devices", "cpu:1", "--metrics", port)
    assert done.returncode == 2
    said = f"but 127.0.0.1:{port} is not (Address already in use): choose another one."
    assert said in done.stderr
