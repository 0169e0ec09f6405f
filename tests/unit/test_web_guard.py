"""Access to the web page, and to the commands behind it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from optuna_hermes.view._web._app import is_ours, owner
from optuna_hermes.view._web._guard import COMMAND_HEADER, HEADERS, Guard, RequestParts
from optuna_hermes.view._web._server import is_loopback

TOKEN, SESSION = "a-token-of-many-letters", "another-secret"
GUARD = Guard(token=TOKEN, session=SESSION, cookie="hermes-8470", trusts_own=True)
FOR_ALL = replace(GUARD, trusts_own=False)
COMMAND = {COMMAND_HEADER.replace("-", "_"): "1"}


def asked(
    method: str = "GET",
    path: str = "/",
    *,
    own: bool = False,
    host: str = "localhost:8470",
    **more: str,
) -> RequestParts:
    headers = {"host": host, **{name.replace("_", "-"): value for name, value in more.items()}}
    return RequestParts(method=method, path=path, headers=headers, is_own=own)


def status(request: RequestParts, guard: Guard = GUARD) -> int:
    refusal = guard.refuse(request)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("path", ["/", "/api/events", "/api/trials/3", "/app.js", "/nowhere"])
def test_without_the_token_nothing_is_shown(path: str) -> None:
    """401, whatever is asked for."""
    assert status(asked(path=path)) == 401


@pytest.mark.parametrize("path", ["/style.css", "/icon.svg"])
def test_the_page_that_asks_for_the_token_has_its_looks(path: str) -> None:
    """A file that tells nothing of a study is for everybody."""
    assert status(asked(path=path)) == 200


def test_token_and_cookie_open() -> None:
    """A script shows the token, a browser the cookie that it was given for it."""
    assert status(asked(authorization=f"Bearer {TOKEN}")) == 200
    assert status(asked(cookie=f"other=1; hermes-8470={SESSION}")) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer "},
        {"cookie": f"hermes-8470={TOKEN}"},
        {"cookie": f"hermes-9999={SESSION}"},
        {"cookie": "hermes-8470="},
        {"cookie": '={"not: a cookie'},
        {"authorization": f"Bearer {SESSION}"},
        {"authorization": "Bearer k\u00e9y"},
    ],
)
def test_what_only_resembles_them_does_not(headers: dict[str, str]) -> None:
    """Neither another word, nor the right one in the wrong place."""
    assert status(asked(**headers)) == 401


def test_a_process_of_ones_own_needs_no_token() -> None:
    """On a loopback address the kernel says whose it is."""
    assert status(asked(own=True)) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8470", "", "localhost.evil.example"),
        # Frameworks that make an address of it take its end for the path.
        *("localhost:1/style.css?", "127.0.0.1:1/style.css?", "localhost:", "[::1]/x", "[::1"),
    ],
)
def test_a_bent_name_leads_nowhere(host: str) -> None:
    """DNS rebinding: the browser calls this server by a name that is not its own."""
    assert status(asked(own=True, host=host)) == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:8470", "10.1.2.3:8470"]
)
def test_its_names_and_addresses_lead_here(host: str) -> None:
    """Also through a tunnel, which has another port; no name server is asked for an address."""
    assert status(asked(own=True, host=host)) == 200


def test_where_all_show_the_token_the_name_is_any() -> None:
    """A proxy passes on its own, and a page by a name that is bent has no cookie."""
    name = "study.example.org"
    assert status(asked(host=name), FOR_ALL) == 401
    assert status(asked(host="[::1"), FOR_ALL) == 421
    known = {"host": name, "cookie": f"hermes-8470={SESSION}"}
    assert status(asked(**known), FOR_ALL) == 200
    ours = {"origin": f"https://{name}", "sec_fetch_site": "same-origin", **COMMAND}
    assert status(asked("POST", "/api/trials/3/hold", **known, **ours), FOR_ALL) == 200


@pytest.mark.parametrize("path", ["/token", "/api/trials/3/hold"])
def test_a_proxy_may_send_a_host_of_its_own(path: str) -> None:
    """The browser says that page and command are of one origin, whatever it is called there."""
    known = {"cookie": f"hermes-8470={SESSION}", "origin": "https://study.example.org", **COMMAND}
    site = {"sec_fetch_site": "same-origin"}
    assert status(asked("POST", path, host="127.0.0.1:8470", **known, **site), FOR_ALL) == 200
    assert status(asked("POST", path, host="127.0.0.1:8470", **known), FOR_ALL) == 403


FORGED = [
    {"sec_fetch_site": "cross-site", **COMMAND},
    {"sec_fetch_site": "same-site", **COMMAND},
    {"origin": "http://evil.example", **COMMAND},
    {"origin": "http://localhost:9999", **COMMAND},
    {"origin": "null", **COMMAND},
    {"origin": "http://localhost:8470"},
    {},
]


@pytest.mark.parametrize("headers", FORGED)
def test_a_forged_command_is_refused(headers: dict[str, str]) -> None:
    """Neither a page of another site nor a form can hold a trial, with the cookie and without."""
    known = {"cookie": f"hermes-8470={SESSION}"}
    assert status(asked("POST", "/api/trials/3/hold", **headers, **known)) == 403
    assert status(asked("POST", "/api/trials/3/hold", own=True, **headers)) == 403


def test_a_command_of_our_page_is_not_forged() -> None:
    """Its origin is the server's own, and it has set the header."""
    ours = {"origin": "http://localhost:8470", **COMMAND}
    request = asked("POST", "/api/trials/3/hold", own=True, sec_fetch_site="same-origin", **ours)
    assert status(request) == 200


def test_a_link_of_another_site_leads_to_the_page_only() -> None:
    """People may come by a link; scripts and frames of other sites see nothing."""
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert status(asked(own=True, **link)) == 200
    assert status(asked("GET", "/api/events", own=True, **link)) == 403
    assert status(asked(own=True, sec_fetch_site="cross-site", sec_fetch_mode="no-cors")) == 403


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    """The policy that browsers are sent allows neither, and no text becomes HTML."""
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy


def test_the_kernel_knows_whose_connection_it_is() -> None:
    """Ours is ours; a port that nobody has is nobody's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()
        with socket.create_connection(at) as client:
            assert is_ours(client.getsockname(), at)
            assert not is_ours(("127.0.0.1", 1), at)


def test_another_users_connection_is_not_ours() -> None:
    """The line of the other end names its user, and only a line of a live connection counts."""
    head = "0: 0100007F:CECA 0100007F:2116"
    rest = "00000000:00000000 00:00000000 00000000"
    local, remote = "0100007F:CECA", "0100007F:2116"
    assert owner([f"{head} 01 {rest} 1234 0 577"], local, remote) == 1234
    assert owner([f"{head} 06 {rest} 0 0 577"], local, remote) is None
    assert owner([f"{head} 01 {rest} 1234 0 577"], remote, local) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_is_seen() -> None:
    """A live process of another user, over a real socket."""
    code = (
        "import encodings.idna, os, socket, sys\nos.setuid(65534)\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(at[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with other:
            assert other.stdout is not None
            port = int(other.stdout.readline())
            seen = is_ours(("127.0.0.1", port), at)
    assert not seen


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu1", False)],
)
def test_which_addresses_are_of_this_host_only(host: str, expected: bool) -> None:
    """All that starts with 127, and no name that somebody could give to another host."""
    assert is_loopback(host) is expected
