"""Random generators of a loader's worker processes: their states, and draws from them.

A worker writes the states of its generators after each batch to memory that it shares with the
training process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from optuna_hermes.suspend._state import rng_state, set_rng_state
from optuna_hermes.suspend._values._generators import (
    FoundGenerators,
    GeneratorOwner,
    holders_in,
    set_states,
)

_SLOT_BYTES = 1 << 16
"""Room for the states of the generators of torch, NumPy and Python, and of five of a data set."""
_TOO_LONG = -1
_WAIT_SECONDS = 10.0
"""Most time to wait until a worker has fetched a batch that it was asked for."""


class Workers:
    """The states of the generators of one iterator's worker processes.

    Args:
        states: what ``state`` returned for each, None for one that begins with its own seed.
    """

    def __init__(self, loader: DataLoader[Any], states: list[str | None] | None = None) -> None:
        # A ring: workers fetch ahead, but the state after the last trained batch is asked for.
        count, ring = loader.num_workers, (loader.prefetch_factor or 2) + 2
        self.lost = False
        """True if a state that was asked for could not be read."""
        same = states is not None and len(states) == count
        self._begun: list[str | None] = list(states or ()) if same else [None] * count
        self._batches = torch.full((count, ring), -1, dtype=torch.int64, device="cpu")
        self._lengths = torch.zeros((count, ring), dtype=torch.int64, device="cpu")
        self._texts = torch.zeros((count, ring, _SLOT_BYTES), dtype=torch.uint8, device="cpu")
        for each in (self._batches, self._lengths, self._texts):
            each.share_memory_()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def recording(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Let the processes that are started within write their states."""
        collate, init = loader.collate_fn, loader.worker_init_fn
        shared = self._batches, self._lengths, self._texts
        watched = _RecordingCollate(loader, shared, self._begun)
        loader.collate_fn, loader.worker_init_fn = watched, watched.begin
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = collate, init

    def state(self, worker: int, batches: int) -> str | None:
        """State of a worker's generators after this number of its batches.

        None if they still have the state that its seed gave them.
        """
        if batches == 0:
            return self._begun[worker]
        slot = batches % self._batches.shape[1]
        deadline = time.monotonic() + _WAIT_SECONDS
        while int(self._batches[worker, slot]) < batches and time.monotonic() < deadline:
            time.sleep(0.001)
        length = int(self._lengths[worker, slot])
        if int(self._batches[worker, slot]) != batches or length == _TOO_LONG:
            self.lost = True
            return None
        if length == 0:
            return self._begun[worker]
        return bytes(self._texts[worker, slot, :length].numpy()).decode()


def random_warning(loader: Any) -> str:
    """The warning about random numbers in workers, with a way out."""
    data: Any = loader.dataset
    while hasattr(data, "dataset"):  # a subset of another one
        data = data.dataset
    return (
        f"{type(data).__name__} draws random numbers in loader workers "
        f"(num_workers={loader.num_workers}): after a suspension to disk it draws others "
        "than an uninterrupted trial would. Draw them in training_step, or use num_workers=0."
    )


class RandomWatch:
    """Detects random numbers drawn in a loader's worker processes while they fetch batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Weak: the workers of one that is made for each epoch end with it.
        self._loader = weakref.ref(loader)
        self._warning = random_warning(loader)
        self._inner = loader.collate_fn, loader.worker_init_fn
        self._drew = torch.zeros(1, dtype=torch.bool, device="cpu")
        self._drew.share_memory_()  # type: ignore[no-untyped-call]
        watched = _DrawingCollate(loader, self._drew, ())
        # Workers that run already have copies of the functions before, and are not watched.
        loader.collate_fn, loader.worker_init_fn = watched, watched.begin

    def drew(self) -> bool:
        return bool(self._drew.item())

    def warning(self) -> str:
        return self._warning

    def unwrap(self) -> None:
        loader = self._loader()
        if loader is not None:
            loader.collate_fn, loader.worker_init_fn = self._inner


class Collate:
    """A ``collate_fn`` for workers; each worker has a copy, and all share some memory.

    Args:
        begun: states with which the workers begin, see ``Workers``; empty for those of their seeds.
    """

    def __init__(self, loader: DataLoader[Any], shared: Any, begun: Sequence[str | None]) -> None:
        self.inner: Any = loader.collate_fn
        """The user's function."""
        self._init = loader.worker_init_fn
        self._shared = shared
        self._begun = begun
        self._worker = self._fetched = 0
        self._first = ""
        self._generators = FoundGenerators()

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        begun = self._begun[worker] if self._begun else None
        # After the user's function, which may seed the generators.
        if begun is not None:
            numbers = json.loads(begun, object_hook=_decoded)
            set_rng_state(numbers)
            set_states(self._own(), numbers["own"])
        self._worker, self._first = worker, self._text()

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        self._fetched += 1
        self._note()
        return batch

    def _own(self) -> list[GeneratorOwner]:
        worker: Any = get_worker_info()
        data = [] if worker is None else [GeneratorOwner("dataset", worker.dataset)]
        return holders_in(*data, GeneratorOwner("collate_fn", self.inner))

    def _text(self) -> str:
        """In a worker, the states of all its generators, as JSON."""
        numbers = {**rng_state(devices=False), "own": self._generators.states(self._own)}
        return json.dumps(numbers, default=_encoded, separators=(",", ":"))

    def _note(self) -> None:
        raise NotImplementedError


class _DrawingCollate(Collate):
    """Sets a flag once a worker has drawn a random number."""

    def _note(self) -> None:
        # At powers of two only, as it costs 0.2 ms: a generator that was drawn from stays changed.
        look = self._fetched & (self._fetched - 1) == 0
        # Outside of a worker there is no first one.
        if look and self._first and self._text() != self._first:
            self._shared.fill_(True)


class _RecordingCollate(Collate):
    """Writes the states of a worker's generators after each batch."""

    def _note(self) -> None:
        batches, lengths, texts = (each[self._worker] for each in self._shared)
        slot, text = self._fetched % len(batches), self._text()
        octets = text.encode()
        if text == self._first:
            lengths[slot] = 0  # nothing was drawn since the start
        elif len(octets) > _SLOT_BYTES:
            lengths[slot] = _TOO_LONG
        else:
            texts[slot, : len(octets)] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
            lengths[slot] = len(octets)
        # Last: the number of the batch marks the slot as complete for the reader.
        batches[slot] = self._fetched


def _encoded(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    octets = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    kind = "$tensor" if isinstance(value, torch.Tensor) else "$array"
    return {kind: [octets, array.dtype.str, list(array.shape)]}


def _decoded(value: dict[str, Any]) -> Any:
    if len(value) != 1:
        return value
    ((kind, parts),) = value.items()
    if kind not in ("$tensor", "$array"):
        return value
    octets, dtype, shape = parts
    array = np.frombuffer(bytearray(base64.b64decode(octets)), dtype).reshape(shape)
    return torch.from_numpy(array) if kind == "$tensor" else array
