"""Where a training loop is in its loader."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from optuna_hermes.suspend._loader import RandomWatch, Replay, is_stateful
from optuna_hermes.suspend._wrapped import Wrapped, inner_of

Batch = TypeVar("Batch")


class Place:
    """The position of a loop in an epoch of batches, whatever they come from."""

    def __init__(self) -> None:
        self.batch = 0
        """Batches of this epoch that are trained: the loop counts them."""
        self.length: int | None = None
        """Batches that this epoch has, None if that is unknown."""
        self.problem: str | None = None
        """Why a run could not come back to its place in this epoch, None if it could."""
        self.only_whole = False
        """True if a run could come back to the beginning of this epoch only."""
        self._source: Any = None
        # A loader may be made for each epoch, and its workers end with it.
        self._replays: weakref.WeakKeyDictionary[Any, Replay | Wrapped]
        self._replays = weakref.WeakKeyDictionary()
        self._watches: weakref.WeakKeyDictionary[Any, RandomWatch] = weakref.WeakKeyDictionary()

    @property
    def warning(self) -> str | None:
        """What a loader has done that cannot be brought back exactly, None if all can."""
        drew = (watch.warning() for watch in self._watches.values() if watch.drew())
        lost = (replay.warning() for replay in self._replays.values())
        return next(filter(None, itertools.chain(drew, lost)), None)

    def iterate(
        self, loader: Iterable[Batch], state: dict[str, Any] | None = None
    ) -> Iterator[Batch]:
        """Begin an epoch.

        Args:
            loader: has ``state_dict`` and ``load_state_dict``, or is a ``DataLoader``, or one that
                Fabric or Accelerate has wrapped, or a sequence; with others there is a ``problem``.
            state: what ``state_dict`` gave, if the epoch goes on from there.
        """
        source = self._source = self._source_of(loader)
        self.length = _length(loader)
        self.only_whole = is_stream(loader)
        self.problem = None if self.only_whole else self._problem(loader)
        self.batch = 0 if state is None else state["batch"]
        if isinstance(source, Wrapped):
            source.begin(loader, None if state is None else state["loader"])
        elif state is not None and source is not None:
            source.load_state_dict(state["loader"])
        if self.only_whole:
            return _begun_late(loader)
        self._watch(loader)
        iterator = iter(loader)
        if source is None:
            next(itertools.islice(iterator, self.batch, self.batch), None)
        elif source is loader:
            self.problem = self.problem or _why_not_saved(source)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is; for right before a batch is fetched."""
        loader = None if self._source is None else self._source.state_dict()
        return {"batch": self.batch, "loader": loader}

    def leave(self) -> None:
        """Give the loaders back what is their own, and let them go."""
        hung: list[Replay | Wrapped | RandomWatch] = [
            *self._replays.values(),
            *self._watches.values(),
        ]
        for each in hung:
            each.unwrap()
        self._replays.clear()
        self._watches.clear()
        self._source = None

    def _source_of(self, loader: Any) -> Any:
        """What knows where a loader is; None if the number of batches says it."""
        wrapped = inner_of(loader) is not None
        if is_stateful(loader) and not wrapped:
            return loader
        if not wrapped and not Replay.fits(loader):
            return None
        if loader not in self._replays:  # its workers, where they persist, hold the first one
            kind = Wrapped if wrapped else Replay
            self._replays[loader] = kind(loader, lambda: self.batch)
        return self._replays[loader]

    def _watch(self, loader: Any) -> None:
        plain = isinstance(self._source, Replay | Wrapped)
        if not plain and RandomWatch.fits(loader) and loader not in self._watches:
            self._watches[loader] = RandomWatch(loader)

    def _problem(self, loader: object) -> str | None:
        if self.length is None:
            return "the length of its loader is unknown"
        if self._source is None and not hasattr(loader, "__getitem__"):
            return (
                "its loader is neither a DataLoader over a map-style data set, nor stateful, nor a "
                "sequence"
            )
        return None


def is_stream(loader: Any) -> bool:
    """True for a loader over an iterable data set, with no worker that outlives an epoch."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        return False
    ends = not (loader.num_workers and loader.persistent_workers)
    return isinstance(loader.dataset, IterableDataset) and ends and not is_stateful(loader)


def _begun_late(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Its batches; what an iterator draws as it is made it draws with the first one."""
    yield from loader


def _why_not_saved(loader: Any) -> str | None:
    """Why a loader does not say where it is, None if it does; asked once it has an iterator."""
    try:
        loader.state_dict()
    except Exception as error:
        return f"{type(loader).__name__}.state_dict() raised {error!r}"
    return None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
