"""Trainings whose batch size may change between two batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from optuna_hermes._lightning._clocks import show_length
from optuna_hermes._lightning._namespace import GradientAccumulationScheduler, Trainer, callbacks_of
from optuna_hermes._lightning._schedules import Pace, scale_rates, unscalable
from optuna_hermes._lightning._trainer_hooks import TrainerHooks, clean
from optuna_hermes._lightning._units import Units
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import BatchSizes
from optuna_hermes.suspend import kept_rng
from optuna_hermes.suspend._loaders._elastic import ElasticSampler, why_not_regrouped
from optuna_hermes.suspend._loaders._sampler import ResumableSampler

Scaling = Literal["linear", "sqrt", "accumulate"]


class Stopwatch:
    """Measures the time from the end of a batch to the end of the next one."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[int, float]] = {}
        self._last_end: float | None = None

    @property
    def seconds(self) -> dict[int, float]:
        """Mean seconds of a batch, by the sizes that were trained."""
        return {size: spent / batches for size, (batches, spent) in self._spent.items()}

    def batch_ended(self, size: int) -> None:
        """Measure the time of a batch; the first one after an interruption does not count."""
        now = time.monotonic()
        if self._last_end is not None:
            batches, spent = self._spent.get(size, (0, 0.0))
            self._spent[size] = batches + 1, spent + now - self._last_end
        self._last_end = now

    def interrupted(self) -> None:
        """Stop the watch: something other than training comes next."""
        self._last_end = None


class ElasticBatch:
    """Changes the batch size of a trial, and scales learning rates or accumulation with it.

    Raises:
        InvalidInputError: the limits or the scaling are invalid.
    """

    def __init__(self, limits: tuple[int, int], scaling: str, trial: str) -> None:
        given: Any = limits
        kinds = [type(each) for each in given] if isinstance(given, Iterable) else []
        if kinds != [int, int] or not 1 <= limits[0] <= limits[1]:
            raise InvalidInputError(
                "elastic_batch must be two whole numbers of 1 or more, the smallest batch size and "
                f"the largest, but is {limits!r}."
            )
        if scaling not in get_args(Scaling):
            raise InvalidInputError(
                f"batch_scaling must be one of {', '.join(get_args(Scaling))} but is {scaling!r}."
            )
        self._limits = limits
        self._scaling = scaling
        self._name = trial
        self._replay: ElasticSampler | None = None
        self._trainer: Trainer | None = None
        self._pace: Pace | None = None
        self._windows = 1
        self._fixed = False
        self._wanted: int | None = None
        self.watch = Stopwatch()

    def refused(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"HermesCallback(elastic_batch={self._limits}) needs batches of any size, but "
            f"those of {self._name} cannot change: {reason}. Mend that, or leave elastic_batch out."
        )

    # -- around a fit --------------------------------------------------------------------------

    def replay(
        self, trainer: Trainer, loader: DataLoader[Any], trained: Callable[[], int]
    ) -> ResumableSampler:
        """Make the ``ResumableSampler`` of a training loader; a fit may make its loader anew."""
        if why_not_regrouped(loader) is not None:
            return ResumableSampler(loader, trained)
        combined, samples = trainer.fit_loop._combined_loader, limited_samples(trainer, loader)
        assert combined is not None
        combined.limits = None  # they count batches, but an epoch must keep its samples
        before, self._replay = self._replay, ElasticSampler(loader, trained, samples)
        if before is not None:
            self._replay.begin_with(before.size)
        return self._replay

    def begin(self, trainer: Trainer, hooks: TrainerHooks, params: Mapping[str, Any]) -> None:
        """Check that the batch size can change; for ``on_train_start``."""
        reason = why_not_elastic(trainer, self._scaling)
        if reason is not None:
            raise self.refused(reason)
        assert self._replay is not None
        first = self._replay.first_size
        if not self._limits[0] <= first <= self._limits[1]:
            raise InvalidInputError(
                f"The loader's batch_size must lie within elastic_batch={self._limits} but is "
                f"{first}: let it begin with a size that is allowed."
            )
        self._trainer = trainer
        self._windows = trainer.accumulate_grad_batches
        # A batch size that the study searches is part of what it compares: it stays.
        self._fixed = _is_searched(first, params)
        self.watch.interrupted()
        if self._scaling != "accumulate" and trainer.lightning_module.automatic_optimization:
            self._pace = Pace(trainer, self._replay)
            epoch_loop = trainer.fit_loop.epoch_loop
            original = epoch_loop.update_lr_schedulers
            hooks.override(epoch_loop, "update_lr_schedulers", self._pace.update, original)

    def begin_epoch(self) -> None:
        """Begin an epoch, all of which has the present batch size for now."""
        self.watch.interrupted()
        if self._replay is not None and self._trainer is not None:
            self._replay.rewind()
            combined = self._trainer.fit_loop._combined_loader
            assert combined is not None
            combined.limits = None  # Lightning may have reloaded the loader, and set it again
            self._show_length()
            if self._pace is not None:
                self._pace.begin_epoch(self._replay)

    def sizes(self, units: Units) -> BatchSizes | None:
        """The batch sizes that the trial may be given, None if its size cannot change."""
        trainer = self._trainer
        if self._fixed or self._replay is None or trainer is None:
            return None
        now = self._replay.size  # may lie outside of the limits: the script may have changed them
        epochs = units.epochs_each(trainer)
        return BatchSizes(
            now=now,
            least=min(self._limits[0], now),
            most=max(self._most(), now),
            seconds=self.watch.seconds,
            unit_samples=None if epochs is None else round(self._replay.samples * epochs),
        )

    # -- between two batches -------------------------------------------------------------------

    def follow(self, wanted: int | None) -> int | None:
        """Change to the requested size, before a fetch; return the one that it changes to."""
        if wanted is None or wanted == self._wanted:
            return None
        replay, trainer = self._running
        size = self._nearest(wanted)
        if self._fixed or size == replay.size:
            self._wanted = wanted
            return None
        if not clean(trainer) or not self._can_begin(size):
            return None
        self._wanted = wanted
        self._change(size)
        return size

    def _can_begin(self, size: int) -> bool:
        """True if batches of this size may begin here; if not, they may at a later point."""
        replay, trainer = self._running
        if self._scaling == "accumulate":  # Lightning counts batches from the epoch's beginning
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            if batches % self._batches_a_step(size):
                return False
        left = replay.left
        return replay.batches_of(left, size) > 0 and not replay.ends_alone(left, size)

    @property
    def _running(self) -> tuple[ElasticSampler, Trainer]:
        assert self._replay is not None
        assert self._trainer is not None
        return self._replay, self._trainer

    def _change(self, size: int) -> None:
        replay, trainer = self._running
        before = replay.size
        loop = trainer.fit_loop
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        assert fetcher is not None
        assert combined is not None
        with kept_rng():  # making an iterator draws a seed for its workers
            replay.resize(size)
            combined.reset()
            iter(fetcher)
        # iter() has reset the count, but the epoch's length includes its trained batches.
        fetcher.fetched += loop.epoch_loop.batch_progress.current.ready
        self._show_length()
        if self._scaling == "accumulate":
            trainer.accumulate_grad_batches = self._batches_a_step(size)
        else:
            factor = size / before if self._scaling == "linear" else math.sqrt(size / before)
            schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
            scale_rates(trainer.optimizers, schedulers, factor)
        show_length(trainer)
        self.watch.interrupted()

    def _show_length(self) -> None:
        """Set the epoch's number of batches where Lightning reads it."""
        replay, trainer = self._running
        trainer.fit_loop.max_batches = trainer.val_check_batch = len(replay)

    # -- sizes ---------------------------------------------------------------------------------

    def _most(self) -> int:
        replay, _ = self._running
        most = min(self._limits[1], max(replay.samples, replay.first_size))
        if self._scaling == "accumulate":
            most = min(most, replay.first_size * self._windows)
        return most

    def _nearest(self, wanted: int) -> int:
        """The possible size nearest below the requested one, or else above it."""
        least, most = self._limits[0], self._most()
        size = max(least, min(most, wanted))
        below, above = range(size, least - 1, -1), range(size + 1, most + 1)
        return next(each for each in chain(below, above) if self._fits(each))

    def _fits(self, size: int) -> bool:
        """True if whole epochs may have this size; the first size always fits."""
        replay, _ = self._running
        if self._scaling == "accumulate" and replay.first_size * self._windows % size:
            return False
        return not replay.ends_alone(replay.samples, size)

    def _batches_a_step(self, size: int) -> int:
        return self._running[0].first_size * self._windows // size

    # -- speed ---------------------------------------------------------------------------------

    def batch_ended(self) -> None:
        if self._replay is not None:
            self.watch.batch_ended(self._replay.size)


