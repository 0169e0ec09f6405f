"""Locks of GPUs against the other brokers of a host."""

from __future__ import annotations

import errno
import pwd
import socket
from collections.abc import Sequence

from optuna_hermes.broker._privacy import peer
from optuna_hermes.errors import BrokerConflictError


def claim_devices(ids: Sequence[str]) -> list[socket.socket]:
    """Lock GPUs for this process's life, against every other broker and user of the host.

    The lock of a device is a socket's name in the kernel, which is one for all users and folders,
    and free when its process ends. Containers with networks of their own have names of their own.

    Raises:
        BrokerConflictError: another broker has one of them.
    """
    claimed: list[socket.socket] = []
    for id_ in ids:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        claimed.append(claim)
        try:
            claim.bind(_device_name(id_))
            claim.listen(1)  # the kernel tells a client that connects whose it is
        except OSError as error:
            for each in claimed:
                each.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise BrokerConflictError(
                f"Device {id_} belongs to another broker of this host ({_holder_of(id_)}): end "
                "that one with `optuna-hermes broker --stop`, or leave the device out."
            ) from error
    return claimed


def _device_name(id_: str) -> str:
    """Name of a device's lock; with a null byte in front it is the kernel's own, and no file."""
    return f"\0optuna-hermes/{id_}"


def _holder_of(id_: str) -> str:
    """Process and user that hold a device's lock, in words, as far as the kernel knows."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_device_name(id_))
            pid, uid = peer(sock)
        except OSError:
            return "which has just ended, or is asked by many"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    return f"process {pid} of {user}"
