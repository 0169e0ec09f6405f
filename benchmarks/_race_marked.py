"""A task of ``race.py``: a recurrent network adds the two numbers of a sequence that are marked."""

from __future__ import annotations

from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
LENGTH = 12
N_TRAINED, N_HELD_OUT = 384, 384
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "weight_decay": Range(low=1e-5, high=1.0, log=True),
    "width": Range(low=4, high=48, log=True, whole=True),
    "bias": Range(low=-2.0, high=4.0),
    "batch_size": Range(low=12, high=96, log=True, whole=True),
}


def _sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and their marks [n, LENGTH, 2], and the sums of the marked ones."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(N_TRAINED + N_HELD_OUT, LENGTH, generator=generator)
    order = torch.rand(numbers.shape, generator=generator).argsort(dim=1)
    marks = (order < 2).float()
    return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(dim=1)


_x, _y = _sequences()
DATA = TensorDataset(_x[:N_TRAINED], _y[:N_TRAINED])
HELD_OUT = [_x[N_TRAINED:], _y[N_TRAINED:]]


class Net(nn.Module):
    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, width, batch_first=True)
        # Of the forget gate: how long it remembers at first.
        nn.init.constant_(self.lstm.bias_hh_l0[width : 2 * width], bias)
        self.head = nn.Linear(width, 1)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = self.head(self.lstm(sequences)[0][:, -1])[:, 0]
        return sums


def begin(params: Params) -> Training:
    loader = DataLoader(DATA, params["batch_size"], shuffle=True)
    return Training(params, lambda: Net(params["width"], params["bias"]), _loss, loader, HELD_OUT)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])
