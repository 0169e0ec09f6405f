"""Hooks in a Trainer: the point between two batches, and the positions of its loaders.

Right before a batch is fetched, nothing in Lightning is half done: optimizers, schedulers, loggers
and a validation that was due are through. A state that is saved there and restored at the same
point of another process leaves no trace.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optuna_hermes._lightning._callbacks import skip_tuners
from optuna_hermes._lightning._module_hooks import (
    LOAD,
    SAVE,
    load_by_callbacks,
    load_by_module,
    saved_by_hooks,
    savers,
    without_hook,
)
from optuna_hermes._lightning._namespace import (
    LightningDataModule,
    ModelCheckpoint,
    SpikeDetection,
    Trainer,
    _DataLoaderIterDataFetcher,
    callbacks_of,
    part,
)
from optuna_hermes._lightning._optimizers import optimizers_of
from optuna_hermes._lightning._pruning import prune, without_masks
from optuna_hermes._lightning._settings import TrainerSettings
from optuna_hermes._lightning._shape import FitParts
from optuna_hermes._lightning._unsaved import loader_sources, unsaved
from optuna_hermes.suspend._loader import Replay, idle
from optuna_hermes.suspend._loader_kinds import has_workers, is_stateful, is_stream, keeps_iterator
from optuna_hermes.suspend._loader_order import order_of, set_order
from optuna_hermes.suspend._module_state import kept_groups, make_room
from optuna_hermes.suspend._own_states import OwnStates
from optuna_hermes.suspend._state import kept_rng, plain, rng_state, set_rng_state
from optuna_hermes.suspend._tree import frozen
from optuna_hermes.suspend._unsaved import Unsaved, reachable
from optuna_hermes.suspend._wrapped import replay_of

# Loaded on first use: most trials train on map-style data, without worker processes.
if TYPE_CHECKING:
    from optuna_hermes.suspend._streams import Stream, Streams
    from optuna_hermes.suspend._workers import RandomWatch


class TrainerHooks:
    """The hooks in one trainer for the duration of one ``fit``.

    Args:
        replay: makes the ``Replay`` of a loader; None for one that is not elastic.
    """

    def __init__(self, trainer: Trainer, trial: str, replay: Callable[..., Replay] | None) -> None:
        self.trainer = trainer
        self.shape = FitParts(trainer)
        self.settings = TrainerSettings(trainer)
        self.unsaved = unsaved(trainer)
        self._name = trial
        self._replay = replay or replay_of
        self._replays: list[tuple[Any, Replay | Stream]] = []
        self._streams: Streams | None = None
        self._watches: list[tuple[Any, RandomWatch]] = []
        self._validated: list[tuple[Any, Replay | OwnStates]] = []
        self._copies: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._masks: dict[str, Any] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._users_path: Any = None
        self._made: dict[str, Any] = {}
        self._made_again: dict[str, Any] = {}
        self._making = ""
        self._validates_later = False
        self._attributes: Unsaved | None = None
        self._overridden: list[tuple[object, str]] = []
        fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        load_states = fit_loop._load_combined_loader_states
        self.override(fit_loop, "_load_combined_loader_states", self._on_loaders, load_states)
        self.override(fit_loop, "setup_data", self._set_up, fit_loop.setup_data)
        epoch_loop = fit_loop.epoch_loop
        self.override(epoch_loop, "reset", self._reset, epoch_loop.reset)
        begin = epoch_loop.on_run_start
        self.override(epoch_loop, "on_run_start", self._begin_batches, begin)
        # Within a fetch, a loader that is at its end may begin anew.
        for name, within in (("_on_before_fetch", True), ("_on_after_fetch", False)):
            note = functools.partial(self._expect, within)
            self.override(epoch_loop, name, _noted, note, getattr(epoch_loop, name))
        self.override(val_loop, "setup_data", self._set_up_validation, val_loop.setup_data)
        for stage, loop in (("training", fit_loop), ("validation", val_loop)):
            source = loop._data_source
            if source.is_module():
                self.override(source, "dataloader", self._ask_for_loaders, stage, source.dataloader)
        self.override(fit_loop, "on_run_start", self._begin_run, fit_loop.on_run_start)
        connector = trainer._checkpoint_connector
        start, restore = connector.resume_start, connector.restore_training_state
        self.override(connector, "resume_start", _noted, self.shape.note_weights, start)
        self.override(connector, "restore_training_state", self._restore_training_state, restore)

    def override(self, owner: object, name: str, call: Callable[..., Any], *args: Any) -> None:
        """Replace a method of an object by a function with these first arguments."""
        # On the object, not its class: other trainers of this process keep the original.
        vars(owner)[name] = functools.partial(call, *args)
        self._overridden.append((owner, name))

    def resume_from(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        hooked: dict[str, Any] | None,
        made: dict[str, Any] | None,
    ) -> None:
        """Make ``fit`` resume from a checkpoint, also if it was given a ``ckpt_path``.

        Args:
            checkpoint: what ``dump`` returned.
            path: of its file.
            hooked: what ``dump`` returned for ``on_load_checkpoint``; None for the same.
            made: the attributes, settings and random states from which its loaders were made, and
                their order, by stage; None to make them of the present ones.
        """
        self._made_again = dict(made or {})
        self._validates_later = made is not None and "validation" not in made
        connector = self.trainer._checkpoint_connector
        seen, restore = checkpoint if hooked is None else hooked, connector.restore_model
        self.override(connector, "resume_start", self._resume_start, checkpoint, seen, path)
        self.override(connector, "restore_model", self._restore_model, restore, seen)

    def skip_tuners(self, found: dict[str, Any]) -> None:
        """Let tuner callbacks take the settings that they found in an earlier process."""
        for callback, begin in skip_tuners(self.trainer, found):
            self.override(callback, "on_fit_start", begin)

    def between_batches(self, call: Callable[[], None]) -> None:
        """Call a function before each fetch of a batch, from ``on_train_start`` on."""
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
        self._hide_loader_states()
        hooked: list[tuple[Any, Any]] = [*self._replays, *self._watches, *self._validated]
        for _, each in hooked:
            each.unwrap()
        self._replays, self._watches, self._validated = [], [], []

    def dump(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The checkpoint that Lightning would write, with the position of the loaders.

        It is the same whatever ``on_save_checkpoint`` of the module and the callbacks do; what
        these make of it is returned beside it, for ``on_load_checkpoint``.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        for loader, replay in self._replays:
            self._show_state(loader, replay)
        try:
            with without_hook(savers(trainer), SAVE):
                checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(
                    weights_only=False
                )
        finally:
            self._hide_loader_states()
        for callback in callbacks_of(trainer, SpikeDetection):
            checkpoint["callbacks"].pop(callback.state_key, None)  # Lightning fails to load it
        hooked = saved_by_hooks(trainer, checkpoint)
        owners = (module, getattr(trainer, "datamodule", None))
        for owner, each in itertools.product(owners, (checkpoint, hooked)):
            if owner is not None and each is not None:
                _leave_arguments_out(owner, each)
        return checkpoint, hooked

    def random_warning(self) -> str | None:
        """A warning if a loader draws random numbers that cannot be restored, else None."""
        drew = (watch.warning() for _, watch in self._watches if watch.drew())
        lost = (replay.warning() for _, replay in self._replays)
        return next(filter(None, (*drew, *lost)), None)

    def loader_states(self) -> dict[str, Any]:
        """State of all loaders beside their positions, with the workers of validation loaders."""
        combined = self.trainer.fit_loop._combined_loader
        return {
            "training": [replay.own_state() for _, replay in self._replays],
            "validation": [each.idle_state() for _, each in self._validated],
            "made": dict(self._made),
            "streams": [] if self._streams is None else self._streams.state_dict(),
            "consumed": list(getattr(getattr(combined, "_iterator", None), "_consumed", [])),
        }

    def restore_loader_states(self, state: dict[str, Any]) -> None:
        """Restore what ``loader_states`` returned; to be called before the first fetch."""
        trainer = self.trainer
        self._validates_later = False
        # Lightning sets these loaders up when it validates, but their states need them now.
        if state["validation"] and not self._validated:
            self._set_up_validation_now()
        for (_, replay), own in zip(self._replays, state["training"], strict=False):
            replay.load_own_state(own)
        for (_, each), saved in zip(self._validated, state["validation"], strict=False):
            each.load_idle_state(saved)
        self._made_again = {}
        combined = trainer.fit_loop._combined_loader
        if state["consumed"] and combined is not None and combined._iterator is not None:
            vars(combined._iterator)["_consumed"] = list(state["consumed"])

    def has_streams(self) -> bool:
        """True if the trial trains on an iterable data set."""
        return any(is_stream(loader) for loader, _ in self._replays)

    def stores_here(self) -> bool:
        """True if the loader positions before the next batch can be restored."""
        return all(each.stores_here() for _, each in self._replays)

    def pass_over(self, state: dict[str, Any]) -> None:
        """Pass over the trained batches of an iterable data set, before the first one is taken."""
        from torch.utils._pytree import tree_map

        from optuna_hermes.suspend._streams import PLACEHOLDER, Stream

        assert self._streams is not None
        self._streams.load_state_dict(state["streams"])
        fetcher = self.trainer.fit_loop._data_fetcher

        def fill(batch: Any, leaf: Any) -> Any:
            return batch if leaf is PLACEHOLDER else leaf

        for _, each in self._replays:
            # Lightning has prefetched one batch to detect the end of the epoch, before the data
            # set's attributes were restored, and got a placeholder.
            batch = each.go_on() if isinstance(each, Stream) else PLACEHOLDER
            if batch is not PLACEHOLDER:
                first, *rest = fetcher.batches[0]  # type: ignore[union-attr]  # it prefetches
                filled = tree_map(functools.partial(fill, batch), first)
                fetcher.batches[0] = (filled, *rest)  # type: ignore[union-attr]

    def end_resume(self) -> None:
        """Undo what only Lightning's own loading of the checkpoint needs."""
        self._hide_loader_states()
        self._put_weights_back()
        # Masks only now, when the optimizers have the parameters.
        prune(self.trainer.lightning_module, self._masks)
        self._masks = {}
        # ``trainer.ckpt_path`` is the user's again: ModelCheckpoint never deletes that file.
        self.trainer._checkpoint_connector._ckpt_path = self._users_path

    def _restore_training_state(self, restore: Callable[[], None]) -> None:
        self.shape.note_optimizers()
        self.settings.begin()
        with kept_groups(optimizers_of(self.trainer)):
            restore()

    def _restore_model(self, restore: Callable[[], None], seen: dict[str, Any]) -> None:
        """Load the weights of the checkpoint, whatever ``on_load_checkpoint`` does to ``seen``."""
        vars(self.trainer._checkpoint_connector).pop("restore_model")
        load_by_module(self.trainer, seen)
        with without_hook([self.trainer.lightning_module], LOAD):
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

    def _hide_loader_states(self) -> None:
        """Hide the positions: from here on a user's checkpoints must load without this package."""
        for loader, _ in self._replays:
            self._show_state(loader, None)

    def _known(self) -> dict[int, object]:
        trainer = self.trainer
        parts = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
        return reachable([*parts, *callbacks_of(trainer), trainer.optimizers])

    def _set_up(self, set_up: Callable[[], None]) -> None:
        """Set the training loaders up, with the states from which they were made first."""
        trainer = self.trainer
        fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        if fit_loop._combined_loader is None or fit_loop._should_reload_train_dl:
            self._make("training", set_up)
        elif val_loop.restarting and fit_loop._combined_loader_states_to_load:
            # Loaders were set up before the checkpoint was loaded: to count batches, for example.
            fit_loop._load_combined_loader_states()
            assert fit_loop._data_fetcher is not None
            iter(fit_loop._data_fetcher)
        self._expect(False)

    def _ask_for_loaders(self, stage: str, ask: Callable[[], Any]) -> Any:
        """Have a hook make loaders, which have the order of their first making once more."""
        loaders = ask()
        if self._making != stage:  # a hook of the user asks, to count batches for example
            return loaders
        made = self._made[stage]
        if "order" in made:
            set_order(loaders, made["order"])
        else:
            made["order"] = order_of(loaders)
        return loaders

    def _begin_run(self, begin: Callable[[], None]) -> None:
        """Call the hooks ``on_train_start``, and note what each process has made by then."""
        begin()
        self.shape.note_classes()
        self.unsaved.note()
        self.unsaved.note_made()

    def _expect(self, expected: bool = True) -> None:
        """Follow the next pass over each training loader, or none: hooks may begin others."""
        for _, replay in self._replays:
            replay.expect(expected)

    def _begin_batches(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        """Begin an epoch's batches; the first epoch's passes were begun with its loaders."""
        combined = self.trainer.fit_loop._combined_loader
        before = None if combined is None else combined._iterator
        self._expect()
        begin(fetcher)
        if combined is not None and combined._iterator is before:
            self._expect(False)

    def _reset(self, reset: Callable[[], None]) -> None:
        """Reset the counts of an epoch's batches, from which the loaders' positions are taken."""
        # A fit that begins with a checkpoint of the user's from the end of an epoch has counted
        # that epoch's batches when its first iterator is made, and is reset only after that.
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        before = _ready(progress)
        reset()
        for _, replay in self._replays:
            replay.shift(_ready(progress) - before)

    def _make(self, stage: str, set_up: Callable[[], None]) -> None:
        before, self._making = self._making, stage
        try:
            # What comes with the loaders each process makes, in time for these.
            with self.unsaved.note_more(), self._as_when_first_made(stage):
                set_up()
        finally:
            self._making = before

    @contextlib.contextmanager
    def _as_when_first_made(self, stage: str) -> Iterator[None]:
        """Make loaders again with the settings, random state and so on of their first making."""
        # Making them may split data at random, and may use attributes of module or data module that
        # change in training; if they are not made for each epoch, that epoch was an earlier one.
        epoch = self.trainer.fit_loop.epoch_progress.current
        if self._attributes is None:
            self._attributes = loader_sources(self.trainer)
            self._attributes.begin()
        made = self._made_again.get(stage)
        if made is None:
            attributes = frozen(self._attributes.state_dict())
            self._made[stage] = {
                "rng": rng_state(),
                "attributes": attributes,
                "epoch": epoch.completed,
                "data": frozen(self._data_state()),
                "settings": self.settings.changed(),
            }
            yield
            return
        self._made[stage] = made
        # Lightning has loaded the present state, which loaders were not made of.
        present = frozen(self._data_state())
        self._load_data_state(made["data"])
        self._attributes.load_state_dict(frozen(made["attributes"]))
        with kept_rng(), self.settings.earlier(made["settings"]):
            set_rng_state(made["rng"])
            now, epoch.completed = epoch.completed, made["epoch"]
            try:
                yield
            finally:
                epoch.completed = now
        self._load_data_state(present)

    def _data_state(self) -> dict[str, Any]:
        """The state that a data module stores by itself; empty if it stores none."""
        data = getattr(self.trainer, "datamodule", None)
        return data.state_dict() if isinstance(data, LightningDataModule) else {}

    def _load_data_state(self, state: dict[str, Any]) -> None:
        if state:
            self.trainer.datamodule.load_state_dict(frozen(state))  # type: ignore[attr-defined]

    def _set_up_validation_now(self) -> None:
        trainer = self.trainer
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        stage, trainer.validating = trainer.state.stage, True
        # Lightning takes this for the epoch of their making, and would make the next ones later.
        made_last = val_loop._last_val_dl_reload_epoch
        val_loop.setup_data()
        val_loop._last_val_dl_reload_epoch = made_last
        trainer.state.stage = stage

    def _set_up_validation(self, set_up: Callable[[], None]) -> None:
        """Set the validation loaders up, before there is an iterator over new ones."""
        # A fit that begins shortly before a validation makes its loaders at once. One that is
        # resumed there, and had none yet, must not: they may be drawn with random numbers.
        if self._validates_later:
            return
        val_loop = self.trainer.fit_loop.epoch_loop.val_loop
        if val_loop._combined_loader is None or val_loop._should_reload_val_dl:
            self._make("validation", set_up)
        combined = val_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        known = self._validated
        if [id(each) for each, _ in known] == [id(loader) for loader in loaders]:
            return
        self._validated = []
        for loader in loaders:
            there = (each for other, each in (*known, *self._validated) if other is loader)
            self._validated.append((loader, next(there, None) or idle(loader)))
        for loader, each in known:
            if all(loader is not other for other in loaders):
                each.unwrap()

    def _on_loaders(self, load_states: Callable[[], None]) -> None:
        """Hook into new training loaders, before there is an iterator over them."""
        fit_loop = self.trainer.fit_loop
        progress = fit_loop.epoch_loop.batch_progress
        combined = fit_loop._combined_loader
        loaders = [] if combined is None else self._apart(combined)
        kept = {id(loader): replay for loader, replay in self._replays}
        self._replays = []
        for loader in loaders:
            if id(loader) in kept:
                self._replays.append((loader, kept.pop(id(loader))))
            elif is_stream(loader) and len(loaders) == 1:
                self._replays.append((loader, self._stream_of(loader, progress)))
            elif any(loader is known for known, _ in self._replays):
                continue
            elif Replay.fits(loader) and not is_stateful(loader):
                replay: Replay | Stream = self._replay(loader, functools.partial(_ready, progress))
                self._replays.append((loader, replay))
            elif has_workers(loader):
                self._watch(loader)
        for replay in kept.values():  # of loaders that are gone: else their workers would not end
            replay.unwrap()
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
            for loader, replay in self._replays:
                self._show_state(loader, replay)
                # Now: with workers, the first indices are drawn as soon as there is an iterator.
                _set_epoch(loader, fit_loop)
        load_states()
        self._expect()

    def _stream_of(self, loader: Any, progress: Any) -> Stream:
        from optuna_hermes.suspend._streams import Stream, Streams

        if self._streams is None:
            self._streams = Streams(self._known)
        return Stream(loader, functools.partial(_ready, progress), self._streams, self._name)

    def _watch(self, loader: Any) -> None:
        from optuna_hermes.suspend._workers import RandomWatch

        if all(loader is not known for known, _ in self._watches):
            self._watches.append((loader, RandomWatch(loader)))

    def _apart(self, combined: Any) -> list[Any]:
        """The training loaders, with copies in the place of a loader that is there before."""
        # Each place has an iterator of its own, so that one loader has several positions.
        before: list[Any] = []
        loaders = []
        for loader in combined.flattened:
            number = sum(loader is each for each in before)
            before.append(loader)
            # Persistent workers serve all places by one iterator: copies would give other batches.
            if number and _has_own_iterators(loader):
                # Kept with the loader, which is hooked into when it is given once more.
                place = id(loader), number
                _, loader = self._copies.setdefault(place, (loader, copy.copy(loader)))
            loaders.append(loader)
        combined.flattened = loaders
        return loaders

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
        for callback in self.trainer.checkpoint_callbacks:
            # Else it would use the folder of the new logger's version, without the best models.
            saved = checkpoint["callbacks"].get(callback.state_key, {}).get("dirpath")
            if isinstance(callback, ModelCheckpoint) and saved:
                callback.dirpath = saved

    @staticmethod
    def _show_state(loader: Any, replay: Replay | Stream | None) -> None:
        """Give a loader the methods by which Lightning finds it stateful, or remove them."""
        for name in ("state_dict", "load_state_dict"):
            vars(loader).pop(name, None)
            if replay is not None:
                vars(loader)[name] = getattr(replay, name)


def why_not_storable(trainer: Trainer) -> str | None:
    """The reason why a trial cannot go to disk, None if it can; for ``on_train_start``."""
    fit_loop = trainer.fit_loop
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes the iterator of the loader"
    if fetcher is None or combined is None or not combined.flattened:
        return "it must have a train loader"
    if len(combined.flattened) == 1 and is_stream(combined.flattened[0]):
        return None
    if fetcher.length is None:
        return "the length of its train loader is unknown"
    if any(keeps_iterator(each) and not is_stateful(each) for each in combined.flattened):
        return "its train loader keeps one iterator for all epochs"
    if len({id(each) for each in combined.flattened}) < len(combined.flattened):
        return "it trains on one loader in several places, with persistent workers or a state"
    if not all(is_stateful(each) or Replay.fits(each) for each in combined.flattened):
        return "its train loader is neither a DataLoader over a map-style data set nor stateful"
    return None


def _has_own_iterators(loader: Any) -> bool:
    """True if each iterator over a loader, whose position can be restored, is independent."""
    return (
        Replay.fits(loader)
        and not is_stateful(loader)
        and not (loader.num_workers and loader.persistent_workers)
    )


def clean(trainer: Trainer) -> bool:
    """True if a checkpoint may be taken between batches: no gradients are being accumulated."""
    fit_loop = trainer.fit_loop
    return not (fit_loop._should_accumulate() or fit_loop._skip_backward)


def batches_done(trainer: Trainer) -> int:
    """Training batches since the trial began."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)


def roots(trainer: Trainer) -> list[object]:
    """Objects that lead to every tensor of a trial; for ``suspend.TrialState``."""
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


def validated_names(trainer: Trainer) -> set[str]:
    """Names of the metrics logged by the validation that ends; for ``on_validation_end``."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    return {
        name
        for item in results.result_metrics
        if not item.has_reset
        for name in results._forked_name(item, False)
    }


