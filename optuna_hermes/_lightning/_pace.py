"""Learning rate schedules that advance by samples when the batch size changes."""

from __future__ import annotations

import math
from collections.abc import Callable

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.suspend._elastic import ElasticReplay


class Pace:
    """Steps the schedulers of a ``fit`` as often in an epoch as with batches of the first size.

    A batch of twice the first size makes two steps of a schedule; of two batches of half that size,
    only the second makes one. So a schedule over a number of steps ends where it was meant to.
    Schedulers that watch a metric are still called once for each step of the optimizer.

    Args:
        trainer: its ``fit`` is in ``on_train_start``.
        replay: of its loader.
    """

    def __init__(self, trainer: Trainer, replay: ElasticReplay) -> None:
        self._trainer = trainer
        self._replay = replay
        self._made = self._due()

    def begin_epoch(self, replay: ElasticReplay) -> None:
        """Begin an epoch, whose loader may be another one."""
        self._replay, self._made = replay, 0

    def update(
        self, original: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        """Replacement for ``update_lr_schedulers`` of Lightning's epoch loop."""
        loop = self._trainer.fit_loop
        steps = 1
        if interval == "step" and not update_plateau_schedulers and not loop._should_accumulate():
            due = self._due()
            steps, self._made = due - self._made, due
        for _ in range(steps):
            original(interval, update_plateau_schedulers)

    def _due(self) -> int:
        """Steps that this epoch's trained samples would have made in batches of the first size."""
        replay, windows = self._replay, self._trainer.accumulate_grad_batches
        if self._trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            return math.ceil(replay.batches_of(replay.samples, replay.first_size) / windows)
        return replay.seen // replay.first_size // windows
