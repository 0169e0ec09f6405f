"""The user at the other end of a connection within this host, from the kernel's socket table."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

_ESTABLISHED = "01"
_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}

Address = tuple[str, int]


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
