"""Fake session of several ranks."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from typing import Any

from optuna_hermes.model import TierName
from optuna_hermes.testing import FakeSession


class RankedSession(FakeSession):
    """A ``FakeSession`` for several ranks: rank 0 counts its batches in shared memory."""

    # Else a suspended training, whose callbacks hold it, would store and restore its attributes.
    __module__ = FakeSession.__module__

    def __init__(self, yields: Mapping[int, TierName] | None = None, **options: Any) -> None:
        self._must = False
        self._trained = multiprocessing.RawValue("i")
        self._noticed = multiprocessing.RawValue("i")
        super().__init__(yields, **options)
        self._scripted = len(self.script)

    @property
    def must_yield(self) -> bool:
        """True from the batch on after which the first process yields."""
        self._noticed.value = self._scripted - len(self.script)  # the yields up to the last call
        while self._batches < self._trained.value:
            self.tick()
        return self._must

    @must_yield.setter
    def must_yield(self, value: bool) -> None:
        self._must = value

    def trained(self, *, wait: bool = True) -> None:
        """Count a trained batch; the process that started the ranks must not ``wait``."""
        self._trained.value += 1
        due = sum(after <= self._trained.value for after in self.script)
        # After the last batch of a lease, until that process has noticed it: a rank that went on
        # would train a batch of the next one.
        while wait and self._noticed.value < due:
            time.sleep(0.001)

    def next(self, yields: Mapping[int, TierName] | None = None) -> RankedSession:
        """The session of the next process of this trial."""
        return RankedSession(
            yields, checkpoint_dir=self.checkpoint_dir, checkpoints=self.checkpoints
        )