def unsynchronised(trainer: Trainer, name: str) -> bool:
    """True if each process has its own value of a metric that was logged."""
    loop = trainer.fit_loop.epoch_loop
    return any(
        item.is_tensor and not item.meta.sync.should and name in results._forked_name(item, False)
        for results in (loop._results, loop.val_loop._results)
        for item in results.result_metrics
    )


def _leave_arguments_out(owner: Any, checkpoint: dict[str, Any]) -> None:
    """Remove hyper-parameters that cannot be stored: the objective makes the module itself."""
    checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # the class of a configuration
    if not plain(checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)):
        checkpoint.pop(owner.CHECKPOINT_HYPER_PARAMS_KEY, None)


def _noted(note: Callable[[], None], call: Callable[..., None], *args: Any, **kw: Any) -> None:
    note()
    call(*args, **kw)


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor


def _content(tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; ``saved``, which it was loaded from, if that is one."""
    apart = tensor.layout is torch.strided and not saved.is_set_to(tensor)
    # Loaded, but for a dtype of fewer bits: hooks and plugins may give the module another later.
    same = apart and saved.device == tensor.device and torch.equal(saved.to(tensor.dtype), tensor)
    return saved if same else tensor.detach().clone()


def _ready(progress: Any) -> int:
    return int(progress.current.ready)


def _follow(
    results: Any,
    waiting: set[str],
    log: Callable[..., None],
    fx: str,
    name: str,
    *args: Any,
    **options: Any,
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


def _set_epoch(loader: Any, fit_loop: Any) -> None:
    epoch = fit_loop.epoch_progress.current.processed
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
