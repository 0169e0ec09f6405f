"""A plain ``DataLoader`` that can be put back to any batch of an epoch without loading data.

The random numbers that its worker processes draw cannot be: whether they draw any is found out.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._state import kept_rng, rng_state, set_rng_state

GENERATORS = (torch.Generator, np.random.Generator, random.Random)


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its position by itself.

    One that wraps another (Accelerate's) has the methods always, and a state only if that one has.
    """
    base = getattr(loader, "base_dataloader", None)
    return callable(getattr(loader, "state_dict", None)) and (base is None or is_stateful(base))


def own_generators(data: Any) -> list[Any]:
    """Random generators that a data set, or the one it is a part of, keeps in its attributes."""
    found: list[Any] = []
    while data is not None:
        values = getattr(data, "__dict__", {}).values()
        found += [each for each in values if isinstance(each, GENERATORS)]
        data = getattr(data, "dataset", None)
    return found


def generator_state(generator: Any) -> Any:
    """The state of one of ``GENERATORS``, in plain values, tensors and arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Put back what ``generator_state`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


class Replay:
    """Stands where a loader keeps its index sampler, and draws an epoch's indices once more.

    It remembers the random state from which the epoch's indices were drawn. To come back to batch
    ``k`` it draws them again from there and drops the first ``k`` lists of indices: nothing is
    read from the data set, and the random numbers of everybody else stay as they were.

    Args:
        loader: a loader over a map-style data set; the wrapper hangs itself into it.
        trained: says how many batches of this epoch are trained. The indices drawn are no measure
            of it: worker processes fetch ahead.
    """

    def __init__(self, loader: DataLoader[Any], trained: Callable[[], int]) -> None:
        # A loader whose workers persist leads here: in a circle it would wait for them, 5 s each.
        self._loader = weakref.ref(loader)
        self._trained = trained
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, self._slot)
        self._begin: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._hang(self)

    @staticmethod
    def fits(loader: object) -> bool:
        """Whether a loader's position is given by the indices it has drawn itself."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        return not hasattr(loader, "base_dataloader")  # which would draw them in its place

    def unwrap(self) -> None:
        """Give the loader its own sampler back."""
        self._hang(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is."""
        if self._resume is not None:  # the iterator that goes on from there was asked for nothing
            return self._resume
        begin = self._begin
        generators = self._generator_states() if begin is None else begin["generators"]
        return {
            "skip": self._trained(),
            "rng": None if begin is None else begin["rng"],
            "generators": generators,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there with the next iterator that is made.

        Raises:
            CheckpointError: the size of its batches was elastic.
        """
        if "size" in state:
            raise CheckpointError(
                "A run that was trained with elastic_batch must go on with it, but HermesCallback "
                "was given none: give it as before."
            )
        self._resume = state

    def __iter__(self) -> Iterator[Any]:
        self._begin = None  # at once, not with the first index: workers may never ask for one
        return self._draw()

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def _draw(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._set_generators(resume["generators"])
        if resume is None or resume["rng"] is None:
            self._begin = {"rng": rng_state(), "generators": self._generator_states()}
            yield from self._batches(self._items())
            return
        self._begin = {"rng": resume["rng"], "generators": resume["generators"]}
        with kept_rng():
            set_rng_state(resume["rng"])
            items = self._items()
            # At least one is drawn here, so that the epoch's order comes from its own state.
            head = list(itertools.islice(items, max(1, resume["skip"])))
        yield from self._batches(itertools.chain(head[resume["skip"] :], items))

    def _items(self) -> Iterator[Any]:
        """What is skipped, one by one: here lists of indices."""
        return iter(self._sampler)

    def _batches(self, items: Iterator[Any]) -> Iterator[Any]:
        """What the loader is given of them."""
        return items

    def _hang(self, sampler: Any) -> None:
        # Past DataLoader.__setattr__, which forbids it since a running iterator would not notice.
        object.__setattr__(self._loader(), self._slot, sampler)

    def _generators(self) -> list[torch.Generator]:
        owners = (self._loader(), self._sampler, getattr(self._sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return [generator for generator in found if isinstance(generator, torch.Generator)]

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)


class RandomWatch:
    """Sees whether a loader's worker processes draw random numbers while they fetch batches.

    It stands where the loader keeps what makes a batch of samples, changes nothing of what is
    drawn, and looks at the generators of torch, NumPy, Python and the data set itself after a
    worker's first, second, fourth and so on batch. Workers that were there before it are not seen.

    Args:
        loader: fetches in at least one worker process; the watch hangs itself into it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._inner = loader.collate_fn, loader.worker_init_fn
        self._drew = torch.zeros(1, dtype=torch.bool)
        self._drew.share_memory_()  # type: ignore[no-untyped-call]
        watched = _Watched(*self._inner, self._drew)
        loader.collate_fn, loader.worker_init_fn = watched, watched.begin

    @staticmethod
    def fits(loader: object) -> bool:
        """Whether it has worker processes."""
        return isinstance(loader, DataLoader) and loader.num_workers > 0

    def drew(self) -> bool:
        """Whether one of them has drawn a random number."""
        return bool(self._drew.item())

    def warning(self) -> str:
        """What that means, and what to do."""
        data: Any = self._loader.dataset
        while hasattr(data, "dataset"):  # a subset of another one
            data = data.dataset
        return (
            f"{type(data).__name__} draws random numbers in loader workers "
            f"(num_workers={self._loader.num_workers}): after a suspension to disk it draws others "
            "than an uninterrupted run would. Draw them in training_step, or use num_workers=0."
        )

    def unwrap(self) -> None:
        """Give the loader its own functions back."""
        self._loader.collate_fn, self._loader.worker_init_fn = self._inner


class _Watched:
    """What the workers call; a worker has a copy of its own, with the flag in common."""

    def __init__(
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], None] | None,
        drew: torch.Tensor,
    ) -> None:
        self._collate = collate
        self._init = init
        self._drew = drew
        self._fetched = 0
        self._begun: tuple[Any, ...] | None = None

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._begun = _numbers()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._fetched += 1
        look = self._fetched & (self._fetched - 1) == 0  # it costs 0.2 ms, and misses nothing
        if look and self._begun is not None and _numbers() != self._begun:
            self._drew.fill_(True)
        return batch


def _numbers() -> tuple[Any, ...]:
    """In a worker, something that is another one as soon as a generator was asked."""
    numpy_state: Any = np.random.get_state()
    worker: Any = get_worker_info()
    own = [generator_state(each) for each in own_generators(worker.dataset)]
    return (
        torch.get_rng_state().numpy().tobytes(),
        numpy_state[1].tobytes(),
        numpy_state[2:],
        random.getstate(),
        [each.tolist() if isinstance(each, torch.Tensor) else str(each) for each in own],
    )
