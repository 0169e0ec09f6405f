"""The web page's server, as a browser or a script meets it."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra [web]")
pytest.importorskip("uvicorn", reason="needs the extra [web]")
pytest.importorskip("httpx2", reason="needs httpx2 for starlette's TestClient")

from starlette.testclient import TestClient

from optuna_hermes.errors import BrokerError, InvalidInputError
from optuna_hermes.view._web import _server
from optuna_hermes.view._web._app import FILES, Actions, Address, make_app
from optuna_hermes.view._web._feed import Feed
from optuna_hermes.view._web._guard import COMMAND_HEADER, HEADERS, Guard

TOKEN, SESSION, COOKIE = "a-token-of-many-letters", "another-secret", "hermes-80"
BEARER = {"authorization": f"Bearer {TOKEN}"}
OURS = {COMMAND_HEADER: "1", "origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}


class Study:
    """Actions that are written down."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def override(self, verb: str, number: int) -> str:
        if number > 9:
            raise InvalidInputError(f"There is no trial {number}.")
        self.done.append((verb, number))
        return f"Trial {number}: {verb}."

    def event_log(self, number: int) -> dict[str, Any]:
        if number > 9:
            raise BrokerError("The broker is gone.")
        return {"trial": number, "params": {"<b>x</b>": "<script>alert(1)</script>"}}


@pytest.fixture
def study() -> Study:
    return Study()


class OneEvent(Feed):
    """A feed that is closed when it has sent its first event."""

    async def listen(self) -> AsyncIterator[bytes]:
        async for event in super().listen():
            yield event
            self.close()


@pytest.fixture
def browser(study: Study) -> Iterator[TestClient]:
    guard = Guard(token=TOKEN, session=SESSION, cookie=COOKIE, trusts_own=True)
    feed = OneEvent(lambda: {"study": {"name": "digits"}})
    app = make_app(feed, Actions(override=study.override, event_log=study.event_log), guard)
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        yield client


def test_without_the_token_people_are_asked_for_it(browser: TestClient) -> None:
    """401 with a page that has a field for it, and no word of the study."""
    answer = browser.get("/")
    assert answer.status_code == 401
    assert 'action="token"' in answer.text
    assert "OPTUNA_HERMES_TOKEN" in answer.text  # where no address with a token was printed
    assert browser.get("/api/events").json()["error"].startswith("The token is missing")


def test_the_token_leaves_the_address(browser: TestClient) -> None:
    """A cookie stands for it that no script can read and no other site can send."""
    answer = browser.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    assert "path=" not in cookie  # that of the page, which a proxy may have below "/"
    page = browser.get("/")
    assert page.status_code == 200
    assert "<h1" in page.text


