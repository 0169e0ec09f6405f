"""Tune a small transformer that reads scikit-learn's digits row by row: 8 trials take turns.

Run it with ``python examples/huggingface_trainer.py``. Stop it when you like, start it again, and
it goes on where it was. Three lines differ from a training that cannot be suspended: those with
``hermes``. Nothing is downloaded: the model begins with random weights.
"""

import sys

import optuna
import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.huggingface import HermesCallback


def sentences() -> tuple[list[dict], list[dict]]:
    """Each pixel of an image is a word: how dark it is, of 17 shades."""
    pixels, digits = load_digits(return_X_y=True)
    rows = [
        {"input_ids": image, "labels": digit}
        for image, digit in zip(pixels.astype(int).tolist(), digits.tolist(), strict=True)
    ]
    return rows[:1437], rows[1437:]


def objective(trial: optuna.Trial, epochs: int = 10) -> float | None:
    torch.set_num_threads(1)  # the network is small, and trials run beside each other
    train, valid = sentences()
    width = 2 ** trial.suggest_int("log_width", 3, 6)
    config = BertConfig(
        vocab_size=17, max_position_embeddings=64, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=trial.suggest_int("layers", 1, 3), num_attention_heads=4, num_labels=10,
    )  # fmt: skip
    args = TrainingArguments(
        f"out/{trial.number}", num_train_epochs=epochs, per_device_train_batch_size=64,
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
        eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    hermes = HermesCallback(trial, monitor="eval_loss")
    model = BertForSequenceClassification(config)
    hermes.train(Trainer(model, args, train_dataset=train, eval_dataset=valid))
    return hermes.value


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="huggingface", storage="sqlite:///huggingface.db", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )  # fmt: skip
    optimize(study, objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 8)
    print(f"Best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
