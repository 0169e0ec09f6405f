"""Reasons, given beforehand, for CUDA to differ in the next process."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from optuna_hermes.suspend._tiers._accelerators import Accelerator, _captured, _Cuda, accelerator
from optuna_hermes.suspend._tiers._saver import warn_of_inexact


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if torch had cuDNN, whose settings are torch's own also without it."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        yield


def reasons(*roots: object) -> set[str]:
    return set(_Cuda("cpu").inexact(roots))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_dropout_within_recurrent_layers(kind: Callable[..., nn.RNNBase]) -> None:
    """CuDNN draws it from a state of its own, wherever in the model the layer is."""
    layer = kind(4, 4, num_layers=2, dropout=0.3)
    assert reasons(object(), nn.Sequential(nn.Linear(4, 4), layer)) == {"cudnn dropout"}


def test_what_is_drawn_from_torchs_generators_is_exact() -> None:
    """Dropout between layers, and recurrent layers without it."""
    assert reasons(nn.Sequential(nn.GRU(4, 4, num_layers=2), nn.Dropout(0.3))) == set()


def test_layers_that_cudnn_does_not_compute_are_exact() -> None:
    """Those that are left on a CPU, and all where it is switched off."""
    layer = nn.GRU(4, 4, num_layers=2, dropout=0.3)
    assert reasons(copy.deepcopy(layer).to("meta")) == set()
    with torch.backends.cudnn.flags(enabled=False, benchmark=True):
        assert reasons(layer) == set()


def test_kernels_that_are_chosen_by_their_speed() -> None:
    """Another process may choose others."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert reasons(nn.Linear(4, 4)) == {"cudnn benchmark"}
        assert Accelerator("cpu").inexact([nn.Linear(4, 4)]) == {}


def test_each_reason_is_logged_once_for_a_study(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trials of a study have their folders side by side."""
    for number in range(2):
        warn_of_inexact(f"trial {number}", tmp_path / f"{number}", {"a": "one.", "b": "two."})
    assert [record.getMessage() for record in caplog.records] == [
        "Trial 0 is not exact when it comes back from disk: one.",
        "Trial 0 is not exact when it comes back from disk: two.",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_build_of_torch_without_accelerators_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.6 raises an error where later ones return None."""

    def old() -> None:
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", old)
    assert accelerator() is None


class Graph:
    """A captured graph, as ``torch.cuda.CUDAGraph`` is one."""

    begun = 0

    def capture_begin(self, pool: str | None = None) -> None:
        self.begun += 1


def test_graphs_that_are_captured_are_known() -> None:
    """Those that are there when it is first asked, those that come later, and none that is gone."""
    there, other = Graph(), object()
    assert set(_captured(Graph)) == {there}
    with patch.object(gc, "get_objects", side_effect=AssertionError("searched again")):
        later = Graph()
        assert set(_captured(Graph)) == {there}, "nothing is captured yet"
        later.capture_begin(pool="its own")
        assert set(_captured(Graph)) == {there, later}
    assert (later.begun, there.begun) == (1, 0)
    del there, later, other
    assert not _captured(Graph)


class Devices:
    """The module of a make with two devices, whose generators are set only when they must be."""

    def __init__(self) -> None:
        self.states = [torch.tensor([1]), torch.tensor([2])]
        self.set: list[int] = []

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state
        self.set.append(index)


def test_a_generator_that_nobody_has_used_is_left_alone() -> None:
    """Setting its state would have cuDNN seed the dropout of recurrent layers anew."""
    make = Accelerator("cpu")
    make.module = Devices()
    make.set_rng_states([torch.tensor([1]), torch.tensor([3])])
    assert make.module.set == [1]
    assert [int(state) for state in make.rng_states()] == [1, 3]
