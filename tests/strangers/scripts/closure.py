"""L-BFGS in Lightning, which calls the step several times a batch."""

from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


class Newton(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.05, max_iter=2)


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(), 8, shuffle=True)
    trainer(pruning).fit(Newton(), loader, DataLoader(Points(8), 4))
    return pruning.value
