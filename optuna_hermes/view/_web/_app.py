"""The web page's server: a thin layer of Starlette over ``Guard`` and ``Feed``."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optuna_hermes.errors import HermesError
from optuna_hermes.view._web._feed import Feed, in_thread
from optuna_hermes.view._web._guard import HEADERS, Guard, Refusal, RequestParts

Address = tuple[str, int]

_ESTABLISHED = "01"
_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}

# Of requests that a proxy has passed on: their connection is not that of the one who asks.
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

FILES = Path(__file__).parent / "static"
# Every valid form is smaller; a larger body would only fill memory.
MAX_FORM_BYTES = 4096
# Of a trial's number: int() takes quadratic time for long ones, and databases have 64 bits.
MOST_DIGITS = 15
VERBS = ("hold", "boost", "release", "finish")


@dataclass(frozen=True, kw_only=True)
class Actions:
    """The functions behind the page's requests: ``override`` applies one of ``VERBS``, in words."""

    override: Callable[[str, int], str]
    event_log: Callable[[int], dict[str, Any]]


def make_app(feed: Feed, actions: Actions, guard: Guard) -> ASGIApp:
    """The server's application."""

    async def page(request: Request) -> Response:
        shown = request.query_params.get("token")
        return FileResponse(FILES / "index.html") if shown is None else enter(request, shown)

    async def token(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM_BYTES:
                reason = f"A body may have {MAX_FORM_BYTES} bytes: send less, or none."
                return _refused(request, Refusal(status=413, reason=reason))
        fields = parse_qs(body.decode("utf-8", "replace"))
        return enter(request, fields.get("token", [""])[0].strip())

    def enter(request: Request, shown: str) -> Response:
        """Exchange the token for a session cookie, and redirect to the page without the token."""
        if not guard.knows(shown):
            return _refused(request, Refusal(status=401, reason="That is not the token."))
        answer: Response = RedirectResponse("./", 303)
        if request.headers.get("sec-fetch-site") == "cross-site":
            # After a link from another site, browsers would follow a redirect without the new
            # SameSite=Strict cookie; a refresh starts at this site.
            answer = HTMLResponse('<!doctype html><meta http-equiv="refresh" content="0; url=./">')
        # Its path is the page's, which a proxy may have below "/".
        answer.set_cookie(guard.cookie, guard.session, path=None, httponly=True, samesite="strict")
        return answer

    async def events(request: Request) -> Response:
        # nginx would keep events back until it has kilobytes of them.
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(feed.listen(), headers=headers, media_type="text/event-stream")

    async def event_log(request: Request) -> Response:
        return await _answer(actions.event_log, request.path_params["number"])

    async def override(request: Request) -> Response:
        verb, number = request.path_params["verb"], request.path_params["number"]
        if verb not in VERBS:
            return JSONResponse({"error": f"No verb {verb!r}: use {', '.join(VERBS)}."}, 404)
        answer = await _answer(lambda n: {"done": actions.override(verb, n)}, number)
        feed.look_now()
        return answer

    api = [
        Route("/events", events),
        Route("/trials/{number}", event_log),
        Route("/trials/{number}/{verb}", override, methods=["POST"]),
    ]
    routes = [
        Route("/", page),
        Route("/token", token, methods=["POST"]),
        # A route of its own: below "/" the answer to another method would be 404 for 405.
        Mount("/api", routes=api),
        Mount("/", StaticFiles(directory=FILES)),
    ]
    return _Gate(Starlette(routes=routes), guard)


async def _answer(call: Callable[[int], dict[str, Any]], number: str) -> Response:
    if not (number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS):
        return JSONResponse({"error": f"There is no trial {number[:MOST_DIGITS]!r}."}, 404)
    try:
        return JSONResponse(await in_thread(partial(call, int(number))))
    except HermesError as error:
        return JSONResponse({"error": str(error)}, 409)


class _Gate:
    """Middleware that lets the guard check requests, and adds its headers to answers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                # Data of a study must not stay in caches; files change with this package's version.
                is_data = scope["path"] == "/" or scope["path"].startswith("/api/")
                headers["cache-control"] = "no-store" if is_data else "no-cache"
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = self._guard.refuse(self._asked(request))
        # The address that is printed has the token: the page itself exchanges it for a cookie.
        shows_token = scope["path"] == "/" and "token" in request.query_params
        if refusal is not None and not (refusal.status == 401 and shows_token):
            await _refused(request, refusal)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _asked(self, request: Request) -> RequestParts:
        client, server = request.scope.get("client"), request.scope.get("server")
        is_direct = not any(name in request.headers for name in _FORWARDED)
        is_trusted = self._guard.trusts_own and is_direct
        is_own = is_trusted and client and server and is_ours(client, server)
        return RequestParts(
            method=request.method,
            # As requests are routed: Starlette makes ``request.url`` of the Host header.
            path=request.scope["path"],
            headers={name.lower(): value for name, value in request.headers.items()},
            is_own=bool(is_own),
        )


def _refused(request: Request, refusal: Refusal) -> Response:
    """The answer to a refused request: a form for the token, JSON for the API, else a line."""
    if refusal.status == 401 and request.scope["path"] in ("/", "/token"):
        html = (FILES / "token.html").read_text("utf-8")
        return HTMLResponse(html, refusal.status, headers={"www-authenticate": "Bearer"})
    if request.scope["path"].startswith("/api/"):
        return JSONResponse({"error": refusal.reason}, refusal.status)
    return PlainTextResponse(f"{refusal.reason}\n", refusal.status)


# -- processes of this user ----------------------------------------------------------------------


def is_ours(client: Address, server: Address) -> bool:
    """True if a process of this user, on this host, has opened a connection.

    False also where the kernel has no such table, and for one that came through the network.
    """
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    try:
        lines = Path("/proc/net", _TABLES[family]).read_text().splitlines()[1:]
        ends = _text(client, family), _text(server, family)
    except OSError:
        return False
    return owner(lines, *ends) == os.getuid()


def owner(lines: Iterable[str], local: str, remote: str) -> int | None:
    """The user whose socket is bound to ``local`` and connected to ``remote``, None if none is.

    Both are as in the ``lines`` of ``/proc/net/tcp``.
    """
    for line in lines:
        # Columns: 1 local end, 2 remote end, 3 state, 7 user.
        found = line.split()
        if found[1:4] == [local, remote, _ESTABLISHED]:
            return int(found[7])
    return None


def _text(address: Address, family: socket.AddressFamily) -> str:
    """An address as the kernel prints it: words of 32 bits in the machine's byte order.

    Example:
        >>> _text(("127.0.0.1", 80), socket.AF_INET)
        '0100007F:0050'
    """
    packed = socket.inet_pton(family, address[0])
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    text = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{text}:{address[1]:04X}"
