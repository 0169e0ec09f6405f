"""Access checks of the web page's requests; pure."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Of every request that changes something. Forms cannot set it, and scripts of other sites only
# after a CORS preflight, which this server never grants.
COMMAND_HEADER = "x-optuna-hermes"

# Paths that need no token: those of the form that asks for it.
PUBLIC = frozenset({"/style.css", "/icon.svg", "/token"})
SAFE_METHODS = frozenset({"GET", "HEAD"})

# IPv6 addresses have colons of their own, and stand in brackets.
_HOST = re.compile(r"(\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[\w.-]+))(:[0-9]{1,5})?", re.ASCII)

# Of every answer: no foreign or inline content, and no HTML made from a trial's text.
HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # With "no-referrer" browsers would send the form's Origin as "null", which is refused below.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestParts:
    """The parts of a request that are checked; names of headers in small letters.

    ``is_own`` is true if the kernel shows that a process of this user, on this host, has sent it.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    is_own: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The refusal of a request: an HTTP status, and a reason with a remedy."""

    status: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """The access rules of a server."""

    token: str  # secret of the user, in the page's address or as ``Authorization: Bearer``
    session: str  # secret of a browser after that, in a cookie
    cookie: str  # the cookie's name
    trusts_own: bool  # processes of this user, on this host, need no token

    def refuse(self, request: RequestParts) -> Refusal | None:
        """The reason for refusing a request, None if it is to be served."""
        return (
            self._check_host(request)
            or self._check_site(request)
            or self._check_token(request)
            or _check_origin(request)
        )

    def knows(self, token: str) -> bool:
        """True if this is the token."""
        return _same(token, self.token)

    def _check_host(self, request: RequestParts) -> Refusal | None:
        # DNS rebinding leads a browser here by another name, with the rights of that name's pages.
        # Where all show the token these have none, and a proxy may pass on any name.
        name = _host_name(request.headers.get("host", ""))
        if name == "localhost" or is_address(name) or (name and not self.trusts_own):
            return None
        return Refusal(
            status=421,
            reason="This server is called localhost, or by its address: use one of these. Behind a "
            "proxy, start it with OPTUNA_HERMES_TOKEN set.",
        )

    def _check_site(self, request: RequestParts) -> Refusal | None:
        site = request.headers.get("sec-fetch-site", "none")
        if site in ("same-origin", "none"):
            return None
        # A link to the page reads nothing that its site could see.
        is_link = request.headers.get("sec-fetch-mode") == "navigate"
        if is_link and request.method in SAFE_METHODS and request.path == "/":
            return None
        return Refusal(status=403, reason="A page of another site has asked: only this one may.")

    def _check_token(self, request: RequestParts) -> Refusal | None:
        if request.is_own or request.path in PUBLIC or self._is_known(request.headers):
            return None
        return Refusal(
            status=401,
            reason="The token is missing: open the address that `optuna-hermes web` has printed. "
            "If that has none, start it with OPTUNA_HERMES_TOKEN set.",
        )

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.knows(shown.strip()):
            return True
        # Not the token itself: cookies are sent to every port of a host.
        return _same(_cookie(headers.get("cookie", ""), self.cookie), self.session)


def _check_origin(request: RequestParts) -> Refusal | None:
    """Refuse a change unless it comes from our own page, or from a program that is no browser."""
    if request.method in SAFE_METHODS:
        return None
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    # A proxy may send a Host of its own; no page can set the other header.
    is_same = request.headers.get("sec-fetch-site") == "same-origin"
    if not is_same and origin not in (None, f"http://{host}", f"https://{host}"):
        return Refusal(
            status=403,
            reason="A page of another origin has asked: only this one may. Behind a proxy without "
            "TLS, have it pass on the Host, with its port.",
        )
    if request.path not in PUBLIC and COMMAND_HEADER not in request.headers:
        return Refusal(
            status=403, reason=f"A command needs the header {COMMAND_HEADER}: 1, so send it."
        )
    return None


def _same(shown: str, secret: str) -> bool:
    # In constant time: how long it takes must not tell how much of a guess is right.
    return hmac.compare_digest(shown.encode(), secret.encode())


def _cookie(header: str, name: str) -> str:
    # http.cookies would give up at a cookie of another server with a form of its own.
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _host_name(host: str) -> str:
    """The name or address of a Host header, without the port; empty where it is malformed."""
    found = _HOST.fullmatch(host)
    return "" if found is None else (found["v6"] or found["name"]).lower()


def is_address(name: str) -> bool:
    """True for a numeric address: DNS rebinding needs a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
