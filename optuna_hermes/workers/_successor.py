"""Successor: a fork server forked from another one, with one more value of ``once``."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

from optuna_hermes._parent import kill


class Successor:
    """A successor, as the fork server sees it that it was forked from."""

    def __init__(self, pid: int, end: socket.socket, words_end: int) -> None:
        self.pid = pid
        self.socket = end
        self.words_end = words_end
        self.is_ready = False
        self.n_requested = 0
        self.workers: set[int] = set()
        self._passed: set[str] = set()
        self._unread = b""

    def fork(self, count: int) -> None:
        self.n_requested += count
        with contextlib.suppress(ConnectionError):  # its exit will be noticed
            self.socket.sendall(b"f" * count)

    def pass_on(self, packed: str, line: bytes) -> None:
        """Have it compute one more value, once, and later if its pipe is full."""
        room = select.poll()
        room.register(self.words_end, select.POLLOUT)
        # It reads nothing while it computes, which may take for ever. The pipe itself cannot be
        # made to refuse: its workers, who write to it too, would lose what they say.
        if packed in self._passed or not room.poll(0):
            return
        with contextlib.suppress(BrokenPipeError):  # its exit will be noticed
            os.write(self.words_end, line + b"\n")
            self._passed.add(packed)

    def lines(self) -> list[bytes] | None:
        """Its next messages, of those to the driver; None if it is gone."""
        try:
            data = self.socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return lines

    def follow(self, line: dict[str, Any]) -> None:
        """Keep count of its workers by a message to the driver."""
        if "forked" in line:
            self.n_requested -= 1
            self.workers.add(line["forked"])
        elif "unforked" in line:
            self.n_requested -= line["unforked"]
        elif "exited" in line:
            self.workers.discard(line["exited"])

    def close(self) -> None:
        """End it, with its workers, and wait until it is gone."""
        self.forget()
        if not self.is_ready:  # it reads nothing while it computes
            kill(self.pid)
        os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Close this process's ends."""
        self.socket.close()
        os.close(self.words_end)
