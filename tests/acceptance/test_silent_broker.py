"""A broker that runs and does not answer: stopped, or on a disk that is gone."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.ledger import open_ledger

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def silent(runtime_dir: Path) -> Iterator[None]:
    """The socket of a broker that accepts whoever comes."""
    runtime_dir.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime_dir / "broker.sock"))
        (runtime_dir / "broker.sock").chmod(0o600)
        listener.listen()
        yield
    (runtime_dir / "broker.sock").unlink()


@pytest.mark.usefixtures("silent")
def test_status_says_so(cli: Cli) -> None:
    """In a line, after a while; a probe has failed."""
    done = cli("status", deadline_seconds=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The broker of this host has not answered for 10 s: ")
    probe = cli("status", "--probe", deadline_seconds=60)
    assert probe.returncode == 1
    assert "nothing trains" in probe.stderr


@pytest.mark.usefixtures("silent")
def test_it_is_not_said_to_have_ended(cli: Cli) -> None:
    """Nor not to be there."""
    done = cli("broker", "--stop", deadline_seconds=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The broker of this host has not answered for 10 s: ")


@pytest.mark.usefixtures("silent")
def test_a_study_is_shown_from_its_ledger(cli: Cli, storage_url: str) -> None:
    """With a word that the broker does not answer."""
    study = optuna.create_study(storage=storage_url, study_name="s")
    _optuna.study_key(study)
    open_ledger(_optuna.ledger_url(study)).close()
    done = cli("status", "--storage", storage_url, "--study-name", "s", deadline_seconds=60)
    assert done.returncode == 0
    assert "has not answered" in done.stderr


@pytest.mark.usefixtures("silent")
def test_the_page_ends_with_ctrl_c(
    start_cli: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    """It is served from the ledger meanwhile."""
    pytest.importorskip("starlette", reason="needs the extra [web]")
    web = start_cli("web", "--port", 0)
    wait_for(lambda: "http://" in web.stderr, message="it serves")
    web.send(signal.SIGINT)
    assert web.wait(60.0).returncode in (0, 130)
