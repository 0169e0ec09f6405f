"""The position of a plain ``DataLoader``, restored to any batch without loading data."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import logging
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._generators import (
    GeneratorOwner,
    holders_in,
    is_users_type,
    set_states,
    states_of,
)
from optuna_hermes.suspend._state import copied, kept_rng, plain, rng_state, set_rng_state

if TYPE_CHECKING:
    from optuna_hermes.suspend._workers import Workers

log = logging.getLogger(__name__)


def is_stateful(loader: Any) -> bool:
    """True if a loader keeps its position by itself.

    One that wraps another (Accelerate's) always has the methods, but a state only if the inner one
    has.
    """
    base = getattr(loader, "base_dataloader", None)
    return callable(getattr(loader, "state_dict", None)) and (base is None or is_stateful(base))


def is_stream(loader: Any) -> bool:
    """True for a loader over an iterable data set that begins anew in each epoch."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        return False
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return False
    kept = keeps_iterator(loader) or (loader.num_workers and loader.persistent_workers)
    return isinstance(loader.dataset, IterableDataset) and not kept


def has_workers(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def keeps_iterator(loader: object) -> bool:
    """True for a loader that goes on with one iterator in all its epochs.

    For example timm's ``MultiEpochsDataLoader``, and ``InfiniteDataLoader`` of ultralytics.
    """
    own = {**getattr(loader, "__dict__", {}), "_iterator": None}  # of workers that persist
    return any(isinstance(each, _BaseDataLoaderIter) for each in own.values())


def data_of(loader: Any) -> list[GeneratorOwner]:
    """A loader's data set and its user's collate function, in which generators may be."""
    collate: Any = getattr(loader, "collate_fn", None)
    if has_workers(loader):
        from optuna_hermes.suspend._workers import Collate  # lazy: few loaders have processes

        # While a loader's workers start it has ours, which holds the user's.
        collate = collate.inner if issubclass(type(collate), Collate) else collate
    return [
        GeneratorOwner("dataset", getattr(loader, "dataset", None)),
        GeneratorOwner("collate_fn", collate),
    ]


@dataclass(frozen=True, kw_only=True)
class PassState:
    """A position in a pass over a loader; its fields have the names of the keys in checkpoints.

    Of the ``drawn`` items, which are batches, or samples in an ``ElasticReplay``, ``skip`` are
    trained and ``ahead`` are not (None: to be drawn again). ``opened`` and ``begin`` are the random
    states from which the sampler's iterator and its first item came.
    """

    skip: int = 0
    before: int
    """Trained batches when the pass began."""
    drawn: int = 0
    ahead: list[Any] | None = None
    ended: bool = False
    opened: dict[str, Any] | None = None
    begin: dict[str, Any] | None = None
    own: dict[str, Any] = field(default_factory=dict)
    seed: torch.Tensor | None = None
    workers: list[Any] | None = None
    batches_before: int | None = None
    """Trained batches when they got this ``size``; both are None in all but ``ElasticReplay``."""
    size: int | None = None
    under: list[Any] | None = None
    """Random states under which the batches ahead were fetched: of ``_LazyReplay``, else None."""

    def to_tree(self) -> dict[str, Any]:
        optional = ("batches_before", "size", "under")
        return {k: v for k, v in vars(self).items() if v is not None or k not in optional}


class Replay:
    """Replaces a loader's index sampler, and can draw an epoch's indices once more.

    It remembers the random state from which the epoch's indices were drawn. To come back to batch
    ``k`` it draws them again from there and drops the first ``k`` lists of indices: nothing is
    read from the data set, and all other random states stay as they were. Worker processes get the
    seed that they had, and the random numbers that they would have drawn next.

    Args:
        loader: a loader over a map-style data set, whose sampler is replaced.
        trained: returns the number of trained batches of this epoch. The indices drawn are no
            measure of it: worker processes fetch ahead.
    """

    _begins_late: ClassVar[bool] = False
    """True if the loader asks for an iterator with the first batch."""

    def __init__(self, loader: DataLoader[Any], trained: Callable[[], int]) -> None:
        # Weak: in a reference cycle, a loader with persistent workers would wait 5 s for each.
        self._loader = weakref.ref(loader)
        self._trained = trained
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, self._slot)
        self._own = OwnStates(loader, self._sampler)
        self._pool = _Pool(loader, self._own)
        self._pass = PassState(before=0)  # as it began: what changes in it is set in ``_present``
        self._resume: PassState | None = None
        self._drawn = 0
        self._ended = False
        self._ahead: deque[Any] = deque(maxlen=self._pool.most_ahead)
        self._set_sampler(self)
        self._pool.install(loader)

    @staticmethod
    def fits(loader: object) -> bool:
        """True if a loader's position is given by the indices that it has drawn itself."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        # Of a wrapper the inner loader draws them, and an iterator that is there has its own.
        return not hasattr(loader, "base_dataloader") and not keeps_iterator(loader)

    def unwrap(self) -> None:
        if getattr(self._loader(), self._slot, None) is self:
            self._set_sampler(self._sampler)
            self._pool.uninstall()

    def expect(self, expected: bool = True) -> None:
        """Follow the next pass over the loader only: others may begin beside the trained one.

        Args:
            expected: False to follow none.
        """
        self._pool.expected = expected

    def state_dict(self) -> dict[str, Any]:
        # The iterator that resumes has drawn nothing yet.
        return (self._resume or self._present()).to_tree()

    def _present(self) -> PassState:
        """The position of the iterator that is there."""
        if self._pool.expected:  # one that is made with the first batch has drawn nothing, too
            return PassState(before=self._trained(), **self.idle_state())
        trained = self._trained() - self._pass.before
        return replace(
            self._pass,
            skip=trained,
            drawn=max(self._drawn, trained),
            ahead=self._items_ahead(trained),
            ended=self._ended,
            own=self._own.state(),
            **self._pool.state(trained),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position with the next iterator.

        Raises:
            CheckpointError: the size of its batches was elastic.
        """
        if "size" in state:
            raise CheckpointError(
                "A trial that was trained with elastic_batch must go on with it, but "
                "HermesCallback was given none: give it as before."
            )
        if state["opened"] is None and state["begin"] is None:
            self.load_idle_state(state)
            return
        self._resume = PassState(**state)
        self._pool.load_state(state)

    def shift(self, batches: int) -> None:
        """Take over that the number of trained batches counts from another beginning."""
        self._pass = replace(self._pass, before=self._pass.before + batches)

    def own_state(self) -> dict[str, Any]:
        """Generators and counters of the loader, independent of its position."""
        return self._own.state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._own.load_state(state)

    def idle_state(self) -> dict[str, Any]:
        """State from which the next epoch begins, for a loader that is in no epoch."""
        return {"own": self._own.state(), **self._pool.state(None)}

    def load_idle_state(self, state: dict[str, Any]) -> None:
        self._own.load_state(state["own"])
        self._pool.load_state(state)

    def warning(self) -> str | None:
        """A warning if its workers draw random numbers that cannot be restored, else None."""
        loader = self._loader()
        if loader is None or not self._pool.lost:
            return None
        from optuna_hermes.suspend._workers import random_warning

        return random_warning(loader)

    def stores_here(self) -> bool:
        """True if the batches of this epoch are of indices that are drawn here."""
        begun = self._begins_late or (self._pool.asked and not self._pool.expected)
        draws = begun and self._drawn >= self._trained() - self._pass.before
        return (draws or self._resume is not None) and not self._pool.interrupted

    def __iter__(self) -> Iterator[Any]:
        if self._pool.is_extra_call():  # torch draws the workers' seed after this first call
            if not self._pool.revives:
                self._items()
            elif self._resume is not None:
                # Workers are copies of this process: they begin with what it had at their start.
                opened = self._resume.opened
                self._own.load_state(self._resume.own if opened is None else opened["own"])
            self._pool.before_seed()
            return iter(())
        return self._trained_pass() if self._pool.begin_pass() else self._batches(self._items())

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or not hasattr(self._sampler, name):
            super().__setattr__(name, value)
        else:  # a loop sets its sampler's epoch, for example, by which that draws
            setattr(self._sampler, name, value)

    def _trained_pass(self) -> Iterator[Any]:
        """The pass whose batches are counted as trained."""
        # Here, not when the first index is drawn: workers may never ask for one.
        self._pass, self._drawn, self._ended = PassState(before=self._trained()), 0, False
        self._ahead.clear()
        return self._fresh() if self._resume is None else self._again()

    def _fresh(self) -> Iterator[Any]:
        self._pass = replace(self._pass, opened=self._states())
        return self._draw(self._items())  # some samplers draw numbers in ``__iter__``

    def _draw(self, items: Iterator[Any]) -> Iterator[Any]:
        self._pass = replace(self._pass, begin=self._states())
        yield from self._follow(self._batches(items))

    def _again(self) -> Iterator[Any]:
        """An epoch from the position to resume."""
        resume, self._resume = self._resume, None
        assert resume is not None
        self._pass = PassState(before=resume.before, opened=resume.opened, begin=resume.begin)
        head: list[Any] = []
        with kept_rng():
            if resume.opened is not None:
                self._set_states(resume.opened)
            items = self._items()
            if resume.begin is not None:
                self._set_states(resume.begin)
                # At least one is drawn here, so that the epoch's order comes from its own state.
                head = list(itertools.islice(items, max(1, resume.drawn)))
        self._own.load_state(resume.own)
        if resume.begin is None:
            yield from self._draw(items)
            return
        self._drawn = resume.skip
        self._pool.rotate(resume.skip if resume.batches_before is None else resume.batches_before)
        ahead = head[resume.skip :] if resume.ahead is None else resume.ahead
        if resume.ended:  # a sampler that is asked again at its end may draw again
            items = iter(())
        yield from self._follow(self._batches(itertools.chain(ahead, items)))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._drawn += 1
            self._ahead.append(batch)
            yield batch
        self._ended = True

    def _items_ahead(self, trained: int) -> list[Any] | None:
        """Items drawn but not trained; None where they can only be drawn again."""
        count = self._drawn - trained
        if count <= 0 or count > len(self._ahead):
            return None
        ahead = list(itertools.islice(self._ahead, len(self._ahead) - count, None))
        return ahead if plain(ahead) else None

    def _items(self) -> Iterator[Any]:
        """The items of an epoch, as they are counted to skip: here lists of indices."""
        return iter(self._sampler)

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        """The batches that the loader is given for these items."""
        return items

    def _set_sampler(self, sampler: Any) -> None:
        # Not setattr: DataLoader forbids it, as a running iterator would not notice the change.
        object.__setattr__(self._loader(), self._slot, sampler)

    def _states(self) -> dict[str, Any]:
        return {"rng": rng_state(), "own": self._own.state()}

    def _set_states(self, states: dict[str, Any]) -> None:
        set_rng_state(states["rng"])
        self._own.load_state(states["own"])


_ARRAYS = (torch.Tensor, np.ndarray)


class OwnStates:
    """Generators, counters and index lists that a loader, its samplers and its data set keep.

    Of data sets, only the numbers, text and flags that the training sets: with worker processes,
    where these do not persist, they hold from its next epoch on.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        self._loader: Callable[[], Any] = lambda: loader
        # A loader may also be a list or a range, which have no weak references.
        with contextlib.suppress(TypeError):
            self._loader = weakref.ref(loader)
        self._samplers: list[Any] = []
        while sampler is not None and all(sampler is not each for each in self._samplers):
            self._samplers.append(sampler)
            inner = getattr(sampler, "batch_sampler", None)
            sampler = getattr(sampler, "sampler", inner)
        self._attributes = [_attributes_of(each, _order_attributes) for each in self._samplers]
        # Workers that persist have data sets of their own, in which the training sets nothing.
        if not getattr(loader, "persistent_workers", False):
            for each in _data_sets(getattr(loader, "dataset", None)):
                reads, together = _set_by_reading(type(each)), _set_together(type(each))
                find = functools.partial(_set_by_training, reads=reads, together=together)
                self._attributes.append(_attributes_of(each, find))

    def state(self) -> dict[str, Any]:
        """Their present state; of attributes, those that have ever had other than first values."""
        return {
            "generators": states_of(self._holders()),
            "attributes": [each.state() for each in self._attributes],
            # These are filled when they are restored: the objective may hold them, too.
            "in_place": [each.in_place() for each in self._attributes],
        }

    def unwrap(self) -> None:
        """Do nothing: unlike a ``Replay`` it changes nothing in its loader."""

    def idle_state(self) -> dict[str, Any]:
        return {"own": self.state(), "seed": None, "workers": None}

    def load_idle_state(self, state: dict[str, Any]) -> None:
        self.load_state(state["own"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; attributes that it lacks get their first values."""
        set_states(self._holders(), state["generators"])
        parts = zip(self._attributes, state["attributes"], state["in_place"], strict=False)
        for attributes, changed, filled in parts:
            attributes.load_state(changed, filled)

    def _holders(self) -> list[GeneratorOwner]:
        loader = self._loader()
        samplers = [GeneratorOwner(f"sampler {n}", each) for n, each in enumerate(self._samplers)]
        return [GeneratorOwner("loader", loader), *holders_in(*samplers, *data_of(loader))]


class _PlainAttributes:
    """The plain attributes of a sampler or data set: first values in this process, and changes."""

    def __init__(self, owner: Any, find: Callable[[Any], dict[str, Any]]) -> None:
        self._owner: Callable[[], Any] = lambda: owner
        with contextlib.suppress(TypeError):
            self._owner = weakref.ref(owner)
        self._find = find
        first = find(owner)
        self._first = {name: _copy(value) for name, value in first.items()}
        self._made = weakref.WeakValueDictionary(  # weak, as those that are replaced may go
            {name: value for name, value in first.items() if isinstance(value, _ARRAYS)}
        )
        # Saved from then on: the next process may have other first values.
        self._changed: set[str] = set()

    def state(self) -> dict[str, Any]:
        now = self._find(self._owner())
        self._changed |= {n for n, value in now.items() if not _same(value, self._first.get(n))}
        return {name: _copy(value) for name, value in now.items() if name in self._changed}

    def in_place(self) -> list[str]:
        """Names of the arrays that are those of the beginning."""
        now = self._find(self._owner())
        return [name for name, value in now.items() if self._made.get(name) is value]

    def load_state(self, state: dict[str, Any], in_place: Collection[str]) -> None:
        self._changed |= state.keys()
        now = self._find(self._owner())  # a value of another kind than first is left as it is
        first = {name: value for name, value in self._first.items() if name in now}
        for name, value in {**first, **state}.items():
            _set_attribute(self._owner(), name, value, in_place=name in in_place)


_seen: weakref.WeakKeyDictionary[Any, _PlainAttributes] = weakref.WeakKeyDictionary()


def _attributes_of(owner: Any, find: Callable[[Any], dict[str, Any]]) -> _PlainAttributes:
    """The attributes of a sampler or data set as they were when any loader with it was first seen.

    Args:
        find: returns those that may be kept.
    """
    # Later loaders with it would take values that the training has changed for its first ones.
    try:
        if owner not in _seen:
            _seen[owner] = _PlainAttributes(owner, find)
        return _seen[owner]
    except TypeError:  # it has no weak references or no hash
        return _PlainAttributes(owner, find)


def idle(loader: Any) -> Replay | OwnStates:
    """Make the keeper of the state from which the next epoch of an idle loader begins."""
    if isinstance(loader, DataLoader) and loader.num_workers and loader.persistent_workers:
        # A persistent pool's seed is drawn once only: drawing it again would advance the random
        # numbers by one.
        return Replay(loader, lambda: 0)
    outer = getattr(loader, "batch_sampler", None)
    return OwnStates(loader, getattr(loader, "sampler", None) if outer is None else outer)


class _Pool:
    """The worker processes of a loader: their seed, and the states of their random generators.

    Torch asks a loader's sampler for an iterator, draws the seed, starts the processes, and asks
    the sampler once more; without processes it asks once.
    """

    def __init__(self, loader: DataLoader[Any], own: OwnStates) -> None:
        self._loader = weakref.ref(loader)
        self._own = own
        self._count = loader.num_workers
        self.most_ahead = 1 + self._count * (loader.prefetch_factor or 0)
        """Most batches that are drawn and not trained."""
        self.expected: bool | None = None
        """True if the next pass is the trained one, False if it is not; None if each may be."""
        self.asked = False
        """True once such a pass has begun."""
        self.interrupted = False
        """True if another pass has taken the processes from the trained one."""
        self._trains = False
        self._workers: Workers | None = None
        self._iterator: Callable[[], Any] = lambda: None
        self._seed: torch.Tensor | None = None
        self._revived: dict[str, Any] | None = None
        self._kept: tuple[Any, Any] | None = None
        self._extra_call = False
        self._first = 0
        self._skipped = 0
        self._fetched = [0] * self._count

    @property
    def lost(self) -> bool:
        """True if the state of a worker's generators could not be read."""
        return self._workers is not None and self._workers.lost

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
            return {name: self._revived[name] for name in ("seed", "workers")}
        if workers is None or idle:
            return {"seed": None, "workers": None}
        iterator = self._iterator()
        last = self._sent(iterator) if trained is None else trained - self._skipped
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            return {"seed": self._seed, "workers": None}  # a worker may have ended early
        counts = self._counts(last)
        return {
            "seed": self._seed,
            "workers": [workers.state(worker, count) for worker, count in enumerate(counts)],
        }

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
        from optuna_hermes.suspend._workers import Workers  # lazy: few loaders have processes

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
        """Remember the state from which the seed is drawn next, or set the restored one."""
        loader = self._loader()
        generator = getattr(loader, "generator", None)
        if self._revived is None:
            own = torch.default_generator if generator is None else generator
            self._seed = own.get_state()
            return
        self._kept = rng_state(), None if generator is None else generator.get_state()
        self._seed = self._revived["seed"]
        (torch.default_generator if generator is None else generator).set_state(self._seed)
        self._revived = None

    def begin_pass(self) -> bool:
        """Begin a pass; return True if it is one to be followed."""
        trains = self.expected is not False
        self.expected = None if self.expected is None else False
        self.asked |= trains
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


def _order_attributes(sampler: Any) -> dict[str, Any]:
    """Attributes of a sampler that hold plain values, or lists and arrays of numbers."""
    return {
        name: value
        for name, value in getattr(sampler, "__dict__", {}).items()
        if type(value) in (bool, int, float, str, type(None), torch.Tensor)
        or (type(value) is list and all(type(each) in (int, float) for each in value))
        or (type(value) is np.ndarray and value.dtype.kind in "biuf")
    }


def _data_sets(data: Any) -> list[Any]:
    """The data sets of the user's classes among a data set and those that it wraps."""
    found: list[Any] = []
    waiting, seen = [data], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not hasattr(type(each), "__getitem__"):
            continue
        seen.add(id(each))
        own = getattr(each, "__dict__", {})
        if is_users_type(type(each)):
            found.append(each)
        if isinstance(each, Dataset):  # as ``Subset`` and ``ConcatDataset``
            several = own.get("datasets")
            waiting += [own.get("dataset"), *(several if isinstance(several, list) else ())]
    return found


def _set_by_training(
    data: Any, *, reads: Collection[str], together: Collection[frozenset[str]]
) -> dict[str, Any]:
    """The numbers, text and flags in a data set, but for those that belong to what is not kept.

    Args:
        data: the data set.
        reads: names of attributes that reading sets, such as that of the part that was read last.
        together: names of attributes that one method sets, for each method: it would find a size
            set, say, and leave the transform of the first size.
    """
    own = getattr(data, "__dict__", {})
    kinds = (bool, int, float, str, type(None))
    values = {name: value for name, value in own.items() if type(value) in kinds}
    partly = {
        name for names in together if not names & own.keys() <= values.keys() for name in names
    }
    return {
        name: value for name, value in values.items() if name not in reads and name not in partly
    }


def _set_together(kind: type) -> list[frozenset[str]]:
    """Names of the attributes that one method sets, for each method but ``__init__``."""
    names = {name for each in kind.__mro__ for name in vars(each)} - {"__init__"}
    return [_stored(code) for name in names for code in _codes_of(kind, name)]


def _stored(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes that a code sets."""
    found = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    return frozenset(found)


def _set_by_reading(kind: type) -> frozenset[str]:
    """Names of the attributes that methods which give samples set, and those that they call."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = ["__getitem__", "__getitems__", "__iter__", "__next__"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for code in _codes_of(kind, name):
            waiting += code.co_names
            found |= _stored(code)
    return frozenset(found)


def _codes_of(kind: type, name: str) -> Iterator[types.CodeType]:
    """The code of a method or property in a class and its bases, and of functions within."""
    for each in kind.__mro__:
        function: Any = inspect.unwrap(vars(each).get(name))  # type: ignore[arg-type]
        function = getattr(function, "fget", getattr(function, "func", function))
        codes = [function.__code__] if isinstance(function, types.FunctionType) else []
        for code in codes:
            yield code
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, list | np.ndarray) else value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _set_attribute(owner: Any, name: str, value: Any, *, in_place: bool) -> None:
    present = vars(owner).get(name)
    if _same(value, present):
        return
    if type(present) is list and type(value) is list:
        present[:] = value  # the objective may hold it
    elif not (in_place and copied(present, value) is present):
        vars(owner)[name] = _copy(value)
