"""Objectives as texts of files: one waits, one is a loop of one's own that notes each unit."""

from __future__ import annotations

from textwrap import indent

TRAINS_UNTIL_GO = """
import time
from pathlib import Path


def objective(trial):
    x = trial.suggest_float("x", 0.0, 1.0)
    Path(__file__).with_name(f"begun-{trial.number}").touch()
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.05)  # training
    return x
"""
"""Its trials begin a file each, and train until there is a file ``go`` beside it."""

_LOOP = """
import os
import time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable


def objective(trial):
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
{set_up}\
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs({units}):
        for x in run.batches(torch.ones(4, 3, 4)):
            time.sleep({seconds})  # training
            loss = (model(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
{each_unit}\
        with Path(__file__).with_name("trained").open("a") as file:
            print({noted}, file=file)
        run.report(loss.item())
    return run.value
"""


def loop(
    units: int,
    *,
    seconds: float = 0.05,
    noted: str = "trial.number, epoch",
    set_up: str = "",
    each_unit: str = "",
) -> str:
    """The text of a file with an ``objective`` of units of four batches.

    Args:
        units: of each trial.
        seconds: of each batch.
        noted: expressions whose values are a line of the file ``trained`` for each unit.
        set_up: lines that follow the making of the model.
        each_unit: lines that follow the batches of a unit.
    """
    parts = {"set_up": indent(set_up, " " * 4), "each_unit": indent(each_unit, " " * 8)}
    return _LOOP.format(units=units, seconds=seconds, noted=noted, **parts)
