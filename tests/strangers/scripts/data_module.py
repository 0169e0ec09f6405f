"""A data module, early stopping, the best checkpoint, a logger, and a test at the end."""

import tempfile
from typing import Any

import lightning.pytorch as pl
from kit import Module, Points, callback, seed, trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, random_split


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.train, self.val = random_split(Points(32), [24, 8])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 4)

    def test_dataloader(self) -> Any:
        return DataLoader(self.val, 8)


class Tested(Module):
    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def objective(trial: Any) -> float:
    seed()
    pruning, folder = callback(trial), tempfile.mkdtemp()
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    early = EarlyStopping("val_loss", patience=3)
    logger = CSVLogger(folder)
    run = trainer(
        pruning, best, early, LearningRateMonitor(), logger=logger, enable_checkpointing=True
    )
    model, data = Tested(), Data()
    run.fit(model, data)
    (tested,) = run.test(model, data, verbose=False)
    return tested["test_loss"] + float(best.best_model_score)
