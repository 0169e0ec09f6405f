"""A training in a plain loop of PyTorch; the tasks that have one fill it in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from _race_tasks import UNITS, Params, digest
from _race_watch import Watch
from torch import nn
from torch.utils.data import DataLoader

Loss = Callable[[nn.Module, Any], torch.Tensor]


class Training:
    """A model in training; its curve follows from the parameters alone.

    Args:
        params: ``lr``, ``decay``, ``warmup`` and ``weight_decay`` are used here.
        model: makes the model; it is called once the random numbers are seeded.
        loss: of a batch.
        loader: of the training data.
        held_out: the batch that values are the loss of.
    """

    def __init__(
        self,
        params: Params,
        model: Callable[[], nn.Module],
        loss: Loss,
        loader: DataLoader[Any],
        held_out: Any,
    ) -> None:
        torch.set_num_threads(1)
        self._seed = digest(params)
        torch.manual_seed(self._seed)
        self.model = model()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=params["lr"], weight_decay=params.get("weight_decay", 0.01)
        )
        self.loader = loader
        self._params = params
        self.loss = loss
        self._held_out = held_out

    def train(
        self,
        watch: Watch,
        report: Callable[[float], object],
        *,
        epochs: Callable[[range], Iterable[int]] = iter,
        batches: Callable[[Any], Iterable[Any]] = iter,
        done: int = 0,
    ) -> None:
        """Train to the end.

        Args:
            watch: of the trial.
            report: called with each unit's value; it may raise.
            epochs: what a contestant wraps the loop over units in.
            batches: what it wraps the loop over batches in.
            done: units that were trained before.
        """
        for unit in epochs(range(done + 1, UNITS + 1)):
            # Of each unit, so that who resumes a trial need not keep the generator's state.
            torch.manual_seed(self._seed + unit)
            for group in self.optimizer.param_groups:
                group["lr"] = rate(self._params, unit)
            self.model.train()
            for batch in batches(self.loader):
                with watch.batch(unit):
                    self.optimizer.zero_grad()
                    self.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
                    self.optimizer.step()
            value = self._validate()
            watch.value(unit, value)
            report(value)

    def _validate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            return float(self.loss(self.model, self._held_out))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def rate(params: Params, unit: int) -> float:
    """The learning rate of a unit: it rises for ``warmup`` units, and falls by ``decay`` a unit."""
    rise = min(1.0, unit / (1 + params.get("warmup", 0)))
    return float(params["lr"] * rise * params["decay"] ** (unit - 1))
