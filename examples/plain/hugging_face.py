"""Hugging Face's Trainer."""

import optuna
import torch
from parts import TRAIN, VALID, network
from torch import nn
from transformers import Trainer, TrainingArguments


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        return {"loss": nn.functional.mse_loss(self.net(x), labels), "logits": self.net(x)}


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(1)
    train, valid = ([{"x": x, "labels": y} for x, y in data] for data in (TRAIN, VALID))
    args = TrainingArguments(
        f"out/{trial.number}", num_train_epochs=6, per_device_train_batch_size=32, use_cpu=True,
        learning_rate=trial.suggest_float("lr", 1e-4, 1e-1, log=True), eval_strategy="epoch",
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Regression(), args, train_dataset=train, eval_dataset=valid)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
