"""The loaders of a fit: they are hooked into, so that their positions can be saved and restored."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from optuna_hermes._lightning._loops import Override
from optuna_hermes._lightning._namespace import (
    LightningDataModule,
    Trainer,
    _DataLoaderIterDataFetcher,
    callbacks_of,
    part,
)
from optuna_hermes._lightning._settings import TrainerSettings
from optuna_hermes._lightning._unsaved import loader_sources
from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._loaders._kinds import (
    has_workers,
    is_stateful,
    is_stream,
    keeps_iterator,
)
from optuna_hermes.suspend._loaders._order import order_of, set_order
from optuna_hermes.suspend._loaders._sampler import ResumableSampler, idle
from optuna_hermes.suspend._loaders._weak import by_identity
from optuna_hermes.suspend._modules._unsaved import ChangedAttributes, reachable
from optuna_hermes.suspend._state import kept_rng, rng_state, set_rng_state
from optuna_hermes.suspend._values._tree import frozen

# Loaded on first use: most trials train on map-style data, without worker processes.
if TYPE_CHECKING:
    from optuna_hermes.suspend._loaders._streams import Stream, Streams
    from optuna_hermes.suspend._loaders._workers import RandomWatch


class LoaderMaking:
    """Makes the loaders of one fit, by stage."""

    def __init__(
        self, trainer: Trainer, settings: TrainerSettings, unsaved: ChangedAttributes
    ) -> None:
        self.made: dict[str, Any] = {}
        """The attributes, settings and random states from which they were made, and their order."""
        self.again: dict[str, Any] = {}
        """The same of an earlier process: loaders are made from these."""
        self.trainer = trainer
        self._settings = settings
        self._unsaved = unsaved
        self._stage = ""
        self._attributes: ChangedAttributes | None = None

    def make(self, stage: str, set_up: Callable[[], None]) -> None:
        """Call what makes the loaders of a stage."""
        before, self._stage = self._stage, stage
        try:
            # What comes with the loaders each process makes, in time for these.
            with self._unsaved.note_more(), self._as_when_first_made(stage):
                set_up()
        finally:
            self._stage = before

    def ask(self, stage: str, ask: Callable[[], Any]) -> Any:
        """Have a hook make loaders, which have the order of their first making once more."""
        loaders = ask()
        if self._stage != stage:  # a hook of the user asks, to count batches for example
            return loaders
        made = self.made[stage]
        if "order" in made:
            set_order(loaders, made["order"])
        else:
            made["order"] = order_of(loaders)
        return loaders

    @contextlib.contextmanager
    def _as_when_first_made(self, stage: str) -> Iterator[None]:
        # Making them may split data at random, and may use attributes of module or data module that
        # change in training; if they are not made for each epoch, that epoch was an earlier one.
        epoch = self.trainer.fit_loop.epoch_progress.current
        if self._attributes is None:
            self._attributes = loader_sources(self.trainer)
            self._attributes.begin()
        made = self.again.get(stage)
        if made is None:
            attributes = frozen(self._attributes.state_dict())
            self.made[stage] = {
                "rng": rng_state(),
                "attributes": attributes,
                "epoch": epoch.completed,
                "data": frozen(self._data_state()),
                "settings": self._settings.changed(),
            }
            yield
            return
        self.made[stage] = made
        # Lightning has loaded the present state, which loaders were not made of.
        present = frozen(self._data_state())
        self._load_data_state(made["data"])
        self._attributes.load_state_dict(frozen(made["attributes"]))
        with kept_rng(), self._settings.earlier(made["settings"]):
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


class FitLoaders:
    """The training and validation loaders of one fit.

    ``replay`` makes the sampler of a training loader; None to leave all loaders as they are.
    """

    def __init__(
        self,
        making: LoaderMaking,
        trial: str,
        override: Override,
        replay: Callable[..., ResumableSampler] | None,
    ) -> None:
        self._trainer = trainer = making.trainer
        self._name = trial
        self._making = making
        self._replay = replay
        self._replays: list[tuple[Any, ResumableSampler | Stream]] = []
        self._streams: Streams | None = None
        # Weak keys: a loader may be made for each epoch, and its workers end with it.
        self._watches: MutableMapping[Any, RandomWatch] = by_identity()
        self._validated: list[tuple[Any, ResumableSampler | LoaderAttributes]] = []
        self._copies: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._validates_later = False
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        for owner, name, call in (
            (fit_loop, "_load_combined_loader_states", self._on_loaders),
            (fit_loop, "setup_data", self._set_up),
            (epoch_loop, "reset", self._reset),
            (epoch_loop, "on_run_start", self._begin_batches),
            # Within a fetch, a loader that is at its end may begin anew.
            (epoch_loop, "_on_before_fetch", functools.partial(self._fetch, True)),
            (epoch_loop, "_on_after_fetch", functools.partial(self._fetch, False)),
            (epoch_loop.val_loop, "setup_data", self._set_up_validation),
        ):
            override(owner, name, call, getattr(owner, name))
        for stage, loop in (("training", fit_loop), ("validation", epoch_loop.val_loop)):
            source = loop._data_source
            if source.is_module():
                override(source, "dataloader", making.ask, stage, source.dataloader)

    def state_dict(self) -> dict[str, Any]:
        """State of all loaders beside their positions, with the workers of validation loaders."""
        combined = self._trainer.fit_loop._combined_loader
        return {
            "training": [replay.own_state() for _, replay in self._replays],
            "validation": [each.idle_state() for _, each in self._validated],
            "made": dict(self._making.made),
            "streams": [] if self._streams is None else self._streams.state_dict(),
            "consumed": list(getattr(getattr(combined, "_iterator", None), "_consumed", [])),
        }

    def resume(self, made: dict[str, Any] | None) -> None:
        """Make loaders from what an earlier process made them of; None for what is there now."""
        self._making.again = dict(made or {})
        self._validates_later = made is not None and "validation" not in made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; to be called before the first fetch."""
        self._validates_later = False
        # Lightning sets these loaders up when it validates, but their states need them now.
        if state["validation"] and not self._validated:
            self._set_up_validation_now()
        for (_, replay), own in zip(self._replays, state["training"], strict=False):
            replay.load_own_state(own)
        for (_, each), saved in zip(self._validated, state["validation"], strict=False):
            each.load_idle_state(saved)
        self._making.again = {}
        combined = self._trainer.fit_loop._combined_loader
        if state["consumed"] and combined is not None and combined._iterator is not None:
            vars(combined._iterator)["_consumed"] = list(state["consumed"])

    def random_warning(self) -> str | None:
        """A warning if a loader draws random numbers that cannot be restored, else None."""
        drew = (watch.warning() for watch in self._watches.values() if watch.drew())
        lost = (replay.warning() for _, replay in self._replays)
        return next(filter(None, (*drew, *lost)), None)

    def has_streams(self) -> bool:
        """True if the trial trains on an iterable data set."""
        return any(is_stream(loader) for loader, _ in self._replays)

    def can_store_here(self) -> bool:
        """True if the loader positions before the next batch can be restored."""
        return all(each.can_store_here() for _, each in self._replays)

    def pass_over(self, state: dict[str, Any]) -> None:
        """Pass over the trained batches of an iterable data set, before the first one is taken."""
        from torch.utils._pytree import tree_map

        from optuna_hermes.suspend._loaders._streams import PLACEHOLDER, Stream

        assert self._streams is not None
        self._streams.load_state_dict(state["streams"])
        fetcher = self._trainer.fit_loop._data_fetcher
        for _, each in self._replays:
            # Lightning has prefetched one batch to detect the end of the epoch, before the data
            # set's attributes were restored, and got a placeholder.
            batch = each.go_on() if isinstance(each, Stream) else PLACEHOLDER
            if batch is not PLACEHOLDER:
                first, *rest = fetcher.batches[0]  # type: ignore[union-attr]  # it prefetches
                filled = tree_map(lambda x, new=batch: new if x is PLACEHOLDER else x, first)
                fetcher.batches[0] = (filled, *rest)  # type: ignore[union-attr]

    def show_positions(self) -> None:
        """Give loaders the methods by which Lightning finds them stateful."""
        for loader, each in self._replays:
            vars(loader).update(state_dict=each.state_dict, load_state_dict=each.load_state_dict)

    def hide_positions(self) -> None:
        """Remove them: from here on a user's checkpoints must load without this package."""
        for loader, _ in self._replays:
            vars(loader).pop("state_dict", None)
            vars(loader).pop("load_state_dict", None)

    def remove_hooks(self) -> None:
        """Remove the hooks from the loaders themselves."""
        self.hide_positions()
        hooked: list[tuple[Any, Any]]
        hooked = [*self._replays, *self._watches.items(), *self._validated]
        for _, each in hooked:
            each.unwrap()
        self._replays, self._validated = [], []
        self._watches.clear()

    def _known(self) -> dict[int, object]:
        trainer = self._trainer
        parts = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
        return reachable([*parts, *callbacks_of(trainer), trainer.optimizers])

    def _set_up(self, set_up: Callable[[], None]) -> None:
        """Set the training loaders up, with the states from which they were made first."""
        fit_loop = self._trainer.fit_loop
        if fit_loop._combined_loader is None or fit_loop._should_reload_train_dl:
            self._making.make("training", set_up)
        elif fit_loop.epoch_loop.val_loop.restarting and fit_loop._combined_loader_states_to_load:
            # Loaders were set up before the checkpoint was loaded: to count batches, for example.
            fit_loop._load_combined_loader_states()
            assert fit_loop._data_fetcher is not None
            iter(fit_loop._data_fetcher)
        self._expect(False)

    def _expect(self, expected: bool = True) -> None:
        """Follow the next pass over each training loader, or none: hooks may begin others."""
        for _, replay in self._replays:
            replay.expect(expected)

    def _fetch(self, expected: bool, call: Callable[[], None]) -> None:
        self._expect(expected)
        call()

    def _begin_batches(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        """Begin an epoch's batches; the first epoch's passes were begun with its loaders."""
        combined = self._trainer.fit_loop._combined_loader
        before = None if combined is None else combined._iterator
        self._expect()
        begin(fetcher)
        if combined is not None and combined._iterator is before:
            self._expect(False)

    def _reset(self, reset: Callable[[], None]) -> None:
        """Reset the counts of an epoch's batches, from which the loaders' positions are taken."""
        # A fit that begins with a checkpoint of the user's from the end of an epoch has counted
        # that epoch's batches when its first iterator is made, and is reset only after that.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        before = _ready(progress)
        reset()
        for _, replay in self._replays:
            replay.shift(_ready(progress) - before)

    def _set_up_validation_now(self) -> None:
        trainer = self._trainer
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
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        if val_loop._combined_loader is None or val_loop._should_reload_val_dl:
            self._making.make("validation", set_up)
        combined = val_loop._combined_loader
        loaders = [] if combined is None or self._replay is None else combined.flattened
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
        make = self._replay
        if make is None:
            load_states()
            return
        fit_loop: Any = self._trainer.fit_loop
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
            elif ResumableSampler.fits(loader) and not is_stateful(loader):
                made = make(loader, functools.partial(_ready, progress))
                self._replays.append((loader, made))
            elif has_workers(loader):
                self._watch(loader)
        for replay in kept.values():  # of loaders that are gone: else their workers would not end
            replay.unwrap()
        if fit_loop.restarting and fit_loop._combined_loader_states_to_load:
            self.show_positions()
            set_epoch = part(self._trainer, "loops.fit_loop")._set_sampler_epoch
            for loader, _ in self._replays:
                # Now: with workers, the first indices are drawn as soon as there is an iterator.
                set_epoch(loader, fit_loop.epoch_progress.current.processed)
        load_states()
        self._expect()

    def _stream_of(self, loader: Any, progress: Any) -> Stream:
        from optuna_hermes.suspend._loaders._streams import Stream, Streams

        if self._streams is None:
            self._streams = Streams(self._known)
        return Stream(loader, functools.partial(_ready, progress), self._streams, self._name)

    def _watch(self, loader: Any) -> None:
        from optuna_hermes.suspend._loaders._workers import RandomWatch

        if loader not in self._watches:
            self._watches[loader] = RandomWatch(loader)

    def _apart(self, combined: Any) -> list[Any]:
        """The training loaders, with copies in the place of a loader that is there before."""
        # Each place has an iterator of its own, so that one loader has several positions.
        given, loaders = list(combined.flattened), []
        for count, loader in enumerate(given):
            number = sum(loader is each for each in given[:count])
            # Persistent workers serve all places by one iterator: copies would give other batches.
            if number and _has_own_iterators(loader):
                # Kept with the loader, which is hooked into when it is given once more.
                place = id(loader), number
                _, loader = self._copies.setdefault(place, (loader, copy.copy(loader)))
            loaders.append(loader)
        # One that is made for each epoch goes with it, and its copies.
        there = set(map(id, given))
        self._copies = {place: each for place, each in self._copies.items() if place[0] in there}
        combined.flattened = loaders
        return loaders


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
    if any(keeps_iterator(each) and not is_stateful(each) for each in combined.flattened):
        return "its train loader keeps one iterator for all epochs"
    if len({id(each) for each in combined.flattened}) < len(combined.flattened):
        return "it trains on one loader in several places, with persistent workers or a state"
    if not all(is_stateful(each) or ResumableSampler.fits(each) for each in combined.flattened):
        return "its train loader is neither a DataLoader over a map-style data set nor stateful"
    return "the length of its train loader is unknown" if fetcher.length is None else None


def _has_own_iterators(loader: Any) -> bool:
    """True if each iterator over a loader, whose position can be restored, is independent."""
    return (
        ResumableSampler.fits(loader)
        and not is_stateful(loader)
        and not (loader.num_workers and loader.persistent_workers)
    )


def _ready(progress: Any) -> int:
    return int(progress.current.ready)
