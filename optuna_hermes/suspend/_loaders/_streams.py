"""The position in iterable data sets, and their attributes from one epoch to the next.

The position of an iterable data set can neither be read nor set. A trial returns to a batch by
passing over those before it: the epoch is opened once more, with the random state and attributes of
its first opening, and the batches before are fetched and dropped. If the training drew random
numbers between two fetches, the state under which each batch was fetched is stored and set again.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from optuna_hermes import _heap
from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._loaders._kinds import data_of
from optuna_hermes.suspend._modules._unsaved import Attributes, reachable
from optuna_hermes.suspend._state import (
    kept_rng,
    rng_state,
    set_rng_state,
)
from optuna_hermes.suspend._values._fingerprint import fingerprint
from optuna_hermes.suspend._values._generators import (
    GeneratorOwner,
    holders_in,
    set_states,
    states_of,
)
from optuna_hermes.suspend._values._tree import frozen, same

log = logging.getLogger(__name__)

PASS_SECONDS = 30.0
"""Most time that fetching the batches to be passed over may have taken."""

MOST_STATES = 1000
"""Most random states of fetches that are kept, of 8 KB each."""

MOST_INNER = 100
"""Most data sets inside of one whose attributes are kept."""

PLACEHOLDER = object()
"""Stands in for a batch that was fetched before the position was restored."""

Known = Callable[[], Collection[int]]
"""Returns the objects that the training holds beside its data sets, by ``id``."""


class Streams:
    """The attributes of the iterable data sets that a training goes through.

    One may be made for each epoch: all are held weakly, and none gets the state of one before it.
    """

    def __init__(self, known: Known) -> None:
        self.known = known
        self._found: list[_Nested] = []
        self._now: Callable[[], Any] = lambda: None
        self._saved_now: dict[str, Any] | None = None
        self._saved_others: list[dict[str, Any]] = []
        self._resumed: list[weakref.ref[Any]] = []

    @property
    def lost(self) -> list[str]:
        """Names of attributes that have changed and cannot be stored."""
        return sorted({name for each, _ in self._living() for name in each.lost})

    def begin(self, data: Any) -> None:
        """Begin an epoch over a data set."""
        self._now = weakref.ref(data)

    def of(self, data: Any, opened: dict[str, Any] | None = None) -> _Nested:
        """The attributes of one data set, which are restored if it is seen for the first time.

        Args:
            opened: its attributes when its epoch began, if that epoch is to begin once more.
        """
        self.begin(data)
        for attributes, living in self._living():
            if living is data:
                return attributes
        attributes = _Nested(data, self.known())
        saved = self._saved_of(data)
        attributes.load_state_dict(saved if opened is None else opened)
        self._found.append(attributes)
        return attributes

    def state_dict(self) -> list[dict[str, Any]]:
        """The changed attributes of the data sets that are left, this epoch's first."""
        states = {id(data): attributes.state_dict() for attributes, data in self._living()}
        now = states.pop(id(self._now()), self._saved_now or {})
        return [now, *states.values(), *self._saved_others]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Set the attributes to restore when a data set is first seen; to be called before that."""
        self._saved_now, self._saved_others = (state or [{}])[0], state[1:]
        present = _heap.objects(IterableDataset) if self._saved_others else ()
        self._resumed = [weakref.ref(each) for each in present]

    def _saved_of(self, data: Any) -> dict[str, Any]:
        """The stored attributes of a data set that is seen for the first time."""
        if self._saved_now is not None:
            saved, self._saved_now = self._saved_now, None
            return saved
        # Data sets have no names: they are told apart by the order in which they are found. Those
        # made since the trial was resumed are new.
        if self._saved_others and any(each() is data for each in self._resumed):
            return self._saved_others.pop(0)
        return {}

    def _living(self) -> list[tuple[_Nested, Any]]:
        """The data sets that are left, with their attributes."""
        found = [(each, each.data()) for each in self._found]
        living = [(each, data) for each, data in found if data is not None]
        self._found = [each for each, _ in living]
        return living


class _Nested:
    """The attributes of a data set, and of the iterable ones inside of it.

    Args:
        data: the data set, which is held weakly.
        known: see ``Known``.
    """

    def __init__(self, data: Any, known: Collection[int]) -> None:
        self.data = weakref.ref(data)
        inside = reachable([data], through_data=True).values()
        inner = [each for each in inside if each is not data and _is_iterable(each)]
        every = [data, *inner[:MOST_INNER]]
        self._parts = [_Attributes(type(each).__name__, each, known=known) for each in every]
        for each in self._parts:
            each.begin()

    @property
    def lost(self) -> set[str]:
        """Names of attributes that have changed and cannot be stored."""
        return {name for each in self._parts if each.data() is not None for name in each.lost}

    def state_dict(self) -> dict[str, Any]:
        states = [{} if each.data() is None else each.state_dict() for each in self._parts]
        return {"sets": states} if any(states) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for attributes, saved in zip(self._parts, state.get("sets", ()), strict=False):
            if attributes.data() is not None:
                attributes.load_state_dict(saved)


def _is_iterable(value: object) -> bool:
    return issubclass(type(value), IterableDataset)  # isinstance may run the code of proxies


class _Attributes(Attributes):
    """The attributes of a data set, which is held weakly."""

    data: Callable[[], Any]

    @property
    def owner(self) -> Any:
        return self.data()

    @owner.setter
    def owner(self, owner: object) -> None:
        self.data = weakref.ref(owner)


class Stream:
    """The position of a loader over an iterable data set."""

    def __init__(
        self, loader: DataLoader[Any], trained: Callable[[], int], streams: Streams, trial: str
    ) -> None:
        self._loader = weakref.ref(loader)
        self._trained = trained
        self._streams = streams
        self._name = trial
        self._opened: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._expected: bool | None = None
        self.before_next: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Random states, and the loader's own, before a batch that ``ends_here`` has fetched."""
        self._waiting: _Batches | None = None
        self._batches: Callable[[], _Batches | None] = lambda: None
        self._shared: list[int] = []
        self._before = self._fetched = 0
        self._seconds = 0.0
        self._under: dict[int, dict[str, Any]] = {}
        self._after: dict[str, Any] | None = None
        self._drawn = False
        self._whole = False
        self._beside = False
        self._late = False
        vars(loader)["_get_iterator"] = self._start
        log.info(
            "%s comes back to its place in %s by passing over what it has trained.",
            trial.capitalize(),
            type(loader.dataset).__name__,
        )

    def unwrap(self) -> None:
        loader = self._loader()
        if loader is not None:
            vars(loader).pop("_get_iterator", None)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Prepare the next iterator: for a new epoch, or to resume one."""
        self._opened, self._whole = None, False
        self.before_next, self._batches = None, lambda: None
        self.expect()
        self._streams.begin(self._loader().dataset)  # type: ignore[union-attr]  # it is iterated
        if state is not None:
            self.load_own_state(state["own"])
            self._resume = state

    def expect(self, expected: bool = True) -> None:
        """See ``ResumableSampler``."""
        self._expected = expected

    def state_dict(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        own = self.own_state() if self.before_next is None else self.before_next[1]
        if self._opened is None:
            return {"opened": None, "own": own}
        skip = self._trained() - self._before
        return {
            "opened": self._opened,
            "own": own,
            "before": self._before,
            "skip": skip,
            # One that ``ends_here`` has fetched will be fetched again, under the states before it.
            "ahead": self._fetched - skip if self.before_next is None else 0,
            "under": [list(each) for each in self._under.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position; placeholders are given until ``go_on`` is called."""
        self._resume, self._late = state, True

    def shift(self, batches: int) -> None:
        """Take over that the number of trained batches counts from another beginning."""
        self._before += batches

    def own_state(self) -> dict[str, Any]:
        return {"generators": states_of(self._holders())}

    def load_own_state(self, state: dict[str, Any]) -> None:
        set_states(self._holders(), state["generators"])

    def idle_state(self) -> dict[str, Any]:
        """See ``ResumableSampler``; the attributes of the data set are kept by ``Streams``."""
        own = {**self.own_state(), "attributes": []}
        return {"own": own, "seed": None, "workers": None}

    def _holders(self) -> list[GeneratorOwner]:
        loader = self._loader()
        data, collate = data_of(loader)
        found = holders_in(data)
        # The others of iterable data sets are among their attributes, but not those of what these
        # read: the attributes of a map-style data set may hold all samples.
        data_sets = (each for each in found if issubclass(type(each.owner), Dataset))
        read = [each.place for each in data_sets if not _is_iterable(each.owner)]
        below = tuple(f"{place}." for place in read)
        more = [e for e in found if e.in_code or e.place in read or e.place.startswith(below)]
        return [GeneratorOwner("loader", loader), *holders_in(collate), *more]

    def ends_here(self) -> bool:
        """True after the epoch's last batch: the next one is fetched to know, and given later."""
        batches = self._batches()
        return batches is not None and batches.ended()

    def warning(self) -> str | None:
        """Return None: worker processes draw the same numbers once more."""
        return None

    def can_store_here(self) -> bool:
        """True if the trial can return to this batch; else only to the beginning of an epoch."""
        if self._resume is not None or self._opened is None or self._trained() == self._before:
            return True
        if not self._whole:
            reason = self._why_whole()
            self._whole = reason is not None
            if self._whole:
                trial = self._name.capitalize()
                log.info("%s is stored between epochs only: %s.", trial, reason)
        return not self._whole

    def _why_whole(self) -> str | None:
        name = type(self._loader().dataset).__name__  # type: ignore[union-attr]
        if self._seconds > PASS_SECONDS:
            return f"it takes {self._seconds:.0f} s to pass over what it has fetched of {name}"
        if len(self._under) > MOST_STATES:
            return f"the training draws random numbers between batches, as {name} does"
        # A data set that draws from it (a replay buffer) would give others when passed over.
        if self._marks() != self._shared:
            return f"the training changes what {name} gives"
        if self._beside:
            return f"within an epoch it begins a second pass over {name}"
        return None

    # -- called by Lightning and torch ---------------------------------------------------------

    def go_on(self) -> Any:
        """Pass over the trained batches now.

        Returns:
            The batch for which a placeholder was given; ``PLACEHOLDER`` if none was.
        """
        self._late = False
        waiting, self._waiting = self._waiting, None
        return PLACEHOLDER if waiting is None else next(waiting)

    def open(self) -> tuple[Any, list[Any]]:
        """Open the loader's own iterator, with its batches that were fetched but not trained."""
        resume, self._resume = self._resume, None
        data = self._loader().dataset  # type: ignore[union-attr]  # it lives while it is iterated
        if resume is None or resume["opened"] is None:
            changed = self._streams.of(data).state_dict()
            self._opened = {"rng": rng_state(), **self.own_state(), "data": frozen(changed)}
            self._before = self._trained()
            return self._made(), []
        self._opened, self._before = resume["opened"], resume["before"]
        own, skip = self.own_state(), resume["skip"]
        # What is fetched again must draw what it drew, and leave no trace in present states.
        with kept_rng():
            set_rng_state(self._opened["rng"])
            self.load_own_state(self._opened)
            self._streams.of(data, frozen(self._opened["data"]))
            iterator, ahead = self._made(), []
            under = dict(resume["under"])
            for number in range(skip + resume["ahead"]):
                if number in under:
                    set_rng_state(under[number])
                try:
                    batch = self.fetch(iterator)
                except StopIteration:
                    raise CheckpointError(
                        f"{self._name.capitalize()} has fetched {skip + resume['ahead']} batches "
                        f"of {type(data).__name__}, which ends after {number} now: it must give "
                        "the same again whenever its epoch is opened."
                    ) from None
                if number >= skip:
                    ahead.append(batch)
        self.load_own_state(own)
        return iterator, ahead

    def fetch(self, iterator: Any) -> Any:
        """Fetch the next batch; remember the random state if the training has drawn before."""
        # Worker processes have random states of their own, which their seed gives again.
        in_process = not self._loader().num_workers  # type: ignore[union-attr]
        before = rng_state(devices=False) if in_process else None
        began = time.perf_counter()
        batch = next(iterator)
        self._seconds += time.perf_counter() - began
        if before is not None:
            after = rng_state(devices=False)
            # Until a fetch draws: the fetches between, which do not, need no state.
            self._drawn = self._drawn or not same(before, self._after)
            if self._drawn and len(self._under) <= MOST_STATES and not same(before, after):
                self._under[self._fetched] = before
                self._drawn = False
            self._after = after
        self._fetched += 1
        return batch

    def _start(self) -> Any:
        if self._expected is False:
            self._beside = True
            return DataLoader._get_iterator(self._loader())  # type: ignore[arg-type]
        self._expected = None if self._expected is None else False
        batches = _Batches(self)
        self._batches = weakref.ref(batches)  # weak: worker processes end with the iterator
        if self._resume is None:
            batches.open()
        return batches

    def _made(self) -> Any:
        self._fetched, self._seconds, self._under = 0, 0.0, {}
        self._shared, self._whole, self._beside = self._marks(), False, False
        loader = self._loader()
        assert loader is not None
        iterator = DataLoader._get_iterator(loader)
        self._after, self._drawn = rng_state(devices=False), False
        return iterator

    def _marks(self) -> list[int]:
        """Fingerprints of the objects that the data set shares with the training."""
        loader = self._loader()
        assert loader is not None
        known = self._streams.known()
        held = reachable([loader.dataset], through_data=True)
        return [fingerprint(each) for name, each in held.items() if name in known]


class _Batches:
    """Iterator that a loader returns in place of its own."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._iterator: Any = None
        self._ahead: list[Any] = []

    def open(self) -> None:
        self._iterator, self._ahead = self._stream.open()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            if self._stream._late:
                self._stream._waiting = self
                return PLACEHOLDER
            self.open()
        self._stream.before_next = None
        return self._ahead.pop(0) if self._ahead else self._stream.fetch(self._iterator)

    def ended(self) -> bool:
        """True if no batch is left; False if none was given yet."""
        if self._iterator is None or self._ahead:
            return False
        before = rng_state(), self._stream.own_state()
        try:
            self._ahead.append(self._stream.fetch(self._iterator))
        except StopIteration:
            self._iterator = iter(())
            return True
        self._stream.before_next = before
        return False
