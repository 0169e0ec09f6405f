"""A ledger in memory for tests, which several brokers may share."""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna_hermes.ledger import Ledger


class MemoryLedger(Ledger):
    """A ledger in memory that ends with this object, also where a broker has closed it.

    Args:
        clock: seconds of Unix time.
        shared: whether several brokers of a test use it.
    """

    def __init__(self, clock: Callable[[], float] = time.time, *, shared: bool = False) -> None:
        super().__init__("memory:", clock)
        self._shared = shared

    @property
    def shared(self) -> bool:
        """True if brokers of other hosts may use it too."""
        return self._shared

    def close(self) -> None:
        """Do nothing: the rows last as long as this object."""
