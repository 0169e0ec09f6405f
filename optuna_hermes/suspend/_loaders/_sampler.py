"""The position of a plain ``DataLoader``, restored to any batch without loading data."""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._loaders._kinds import keeps_iterator
from optuna_hermes.suspend._loaders._processes import LoaderProcesses
from optuna_hermes.suspend._state import kept_rng, plain, rng_state, set_rng_state

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PassState:
    """A position in a pass over a loader; its fields have the names of the keys in checkpoints.

    Of the ``drawn`` items, which are batches, or samples in an ``ElasticSampler``, ``skip`` are
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
    data: list[dict[str, Any]] | None = None
    """Values in the data sets at the start of worker processes that persist."""
    batches_before: int | None = None
    """Trained batches when they got this ``size``; both are None in all but ``ElasticSampler``."""
    size: int | None = None
    under: list[Any] | None = None
    """Random states under which the batches ahead were fetched: of ``_LazySampler``, else None."""

    def to_tree(self) -> dict[str, Any]:
        optional = ("data", "batches_before", "size", "under")
        return {k: v for k, v in vars(self).items() if v is not None or k not in optional}


class ResumableSampler:
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
        self._own = LoaderAttributes(loader, self._sampler)
        self._pool = LoaderProcesses(loader, self._own)
        self._pass = PassState(before=0)  # as it began: what changes in it is set in ``_present``
        self._resume: PassState | None = None
        self._drawn = 0
        self._ended = self._said = False
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
            own, before = self._own.state(), self._trained()
            return PassState(before=before, own=own, **self._pool.state(None))
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
        """A warning if its workers may draw random numbers that cannot be restored, else None."""
        loader = self._loader()
        if loader is not None and self._pool.began_unwatched:
            return (
                f"Persistent workers of a loader over {type(loader.dataset).__name__} have begun "
                "before the loop: if they draw random numbers, they draw those of that time again "
                "after a suspension to disk. Take a first batch from another loader: "
                "next(iter(DataLoader(data, batch_size)))."
            )
        if loader is None or not self._pool.lost:
            return None
        from optuna_hermes.suspend._loaders._workers import random_warning

        return random_warning(loader)

    def can_store_here(self) -> bool:
        """True if this epoch's batches are those of the first indices that are drawn here."""
        if self._trained() != self._pass.before and not self._is_in_order():
            return False
        begun = self._begins_late or (self._pool.was_used and not self._pool.expected)
        draws = begun and self._drawn >= self._trained() - self._pass.before
        return (draws or self._resume is not None) and not self._pool.interrupted

    def _is_in_order(self) -> bool:
        """False where workers' batches come as they are ready; said once."""
        loader = self._loader()
        if getattr(loader, "in_order", True) or not getattr(loader, "num_workers", 0):
            return True
        if not self._said:
            self._said = True
            log.info("Trials are stored between epochs only: their loader has in_order=False.")
        return False

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._sampler, memo)  # nobody follows a copy of the loader

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


def idle(loader: Any) -> ResumableSampler | LoaderAttributes:
    """Make the keeper of the state from which the next epoch of an idle loader begins."""
    if isinstance(loader, DataLoader) and loader.num_workers and loader.persistent_workers:
        # A persistent pool's seed is drawn once only: drawing it again would advance the random
        # numbers by one.
        return ResumableSampler(loader, lambda: 0)
    outer = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if outer is None else outer
    # Of a loader that is trained on, too: what follows it there restores its own position.
    if isinstance(sampler, ResumableSampler):
        sampler = sampler._sampler
    return LoaderAttributes(loader, sampler)
