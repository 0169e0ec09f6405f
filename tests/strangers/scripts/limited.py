"""No longer than an hour, with a schedule that asks for its number of steps."""

from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer
from torch.utils.data import DataLoader


class Cycle(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning, max_time="00:01:00:00").fit(Cycle(), loader, DataLoader(Points(8), 4))
    return pruning.value
