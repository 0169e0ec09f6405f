"""Copies of a state in main memory, where there is no accelerator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._tiers._arena import host_block
from optuna_hermes.suspend._tiers._saver import Saver
from optuna_hermes.testing import FakeSession


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies to it are slower."""
    caplog.set_level(logging.INFO)
    empty = torch.empty

    def refuses(*sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cannot lock memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuses)
    assert host_block(512, pin=True).shape == (512,)
    assert "Host memory cannot be pinned, copies will be slower: cannot lock memory" in caplog.text


def test_a_state_that_holds_itself_is_refused_by_who_writes_it(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.ones(2)}
    state["state"] = state
    saver = Saver(FakeSession(checkpoint_dir=tmp_path), "trial 7")
    saver.begin(state, units=1)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        saver.finish(wait=True)
