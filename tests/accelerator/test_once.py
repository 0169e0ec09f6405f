"""A computation shared by all trials draws the same numbers on a device, and leaves no trace."""

from __future__ import annotations

import pytest
import torch

from optuna_hermes import once
from optuna_hermes.workers import _once
from support.accelerator import KIND

pytestmark = pytest.mark.accelerator

DEVICE = f"{KIND}:0"


def drawn(count: int) -> list[float]:
    return torch.rand(8, device=DEVICE)[:count].tolist()


def test_the_generators_of_devices_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls begin with the same state, and the trial's own numbers go on."""
    monkeypatch.setattr(_once, "_process", _once._Process())
    torch.manual_seed(3)
    expected = [drawn(4), drawn(4)]
    torch.manual_seed(3)
    seen, first = [drawn(4)], once(drawn, 2)
    assert once(drawn, 3)[:2] == first
    assert [*seen, drawn(4)] == expected


def test_a_process_that_has_used_a_device_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server would have to use the device, which its forks could not any more."""
    shared: list[str] = []
    notes: list[str] = []
    torch.zeros(1, device=DEVICE)
    monkeypatch.setattr(_once, "_process", _once._Process())
    _once.begin_worker(shared.append, notes.append)
    once(drawn, 2)
    assert not shared
    assert notes == [
        _once.not_shared("drawn", "it, or the trial before it, has used an accelerator")
    ]
