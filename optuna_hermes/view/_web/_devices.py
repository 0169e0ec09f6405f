"""The devices as the web page shows them; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna_hermes.view import _words as words
from optuna_hermes.view._web._trials import Json

STEADY_SECONDS = 0.5
"""Changes of a slice's times below this are ignored: the broker's answers take their time."""


class DeviceRows:
    """Entries of devices; remembers the times of their leases, so that they do not jitter."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], tuple[float, float]] = {}

    def shown(self, broker: Mapping[str, Any] | None, now: float) -> list[Json]:
        """The devices of a broker with their holders.

        Args:
            broker: its status, None if there is none.
            now: wall clock seconds (Unix time) of that status.
        """
        devices = broker["devices"] if broker else ()
        labels = short([device["id"] for device in devices])
        return [
            _device(device, label, self._holder(device, now))
            for device, label in zip(devices, labels, strict=True)
        ]

    def _holder(self, device: Mapping[str, Any], now: float) -> Json | None:
        """The holder of a device. Its times are absolute, so that they change only with a lease."""
        holder = device["holder"]
        if holder is None:
            return None
        lease = (device["id"], holder["epoch"])
        times = (now - holder["since_seconds"], now + holder["left_seconds"])
        known = self._since.get(lease)
        moved = known is None or max(abs(a - b) for a, b in zip(times, known, strict=True))
        if known is None or moved > STEADY_SECONDS:
            known = times
        self._since = {k: v for k, v in self._since.items() if k[0] != device["id"]}
        self._since[lease] = known
        return {
            "study": holder["study"],
            "trial": holder["trial"],
            "yielding": holder["state"] == "yielding",
            "since": round(known[0], 2),
            "until": round(known[1], 2),
        }


def short(ids: Sequence[str]) -> list[str]:
    """Names of devices for people: UUIDs are cut to the shortest unique beginning.

    Example:
        >>> short(["GPU-5c2f0a11-aaaa", "GPU-5c2f0a12-bbbb", "cpu:0"])
        ['GPU-5c2f0a11', 'GPU-5c2f0a12', 'cpu:0']
    """
    for length in range(8, 48, 2):
        cut = [id_ if len(id_) <= length + 4 else id_[: length + 4].rstrip("-") for id_ in ids]
        if len(set(cut)) == len(set(ids)):
            return cut
    return list(ids)


def _device(device: Mapping[str, Any], label: str, holder: Json | None) -> Json:
    return {
        "id": device["id"],
        "label": label,
        "kind": device["kind"],
        "state": "held" if holder else words.idle(device),
        "problem": device["problem"],
        "memory_bytes": device["memory_bytes"],
        "memory_free_bytes": device["memory_free_bytes"],
        "holder": holder,
    }
