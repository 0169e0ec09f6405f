"""A task of ``race.py``: a perceptron learns a noisy function of twelve numbers."""

from __future__ import annotations

from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
N_FEATURES = 12
N_TRAINED = 768
N_HELD_OUT = 512
NOISE = 0.3
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "weight_decay": Range(low=1e-4, high=10.0, log=True),
    "dropout": Range(low=0.0, high=0.5),
    "width": Range(low=8, high=256, log=True, whole=True),
    "batch_size": Range(low=24, high=192, log=True, whole=True),
}


def _table() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose target is a sum of waves of a few numbers each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_TRAINED + N_HELD_OUT, N_FEATURES, generator=generator)
    ways = torch.randn(N_FEATURES, 6, generator=generator) / N_FEATURES**0.5
    y = torch.sin(2 * x @ ways).sum(dim=1) + x[:, 0] * x[:, 1]
    y = (y - y.mean()) / y.std()
    return x, y + NOISE * torch.randn(len(y), generator=generator)


_x, _y = _table()
DATA = TensorDataset(_x[:N_TRAINED], _y[:N_TRAINED])
HELD_OUT = [_x[N_TRAINED:], _y[N_TRAINED:]]


def begin(params: Params) -> Training:
    def model() -> nn.Module:
        width, dropout = params["width"], nn.Dropout(params["dropout"])
        first, second = nn.Linear(N_FEATURES, width), nn.Linear(width, width)
        layers = first, nn.ReLU(), dropout, second, nn.ReLU(), dropout, nn.Linear(width, 1)
        return nn.Sequential(*layers)

    loader = DataLoader(DATA, params["batch_size"], shuffle=True)
    return Training(params, model, _loss, loader, HELD_OUT)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])
