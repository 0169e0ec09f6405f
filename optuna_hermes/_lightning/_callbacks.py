"""Lightning's own callbacks: their unsaved state, and those that train to find a setting."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from optuna_hermes._lightning._namespace import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    LearningRateMonitor,
    LightningModule,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Trainer,
    callbacks_of,
    part,
)

_FIELDS: dict[type[Callback], tuple[str, ...]] = {
    LearningRateMonitor: ("lrs", "last_momentum_values", "last_weight_decay_values"),
    ModelCheckpoint: (
        "_defer_save_until_validation",
        "_last_checkpoint_saved",
        "_last_global_step_saved",
        "current_score",
    ),
    StochasticWeightAveraging: ("_initialized",),
}

log = logging.getLogger(__name__)


def callback_state(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Unsaved attributes, by the callback's ``state_key``."""
    return {
        callback.state_key: {name: vars(callback)[name] for name in names if name in vars(callback)}
        for callback, names in _known(trainer)
    }


def restore_callbacks(trainer: Trainer, state: dict[str, dict[str, Any]]) -> None:
    """Restore what ``callback_state`` returned; to be called before the first fetch."""
    for callback, _ in _known(trainer):
        saved = state.get(callback.state_key, {})
        if isinstance(callback, StochasticWeightAveraging) and saved.get("_initialized"):
            # It swaps the scheduler where an epoch begins, but a trial may resume within one. The
            # class's own hook: that of a user's subclass was called by the earlier process.
            kind = part(trainer, "callbacks").StochasticWeightAveraging
            kind.on_train_epoch_start(callback, trainer, trainer.lightning_module)
        vars(callback).update(saved)


def restore_models(trainer: Trainer, callback: ModelCheckpoint, saved: dict[str, Any]) -> bool:
    """Let a callback go on with the models of the earlier process, before its state is loaded.

    Args:
        saved: its ``state_dict``, from which models are removed that are gone: the trial was on
            another host, its process was killed once it had replaced them, or its objective has
            deleted them.

    Returns:
        True if some of them are gone.
    """
    folder = saved.get("dirpath")
    if not folder:
        return False
    if "://" in folder or os.path.isdir(folder):
        # Its own folder would be that of the new logger's version, without the models.
        callback.dirpath = folder
    else:
        saved["dirpath"] = callback.dirpath
    best, models = saved.get("best_model_path", ""), saved.get("best_k_models", {})
    gone = {path for path in (best, *models) if path and "://" not in path}
    gone = {path for path in gone if not os.path.exists(path)}
    if not gone:
        return False
    if trainer.is_global_zero:
        log.warning(
            "%d of the models in %s are gone, as the trial was on another host, its process was "
            "killed, or its objective deletes them when it begins: ModelCheckpoint goes on without "
            "them in %s.",
            len(gone),
            folder,
            callback.dirpath,
        )
    saved["best_k_models"] = left = {n: score for n, score in models.items() if n not in gone}
    if best in gone:
        choose = min if callback.mode == "min" else max
        saved["best_model_path"] = best = choose(left, key=left.__getitem__, default="")
        saved["best_model_score"] = left.get(best)
    return True


def _known(trainer: Trainer) -> list[tuple[Callback, tuple[str, ...]]]:
    kinds = _FIELDS.items()
    return [(each, names) for kind, names in kinds for each in callbacks_of(trainer, kind)]


def move_before_checkpoints(trainer: Trainer, callback: Callback) -> None:
    """Place a callback before those that save models, as Lightning does where a Trainer is made.

    An appended one would be told after them that a trial leaves, and report after they have saved.
    """
    callbacks = callbacks_of(trainer)
    if callback not in callbacks:  # another callback calls its hooks
        return
    own = callbacks.index(callback)
    first = min(map(callbacks.index, trainer.checkpoint_callbacks), default=own)
    if first < own:
        # A new list: hooks are being called for each in the one before.
        others = [*callbacks[:own], *callbacks[own + 1 :]]
        vars(trainer)["callbacks"] = [*others[:first], callback, *others[first:]]


def expect_suspension(trainer: Trainer) -> None:
    """Keep Lightning from saving a checkpoint for the exception by which a trial leaves."""
    # OnExceptionCheckpoint and ``save_on_exception`` would take ``Suspended`` for a failure.
    for callback in trainer.checkpoint_callbacks:
        vars(callback)["on_exception"] = lambda *args: None


def tunes(trainer: Trainer | None, callback: Callback) -> bool:
    """True while a callback trains to find a setting, for which it removes all others."""
    return callback not in getattr(trainer, "callbacks", ())  # asked before every batch


def found_by(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """The settings that such callbacks have found, by ``state_key``; of others there is none."""
    found: dict[str, Any] = {}
    for each in callbacks:
        if isinstance(each, LearningRateFinder) and each.optimal_lr is not None:
            found[each.state_key] = vars(each.optimal_lr)
        elif isinstance(each, BatchSizeFinder):
            found[each.state_key] = {"batch_size": each.optimal_batch_size}
    return found


def skip_tuners(
    trainer: Trainer, found: dict[str, Any]
) -> Iterator[tuple[Callback, Callable[..., None]]]:
    """Yield the callbacks that need not search again, with a replacement for ``on_fit_start``."""
    for each in callbacks_of(trainer):
        if isinstance(each, LearningRateFinder | BatchSizeFinder):
            yield each, functools.partial(_take, each, found.get(each.state_key))


def search_of(trainer: Trainer) -> Callback | None:
    """The callback for whose search alone Lightning's ``Tuner`` calls ``fit``, else None."""
    kinds = LearningRateFinder | BatchSizeFinder
    finders = (each for each in callbacks_of(trainer) if isinstance(each, kinds))
    return next((each for each in finders if each._early_exit), None)


def skip_search(trainer: Trainer, finder: Callback, found: dict[str, Any]) -> None:
    """Let such a callback take what it found in an earlier process, and end its ``fit``.

    Where ``found_by`` has found nothing of it, it searches again.
    """
    if finder.state_key not in found:
        return
    take = dict(skip_tuners(trainer, found))[finder]

    def take_and_end(trainer: Trainer, module: LightningModule) -> None:
        take(trainer, module)
        raise part(trainer, "utilities.exceptions")._TunerExitException

    vars(finder)["on_fit_start"] = take_and_end


def _take(
    finder: LearningRateFinder | BatchSizeFinder,
    found: dict[str, Any] | None,
    trainer: Trainer,
    module: LightningModule,
) -> None:
    if found is None:
        return
    parsing = part(trainer, "utilities.parsing")
    if isinstance(finder, LearningRateFinder):
        tuner = part(trainer, "tuner.lr_finder")
        finder.optimal_lr = result = tuner._LRFinder.__new__(tuner._LRFinder)
        vars(result).update(found)
        rate = result.suggestion() if finder._update_attr else None
        if rate is not None:  # for the module only: optimizers get it with their state
            name = tuner._determine_lr_attr_name(module, finder._attr_name)
            parsing.lightning_setattr(module, name, rate)
    else:
        finder.optimal_batch_size = found["batch_size"]
        parsing.lightning_setattr(module, finder._batch_arg_name, found["batch_size"])
        # They may have been made with the size before: Lightning makes them again.
        loop = trainer.fit_loop
        loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None
