"""Messages about devices while a study runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

NOTED_SECONDS = 3.0
"""Shortest duration of a problem that is shown."""


class DeviceNews:
    """Notes once why a device cannot be leased, and once that it can again.

    Args:
        note: shows a line.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._said: dict[str, str] = {}
        self._seen: dict[str, tuple[str, float]] = {}

    def look(self, devices: Iterable[Mapping[str, Any]], now: float) -> None:
        """Note changes in the devices' problems.

        Args:
            devices: as the broker's status has them.
            now: seconds of any clock.
        """
        for device in devices:
            id_, problem = device["id"], device["problem"]
            before, since = self._seen.get(id_, ("", now))
            if problem != before:
                since = now
            self._seen[id_] = problem, since
            if problem != self._said.get(id_, "") and now - since >= NOTED_SECONDS:
                self._said[id_] = problem
                self._note(f"{id_}: {problem or 'all is well again'}.")
