"""A task of ``race.py``: a perceptron restores scikit-learn's digits from few numbers each."""

from __future__ import annotations

from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params, Range
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
N_PIXELS = 64
N_TRAINED = 768
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "noise": Range(low=0.0, high=0.5),
    "width": Range(low=16, high=128, log=True, whole=True),
    "n_codes": Range(low=2, high=32, log=True, whole=True),
    "batch_size": Range(low=24, high=192, log=True, whole=True),
}

_images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
_images = _images[torch.randperm(len(_images), generator=torch.Generator().manual_seed(0))]
DATA = TensorDataset(_images[:N_TRAINED])
HELD_OUT = [_images[N_TRAINED:]]


class Net(nn.Module):
    def __init__(self, width: int, n_codes: int, noise: float) -> None:
        super().__init__()
        self._noise = noise
        self.layers = nn.Sequential(
            nn.Linear(N_PIXELS, width), nn.ReLU(), nn.Linear(width, n_codes), nn.ReLU(),
            nn.Linear(n_codes, width), nn.ReLU(), nn.Linear(width, N_PIXELS),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            images = images + self._noise * torch.randn_like(images)
        restored: torch.Tensor = self.layers(images)
        return restored


def begin(params: Params) -> Training:
    def model() -> nn.Module:
        return Net(params["width"], params["n_codes"], params["noise"])

    loader = DataLoader(DATA, params["batch_size"], shuffle=True)
    return Training(params, model, _loss, loader, HELD_OUT)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[0])
