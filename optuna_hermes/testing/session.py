"""Fake session whose grants and revocations are scripted.

It is in the package because a suspended training leaves the package's own objects alone: of a
session from elsewhere, as of any object of its user, it would store and restore the attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optuna_hermes.errors import Suspended
from optuna_hermes.model import BatchSizes, Checkpoint, TierName
from optuna_hermes.suspend import CleanPoint

if TYPE_CHECKING:
    from optuna_hermes.suspend._tiers._tier_mover import TierMover


class FakeSession:
    """A ``suspend.Session`` that revokes its lease after given numbers of batches.

    Args:
        yields: tier to wait in, by the number of batches since this session began.
        decides: tier to wait in, by the unit after whose report this is decided.
        checkpoint_dir, checkpoint_url, checkpoints, devices: see ``Session``.
        while_parked: called when the trial waits in this process, to stand for other trainings.
        evicts: further tiers that the trial is moved to, after ``while_parked``.
        batch_sizes: size of the next batches, by the number of batches since this session began;
            where the trial yields too it gets the size when it resumes.
    """

    def __init__(
        self,
        yields: Mapping[int, TierName] | None = None,
        *,
        decides: Mapping[int, TierName] | None = None,
        checkpoint_dir: Path | None = None,
        checkpoint_url: str | None = None,
        checkpoints: tuple[Checkpoint, ...] = (),
        while_parked: Callable[[], None] = lambda: None,
        evicts: tuple[TierName, ...] = (),
        devices: tuple[str, ...] = ("cpu:0",),
        batch_sizes: Mapping[int, int] | None = None,
    ) -> None:
        self.must_yield = False
        self.sizes = dict(batch_sizes or {})
        self.batch_size = self._next_size = self.sizes.pop(0, None)
        self.stretched: list[BatchSizes] = []
        self.devices = devices
        self.checkpoint_dir = checkpoint_dir
        self.checkpoint_url = checkpoint_url
        self.checkpoints = checkpoints
        self.trainings: list[bool] = []
        self.reports: list[tuple[int, int, float]] = []
        self.units_left: list[int | None] = []
        self.beats: list[int | None] = []
        self.parks: list[TierName] = []
        self.states: list[Checkpoint] = []
        self.blocked_seconds = 0.0
        self.script = dict(yields or {})
        self._decisions = dict(decides or {})
        self._while_parked = while_parked
        self._evicts = evicts
        self._batches = 0
        self.requested_tier: TierName = "resident"
        self._tier_mover: TierMover | None = None

    def tick(self) -> None:
        """Count a trained batch; the test's own loop calls it for each, or nothing is revoked."""
        self._batches += 1
        asked = self.script.pop(self._batches, None)
        self._next_size = self.sizes.pop(self._batches, self._next_size)
        if asked is not None:
            self.requested_tier = asked
            self.must_yield = True
        elif not self.must_yield:
            self.batch_size = self._next_size

    def again(
        self,
        yields: Mapping[int, TierName] | None = None,
        batch_sizes: Mapping[int, int] | None = None,
    ) -> FakeSession:
        """The session of the next process of this trial, which finds this one's checkpoints."""
        return FakeSession(
            yields,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_url=self.checkpoint_url,
            checkpoints=self.checkpoints,
            while_parked=self._while_parked,
            devices=self.devices,
            batch_sizes=batch_sizes,
        )

    def training(self, *, can_store: bool, late: bool = False) -> None:
        """See ``suspend.Session``."""
        self.trainings.append(can_store)

    def report_sizes(self, sizes: BatchSizes) -> None:
        """See ``suspend.Session``."""
        self.stretched.append(sizes)

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """See ``suspend.Session``."""
        # The first may come before all batches, from a validation; those of a resumed one, too.
        if self.script and len(self.reports) == 1 and not (self._batches or self.checkpoints):
            warnings.warn(
                f"A FakeSession of yields {self.script} suspends nothing, as no batch was counted "
                "before the second report: call session.tick() after each.",
                stacklevel=2,
            )
        self.reports.append((unit, step, value))
        self.units_left.append(units_left)

    def wait_for_decision(self) -> None:
        """See ``suspend.Session``."""
        asked = self._decisions.pop(self.reports[-1][0], None) if self.reports else None
        if asked is not None:
            self.requested_tier = asked
            self.must_yield = True

    def beat(self, memory_bytes: int | None = None) -> None:
        """See ``suspend.Session``."""
        self.beats.append(memory_bytes)

    def saved(self, checkpoint: Checkpoint, *, blocked_seconds: float = 0.0) -> None:
        """See ``suspend.Session``."""
        self.blocked_seconds += blocked_seconds
        self.states.append(checkpoint)
        self.checkpoints = (checkpoint, *self.checkpoints[:1])

    def park(self, state: CleanPoint) -> None:
        """See ``suspend.Session``.

        Raises:
            Suspended: the trial went to disk.
        """
        self.must_yield = False
        self._put(state, self.requested_tier)
        state.waits()
        self._while_parked()
        for tier in self._evicts:
            self._put(state, tier)
        assert self._tier_mover is not None
        self._tier_mover.back()
        self.batch_size = self._next_size

    def _put(self, state: CleanPoint, tier: TierName) -> None:
        from optuna_hermes.suspend._tiers._tier_mover import TierMover  # it needs torch

        if self._tier_mover is None:
            self._tier_mover = TierMover(
                self.checkpoint_dir, lambda: self.checkpoints, self.checkpoint_url
            )
        held = self._tier_mover.put(state, tier)
        assert self._tier_mover.tier is not None
        self.parks.append(self._tier_mover.tier)
        if held.stored is not None:
            self.saved(held.stored)
            raise Suspended(f"The trial is stored in {held.stored.path}.")
