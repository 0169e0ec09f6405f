"""Parts of training loops, and of tests that send them to disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from optuna_hermes.errors import Suspended
from optuna_hermes.testing import FakeSession

T = TypeVar("T")


def descend(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    losses: list[float],
    session: FakeSession,
    *,
    anew: bool = True,
) -> None:
    """Train a batch; ``anew`` False adds its gradients to those that are there."""
    if anew:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    losses.append(loss.item())
    session.tick()


def by_way_of_disk(train: Callable[[FakeSession], T], folder: Path, *stops: int) -> T:
    """The result of a training that is suspended after so many batches, each time anew."""
    session = FakeSession(checkpoint_dir=folder / "study" / "trial")
    for after in stops:
        session = session.again({after: "disk"})
        with pytest.raises(Suspended):
            train(session)
    return train(session.again())
