"""Training of every contestant of ``switch_cost.py``, and the reading of its switches.

Each batch of each trial leaves a line ``trial process start end`` in one file: seconds of the
monotonic clock, which all processes of a host share. A switch is where the next line is another
trial's.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from optuna_hermes.suspend._tiers._accelerators import used_accelerator

LAYERS = 16
COPIES = 3
"""AdamW keeps two more tensors for each parameter."""


class Net(torch.nn.Module):
    """Square layers whose parameters take, with the state of AdamW, about ``state_bytes``."""

    def __init__(self, state_bytes: int) -> None:
        super().__init__()
        self.width = max(1, round((state_bytes / COPIES / LAYERS / 4) ** 0.5))
        layers = [torch.nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.expand(-1, self.width))  # type: ignore[no-any-return]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    wait()


def wait() -> None:
    """Until the accelerator has done what it was given."""
    if used_accelerator() is not None:
        torch.accelerator.synchronize()


class Batches:
    """Writes the lines."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, trial: int, start: float, end: float) -> None:
        os.write(self._file, f"{trial} {os.getpid()} {start:.6f} {end:.6f}\n".encode())


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Seconds of every switch, from the end of one trial's last batch."""

    to_batch: list[float]  # to the beginning of the other trial's first batch
    to_step: list[float]  # to the end of that batch, its training step done
    processes: int  # how many have trained
    step: float | None  # the median batch that is not the first after a switch, None if all are


def count_switches(path: Path) -> int:
    return len(read_switches(path, skip=0).to_batch) if path.exists() else 0


def read_switches(path: Path, *, skip: int) -> Switches:
    """The switches of a file, without the first ``skip``: each trial begins for the first time."""
    lines = [line.split() for line in path.read_text().splitlines()]
    batches = sorted((float(start), float(end), trial) for trial, _, start, end in lines)
    to_batch, to_step, steps = [], [], []
    for (_, left, before), (start, end, trial) in pairwise(batches):
        if trial == before:
            steps.append(end - start)
        else:
            to_batch.append(start - left)
            to_step.append(end - left)
    step = statistics.median(steps) if steps else None
    return Switches(
        to_batch=to_batch[skip:],
        to_step=to_step[skip:],
        processes=len({process for _, process, *_ in lines}),
        step=step,
    )
