"""Access checks of the web page's requests; pure.

Four checks, in this order: the Host header names this server (else DNS rebinding could lead a
browser here); the request was not made by a page of another site; it has the token, the session
cookie, or comes from a process of this user; if it changes something, it comes from our own page.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

COMMAND_HEADER = "x-optuna-hermes"
"""Header of every request that changes something. Forms cannot set it, and scripts of other sites
only after a CORS preflight, which this server never grants."""

PUBLIC = frozenset({"/style.css", "/icon.svg", "/token"})
"""Paths that need no token: those of the form that asks for it."""

SAFE_METHODS = frozenset({"GET", "HEAD"})

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
"""Headers of every answer: no foreign or inline content, and no HTML made from a trial's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestParts:
    """The parts of a request that are checked.

    Args:
        method: in capitals.
        path: without its query.
        headers: by their names in small letters.
        is_own: true if the kernel shows that a process of this user, on this host, has sent it.
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
    """The access rules of a server.

    Args:
        token: secret of the user, in the page's address or as ``Authorization: Bearer``.
        session: secret of a browser after that, in a cookie. It differs from the token, since
            cookies are sent to every port of a host.
        cookie: the cookie's name.
        names: allowed names in the Host header, besides any numeric address.
    """

    token: str
    session: str
    cookie: str
    names: frozenset[str]

    def refuse(self, asked: RequestParts) -> Refusal | None:
        """The reason for refusing a request, None if it is to be served."""
        return self._misled(asked) or self._forged(asked) or self._unknown(asked) or _unsaid(asked)

    def knows(self, token: str) -> bool:
        """True if this is the token; compared in constant time."""
        return _same(token, self.token)

    def _misled(self, asked: RequestParts) -> Refusal | None:
        name = _host_name(asked.headers.get("host", ""))
        if name in self.names or _is_address(name):
            return None
        known = ", ".join(sorted(self.names))
        return Refusal(
            status=421,
            reason=f"This server is called {known}, or by its address: use one of these.",
        )

    def _forged(self, asked: RequestParts) -> Refusal | None:
        """Refuse requests by pages of other sites, by ``Sec-Fetch-Site``; links are allowed."""
        site = asked.headers.get("sec-fetch-site", "none")
        if site in ("same-origin", "none"):
            return None
        is_link = asked.headers.get("sec-fetch-mode") == "navigate"
        if is_link and asked.method in SAFE_METHODS and asked.path == "/":
            return None
        return Refusal(status=403, reason="A page of another site has asked: only this one may.")

    def _unknown(self, asked: RequestParts) -> Refusal | None:
        if asked.is_own or asked.path in PUBLIC or self._is_known(asked.headers):
            return None
        return Refusal(
            status=401,
            reason="The token is missing: open the address that `optuna-hermes web` has printed.",
        )

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.knows(shown.strip()):
            return True
        return _same(_cookie(headers.get("cookie", ""), self.cookie), self.session)


def _unsaid(asked: RequestParts) -> Refusal | None:
    """Refuse a change unless it comes from our own page, or from a program that is no browser."""
    if asked.method in SAFE_METHODS:
        return None
    host = asked.headers.get("host", "")
    origin = asked.headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return Refusal(status=403, reason="A page of another origin has asked: only this one may.")
    if asked.path not in PUBLIC and COMMAND_HEADER not in asked.headers:
        return Refusal(
            status=403, reason=f"A command needs the header {COMMAND_HEADER}: 1, so send it."
        )
    return None


def _same(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode(), secret.encode())


def _cookie(header: str, name: str) -> str:
    """A cookie's value; parsed by hand, since other servers' cookies may have any form."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _host_name(host: str) -> str:
    """The name or address of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    """True for a numeric address: DNS rebinding needs a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