def limited_samples(trainer: Trainer, loader: DataLoader[Any]) -> int | None:
    """The samples of an epoch to which ``limit_train_batches`` limits a loader; None for all."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    limit = math.inf if combined.limits is None else combined.limits[0]
    return None if limit >= len(loader) else int(limit) * int(loader.batch_size or 1)


def _is_searched(size: int, params: Mapping[str, Any]) -> bool:
    """True if the batch size is a parameter of its trial, judged by name and value."""
    return any(
        "batch" in name.lower() and type(value) is int and value == size
        for name, value in params.items()
    )


def why_not_elastic(trainer: Trainer, scaling: str) -> str | None:
    """The reason why the batch size of a ``fit`` cannot change, None if it can."""
    loader_reason = _why_not_loader(trainer)
    if loader_reason is not None:
        return loader_reason
    if trainer.max_steps >= 0:
        return "max_steps counts steps, and would be another number of samples"
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        return "its validations are not at the ends of epochs"
    if callbacks_of(trainer, GradientAccumulationScheduler):
        return "GradientAccumulationScheduler changes its steps too"
    if scaling != "accumulate" and trainer.global_step == 0:  # one that has begun goes on
        own = unscalable(each.scheduler for each in trainer.lr_scheduler_configs)
        if own is not None:
            return f"its {type(own).__name__} sets rates that do not follow the optimizer's"
    if not trainer.lightning_module.automatic_optimization:
        return "it optimizes by hand" if scaling == "accumulate" else None
    if scaling == "accumulate":
        itself = trainer.strategy.handles_gradient_accumulation
        return "its strategy accumulates gradients by itself" if itself else None
    paced = [each for each in trainer.lr_scheduler_configs if not each.reduce_on_plateau]
    if any(each.interval == "step" and each.frequency != 1 for each in paced):
        return "a scheduler of it steps after every few batches (frequency)"
    return None


def _why_not_loader(trainer: Trainer) -> str | None:
    combined = trainer.fit_loop._combined_loader
    if trainer.world_size > 1:
        return "it trains in several processes"
    if combined is None or len(combined.flattened) != 1:
        return "it must have one train loader"
    if trainer.overfit_batches:  # type: ignore[attr-defined]  # it is set by a connector
        return "overfit_batches repeats some of its batches"
    sampler = getattr(combined.flattened[0], "batch_sampler", None)
    if not isinstance(sampler, ElasticSampler):
        return why_not_regrouped(combined.flattened[0]) or "its train loader is another one"
    return None
