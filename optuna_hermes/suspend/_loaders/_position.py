"""The loader position of a training loop."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

from optuna_hermes.suspend._loaders._kinds import (
    data_of,
    has_workers,
    is_stateful,
    is_stream,
    keeps_iterator,
    length_of,
)
from optuna_hermes.suspend._loaders._order import order_of, set_order
from optuna_hermes.suspend._loaders._sampler import ResumableSampler
from optuna_hermes.suspend._loaders._streams import Known, Stream, Streams
from optuna_hermes.suspend._loaders._weak import by_identity
from optuna_hermes.suspend._loaders._workers import RandomWatch
from optuna_hermes.suspend._loaders._wrapped import inner_of, replay_of
from optuna_hermes.suspend._values._generators import (
    GeneratorOwner,
    holders_in,
    set_states,
    states_of,
)

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Keeper = ResumableSampler | Stream

_ITERATORS: dict[type, tuple[str, str]] = {
    enumerate: ("enumerate()", "enumerate({})"),
    zip: ("zip()", "zip({}, others)"),
}


class LoaderPosition:
    """The position of a loop in an epoch of batches, for every supported kind of loader."""

    def __init__(self, known: Known, trial: str) -> None:
        self.streams = Streams(known)
        """Attributes of iterable data sets."""
        self._name = trial
        self.batch = 0
        """Trained batches of this epoch; the loop counts them."""
        self.length: int | None = None
        """Batches in this epoch, None if unknown."""
        self.problem: str | None = None
        """The reason why the position in this epoch cannot be restored, None if it can."""
        self._source: Any = None
        self.misjudged = False
        """True once an epoch had another number of batches than its length, in any process."""
        self._order: dict[str, dict[str, Any]] = {}
        # Weak keys: a loader may be made for each epoch, and its workers end with it.
        self._replays: MutableMapping[Any, Keeper] = by_identity()
        self._watches: MutableMapping[Any, RandomWatch] = by_identity()

    def warning(self) -> str | None:
        """A warning about what cannot be restored exactly, None if all can."""
        drew = (watch.warning() for watch in self._watches.values() if watch.drew())
        lost = (replay.warning() for replay in self._replays.values())
        return next(filter(None, itertools.chain(drew, lost)), None)

    def iterate(
        self,
        loader: Iterable[Batch],
        state: dict[str, Any] | None = None,
        idle: dict[str, Any] | None = None,
    ) -> Iterator[Batch]:
        """Begin an epoch, or resume the one of which ``state_dict`` has returned this state.

        With loaders whose position can neither be set nor counted there is a ``problem``.

        Args:
            idle: the state from which an epoch begins; None for the loader's present one.
        """
        # Of a sequence it is the objective's own.
        made = [loader] if hasattr(loader, "dataset") else []
        if state is not None:
            self.streams.load_state_dict(state["streams"])
            self._order = state.get("order", {})
            set_order(made, self._order)  # before its batches are counted
        source = self._source = self._source_of(loader)
        self.length = length_of(loader)
        self.problem = self._problem(loader)
        self.batch = 0 if state is None else state["batch"]
        if idle is not None and isinstance(source, ResumableSampler):
            source.load_idle_state(idle)
        if state is None:
            self._order = order_of(made)
        if isinstance(source, Stream):
            source.begin(None if state is None else state["loader"])
            return _begun_late(loader)
        if state is not None and source is not None:
            source.load_state_dict(state["loader"])
        self._watch(loader)
        if isinstance(source, ResumableSampler):
            source.expect()
        iterator = iter(loader)
        if source is None:
            # A sequence, or a loader with a ``problem``: its batches are read and dropped.
            next(itertools.islice(iterator, self.batch, self.batch), None)
        elif isinstance(source, ResumableSampler) and not source.can_store_here():
            self.problem = self.problem or "its loader does not go by its sampler"
        elif source is loader:
            self.problem = self.problem or _why_not_saved(source)
            if state is not None:  # only now: a stream may have fetched what was trained
                set_states(self._own_data(), state["data"])
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The position; to be read right before a batch is fetched, or after ``ends_here``."""
        loader = None if self._source is None else self._source.state_dict()
        return {
            "batch": self.batch,
            "loader": loader,
            "order": self._order,
            "misjudged": self.misjudged,
            "streams": self.streams.state_dict(),
            "data": states_of(self._own_data()),
        }

    def idle(self, *, between: bool) -> dict[int, Keeper]:
        """The keepers of the loaders that are in no epoch, by the ``id`` of the plain loaders.

        Args:
            between: True if none is in an epoch.
        """
        return {
            id(loader if (inner := inner_of(loader)) is None else inner): each
            for loader, each in self._replays.items()
            if between or each is not self._source
        }

    def end(self) -> None:
        """Compare an epoch's batches with its length, by which its last one is recognised."""
        exact = isinstance(self._source, Stream) or self.length in (None, self.batch)
        if not (exact or self.misjudged):
            self.misjudged = True
            log.info(
                "%s is stored between epochs only: the length of its loader is %s, but it gave %s "
                "batches.",
                self._name.capitalize(),
                self.length,
                self.batch,
            )

    def can_store_here(self) -> bool:
        """True if the position before the next batch can be restored."""
        source = self._source
        if self.misjudged and self.batch:
            return False
        return not isinstance(source, Keeper) or source.can_store_here()

    def ends_here(self) -> bool:
        """True after an epoch's last batch; where no length is certain, the next is fetched."""
        source = self._source
        return source.ends_here() if isinstance(source, Stream) else self.batch == self.length

    def rng_state(self, now: dict[str, Any]) -> dict[str, Any]:
        """The random states before the next batch, which may be fetched already."""
        source = self._source
        before = source.before_next if isinstance(source, Stream) else None
        return now if before is None else before[0]

    def leave(self) -> None:
        """Restore the loaders' own samplers and functions, and drop all references to them."""
        installed: list[Keeper | RandomWatch] = [*self._replays.values(), *self._watches.values()]
        for each in installed:
            each.unwrap()
        self._replays.clear()
        self._watches.clear()
        self._source = None

    def _own_data(self) -> list[GeneratorOwner]:
        """The holders of generators in the data of a loader that keeps its position itself."""
        source = self._source
        if source is None or isinstance(source, Keeper) or has_workers(source):
            return []
        return holders_in(*data_of(source))

    def _source_of(self, loader: Any) -> Any:
        """The object that keeps a loader's position; None if the number of batches suffices."""
        wrapped = inner_of(loader) is not None
        if is_stateful(loader) and not wrapped:
            return loader
        stream = is_stream(loader)
        if not (wrapped or stream or ResumableSampler.fits(loader)):
            return None
        # One for all its epochs: worker processes, where they persist, hold the first one.
        if loader not in self._replays:
            if stream:
                made = Stream(loader, lambda: self.batch, self.streams, self._name)
                self._replays[loader] = made
            else:
                self._replays[loader] = replay_of(loader, lambda: self.batch)
        return self._replays[loader]

    def _watch(self, loader: Any) -> None:
        kept = isinstance(self._source, Keeper)
        if not kept and has_workers(loader) and loader not in self._watches:
            self._watches[loader] = RandomWatch(loader)

    def _problem(self, loader: object) -> str | None:
        if is_stream(loader):
            return None
        if self._source is None and keeps_iterator(loader):
            return "its loader keeps one iterator for all epochs"
        if (around := _around(loader)) is not None:
            name, form = around
            return (
                f"its loader is within {name}: write {form.format('run.batches(loader)')}, not "
                f"run.batches({form.format('loader')})"
            )
        if self._source is None and not hasattr(loader, "__getitem__"):
            return (
                f"its loader, of {type(loader).__name__}, is neither a DataLoader over a map-style "
                "data set, nor stateful, nor a sequence"
            )
        if self.length is None:
            return "the length of its loader is unknown (its data set, or it, may have __len__)"
        return None


def _around(loader: object) -> tuple[str, str] | None:
    """The name of an iterator around a loader, and how it is written; None for a loader."""
    if type(loader).__module__.startswith("tqdm."):
        return "a progress bar", "tqdm({})"
    return _ITERATORS.get(type(loader))


def _begun_late(loader: Iterable[Batch]) -> Iterator[Batch]:
    # A generator: the iterator, which may draw random numbers, is made with the first batch.
    yield from loader


def _why_not_saved(loader: Any) -> str | None:
    """The reason why ``state_dict()`` of a loader in an epoch fails, None if it works."""
    try:
        loader.state_dict()
    except Exception as error:
        return f"{type(loader).__name__}.state_dict() raised {error!r}"
    return None
