"""Who may see the web page, and who may say something through it, pure.

Four questions, in this order: is the request meant for this server, or did a name that somebody
bent lead a browser here (DNS rebinding)? Is it from somebody who may? Was it made by a page of
another site? And if it changes something: was it made by our own page?
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

COMMAND_HEADER = "x-optuna-hermes"
"""On every request that changes something. No form can set it, and a script of another site only
with the server's leave, which it never gives."""

PUBLIC = frozenset({"/style.css", "/icon.svg", "/token"})
"""What who has no token needs to give it."""

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
    # With none at all browsers would not say of a form that it is our own.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every answer: nothing from elsewhere, nothing inline, no text of a trial that becomes HTML."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What matters of a request.

    Args:
        method: in capitals.
        path: without its query.
        headers: by their names in small letters.
        is_own: the kernel says that the other end is a process of this user, on this host.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    is_own: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a request is not served: an HTTP status, and what to do."""

    status: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Who is let in.

    Args:
        token: what people show, in the page's address or as ``Authorization: Bearer``.
        session: what a browser shows after that, in a cookie. Another secret, for cookies are
            sent to every port of a host.
        cookie: the cookie's name.
        names: under which the server may be called, besides any address in digits.
    """

    token: str
    session: str
    cookie: str
    names: frozenset[str]

    def refuse(self, asked: Asked) -> Refusal | None:
        """Why a request is not served, None if it is."""
        return self._misled(asked) or self._forged(asked) or self._unknown(asked) or _unsaid(asked)

    def knows(self, token: str) -> bool:
        """Whether this is the token; takes as long for a wrong one."""
        return _same(token, self.token)

    def _misled(self, asked: Asked) -> Refusal | None:
        name = _host_name(asked.headers.get("host", ""))
        if name in self.names or _is_address(name):
            return None
        known = ", ".join(sorted(self.names))
        return Refusal(
            status=421,
            reason=f"This server is called {known}, or by its address: use one of these.",
        )

    def _forged(self, asked: Asked) -> Refusal | None:
        """A browser says which site's page asks: another's may lead people here, and no more."""
        site = asked.headers.get("sec-fetch-site", "none")
        if site in ("same-origin", "none"):
            return None
        is_link = asked.headers.get("sec-fetch-mode") == "navigate"
        if is_link and asked.method in SAFE_METHODS and asked.path == "/":
            return None
        return Refusal(status=403, reason="A page of another site has asked: only this one may.")

    def _unknown(self, asked: Asked) -> Refusal | None:
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


def _unsaid(asked: Asked) -> Refusal | None:
    """A request that changes something comes from our page, or from no page at all."""
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
    """A cookie's value. Those of other servers of this host may be in no known form."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _host_name(host: str) -> str:
    """A name or an address without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    """An address in digits: nobody can bend what no name server is asked for."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
