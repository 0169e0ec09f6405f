"""A broker that runs and does not answer: stopped, or on a disk that is gone."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna
from optuna_hermes.broker._client import _connection
from optuna_hermes.cli import run
from optuna_hermes.ledger import open_ledger


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers of this process give up soon."""
    monkeypatch.setattr(_connection, "SILENT_SECONDS", 0.5)


@pytest.mark.usefixtures("silent", "impatient")
def test_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, after a while; a probe has failed."""
    assert run(("status",)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: The broker of this host has not answered for 10 s: ")
    assert run(("status", "--probe")) == 1
    assert "nothing trains" in capsys.readouterr().err


@pytest.mark.usefixtures("silent", "impatient")
def test_it_is_not_said_to_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor not to be there."""
    assert run(("broker", "--stop")) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: The broker of this host has not answered for 10 s: ")


@pytest.mark.usefixtures("silent", "impatient")
def test_a_study_is_shown_from_its_ledger(
    capsys: pytest.CaptureFixture[str], storage_url: str
) -> None:
    """With a word that the broker does not answer."""
    study = optuna.create_study(storage=storage_url, study_name="s")
    _optuna.study_key(study)
    open_ledger(_optuna.ledger_url(study)).close()
    assert run(("status", "--storage", storage_url, "--study-name", "s")) == 0
    assert "has not answered" in capsys.readouterr().err


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
