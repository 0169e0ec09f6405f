"""State of Lightning's own callbacks that their ``state_dict`` lacks."""

from __future__ import annotations

from typing import Any

from optuna_hermes._lightning._namespace import (
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Trainer,
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
            # It swaps the scheduler where an epoch begins, but a trial may resume within one.
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
        vars(callback).update(saved)


def _known(trainer: Trainer) -> list[tuple[Callback, tuple[str, ...]]]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # it is set by a connector
    return [
        (callback, names)
        for callback in callbacks
        for kind, names in _FIELDS.items()
        if isinstance(callback, kind)
    ]


def expect_suspension(trainer: Trainer) -> None:
    """Keep Lightning from saving a checkpoint for the exception by which a trial leaves."""
    # OnExceptionCheckpoint and ``save_on_exception`` would take ``Suspended`` for a failure.
    for callback in trainer.checkpoint_callbacks:
        vars(callback)["on_exception"] = lambda *args: None