def test_by_a_link_of_another_site_the_token_works_too(browser: TestClient) -> None:
    """A redirect would arrive without the strict cookie, so the page goes on by itself."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    answer = browser.get(f"/?token={TOKEN}", headers=link)
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert TOKEN not in answer.text


@pytest.mark.parametrize("text", ["", "wrong", SESSION, TOKEN[:-1], TOKEN + "x"])
def test_another_token_opens_nothing(browser: TestClient, text: str) -> None:
    """Neither in the address nor in the field, and no cookie is given for it."""
    for answer in (
        browser.get("/", params={"token": text}),
        browser.post("/token", data={"token": text}),
    ):
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers


def test_the_token_may_be_typed(browser: TestClient) -> None:
    """The field does what the address does."""
    answer = browser.post("/token", data={"token": f" {TOKEN} "})
    assert answer.status_code == 303
    assert COOKIE in answer.cookies


def test_every_answer_has_the_policy(browser: TestClient) -> None:
    """Pages, files, refusals and what is not there."""
    for path in ("/", "/app.js", "/nowhere", "/style.css", f"/?token={TOKEN}"):
        for headers in ({}, BEARER, {"host": "evil.example"}):
            answer = browser.get(path, headers=headers)
            for name, value in HEADERS.items():
                assert answer.headers[name] == value


@pytest.mark.parametrize("path", ["/../_web_app.py", "/%2e%2e/_web_app.py", "/..%2f_web_app.py"])
def test_no_other_file_is_served(browser: TestClient, path: str) -> None:
    """Dots lead nowhere."""
    assert browser.get(path, headers=BEARER).status_code == 404


def test_a_command_is_done_once(browser: TestClient, study: Study) -> None:
    """The verb and the trial arrive, and what was done is said."""
    answer = browser.post("/api/trials/3/hold", headers=BEARER | OURS)
    assert answer.json() == {"done": "Trial 3: hold."}
    assert study.done == [("hold", 3)]


def test_a_forged_command_does_nothing(browser: TestClient, study: Study) -> None:
    """With the cookie of somebody who is logged in."""
    browser.cookies.set(COOKIE, SESSION)
    for forged in (
        {"origin": "http://evil.example"},
        {COMMAND_HEADER: "1", "origin": "http://evil.example"},
        {**OURS, "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1"},
    ):
        answer = browser.post("/api/trials/3/finish", headers=forged)
        assert answer.status_code == 403
        assert "only this one may" in answer.json()["error"] or COMMAND_HEADER in answer.text
    assert browser.get("/api/trials/3/finish").status_code == 405
    assert study.done == []


@pytest.mark.parametrize("host", ["localhost:1/style.css?", "127.0.0.1:1/token?"])
def test_a_host_with_a_path_opens_nothing(browser: TestClient, study: Study, host: str) -> None:
    """The checked path is that by which a request is routed."""
    for method, route in (("GET", "/api/trials/3"), ("POST", "/api/trials/3/hold")):
        answer = browser.request(method, route, headers={"host": host} | OURS)
        assert answer.status_code in (401, 421)
    assert study.done == []


def test_what_cannot_be_done_is_said(browser: TestClient) -> None:
    """In the words of the error."""
    headers = BEARER | OURS
    refused = browser.post("/api/trials/10/boost", headers=headers)
    assert (refused.status_code, refused.json()) == (409, {"error": "There is no trial 10."})
    assert browser.get("/api/trials/10", headers=BEARER).json() == {"error": "The broker is gone."}
    unknown = browser.post("/api/trials/3/delete", headers=headers)
    assert (unknown.status_code, "No verb 'delete'" in unknown.text) == (404, True)
    assert browser.post(f"/api/trials/{2**64}/hold", headers=headers).status_code == 404
    assert browser.get(f"/api/trials/{2**64}", headers=headers).status_code == 404


def test_an_event_log_is_json_and_not_html(browser: TestClient) -> None:
    """Text of a trial stays text."""
    answer = browser.get("/api/trials/3", headers=BEARER)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["params"]["<b>x</b>"] == "<script>alert(1)</script>"


def test_events_begin_with_the_page(browser: TestClient) -> None:
    """The first one is whole, and the stream ends when the server does."""
    answer = browser.get("/api/events", headers=BEARER)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"  # nginx would wait for kilobytes
    name, data = answer.text.strip().split("\n")
    assert name == "event: page"
    assert json.loads(data.removeprefix("data: "))["study"] == {"name": "digits"}


def test_no_file_of_the_page_has_anything_inline() -> None:
    """The policy would stop it, and people would see a page without it."""
    for page in FILES.glob("*.html"):
        html = page.read_text()
        assert "style=" not in html
        assert "<style" not in html
        assert "<script>" not in html
        assert " on" + "click=" not in html
    for script in FILES.glob("*.js"):
        code = script.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in code, (script.name, way)


def test_every_file_that_a_page_names_is_there() -> None:
    """Scripts, styles and icons, and the modules that scripts import."""
    for page in FILES.glob("*.html"):
        for name in re.findall(r'(?:href|src)="([^#"][^"]*)"', page.read_text()):
            assert (FILES / name).is_file(), name
    for script in FILES.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', script.read_text()):
            assert (FILES / name).is_file(), name


def test_the_page_may_be_below_another_path() -> None:
    """A proxy has it there, as JupyterHub does: no address begins with a slash."""
    for file in [*FILES.glob("*.html"), *FILES.glob("*.js")]:
        found = re.findall(
            r"""(?:href|src|action)="/|(?:fetch|EventSource)\(["'`]/""", file.read_text()
        )
        assert found == [], file.name


