"""Each piece of torch that is not promised is still what ``suspend/_loader*.py`` takes it for.

If a test here fails after an upgrade, torch has changed that piece: look at ``suspend/_loader*.py``
and ``suspend/_loaders/_workers.py`` before anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter


class Asked(Sampler[int]):
    """Notes how torch's generator stands when it is asked for an iterator."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[int]:
        self.states.append(torch.get_rng_state())
        return iter(range(8))

    def __len__(self) -> int:
        return 8


def loader(sampler: Any, **options: Any) -> DataLoader[Any]:
    context = "fork" if options.get("num_workers") else None
    return DataLoader(range(8), sampler=sampler, multiprocessing_context=context, **options)  # type: ignore[arg-type]


def test_a_sampler_is_asked_before_and_after_the_seed_of_workers() -> None:
    """Once before it is drawn, once after; without workers once, and in later passes once."""
    sampler = Asked()
    iterator = iter(loader(sampler, num_workers=1, persistent_workers=True, batch_size=None))
    list(iterator)
    assert len(sampler.states) == 2
    assert not torch.equal(*sampler.states)
    sampler = Asked()
    list(iter(loader(sampler, batch_size=None)))
    assert len(sampler.states) == 1
    sampler = Asked()
    again = loader(sampler, num_workers=1, persistent_workers=True, batch_size=None)
    list(again)
    list(again)
    assert len(sampler.states) == 3


def test_an_iterator_with_workers_is_made_by_a_function_of_the_loader() -> None:
    """It may be replaced in a loader, and an iterator is made and then set up."""
    source = inspect.getsource(DataLoader._get_iterator)
    assert "self.check_worker_number_rationality()" in source
    assert "return _MultiProcessingDataLoaderIter(self)" in source
    assert "self._get_iterator()" in inspect.getsource(DataLoader.__iter__)
    assert list(inspect.signature(_MultiProcessingDataLoaderIter.__init__).parameters) == [
        "self",
        "loader",
    ]
    assert "loader._get_shared_seed" not in inspect.getsource(_BaseDataLoaderIter.__init__)
    assert "_base_seed" in inspect.getsource(_BaseDataLoaderIter.__init__)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_go_to_the_workers_in_turn(workers: int) -> None:
    """The number sent is counted, and the turns are an iterator that can be wound on."""
    each: Any = iter(loader(Asked(), num_workers=workers, prefetch_factor=1))
    assert each._send_idx == workers
    assert next(each._worker_queue_idx_cycle) == 0
    assert "next(self._worker_queue_idx_cycle)" in inspect.getsource(
        _MultiProcessingDataLoaderIter._try_put_index
    )
    assert "_send_idx = 0" in inspect.getsource(_MultiProcessingDataLoaderIter._reset)
    assert each._rcvd_idx == 0
    list(each)
    assert each._rcvd_idx == each._send_idx


def test_persistent_workers_hang_on_the_loader() -> None:
    """Its iterator is an attribute, and without it other processes are started."""
    each = loader(Asked(), num_workers=1, persistent_workers=True)
    first = iter(each)
    assert each._iterator is first
    assert iter(each) is first
    each._iterator = None
    assert iter(each) is not first


@pytest.mark.parametrize("make", ["cuda", "xpu"])
def test_the_capture_of_a_graph_begins_in_a_method_that_can_be_wrapped(make: str) -> None:
    """In Python, on a class whose objects can be referred to weakly (``suspend/_accelerators``)."""
    kind = getattr(torch.get_device_module(make), f"{make.upper()}Graph", None)
    if kind is None:
        pytest.skip("this torch has none")
    assert inspect.isfunction(kind.capture_begin)
    assert kind.__weakrefoffset__ != 0  # below 0 it is in front of the object, as of Python 3.12
