"""The only place that touches what Lightning does not promise; each piece is pinned by a test.

The point between two batches, right before the next one is fetched, is the one at which nothing of
Lightning is half done: optimizers, schedulers, loggers and a validation that was due are through.
What is saved there and put back there, in the same place of another process, leaves no trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import RestartStage
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from optuna_hermes.suspend._loader import Replay
from optuna_hermes.suspend._state import moved, on_device, plain

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "torch.mean": torch.mean,
    "torch.sum": torch.sum,
    "torch.max": torch.max,
    "torch.min": torch.min,
    "sum": sum,
}
_CONNECTOR = (
    "_callback_metrics",
    "_logged_metrics",
    "_progress_bar_metrics",
    "_first_loop_iter",
    "_current_fx",
)
_NOT_PLAIN = ("reduce_fx", "_sync")


class Wiring:
    """What hangs in one trainer for the time of one ``fit``.

    Args:
        trainer: its ``fit`` is in the ``setup`` hook.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._replays: list[tuple[Any, Replay]] = []
        self._overridden: list[tuple[object, str]] = []
        fit_loop = trainer.fit_loop
        load_states = fit_loop._load_combined_loader_states
        self._override(fit_loop, "_load_combined_loader_states", self._on_loaders, load_states)

    def resume_from(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Make ``fit`` go on from a checkpoint, whatever ``ckpt_path`` it was given."""
        connector = self._trainer._checkpoint_connector
        self._override(connector, "resume_start", self._resume_start, checkpoint, path)

    def skip_finished_validation(self) -> None:
        """Go straight to the next fetch: the validation that was due has been done.

        To be called in ``on_train_start`` of a ``fit`` that was resumed.
        """
        self._trainer.fit_loop.epoch_loop._restart_stage = RestartStage.NONE

    def between_batches(self, call: Callable[[], None]) -> None:
        """Call a function before each fetch of a batch, from ``on_train_start`` on."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._override(epoch_loop, "_on_before_fetch", _in_turn, call, epoch_loop._on_before_fetch)

    def remove(self) -> None:
        """Leave the trainer and its loaders as they were."""
        while self._overridden:
            owner, name = self._overridden.pop()
            vars(owner).pop(name, None)
        for loader, replay in self._replays:
            self._show_state(loader, None)
            replay.unwrap()
        self._replays = []

    def dump(self) -> dict[str, Any]:
        """The checkpoint that Lightning would write, with the position of the loaders."""
        trainer = self._trainer
        with self._resumable_loaders():
            checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(
                weights_only=False
            )
        # The objective makes the module itself; its arguments need not be loadable.
        for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
            if owner is not None and not plain(checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)):
                checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_KEY, None)
        return checkpoint

    def hide_loader_states(self) -> None:
        """From the first batch on: a user's own checkpoints must load without this package."""
        for loader, _ in self._replays:
            self._show_state(loader, None)

    def _override(self, owner: object, name: str, call: Callable[..., Any], *args: Any) -> None:
        vars(owner)[name] = functools.partial(call, *args)
        self._overridden.append((owner, name))

    def _on_loaders(self, load_states: Callable[[], None]) -> None:
        """New training loaders are there, and no iterator of them yet."""
        fit_loop = self._trainer.fit_loop
        progress = fit_loop.epoch_loop.batch_progress
        combined = fit_loop._combined_loader
        known = {id(loader) for loader, _ in self._replays}
        for loader in combined.flattened if combined is not None else []:
            if id(loader) not in known and Replay.fits(loader) and not _stateful(loader):
                replay = Replay(loader, lambda: int(progress.current.ready))
                self._replays.append((loader, replay))
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
            for loader, replay in self._replays:
                self._show_state(loader, replay)
                # Workers draw the indices as soon as there is an iterator.
                _set_epoch(loader, fit_loop)
        load_states()

    def _resume_start(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        checkpoint_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        connector = self._trainer._checkpoint_connector
        vars(connector).pop("resume_start")  # learning rate finders restore their own later
        connector._ckpt_path = str(path)
        connector._loaded_checkpoint = checkpoint
        for callback in self._trainer.checkpoint_callbacks:
            # A new logger has a new version and so a new folder; the best models are in the old.
            saved = checkpoint["callbacks"].get(callback.state_key, {}).get("dirpath")
            if isinstance(callback, ModelCheckpoint) and saved:
                callback.dirpath = saved

    @contextlib.contextmanager
    def _resumable_loaders(self) -> Iterator[None]:
        for loader, replay in self._replays:
            self._show_state(loader, replay)
        try:
            yield
        finally:
            self.hide_loader_states()

    @staticmethod
    def _show_state(loader: Any, replay: Replay | None) -> None:
        """Let Lightning find that a loader is stateful, or not."""
        for name in ("state_dict", "load_state_dict"):
            vars(loader).pop(name, None)
            if replay is not None:
                vars(loader)[name] = getattr(replay, name)


def why_not_storable(trainer: Trainer) -> str | None:
    """Why a run cannot be put on disk exactly, None if it can; for ``on_train_start``."""
    fit_loop = trainer.fit_loop
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    if trainer.world_size > 1:
        return "it trains in more than one process"
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes the iterator of the loader"
    if fetcher is None or combined is None or len(combined.flattened) != 1:
        return "it must have one train loader"
    if fetcher.length is None:
        return "the length of its train loader is unknown"
    loader = combined.flattened[0]
    if not _stateful(loader) and not Replay.fits(loader):
        return "its train loader is neither a DataLoader over a map-style data set nor stateful"
    return None


def clean(trainer: Trainer) -> bool:
    """Whether a checkpoint may be taken between batches: no gradients are being accumulated."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def batches_done(trainer: Trainer) -> int:
    """Training batches since the run began."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)


def validated_names(trainer: Trainer) -> set[str]:
    """Names of the metrics logged by the validation that ends; for ``on_validation_end``."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    return {
        name
        for item in results.result_metrics
        if not item.has_reset
        for name in results._forked_name(item, False)
    }


def leave_out(trainer: Trainer, seconds: float) -> None:
    """Take time that was not spent on training out of what counts time."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            for stage, start in callback._start_time.items():
                callback._start_time[stage] = None if start is None else start + seconds
        elif isinstance(callback, ModelCheckpoint) and callback._last_time_checked is not None:
            callback._last_time_checked += seconds
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        trainer._last_val_time += seconds  # type: ignore[attr-defined]  # it is set in ``fit``


# -- what a checkpoint of Lightning lacks ------------------------------------------------------


def loop_state(trainer: Trainer) -> dict[str, Any]:
    """What Lightning knows between two batches and does not save."""
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    return {
        "batches_that_stepped": epoch_loop._batches_that_stepped,
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "validation": epoch_loop.val_loop.batch_progress.state_dict(),
        "validated": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        "reloaded": [
            trainer.fit_loop._last_train_dl_reload_epoch,
            epoch_loop.val_loop._last_val_dl_reload_epoch,
        ],
        "connector": {name: getattr(trainer._logger_connector, name) for name in _CONNECTOR},
        "results": [_result_state(key, item) for key, item in epoch_loop._results.items()],
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
        "evaluating": [name for name, part in module.named_modules() if not part.training],
        **_attributes(module),
        "gradients": {} if module.automatic_optimization else _gradients(module),
    }


def restore_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Put it back; to be called before the first fetch of a ``fit`` that was resumed."""
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    state = {**moved(state, module.device), "attributes": state["attributes"]}
    epoch_loop._batches_that_stepped = state["batches_that_stepped"]
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    epoch_loop.val_loop.batch_progress.load_state_dict(state["validation"])
    epoch_loop.val_loop._seen_batches_per_dataloader.update(state["validated"])
    trainer.fit_loop._last_train_dl_reload_epoch = state["reloaded"][0]
    epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"][1]
    for name, value in state["connector"].items():
        setattr(trainer._logger_connector, name, value)
    for name, metric in _metrics(module):
        if name in state["metrics"]:
            _restore_metric(metric, state["metrics"][name])
    _restore_results(trainer, epoch_loop._results, state["results"])
    for name, part in module.named_modules():
        part.training = name not in state["evaluating"]
    for name, value in {**state["attributes"], **state["device_attributes"]}.items():
        _restore_attribute(module, name, value)
    for name, parameter in module.named_parameters():
        if name in state["gradients"]:
            parameter.grad = state["gradients"][name]


def _metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {
        "states": dict(metric.metric_state),
        "updates": metric._update_count,
        "computed": metric._computed if plain(metric._computed) else None,
        "forward": metric._forward_cache if plain(metric._forward_cache) else None,
    }


def _restore_metric(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = state["computed"]
    metric._forward_cache = state["forward"]


def _result_state(key: str, item: _ResultMetric) -> dict[str, Any]:
    reduce_fx, sync = item.meta.reduce_fx, item.meta.sync
    return {
        "key": key,
        "meta": {k: v for k, v in vars(item.meta).items() if k not in _NOT_PLAIN},
        "reduce_fx": next(name for name, known in _REDUCTIONS.items() if known is reduce_fx),
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": item.is_tensor,
        "has_reset": item.has_reset,
        "metric": _metric_state(item),
    }


def _restore_results(
    trainer: Trainer, results: _ResultCollection, states: list[dict[str, Any]]
) -> None:
    results.clear()
    module = trainer.lightning_module
    for state in states:
        meta = _Metadata(**state["meta"], reduce_fx=_REDUCTIONS[state["reduce_fx"]])
        meta.sync = _Sync(fn=trainer.strategy.reduce, **state["sync"])
        item = _ResultMetric(meta, state["is_tensor"])
        if meta.metric_attribute is not None:
            item.value = module.get_submodule(meta.metric_attribute)
        item.has_reset = state["has_reset"]
        _restore_metric(item, state["metric"])
        results[state["key"]] = item


@functools.cache
def _own_attributes() -> frozenset[str]:
    """What every LightningModule has, which Lightning restores or sets up itself."""
    return frozenset(vars(LightningModule())) | {"_hparams_name", "_log_hyperparams"}


def _attributes(module: LightningModule) -> dict[str, dict[str, Any]]:
    """The numbers, tensors and lists that a user's module keeps in plain attributes."""
    kept: dict[str, dict[str, Any]] = {"attributes": {}, "device_attributes": {}}
    for name, value in vars(module).items():
        if name not in _own_attributes() and plain(value):
            kept["device_attributes" if on_device(value) else "attributes"][name] = value
    return kept


def _restore_attribute(module: LightningModule, name: str, value: Any) -> None:
    present = vars(module).get(name)
    # In place where it can be: the objective may hold the same list.
    if type(present) is list and type(value) is list:
        present[:] = value
    elif type(present) is dict and type(value) is dict:
        present.clear()
        present.update(value)
    else:
        setattr(module, name, value)


def _gradients(module: LightningModule) -> dict[str, torch.Tensor]:
    """Whoever optimizes by hand may accumulate by hand."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _stateful(loader: object) -> bool:
    return callable(getattr(loader, "state_dict", None))


def _set_epoch(loader: Any, fit_loop: Any) -> None:
    epoch = fit_loop.epoch_progress.current.processed
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
