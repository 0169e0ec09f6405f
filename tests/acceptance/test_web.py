"""``optuna-hermes web`` as a process, without a browser."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import optuna
import pytest

pytest.importorskip("starlette", reason="needs the extra [web]")
pytest.importorskip("uvicorn", reason="needs the extra [web]")

from optuna_hermes.cli import run
from optuna_hermes.view._web._source import PageReader

Start = Callable[..., Any]


def served(running: Any, wait_for: Callable[..., Any]) -> str:
    """The address that the server has printed."""
    return str(wait_for(lambda: re.search(r"http://\S+", running.stderr), message="it serves")[0])


def get(address: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def first_page(address: str, **headers: str) -> dict[str, Any]:
    """Return the page that the stream of events begins with."""
    request = urllib.request.Request(f"{address}api/events", headers=headers)
    with urllib.request.urlopen(request, timeout=30.0) as stream:
        assert stream.readline() == b"event: page\n"
        page: dict[str, Any] = json.loads(stream.readline().removeprefix(b"data: "))
    return page


def test_at_an_address_of_others_the_token_is_needed(
    start_cli: Start, wait_for: Callable[..., Any], storage_url: str
) -> None:
    """401 without it, also for processes of ours; it is in no log, and Ctrl-C ends open pages."""
    optuna.create_study(storage=storage_url, study_name="s")
    running = start_cli(
        *("web", "--storage", storage_url, "--study-name", "s", "--host", "0.0.0.0", "--port", 0)
    )
    address, token = re.sub(r"//[^:]+", "//127.0.0.1", served(running, wait_for)).split("?token=")
    for path in ("", "api/events", "app.js", "?token=wrong"):
        assert get(address + path)[0] == 401
    assert get(address, Authorization=f"Bearer {token}")[0] == 200
    page = first_page(address, Authorization=f"Bearer {token}")
    assert page["study"]["name"] == "s"
    assert page["live"]["is"] == "still"
    status, _ = get(f"{address}?token={token}")
    assert status == 401  # the redirect arrives without its cookie: urllib keeps none
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with socket.create_connection(("127.0.0.1", port)) as open_page:
        bearer = f"Authorization: Bearer {token}"
        request = f"GET /api/events HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n\r\n"
        open_page.sendall(request.encode())
        assert open_page.recv(100).startswith(b"HTTP/1.1 200")
        running.send(signal.SIGINT)
        done = running.wait(20.0)
    assert done.returncode in (0, 130)
    assert done.stderr.count(token) == 1
    assert done.stdout == ""


def test_on_this_host_ones_own_processes_need_none(
    start_cli: Start, wait_for: Callable[..., Any]
) -> None:
    """Without a study the broker is shown; with a token of one's own everybody has to show it."""
    start_cli("broker", "--devices", "cpu:2")
    bare = served(start_cli("web", "--port", 0), wait_for)
    assert "token" not in bare
    assert get(bare)[0] == 200

    def devices() -> list[str]:
        return [device["id"] for device in first_page(bare)["devices"]]

    wait_for(lambda: devices() == ["cpu:0", "cpu:1"])
    assert get(bare, Host="evil.example")[0] == 421
    own = {"OPTUNA_HERMES_TOKEN": "sixteen+letters/or&more#="}
    address = served(start_cli("web", "--port", 0, env=own), wait_for)
    assert get(address.partition("?")[0])[0] == 401
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(address, timeout=30.0) as answer:
        assert answer.status == 200


def test_a_broker_that_ends_and_comes_back_is_noticed(
    start_cli: Start, wait_for: Callable[..., Any], runtime_dir: Any
) -> None:
    """The connection is kept between two looks, and made anew when it has broken."""
    watch = PageReader()
    assert watch.look()["study"]["host"] is None
    broker = start_cli("broker", "--devices", "cpu:1")
    wait_for(lambda: len(watch.look()["devices"]) == 1)
    broker.kill()
    wait_for(lambda: watch.look()["study"]["host"] is None)
    start_cli("broker", "--devices", "cpu:3")
    wait_for(lambda: len(watch.look()["devices"]) == 3)
    watch.close()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--study-name", "s"], "--study-name needs --storage"),
        (["--storage", "sqlite:///none.db", "--study-name", "s"], "No file 'none.db'"),
        (["--token", "short"], "--token must have 16 characters or more but got 5"),
        (["--token", "schlüssel" * 2], "--token must have ASCII characters alone"),
        (["--host", "192.0.2.1"], "--host and --port must be free here but 192.0.2.1"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """Status 2 and one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)
    assert run(["web", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert expected in said


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the command."""
    monkeypatch.setitem(sys.modules, "optuna_hermes.view._web._server", None)
    assert run(["web"]) == 2
    assert "pip install 'optuna-hermes[web]'" in capsys.readouterr().err
