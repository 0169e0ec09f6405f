"""The web page's server process: its socket, its token, and its shutdown."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable
from types import FrameType
from urllib.parse import quote

import uvicorn

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view._web._app import Actions, make_app
from optuna_hermes.view._web._feed import Feed
from optuna_hermes.view._web._guard import Guard, is_address

# Characters: with fewer a token could be guessed, for nothing here slows guesses down.
LEAST_TOKEN = 16
LEAVE_SECONDS = 2


def serve(
    feed: Feed,
    actions: Actions,
    *,
    host: str,
    port: int,
    token: str | None,
    ready: Callable[[str], object],
) -> None:
    """Serve the page until SIGINT or SIGTERM; call ``ready`` with its address when it is there.

    Port 0 is any that is free. No ``token`` draws one, and on a loopback address lets processes of
    this user in without it.

    Raises:
        InvalidInputError: the address is not available, or the token is too short or not ASCII.
    """
    if token is not None and len(token) < LEAST_TOKEN:
        raise InvalidInputError(
            f"--token must have {LEAST_TOKEN} characters or more but got {len(token)}: leave it "
            "out, and one is drawn."
        )
    if token is not None and not token.isascii():
        # In the header of a request it would be other characters.
        raise InvalidInputError(
            "--token must have ASCII characters alone but has others: leave it out, and one is "
            "drawn."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # A server started again must not wait for its old connections in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(128)
        except OSError as error:
            raise InvalidInputError(
                f"--host and --port must be free here but {host}:{port} is not "
                f"({error.strerror or error}): choose others."
            ) from error
        trusts_own = token is None and is_loopback(host)
        port = sock.getsockname()[1]
        guard = Guard(
            token=token or secrets.token_urlsafe(24),
            session=secrets.token_urlsafe(24),
            # Cookies are shared by all ports of a host: each server has one of its own.
            cookie=f"hermes-{port}",
            trusts_own=trusts_own,
        )
        app = make_app(feed, actions, guard)
        # No access log: addresses may hold the token.
        config = uvicorn.Config(
            app,
            # The gate asks the kernel whose connection it is: no header may name another one.
            proxy_headers=False,
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=LEAVE_SECONDS,
        )
        # No browser can open the wildcard address.
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        shown = "" if trusts_own else f"?token={quote(guard.token, safe='')}"
        ready(f"http://{name}:{port}/{shown}")
        _Server(config, feed).run(sockets=[sock])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # It waits for the end of every answer, and those of event streams have none.
        self._feed.close()
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """True if only this host reaches an address."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
