"""States of the random generators of a loader's worker processes, batch by batch.

A worker writes the states of its generators after each batch to memory that it shares with the
training process. As it fetches ahead, the newest of these states are kept in a ring; the one that
counts is that after the last trained batch.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from optuna_hermes.suspend._generators import (
    generator_state,
    own_generators,
    set_generator_state,
)

_SLOT_BYTES = 1 << 15
"""Room for three times the states of the generators of torch, NumPy and Python."""
_TOO_LONG = -1
_WAIT_SECONDS = 10.0
"""Most time to wait until a worker has fetched a batch that it was asked for."""


class Workers:
    """The states of the generators of one iterator's worker processes.

    Args:
        loader: has worker processes.
        states: what ``state`` returned for each, None for one that begins with its own seed.
    """

    def __init__(self, loader: DataLoader[Any], states: list[str | None] | None = None) -> None:
        count, ring = loader.num_workers, (loader.prefetch_factor or 2) + 2
        self.lost = False
        """True if a state that was asked for could not be read."""
        same = states is not None and len(states) == count
        self._begun: list[str | None] = list(states or ()) if same else [None] * count
        self._batches = torch.full((count, ring), -1, dtype=torch.int64)
        self._lengths = torch.zeros((count, ring), dtype=torch.int64)
        self._texts = torch.zeros((count, ring, _SLOT_BYTES), dtype=torch.uint8)
        for each in (self._batches, self._lengths, self._texts):
            each.share_memory_()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def hung(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Let the processes that are started within write their states."""
        collate, init = loader.collate_fn, loader.worker_init_fn
        shared = self._batches, self._lengths, self._texts
        watched = _BeginningCollate(collate, init, shared, self._begun)
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


class _BeginningCollate:
    """A ``collate_fn`` for workers; each worker has a copy, and all have the shared memory."""

    def __init__(
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], None] | None,
        shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        begun: list[str | None],
    ) -> None:
        self._collate = collate
        self._init = init
        self._shared = shared
        self._begun = begun
        self._worker = self._fetched = 0
        self._first = ""

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        begun = self._begun[worker]
        if begun is not None:
            _restore(json.loads(begun, object_hook=_decoded))
        self._worker, self._first = worker, _text()

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        self._fetched += 1
        batches, lengths, texts = (each[self._worker] for each in self._shared)
        slot, text = self._fetched % len(batches), _text()
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
        return batch


def _own() -> list[Any]:
    worker: Any = get_worker_info()
    return own_generators(worker.dataset)


def _text() -> str:
    """In a worker, the states of all its generators, as JSON."""
    numpy_state: Any = np.random.get_state()
    version, words, gauss = random.getstate()
    numbers = {
        "torch": torch.get_rng_state(),
        "numpy": list(numpy_state),
        "python": [version, np.asarray(words, np.uint32), gauss],
        "own": [generator_state(each) for each in _own()],
    }
    return json.dumps(numbers, default=_encoded, separators=(",", ":"))


def _restore(numbers: dict[str, Any]) -> None:
    torch.set_rng_state(numbers["torch"])
    np.random.set_state(tuple(numbers["numpy"]))
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    for generator, state in zip(_own(), numbers["own"], strict=False):
        set_generator_state(generator, state)


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
