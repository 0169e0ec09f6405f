"""Hooks in a Trainer: the point between two batches, and a fit's way back there.

Right before a batch is fetched, nothing in Lightning is half done: optimizers, schedulers, loggers
and a validation that was due are through. A state that is saved there and restored at the same
point of another process leaves no trace.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optuna_hermes._lightning._callbacks import restore_models
from optuna_hermes._lightning._fit_loaders import FitLoaders, LoaderMaking
from optuna_hermes._lightning._module_hooks import (
    LOAD,
    SAVE,
    load_by_callbacks,
    load_by_module,
    saved_by_hooks,
    savers,
    with_objects,
    without_hook,
)
from optuna_hermes._lightning._namespace import (
    LightningModule,
    ModelCheckpoint,
    SpikeDetection,
    Trainer,
    callbacks_of,
    part,
)
from optuna_hermes._lightning._optimizers import follow_references, optimizers_of
from optuna_hermes._lightning._pruning import prune, without_masks
from optuna_hermes._lightning._settings import TrainerSettings
from optuna_hermes._lightning._shape import FitParts
from optuna_hermes._lightning._unsaved import unsaved
from optuna_hermes.suspend._loaders._sampler import ResumableSampler
from optuna_hermes.suspend._modules._module_state import kept_groups, make_room
from optuna_hermes.suspend._state import plain
from optuna_hermes.suspend._values._tree import with_plain_tensors


class TrainerHooks:
    """The hooks in one trainer for one ``fit``; for ``replay`` see ``FitLoaders``."""

    def __init__(
        self, trainer: Trainer, trial: str, replay: Callable[..., ResumableSampler] | None
    ) -> None:
        self.trainer = trainer
        self.lacks_models = False
        """True if ``ModelCheckpoint`` has saved some before the fit was resumed that are gone."""
        self.shape = FitParts(trainer)
        self.settings = TrainerSettings(trainer)
        self.unsaved = unsaved(trainer)
        self._masks: dict[str, Any] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._users_path: Any = None
        self._overridden: list[tuple[object, str]] = []
        self._trains = False
        """True once the fit has begun: what begins later is the search of a callback within it."""
        making = LoaderMaking(trainer, self.settings, self.unsaved)
        self.loaders = FitLoaders(making, trial, self.override, replay)
        begin, connector = trainer.fit_loop.on_run_start, trainer._checkpoint_connector
        self.override(trainer.fit_loop, "on_run_start", self._begin_run, begin)
        start, restore = connector.resume_start, connector.restore_training_state
        self.override(connector, "resume_start", self._start, start)
        self.override(connector, "restore_training_state", self._restore_training_state, restore)

    def override(self, owner: object, name: str, call: Callable[..., Any], *args: Any) -> None:
        """Replace a method of an object by a function with these first arguments."""
        # On the object, not its class: other trainers of this process keep the original.
        vars(owner)[name] = functools.partial(call, *args)
        self._overridden.append((owner, name))

    def resume_from(
        self, checkpoint: dict[str, Any], path: Path, hooked: dict[str, Any] | None, *, strict: bool
    ) -> None:
        """Make ``fit`` resume from a checkpoint, also if it was given a ``ckpt_path``.

        ``hooked`` is what ``dump`` returned for ``on_load_checkpoint``, None for the same;
        ``strict`` is False for a checkpoint that lacks weights.
        """
        connector = self.trainer._checkpoint_connector
        seen, restore = checkpoint if hooked is None else hooked, connector.restore_model
        self.override(connector, "resume_start", self._resume_start, checkpoint, seen, path)
        self.override(connector, "restore_model", self._restore_model, restore, seen, strict)

    def between_batches(self, call: Callable[[], None]) -> None:
        """Call a function before each fetch of a batch, from ``on_train_start`` on."""
        self._trains = True
        epoch_loop = self.trainer.fit_loop.epoch_loop
        self.override(epoch_loop, "_on_before_fetch", _in_turn, call, epoch_loop._on_before_fetch)

    def follow_sync_dist(self) -> None:
        """Take over ``sync_dist`` of restored metrics from the module's next call of ``log``."""
        # Lightning refuses a metric whose ``sync_dist`` has changed, and does not store the
        # argument where there is one process only.
        results = self.trainer.fit_loop.epoch_loop._results
        self.override(results, "log", _follow, results, set(results), results.log)

    def remove(self) -> None:
        """Remove all hooks from the trainer and its loaders."""
        while self._overridden:
            owner, name = self._overridden.pop()
            vars(owner).pop(name, None)  # shows the class's method again
        self.loaders.remove_hooks()

    def dump(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The checkpoint that Lightning would write, with the position of the loaders.

        It is the same whatever ``on_save_checkpoint`` of the module and the callbacks do; what
        these make of it is returned beside it, for ``on_load_checkpoint``.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        self.loaders.show_positions()
        try:
            with without_hook(savers(trainer), SAVE):
                dump = trainer._checkpoint_connector.dump_checkpoint
                checkpoint: dict[str, Any] = dump(weights_only=False)
        finally:
            self.loaders.hide_positions()
        for callback in callbacks_of(trainer, SpikeDetection):
            checkpoint["callbacks"].pop(callback.state_key, None)  # Lightning fails to load it
        checkpoint["callbacks"] = with_plain_tensors(checkpoint["callbacks"])  # best scores, say
        hooked = saved_by_hooks(trainer, checkpoint)
        owners = (module, getattr(trainer, "datamodule", None))
        for owner, each in itertools.product(owners, (checkpoint, hooked)):
            if owner is not None and each is not None:
                _leave_arguments_out(owner, each)
        return checkpoint, hooked

    def end_resume(self) -> None:
        """Undo what only Lightning's own loading of the checkpoint needs."""
        self.loaders.hide_positions()
        self._put_weights_back()
        # Masks only now, when the optimizers have the parameters.
        prune(self.trainer.lightning_module, self._masks)
        self._masks = {}
        # ``trainer.ckpt_path`` is the user's again: ModelCheckpoint never deletes that file.
        self.trainer._checkpoint_connector._ckpt_path = self._users_path

    def _start(self, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._trains:
            self.shape.note_weights()
        start(*args, **kwargs)

    def _restore_training_state(self, restore: Callable[[], None]) -> None:
        if not self._trains:
            self.shape.note_optimizers()
            self.settings.begin()
        follow_references(self.trainer, self.trainer._checkpoint_connector._loaded_checkpoint)
        with kept_groups(optimizers_of(self.trainer).values()):
            restore()

    def _restore_model(
        self, restore: Callable[[], None], seen: dict[str, Any], strict: bool
    ) -> None:
        """Load the weights of the checkpoint, whatever ``on_load_checkpoint`` does to ``seen``."""
        connector = self.trainer._checkpoint_connector
        vars(connector).pop("restore_model")
        seen.update(with_objects(self.trainer, seen, connector._loaded_checkpoint))
        load_by_module(self.trainer, seen)
        module = self.trainer.lightning_module
        with without_hook([module], LOAD), contextlib.nullcontext() if strict else _loosely(module):
            restore()

    def _restore_callbacks(self, seen: dict[str, Any]) -> None:
        """Restore the callbacks, whatever they do to ``seen``, and note the loaded weights."""
        trainer = self.trainer
        connector = trainer._checkpoint_connector
        vars(connector).pop("restore_callbacks")
        saved = connector._loaded_checkpoint["state_dict"]
        # Before the callbacks load others: averages, say, or those that no ``state_dict`` has.
        for name, tensor in _weights(trainer.lightning_module):
            if name in saved:
                self._weights[name] = _content(tensor, saved[name])
        load_by_callbacks(trainer, seen)
        call = part(trainer, "trainer.call")
        call._call_callbacks_load_state_dict(trainer, connector._loaded_checkpoint)
        for name, tensor in _weights(trainer.lightning_module):
            if name not in self._weights:
                self._weights[name] = tensor.detach().clone()

    def _put_weights_back(self) -> None:
        """Undo what hooks of the fit's beginning did to weights: they were called before."""
        module = self.trainer.lightning_module
        loaded, self._weights = self._weights, {}
        make_room(module, loaded)
        with torch.no_grad():
            for name, tensor in _weights(module):
                is_set = tensor.layout is not torch.strided  # a sparse one: see ``make_room``
                if name in loaded and loaded[name].shape == tensor.shape and not is_set:
                    value = loaded[name].to(tensor.device, tensor.dtype)
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def _begin_run(self, begin: Callable[[], None]) -> None:
        """Call the hooks ``on_train_start``, and note what each process has made by then."""
        within = self._trains
        begin()  # in which the fit begins
        if within:
            return
        self.shape.note_classes()
        self.unsaved.note()
        self.unsaved.note_made()

    def _resume_start(
        self,
        checkpoint: dict[str, Any],
        seen: dict[str, Any],
        path: Path,
        checkpoint_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        connector = self.trainer._checkpoint_connector
        vars(connector).pop("resume_start")  # once only: learning rate finders call it later
        self.override(connector, "restore_callbacks", self._restore_callbacks, seen)
        self.shape.note_weights()
        checkpoint["state_dict"], self._masks = without_masks(
            checkpoint["state_dict"], self.shape.weights.sizes
        )
        make_room(self.trainer.lightning_module, checkpoint["state_dict"])
        self._users_path, connector._ckpt_path = checkpoint_path, str(path)
        connector._loaded_checkpoint = checkpoint
        states = checkpoint["callbacks"]
        for callback in callbacks_of(self.trainer, ModelCheckpoint):
            if callback.state_key in states:
                gone = restore_models(self.trainer, callback, states[callback.state_key])
                self.lacks_models = self.lacks_models or gone


def clean(trainer: Trainer) -> bool:
    """True if a checkpoint may be taken between batches: no gradients are being accumulated."""
    fit_loop = trainer.fit_loop
    return not (fit_loop._should_accumulate() or fit_loop._skip_backward)


def roots(trainer: Trainer) -> list[object]:
    """Objects that lead to every tensor of a trial; for ``suspend.CleanPoint``."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return [
        trainer.lightning_module,
        trainer.optimizers,
        trainer.lr_scheduler_configs,
        callbacks_of(trainer),
        trainer.precision_plugin,
        trainer._logger_connector,
        epoch_loop._results,
        epoch_loop.val_loop._results,
    ]


def _leave_arguments_out(owner: Any, checkpoint: dict[str, Any]) -> None:
    """Remove hyper-parameters that cannot be stored: the objective makes the module itself."""
    checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # the class of a configuration
    if not plain(checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)):
        checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_KEY, None)


@contextlib.contextmanager
def _loosely(module: LightningModule) -> Iterator[None]:
    """Let a module load weights of which some are missing."""
    strict = module.strict_loading
    if strict:
        module.strict_loading = False
    try:
        yield
    finally:
        if strict:
            module.strict_loading = True


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor


def _content(tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; ``saved``, which it was loaded from, if that is one."""
    apart = tensor.layout is torch.strided and not saved.is_set_to(tensor)
    # Loaded, but for a dtype of fewer bits: hooks and plugins may give the module another later.
    same = apart and saved.device == tensor.device and torch.equal(saved.to(tensor.dtype), tensor)
    return saved if same else tensor.detach().clone()


def _follow(
    results: Any, waiting: set[str], log: Any, fx: str, name: str, *args: Any, **options: Any
) -> None:
    for key in [key for key in waiting if key in results]:
        meta = results[key].meta
        if (meta.fx, meta.name) == (fx, name):
            meta.sync.should = options.get("sync_dist", False)
            waiting.discard(key)
    log(fx, name, *args, **options)


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    try:
        first()
    except StopIteration as error:  # Lightning would take it for the end of the data
        raise RuntimeError("A hook between two batches raised StopIteration.") from error
    second()
