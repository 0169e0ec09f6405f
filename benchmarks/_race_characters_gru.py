"""A task of ``race.py``: a recurrent network predicts the next character of a source text."""

from __future__ import annotations

import torch
from _race_characters import N_CHARACTERS
from _race_characters import begin as begin_training
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn

KIND = "loop"
SPACE = {
    "lr": Range(low=1e-3, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "weight_decay": Range(low=1e-5, high=1.0, log=True),
    "dropout": Range(low=0.0, high=0.5),
    "width": Range(low=16, high=48, log=True, whole=True),
    "batch_size": Range(low=12, high=32, log=True, whole=True),
}


class Net(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_CHARACTERS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, N_CHARACTERS)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.gru(self.dropout(self.embedding(codes)))
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits


def begin(params: Params) -> Training:
    return begin_training(params, lambda: Net(params["width"], params["dropout"]))
