"""Objects that are found though the garbage collector passes over them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes import _heap
from optuna_hermes.suspend._loaders._other_loaders import OtherLoaders


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataLoader[tuple[torch.Tensor, ...]]]:
    """A loader of the objective's module, as a worker finds it that was forked from its server."""
    monkeypatch.setattr(_heap, "_frozen", [])
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    gc.collect()
    _heap.freeze()
    yield loader
    del scaler
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as the session's other tests begin


def test_loaders_of_before_the_freeze_come_back(frozen: DataLoader[tuple[torch.Tensor]]) -> None:
    """The second epoch of a loader that only validates is as it would have been."""
    others = OtherLoaders()
    others.begin({})
    first = [batch.item() for (batch,) in frozen]
    state = others.state({})
    second = [batch.item() for (batch,) in frozen]
    others.leave()
    assert isinstance(frozen.generator, torch.Generator)
    frozen.generator.manual_seed(3)  # as in another worker
    others.begin({})
    others.load_state(state)
    assert first != second
    assert [batch.item() for (batch,) in frozen] == second
    others.leave()


def test_scalers_of_before_the_freeze_are_found(frozen: object) -> None:
    """As Fabric holds one that is made where the objective's module is imported."""
    assert 3.0 in [each.get_scale() for each in _heap.objects(torch.amp.GradScaler)]


def test_objects_are_told_once(frozen: DataLoader[tuple[torch.Tensor]]) -> None:
    """Those of before and those of after, by class; one that has gone is left out."""
    after = DataLoader(frozen.dataset)
    found = list(_heap.objects(DataLoader))
    assert [each is frozen for each in found].count(True) == 1
    assert [each is after for each in found].count(True) == 1
    assert all(isinstance(each, DataLoader) for each in found)
