"""A task of ``race.py``: a small Transformer predicts the next character of a source text."""

from __future__ import annotations

import torch
from _race_characters import LENGTH, N_CHARACTERS
from _race_characters import begin as begin_training
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn

KIND = "loop"
N_HEADS = 4
SPACE = {
    "lr": Range(low=1e-3, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "warmup": Range(low=0, high=8, whole=True),
    "dropout": Range(low=0.0, high=0.4),
    "head_width": Range(low=3, high=12, log=True, whole=True),
    "batch_size": Range(low=8, high=32, log=True, whole=True),
}


class Net(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N_CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(
            width, N_HEADS, 2 * width, dropout, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, N_CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(codes) + self.places
        logits: torch.Tensor = self.head(self.layer(hidden, self.mask, is_causal=True))
        return logits


def begin(params: Params) -> Training:
    return begin_training(params, lambda: Net(N_HEADS * params["head_width"], params["dropout"]))
