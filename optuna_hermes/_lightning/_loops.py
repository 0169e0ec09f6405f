"""Lightning's loops between two batches: state that checkpoints lack, and the way back there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

from optuna_hermes._lightning._callbacks import callback_state, restore_callbacks
from optuna_hermes._lightning._clocks import clock_state, restore_clocks
from optuna_hermes._lightning._namespace import (
    Trainer,
    _ResultCollection,
    _ResultMetric,
    callbacks_of,
    part,
)
from optuna_hermes.suspend._loaders._kinds import data_of, is_stream
from optuna_hermes.suspend._loop_code._code import classes_of
from optuna_hermes.suspend._modules._metrics import metric_state, metrics_in, restore_metric
from optuna_hermes.suspend._modules._module_state import beside_weights, put_beside_weights
from optuna_hermes.suspend._state import moved
from optuna_hermes.suspend._values._generators import (
    GeneratorOwner,
    holders_in,
    set_states,
    states_of,
)
from optuna_hermes.suspend._values._tree import with_plain_tensors

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "torch.mean": torch.mean,
    "torch.sum": torch.sum,
    "torch.max": torch.max,
    "torch.min": torch.min,
    "sum": sum,
    "max": max,
    "min": min,
}
_CONNECTOR = (
    "_callback_metrics",
    "_logged_metrics",
    "_progress_bar_metrics",
    "_first_loop_iter",
    "_current_fx",
)
_OF_SCHEDULES = ("interval", "frequency", "monitor")
_NOT_PLAIN = ("reduce_fx", "_sync")

Override = Callable[..., None]
"""Replaces a method by a function with its first arguments; see ``TrainerHooks``."""


def loop_state(trainer: Trainer) -> dict[str, Any]:
    """The unsaved state between two batches."""
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    return {
        "batches_that_stepped": epoch_loop._batches_that_stepped,
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "automatic_optimization": module.automatic_optimization,
        "schedules": [
            {name: getattr(config, name) for name in _OF_SCHEDULES}
            for config in trainer.lr_scheduler_configs
        ],
        "validation": epoch_loop.val_loop.batch_progress.state_dict(),
        "validated": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        "reloaded": [
            trainer.fit_loop._last_train_dl_reload_epoch,
            epoch_loop.val_loop._last_val_dl_reload_epoch,
        ],
        "connector": with_plain_tensors(
            {name: getattr(trainer._logger_connector, name) for name in _CONNECTOR}
        ),
        "results": [_result_state(key, item) for key, item in epoch_loop._results.items()],
        "data": states_of(_data_generators(trainer)),
        # Gradients, too: Lightning resets them when the next ``training_step`` is done, which may
        # read them. After a validation there are none.
        **beside_weights(module),
        "callbacks": with_plain_tensors(callback_state(trainer)),
        "clocks": clock_state(trainer),
    }


def restore_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore what ``loop_state`` returned, before the first fetch of a resumed ``fit``."""
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    restore_callbacks(trainer, state["callbacks"])
    put_beside_weights(module, state)
    restore_clocks(trainer, state["clocks"])
    # Generators' tensors may be on other devices than the module.
    state = {**state, **moved({k: v for k, v in state.items() if k != "data"}, module.device)}
    # Else Lightning would skip the schedulers that watch metrics at the end of this epoch.
    trainer.fit_loop._restarting = False
    epoch_loop._batches_that_stepped = state["batches_that_stepped"]
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    module.automatic_optimization = state["automatic_optimization"]
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedules"], strict=False):
        vars(config).update(saved)
    epoch_loop.val_loop.batch_progress.load_state_dict(state["validation"])
    # ``update``: Lightning made a defaultdict of it.
    epoch_loop.val_loop._seen_batches_per_dataloader.update(state["validated"])
    trainer.fit_loop._last_train_dl_reload_epoch = state["reloaded"][0]
    epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"][1]
    for name, value in state["connector"].items():
        setattr(trainer._logger_connector, name, value)
    set_states(_data_generators(trainer), state["data"])
    _restore_results(trainer, epoch_loop._results, state["results"])


def add_up(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Add the metrics that processes which no longer exist had accumulated in this epoch."""
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
    metrics = dict(metrics_in(module))
    for state in states:
        there = moved({key: state[key] for key in ("metrics", "results")}, module.device)
        for name, saved in there["metrics"].items():
            if name in metrics and saved["updates"]:
                _add(metrics[name], saved)
        for saved in there["results"]:
            item = results.get(saved["key"])
            if item is not None and item.is_tensor and item.meta.on_epoch:
                _add(item, saved["metric"])


def _add(metric: Metric, saved: dict[str, Any]) -> None:
    meta = getattr(metric, "meta", None)
    if meta is not None and (meta.is_max_reduction or meta.is_min_reduction):
        metric.value = meta.reduce_fx(metric.value, saved["states"]["value"])
        return
    metric._update_count += saved["updates"]
    metric._reduce_states(saved["states"])
    metric._computed = None


def _data_generators(trainer: Trainer) -> list[Any]:
    """The own generators of data sets and collate functions, as far as this process draws them."""
    training = trainer.fit_loop._combined_loader
    validation = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    trained = [] if training is None else training.flattened
    # Those of iterable data sets are restored by passing over batches.
    loaders = [loader for loader in trained if not is_stream(loader)]
    loaders += [] if validation is None else validation.flattened
    return [found for each in loaders for found in holders_in(*data_of(each))]


def code_of(trainer: Trainer) -> list[GeneratorOwner]:
    """The generators that classes of the user's module, its parts, data and callbacks draw from."""
    data = getattr(trainer, "datamodule", None)
    every = (*trainer.lightning_module.modules(), data, *callbacks_of(trainer))
    return holders_in(*classes_of(every))


def _result_state(key: str, item: _ResultMetric) -> dict[str, Any]:
    reduce_fx, sync = item.meta.reduce_fx, item.meta.sync
    return {
        "key": key,
        "meta": {k: v for k, v in vars(item.meta).items() if k not in _NOT_PLAIN},
        "reduce_fx": next(name for name, known in _REDUCTIONS.items() if known is reduce_fx),
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": item.is_tensor,
        "has_reset": item.has_reset,
        "metric": metric_state(item),
    }


def _restore_results(
    trainer: Trainer, results: _ResultCollection, states: list[dict[str, Any]]
) -> None:
    results.clear()
    module = trainer.lightning_module
    made_of = part(trainer, "trainer.connectors.logger_connector.result")
    for state in states:
        meta = made_of._Metadata(**state["meta"], reduce_fx=_REDUCTIONS[state["reduce_fx"]])
        # Functions are not stored: this process's strategy provides its own.
        meta.sync = made_of._Sync(fn=trainer.strategy.reduce, **state["sync"])
        item = made_of._ResultMetric(meta, state["is_tensor"])
        if meta.metric_attribute is not None:
            item.value = module.get_submodule(meta.metric_attribute)
        item.has_reset = state["has_reset"]
        restore_metric(item, state["metric"])
        results[state["key"]] = item


def go_on_within_epoch(trainer: Trainer, override: Override) -> None:
    """Go straight to the next fetch; for ``on_train_start`` of a resumed fit."""
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    # From 2.5 on Lightning knows at which point of an epoch a checkpoint was taken. Before, it
    # calls the hooks of the epoch's beginning once more and, where a validation was due, validates
    # in the place of the next batch.
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
    vars(epoch_loop)["on_run_start"] = begin
    begin(fetcher)
    epoch_loop._restarting = False
