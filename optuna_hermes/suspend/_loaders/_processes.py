"""The worker processes of a loader that is watched."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._state import rng_state, set_rng_state

if TYPE_CHECKING:
    from optuna_hermes.suspend._loaders._workers import Workers

log = logging.getLogger(__name__)


class LoaderProcesses:
    """The worker processes of a loader: their seed, and the states of their random generators.

    Torch asks a loader's sampler for an iterator, draws the seed, starts the processes, and asks
    the sampler once more; without processes it asks once.
    """

    def __init__(self, loader: DataLoader[Any], own: LoaderAttributes) -> None:
        self._loader = weakref.ref(loader)
        self._own = own
        self._count = loader.num_workers
        self.most_ahead = 1 + self._count * (loader.prefetch_factor or 0)
        """Most batches that are drawn and not trained."""
        self.expected: bool | None = None
        """True if the next pass is the trained one, False if it is not; None if each may be."""
        self.was_used = False
        """True once such a pass has begun."""
        self.interrupted = False
        """True if another pass has taken the processes from the trained one."""
        self._trains = False
        self._workers: Workers | None = None
        self._iterator: Callable[[], Any] = lambda: None
        self._seed: torch.Tensor | None = None
        self._revived: dict[str, Any] | None = None
        self._kept: tuple[Any, Any, Any] | None = None
        self._data: dict[str, dict[str, Any]] | None = None
        """The data sets' values at the start of processes that persist."""
        self._extra_call = False
        self._first = 0
        self._skipped = 0
        self._fetched = [0] * self._count

    @property
    def lost(self) -> bool:
        """True if the state of a worker's generators could not be read."""
        return self._workers is not None and self._workers.lost

    @property
    def began_unwatched(self) -> bool:
        """True if processes that persist have begun before anybody watched them."""
        return self._workers is None and getattr(self._loader(), "_iterator", None) is not None

    @property
    def revives(self) -> bool:
        """True if the next processes continue from a restored state."""
        return self._revived is not None

    def install(self, loader: DataLoader[Any]) -> None:
        """Intercept the start of worker processes."""
        if self._count:
            vars(loader)["_get_iterator"] = self._get_iterator

    def uninstall(self) -> None:
        vars(self._loader()).pop("_get_iterator", None)

    def state(self, trained: int | None) -> dict[str, Any]:
        """Seed and generators of the processes.

        Args:
            trained: trained batches of this epoch; None for a loader that is in no epoch, whose
                processes matter only if they persist.
        """
        loader, workers = self._loader(), self._workers
        idle = trained is None and not getattr(loader, "persistent_workers", False)
        if self._revived is not None:
            return {name: self._revived.get(name) for name in ("seed", "workers", "data")}
        if workers is None or idle:
            return {"seed": None, "workers": None, "data": None}
        iterator = self._iterator()
        last = self._sent(iterator) if trained is None else trained - self._skipped
        states = None
        # A worker of an iterable data set may have ended early.
        if not isinstance(getattr(loader, "dataset", None), IterableDataset):
            counts = enumerate(self._counts(last))
            states = [workers.state(worker, count) for worker, count in counts]
        return {"seed": self._seed, "workers": states, "data": self._data}

    def load_state(self, state: dict[str, Any]) -> None:
        """Let the next processes continue from what ``state`` returned."""
        loader = self._loader()
        self._revived = state if state.get("seed") is not None and self._count else None
        if self._revived is not None and loader is not None:
            loader._iterator = None  # drop persistent workers started before, with another seed

    # -- called in torch's order ---------------------------------------------------------------

    def _get_iterator(self) -> Any:
        loader = self._loader()
        assert loader is not None
        if self.expected is False and not loader.persistent_workers:
            return type(loader)._get_iterator(loader)
        # By its class, which may wrap torch's iterator in one of its own (PyTorch Geometric's do).
        with _iterators_made_by(self._make):
            return type(loader)._get_iterator(loader)

    def _make(self, loader: DataLoader[Any]) -> _MultiProcessingDataLoaderIter:
        if loader is not self._loader():  # another thread's
            return _MultiProcessingDataLoaderIter(loader)
        # Few loaders have processes.
        from optuna_hermes.suspend._loaders._workers import Workers

        revived = self._revived
        workers = Workers(loader, None if revived is None else revived["workers"])
        # In two steps: __init__ already draws indices, for which ``rotate`` needs the iterator.
        iterator = _MultiProcessingDataLoaderIter.__new__(_MultiProcessingDataLoaderIter)
        self._workers, self._iterator = workers, weakref.ref(iterator)
        self._first = self._skipped = 0
        self._fetched = [0] * self._count
        self._extra_call = True
        with workers.recording(loader):
            iterator.__init__(loader)  # type: ignore[misc]  # as ``_get_iterator`` does
        return iterator

    def is_extra_call(self) -> bool:
        """True if torch will draw a seed next, and then ask for an iterator once more."""
        extra, self._extra_call = self._extra_call, False
        return extra

    def before_seed(self) -> None:
        """Remember the state from which the seed is drawn next, or set the restored one.

        The same with the data sets of processes that persist, which are copies of the present ones.
        """
        loader = self._loader()
        generator = getattr(loader, "generator", None)
        persists = getattr(loader, "persistent_workers", False)
        values = self._own.data.values() if persists else None
        if self._revived is None:
            own = torch.default_generator if generator is None else generator
            self._seed, self._data = own.get_state(), values
            return
        self._kept = rng_state(), None if generator is None else generator.get_state(), values
        self._seed = self._revived["seed"]
        self._data = self._revived.get("data") if persists else None
        if self._data is not None:
            self._own.data.set(self._data)
        (torch.default_generator if generator is None else generator).set_state(self._seed)
        self._revived = None

    def begin_pass(self) -> bool:
        """Begin a pass; return True if it is one to be followed."""
        trains = self.expected is not False
        self.expected = None if self.expected is None else False
        self.was_used |= trains
        if trains or getattr(self._loader(), "persistent_workers", False):
            self._begin_in_workers(trains)
        return trains

    def _begin_in_workers(self, trains: bool) -> None:
        trained, self._trains = self._trains, trains
        kept, self._kept = self._kept, None
        if kept is not None:  # undo what drawing the seed again did to the global generators
            set_rng_state(kept[0])
            if kept[1] is not None:
                self._loader().generator.set_state(kept[1])  # type: ignore[union-attr]
            if self._data is not None:
                self._own.data.set(kept[2])
            return
        iterator = self._iterator()
        if iterator is not None and hasattr(iterator, "_send_idx"):  # the processes persist
            if trained and not trains and iterator._rcvd_idx < iterator._send_idx:
                self._interrupt()
            self._fetched = self._counts(self._sent(iterator))
            self._first = self._skipped = 0

    def _interrupt(self) -> None:
        if not self.interrupted:
            loader: Any = self._loader()
            log.warning(
                "A trial can only wait in memory from here on: within an epoch it begins a second "
                "pass over a loader of %s, and takes its persistent workers from the first. Use "
                "another loader there.",
                type(loader.dataset).__name__,
            )
        self.interrupted = True

    def rotate(self, skipped: int) -> None:
        """Begin with the worker that is next in turn after ``skipped`` batches."""
        self._skipped = skipped
        iterator = self._iterator()
        if self._count and iterator is not None and hasattr(iterator, "_worker_queue_idx_cycle"):
            self._first = skipped % self._count
            for _ in range(self._first):
                next(iterator._worker_queue_idx_cycle)

    @staticmethod
    def _sent(iterator: Any) -> int:
        return 0 if iterator is None else int(iterator._send_idx)

    def _counts(self, last: int) -> list[int]:
        """Batches that each process has fetched after ``last`` batches of this pass."""
        before = enumerate(self._fetched)
        return [
            fetched + len(range((worker - self._first) % self._count, last, self._count))
            for worker, fetched in before
        ]


@contextlib.contextmanager
def _iterators_made_by(make: Callable[[DataLoader[Any]], Any]) -> Iterator[None]:
    """Let torch make the iterators of loaders with workers by a function."""
    names, name = vars(torch.utils.data.dataloader), _MultiProcessingDataLoaderIter.__name__
    before, names[name] = names[name], make
    try:
        yield
    finally:
        names[name] = before
