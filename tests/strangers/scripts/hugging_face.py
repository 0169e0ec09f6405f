"""Hugging Face's Trainer."""

import tempfile
from typing import Any

import torch
from kit import EPOCHS, PLAIN, TRIALS, Points, seed, work
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Data(Points):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Any, labels: Any) -> Any:
        if self.training:
            work()
        made = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(made, labels), "logits": made}


class Reporting(TrainerCallback):
    def __init__(self, trial: Any) -> None:
        self.trial = trial
        self.number = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **rest: Any) -> None:
        self.number += 1
        self.trial.report(metrics["eval_loss"], self.number)


def objective(trial: Any) -> float:
    seed()
    if PLAIN:
        pruning: Any = Reporting(trial)
    else:
        TRIALS.append(trial)
        from optuna_hermes.huggingface import HermesCallback

        pruning = HermesCallback(trial, monitor="eval_loss")
    options = {"per_device_train_batch_size": 4, "eval_strategy": "epoch", "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3}
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(folder, num_train_epochs=EPOCHS, **options, **quiet)
    torch.manual_seed(1)
    run = Trainer(Model(), arguments, train_dataset=Data(), eval_dataset=Data(8))
    run.add_callback(pruning)
    if PLAIN:
        run.train()
    else:
        pruning.train(run)
    run.remove_callback(pruning)
    return run.evaluate()["eval_loss"]
