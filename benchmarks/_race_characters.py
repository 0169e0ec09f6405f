"""The text that both character models of ``race.py`` learn: sources of the standard library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _race_loop import Training
from _race_tasks import Params
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

N_CHARACTERS = 128
LENGTH = 32
N_SEQUENCES = 128
"""In a unit, drawn from all there are."""
TRAINED = ("argparse.py", "ast.py", "calendar.py", "configparser.py", "csv.py")
HELD_OUT = ("inspect.py", 48)


def _windows(*names: str) -> torch.Tensor:
    """Sequences and their next characters, one after the other."""
    library = Path(os.__file__).parent
    text = b"".join((library / name).read_bytes() for name in names)
    codes = torch.tensor(list(text)).clamp(max=N_CHARACTERS - 1)
    return codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


DATA = TensorDataset(_windows(*TRAINED))
_held_out = _windows(HELD_OUT[0])
HELD_OUT_BATCH = [_held_out[:: len(_held_out) // HELD_OUT[1]][: HELD_OUT[1]]]


def begin(params: Params, model: Callable[[], nn.Module]) -> Training:
    sampler = RandomSampler(DATA, num_samples=N_SEQUENCES)
    loader = DataLoader(DATA, params["batch_size"], sampler=sampler)
    return Training(params, model, _loss, loader, HELD_OUT_BATCH)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
