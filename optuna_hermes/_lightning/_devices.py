"""Trainings whose number of devices may change when they resume from disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from optuna_hermes._lightning._elastic import Stopwatch, limited_samples
from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes._lightning._trainer_hooks import TrainerHooks
from optuna_hermes._lightning._units import Units
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import BatchSizes
from optuna_hermes.suspend._loaders._elastic import DividedSampler, why_not_regrouped
from optuna_hermes.suspend._loaders._sampler import ResumableSampler
from optuna_hermes.suspend._state import seed_everything, trial_seed


class ElasticDevices:
    """Divides every batch of a trial among its present devices.

    Raises:
        InvalidInputError: ``most`` is less than one.
    """

    def __init__(self, most: int, trial: str) -> None:
        if type(most) is not int or most < 1:
            raise InvalidInputError(
                f"max_devices must be a whole number of 1 or more but is {most!r}."
            )
        self.seed: int | None = None
        """Seed of the order of samples and of new processes; the same for the whole trial."""
        self._most = most
        self._name = trial
        self.watch = Stopwatch()
        self._reason: str | None = None
        self._trainer: Trainer | None = None
        self._batch_size = 1
        self._samples = 1

    def refused(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"HermesCallback(max_devices={self._most}) needs a training that goes on with any "
            f"number of devices, but {self._name} cannot: {reason}. Mend that, or leave "
            "max_devices out."
        )

    # -- around a fit --------------------------------------------------------------------------

    def settle(self) -> None:
        """Fix the seed, in the process that starts all others."""
        if self.seed is None:
            self.seed = torch.initial_seed()

    def prepare(self, trainer: Trainer, hooks: TrainerHooks, devices: int) -> None:
        """Check the devices, and let all processes have the same loader; for ``setup``."""
        self.check(trainer.world_size, devices)
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader
        # Else Lightning would replace the training loader's sampler in each process.
        hooks.override(connector, "_prepare_dataloader", _unless_training, prepare)

    def check(self, given: int, devices: int) -> None:
        """Check that a trainer has as many devices as the lease."""
        if given != devices:
            raise self.refused(
                f"its lease has {devices}, and the Trainer was given {given} (use "
                "Trainer(**hermes.trainer_options), and leave devices, strategy and accelerator "
                "to it)"
            )

    def replay(
        self, trainer: Trainer, loader: DataLoader[Any], trained: Callable[[], int]
    ) -> ResumableSampler:
        self._reason = why_not_regrouped(loader)
        if self._reason is not None:
            return ResumableSampler(loader, trained)
        self.settle()
        assert self.seed is not None
        self._batch_size = int(loader.batch_size or 1)
        progress: Any = trainer.fit_loop.epoch_progress.current
        whole = len(loader.batch_sampler.sampler)  # type: ignore[union-attr]
        self._samples = limited_samples(trainer, loader) or whole
        return DividedSampler(
            loader,
            trained,
            epoch=lambda: int(progress.processed),
            seed=self.seed,
            rank=trainer.global_rank,
            count=trainer.world_size,
        )

    def begin(self, trainer: Trainer, hooks: TrainerHooks, params: Mapping[str, Any]) -> None:
        """Check that the number of devices can change; for ``on_train_start``."""
        combined = trainer.fit_loop._combined_loader
        if combined is None or len(combined.flattened) != 1:
            raise self.refused("it must have one train loader")
        loader = combined.flattened[0]
        if not isinstance(getattr(loader, "batch_sampler", None), DividedSampler):
            raise self.refused(self._reason or why_not_regrouped(loader) or "its loader is another")
        self._trainer = trainer
        self.watch.interrupted()

    def seed_new(self, trainer: Trainer) -> None:
        """Seed a process that did not exist when the checkpoint was written."""
        assert self.seed is not None
        # With the batches: a rank that ends and begins anew must not draw its numbers once more.
        rank = trial_seed(self.seed, trainer.global_rank)
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        seed_everything(trial_seed(rank, int(batches)))

    def begin_epoch(self) -> None:
        self.watch.interrupted()

    def sizes(self, units: Units) -> BatchSizes | None:
        """The sizes and devices that the trial may be given, None before training."""
        trainer, size = self._trainer, self._batch_size
        if trainer is None:
            return None
        epochs = units.epochs_each(trainer)
        return BatchSizes(
            now=size,
            least=size,
            most=size,
            seconds=self.watch.seconds,
            unit_samples=None if epochs is None else round(self._samples * epochs),
            most_devices=max(1, min(self._most, size)),
        )

    def follow(self, wanted: int | None) -> None:
        """Do nothing: the batch size never changes."""

    # -- speed ---------------------------------------------------------------------------------

    def batch_ended(self) -> None:
        self.watch.batch_ended(self._batch_size)


def _unless_training(
    prepare: Callable[..., object], loader: object, shuffle: bool, mode: str
) -> object:
    return loader if mode == "train" else prepare(loader, shuffle=shuffle, mode=mode)
