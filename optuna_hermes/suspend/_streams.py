"""Iterable data sets: what they remember from one epoch to the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from optuna_hermes.suspend._unsaved import Attributes

log = logging.getLogger(__name__)


class Streams:
    """The attributes of the iterable data sets that a loop goes through, at the start of an epoch.

    No position in such a data set is known. A run over it is stored between epochs, and comes back
    to the beginning of one.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Any, Attributes]] = []
        self._saved: list[dict[str, Any]] = []

    @property
    def lost(self) -> list[str]:
        """Attributes that have changed and cannot be stored."""
        return sorted(name for _, attributes in self._found for name in attributes.lost)

    def follow(self, loader: Any, known: Callable[[], Collection[int]], run: str) -> None:
        """Its epoch begins; ``known`` gives what is stored elsewhere, by ``id``."""
        data = loader.dataset
        if any(each is data for each, _ in self._found):
            return
        if not self._found:
            log.info("The run of %s is stored between epochs only: its data are a stream.", run)
        attributes = Attributes(type(data).__name__, data, known=known())
        if len(self._found) < len(self._saved):  # in the order in which they were found before
            attributes.load_state_dict(self._saved[len(self._found)])
        attributes.begin()
        self._found.append((data, attributes))

    def state_dict(self) -> list[dict[str, Any]]:
        """What has changed since the objective has made them."""
        found = [attributes.state_dict() for _, attributes in self._found]
        return [*found, *self._saved[len(found) :]]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """To be called before the first epoch of this process."""
        self._saved = state
