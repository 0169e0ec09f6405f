"""A task of ``race.py``: from which module of the standard library is a line? A bag of words."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params, Range
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
MODULES = ("argparse", "ast", "difflib", "doctest", "inspect", "mailbox", "tarfile", "turtle")
N_WORDS = 512
"""Words are told apart by their checksums, of which there are so many."""
LENGTH = 8
"""Words of a line that are looked at; lines of fewer than three are left out."""
N_TRAINED, N_HELD_OUT = 1200, 1000
SPACE = {
    "lr": Range(low=1e-4, high=1e-1, log=True),
    "decay": Range(low=0.75, high=1.0),
    "warmup": Range(low=0, high=6, whole=True),
    "weight_decay": Range(low=1e-3, high=10.0, log=True),
    "dropout": Range(low=0.0, high=0.7),
    "width": Range(low=4, high=64, log=True, whole=True),
    "batch_size": Range(low=24, high=192, log=True, whole=True),
}


def _lines() -> tuple[torch.Tensor, torch.Tensor]:
    rows: list[list[int]] = []
    modules: list[int] = []
    for number, name in enumerate(MODULES):
        for line in (Path(os.__file__).parent / f"{name}.py").read_text("utf-8").splitlines():
            words = [zlib.crc32(word.encode()) % N_WORDS for word in re.findall(r"\w+", line)]
            if len(words) >= 3:
                rows.append((words + [N_WORDS] * LENGTH)[:LENGTH])
                modules.append(number)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return torch.tensor(rows)[order], torch.tensor(modules)[order]


_rows, _modules = _lines()
DATA = TensorDataset(_rows[:N_TRAINED], _modules[:N_TRAINED])
HELD_OUT = [_rows[-N_HELD_OUT:], _modules[-N_HELD_OUT:]]


def begin(params: Params) -> Training:
    def model() -> nn.Module:
        bag = nn.EmbeddingBag(N_WORDS + 1, params["width"], padding_idx=N_WORDS)
        head = nn.Linear(params["width"], len(MODULES))
        return nn.Sequential(bag, nn.Dropout(params["dropout"]), head)

    loader = DataLoader(DATA, params["batch_size"], shuffle=True)
    return Training(params, model, _loss, loader, HELD_OUT)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
