"""The same in Lightning: the module keeps the hidden state, and a metric by epoch."""

from typing import Any

import lightning.pytorch as pl
import torch
from kit import callback, seed, trainer, work
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric


class Waves(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(17.0) / 3 + index)


class Recurrent(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden: torch.Tensor | None = None
        self.mean = MeanMetric()
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.hidden = None
        self.losses.clear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        work()
        made, hidden = self.gru(batch[:, :-1, None], self.hidden)
        self.hidden = hidden.detach()
        loss = nn.functional.mse_loss(self.out(made).squeeze(-1), batch[:, 1:])
        self.mean.update(loss)
        self.losses.append(loss.item())
        self.log("mean", self.mean)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("sum", sum(self.losses) + float(self.mean.compute()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "sum"}}


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial, "sum")
    trainer(pruning).fit(Recurrent(), DataLoader(Waves(), 2))
    return pruning.value
