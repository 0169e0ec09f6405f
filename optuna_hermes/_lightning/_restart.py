"""The point within an epoch at which a resumed fit goes on, without repeating hooks.

From 2.5 on Lightning knows at which point of an epoch a checkpoint was taken. Before, it calls the
hooks of the epoch's beginning once more and, where a validation was due, runs that in the place of
the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optuna_hermes._lightning._namespace import Trainer, part

Override = Callable[..., None]
"""Replaces a method by a function with its first arguments; see ``Wiring``."""


def go_on_within_epoch(trainer: Trainer, override: Override) -> None:
    """Go straight to the next fetch; for ``on_train_start`` of a resumed fit."""
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    if hasattr(epoch_loop, "_restart_stage"):
        epoch_loop._restart_stage = "none"  # else it would validate once more
        return
    set_epoch = part(trainer, "loops.fit_loop")._set_sampler_epoch
    override(fit_loop, "on_advance_start", _take_up_epoch, fit_loop, set_epoch)
    override(epoch_loop, "on_run_start", _take_up_batches, epoch_loop, epoch_loop.on_run_start)


def _take_up_epoch(fit_loop: Any, set_epoch: Callable[..., None]) -> None:
    """Begin an epoch without its hooks; undoes its own override."""
    vars(fit_loop).pop("on_advance_start")
    fit_loop.setup_data()
    for loader in fit_loop._combined_loader.flattened:
        set_epoch(loader, fit_loop.epoch_progress.current.processed)
    current = fit_loop.epoch_progress.current
    current.ready = current.started = current.processed + 1


def _take_up_batches(epoch_loop: Any, begin: Callable[..., None], fetcher: Any) -> None:
    """Begin the batches, and end what differs in a resumed fit; undoes its own override."""
    vars(epoch_loop).pop("on_run_start")
    begin(fetcher)
    epoch_loop._restarting = False