def test_the_chart_library_is_the_one_that_its_readme_names() -> None:
    """Nobody has changed it since it came from npm."""
    folder = FILES / "uplot"
    lines = re.findall(r"`([\w.]+)` \| `([0-9a-f]{64})`", (folder / "README.md").read_text())
    assert len(lines) == 2
    for name, digest in lines:
        assert hashlib.sha256(Path(folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
def test_a_body_is_read_up_to_a_bound(browser: TestClient, announced: bool) -> None:
    """Whoever sends gigabytes for a token is refused before they are in memory."""
    parts = [b"token=", *[b"x" * 1000] * 100]
    body: Any = b"".join(parts) if announced else iter(parts)
    answer = browser.post("/token", content=body, headers=OURS)
    assert answer.status_code == 413, answer.text


@pytest.mark.parametrize("number", ["9" * 5000, "1" + "0" * 15, "-1", "1.0", "x", "%C2%B2"])
def test_a_number_that_no_trial_has_is_not_found(
    browser: TestClient, study: Study, number: str
) -> None:
    """Also one that Python would not read, and what is no number."""
    assert browser.get(f"/api/trials/{number}", headers=BEARER).status_code == 404
    answer = browser.post(f"/api/trials/{number}/hold", headers=BEARER | OURS)
    assert answer.status_code == 404
    assert len(answer.text) < 100
    assert study.done == []


# -- who asks --------------------------------------------------------------------------------


@pytest.fixture
def at() -> Iterator[Address]:
    """The address of a listening server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def status_of(study: Study, at: Address, client: Address, **headers: str) -> int:
    """The status of a request without a token, over a connection from ``client`` to ``at``."""
    guard = Guard(token=TOKEN, session=SESSION, cookie=COOKIE, trusts_own=True)
    actions = Actions(override=study.override, event_log=study.event_log)
    app = make_app(Feed(dict), actions, guard)
    browser = TestClient(app, base_url=f"http://127.0.0.1:{at[1]}", client=client)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return int(browser.get("/api/trials/3", headers=named).status_code)


def test_a_process_of_this_user_needs_no_token(study: Study, at: Address) -> None:
    """Its connection is its own; at a port that it does not have there is nobody."""
    with socket.create_connection(at) as mine:
        assert status_of(study, at, mine.getsockname()) == 200
        assert status_of(study, at, ("127.0.0.1", 1)) == 401


@pytest.mark.parametrize("header", ["forwarded", "via", "x_forwarded_for", "x_real_ip"])
def test_whoever_comes_by_a_proxy_needs_the_token(study: Study, at: Address, header: str) -> None:
    """A proxy of this user is no reason to let in everybody who reaches it."""
    with socket.create_connection(at) as proxy:
        assert status_of(study, at, proxy.getsockname(), **{header: "192.0.2.1"}) == 401


def test_no_header_says_who_asks(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may know the port of a page that is open, and is not taken for its user."""
    seen = []

    def ask(self: Any, sockets: list[socket.socket]) -> None:
        at = sockets[0].getsockname()
        self.config.load()
        with socket.create_connection(at) as mine:  # of a page that this user has open
            stranger = TestClient(
                self.config.loaded_app,
                base_url=f"http://127.0.0.1:{at[1]}",
                client=("127.0.0.1", 1),
            )
            forged = {"x-forwarded-for": f"127.0.0.1:{mine.getsockname()[1]}"}
            status = stranger.get("/api/trials/3", headers=forged).status_code
            seen.append((self.config.proxy_headers, status))

    monkeypatch.setattr(_server._Server, "run", ask)
    _server.serve(
        Feed(dict),
        Actions(override=study.override, event_log=study.event_log),
        host="127.0.0.1",
        port=0,
        token=None,
        ready=lambda address: None,
    )
    assert seen == [(False, 401)]
