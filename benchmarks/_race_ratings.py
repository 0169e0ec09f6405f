"""A task of ``race.py``: factors of a matrix of ratings, of which some are known."""

from __future__ import annotations

from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
N_USERS, N_ITEMS, RANK = 120, 80, 4
N_TRAINED, N_HELD_OUT = 2400, 1200
NOISE = 0.3
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "weight_decay": Range(low=1e-4, high=10.0, log=True),
    "spread": Range(low=1e-2, high=1.0, log=True),
    "rank": Range(low=1, high=32, log=True, whole=True),
    "batch_size": Range(low=48, high=384, log=True, whole=True),
}


def _ratings() -> list[torch.Tensor]:
    """Users, items, and the ratings that these gave those."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(N_USERS, (N_TRAINED + N_HELD_OUT,), generator=generator)
    items = torch.randint(N_ITEMS, (N_TRAINED + N_HELD_OUT,), generator=generator)
    tastes = torch.randn(N_USERS, RANK, generator=generator)
    kinds = torch.randn(N_ITEMS, RANK, generator=generator)
    ratings = (tastes[users] * kinds[items]).sum(dim=1) / RANK**0.5
    return [users, items, ratings + NOISE * torch.randn(len(ratings), generator=generator)]


_known = _ratings()
DATA = TensorDataset(*(each[:N_TRAINED] for each in _known))
HELD_OUT = [each[N_TRAINED:] for each in _known]


class Net(nn.Module):
    def __init__(self, rank: int, spread: float) -> None:
        super().__init__()
        self.users = nn.Embedding(N_USERS, rank)
        self.items = nn.Embedding(N_ITEMS, rank)
        for each in (self.users, self.items):
            nn.init.normal_(each.weight, 0.0, spread)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        ratings: torch.Tensor = (self.users(users) * self.items(items)).sum(dim=1)
        return ratings


def begin(params: Params) -> Training:
    loader = DataLoader(DATA, params["batch_size"], shuffle=True)
    return Training(params, lambda: Net(params["rank"], params["spread"]), _loss, loader, HELD_OUT)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(*batch[:2]), batch[2])
