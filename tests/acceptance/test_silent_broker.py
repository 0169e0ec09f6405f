"""A broker that runs and does not answer: stopped, or on a disk that is gone."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from optuna_hermes import _optuna, visualization
from optuna_hermes._job_environment import host_name
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import connect
from optuna_hermes.broker._client import _connection
from optuna_hermes.cli import run
from optuna_hermes.cli._studies import facts_reader
from optuna_hermes.cli._top import StudySource
from optuna_hermes.cli._web import _actions
from optuna_hermes.errors import BrokerError, BrokerSilentError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.view.source import StudyReader
from optuna_hermes.workers import _driver
from optuna_hermes.workers._driver import Driver
from optuna_hermes.workers._settings import OptimizeSettings
from support.records import trial_record


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
def other(runtime_dir: Path) -> Iterator[str]:
    """The reason that a broker of another version, as before an upgrade, tells whoever comes."""
    reason = "This broker is of another version: when its studies have ended, `kill 7`."
    runtime_dir.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)

    def refuse() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # the test is over
                return
            with sock:
                sock.sendall(wire.frame(wire.Refused(reason=reason)))
                sock.recv(1000)

    with listener:
        listener.bind(str(runtime_dir / "broker.sock"))
        (runtime_dir / "broker.sock").chmod(0o600)
        listener.listen()
        thread = threading.Thread(target=refuse)
        thread.start()
        yield reason
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    (runtime_dir / "broker.sock").unlink()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers of this process give up soon."""
    monkeypatch.setattr(_connection, "SILENT_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
def test_a_queue_that_is_full_is_waited_for_as_long(runtime_dir: Path) -> None:
    """Each try at a stopped broker stays in it; a signal does not end the wait either."""
    runtime_dir.chmod(0o700)
    path = str(runtime_dir / "broker.sock")
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(0)
        first.connect(path)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(BrokerSilentError, match="has not answered"):
                connect("viewer")
            with pytest.raises(ZeroDivisionError):  # whatever the caller makes of it
                connect("driver", lambda seconds: 1 / 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("silent", "impatient")
def test_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, after a while; a probe has failed."""
    assert run(("status",)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: The broker of this host has not answered for 10 s: ")
    assert run(("status", "--probe")) == 1
    assert capsys.readouterr() == ("", said.err)


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
    said = capsys.readouterr()
    assert "has not answered" in said.err
    assert "trials may train" in said.out
    assert "nothing trains" not in said.out
    assert run(("status", "--storage", storage_url, "--study-name", "s", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["broker"], document["silent"]) == (None, True)


@pytest.fixture
def running(storage_url: str) -> str:
    """The key of a study whose trial 0 trains here, as its ledger says."""
    study = optuna.create_study(storage=storage_url, study_name="s")
    key = _optuna.study_key(study)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        ledger.save_trial(trial_record(0, study=key, state="running", host=host_name()))
    return key


@pytest.mark.usefixtures("silent", "impatient", "running")
def test_its_trials_are_as_the_ledger_says(storage_url: str) -> None:
    """They may train: nobody says that they do not."""
    with closing(StudyReader(facts_reader(storage_url, "s"))) as reader:
        assert reader.status() is None
        history = reader.history(None)
    assert history is not None
    assert [trial.state for trial in history.trials] == ["running"]
    data = visualization._study.read_study(optuna.load_study(storage=storage_url, study_name="s"))
    assert [trial.state for trial in data.history.trials] == ["running"]


@pytest.mark.usefixtures("silent", "impatient")
def test_an_event_log_is_shown(storage_url: str, running: str) -> None:
    """On the page and in `top`, which does not say that no broker serves the study."""
    pytest.importorskip("starlette", reason="needs the extra [web]")
    assert _actions(storage_url, "s").event_log(0)["state"] == "running"
    source = StudySource(storage_url, "s")
    source.event_log(running, 0)
    assert source.look(running).read_only.startswith("The broker does not answer: ")
    with pytest.raises(BrokerError, match="does not answer: trials may train"):
        StudySource(None, None).look("")


def test_a_broker_of_another_version_is_not_taken_for_none(
    other: str,
    storage_url: str,
    running: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After an upgrade: its trials train, the ledger is shown, and it is said what to do."""
    assert run(("status", "--storage", storage_url, "--study-name", "s")) == 0
    said = capsys.readouterr()
    assert other in said.err
    assert "nothing trains" not in said.out
    source = StudySource(storage_url, "s")
    picture = source.look(running)
    assert picture.read_only == f"{other} What the ledger has is shown, read-only."
    assert [trial.state for trial in picture.trials] == ["running"]
    with pytest.raises(BrokerError, match="of another version"):
        StudySource(None, None).look("")
    optuna.logging.enable_propagation()
    visualization._study.read_study(optuna.load_study(storage=storage_url, study_name="s"))
    optuna.logging.disable_propagation()
    assert other in caplog.text


@pytest.mark.usefixtures("silent")
def test_a_signal_ends_a_call_within_its_grace_period(storage_url: str) -> None:
    """Whoever waits for the broker looks at the clock meanwhile."""
    notes, killed = list[str](), list[bool]()
    screen: Any = SimpleNamespace(note=notes.append, warn=notes.append)
    pool: Any = SimpleNamespace(
        began=0.0,
        has_job=True,
        status_of=lambda pid: None,
        kill_all=lambda: killed.append(True),
    )
    study = optuna.create_study(storage=storage_url)
    driver = Driver(study, pool, OptimizeSettings(grace=1.5), screen)
    driver._stops.nothing_begun = False
    driver._stops.interrupt(signal.SIGTERM)
    began = time.monotonic()
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        driver._serve(ledger)
    assert time.monotonic() - began > 1.0  # it may answer until then
    assert (killed, driver._stopped) == ([True], True)
    assert notes == [
        "SIGTERM: suspending every live trial, within 1 s.",
        "The broker has not answered for 1 s, so trials that train could not be suspended: all "
        "workers are ended, and trials go on from the checkpoints that they have on disk.",
    ]


@pytest.mark.usefixtures("silent")
def test_it_is_named_to_who_waits_for_it(storage_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each silence, of a call that nothing else has ended."""
    monkeypatch.setattr(_driver, "SILENT_SECONDS", 0.0)
    notes = list[str]()
    screen = SimpleNamespace(note=notes.append, warn=notes.append)
    pool = SimpleNamespace(began=0.0)
    driver = Driver(optuna.create_study(storage=storage_url), pool, OptimizeSettings(), screen)  # type: ignore[arg-type]
    looks = iter(range(3))

    def look(seconds: float) -> None:
        driver._on_silence(seconds)
        if next(looks, None) is None:
            raise BrokerSilentError("enough")

    with pytest.raises(BrokerSilentError, match="enough"):
        connect("driver", look)
    assert notes == [_connection.SILENT]


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
