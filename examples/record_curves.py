"""Record the learning curves in ``examples/curves``: random trials, each trained to its end.

``python examples/record_curves.py --out my_curves`` writes a file for each task, in the format of
``examples/curves/README.md``; ``optuna-hermes simulate my_curves/*.npz`` then shows what each
policy would have made of these trainings. To record a task of your own, add it to ``TASKS``.

The values of a trial depend on ``--seed`` and its number alone; the seconds are measured.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sklearn
import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

OPTIMIZERS = ("sgd", "adam")
ACTIVATIONS = ("relu", "tanh")
NAMES = (
    "optimizer:sgd|adam", "lr", "momentum", "weight_decay", "batch_size", "width", "dropout",
    "activation:relu|tanh",
)  # fmt: skip
HOLD = 10.0  # what has diverged counts as so many times the median first value


class Params(NamedTuple):
    """One trial's hyper-parameters, in the order of ``NAMES``; choices as their indices."""

    optimizer: int
    lr: float
    momentum: float
    weight_decay: float
    batch_size: int
    width: int
    dropout: float
    activation: int


class Split(NamedTuple):
    x_train: Tensor
    x_val: Tensor
    y_train: Tensor
    y_val: Tensor


@dataclass(frozen=True)
class Task:
    data: str  # of scikit-learn
    metric: str
    train_loss: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], Tensor]
    convolve: bool = False

    def load(self, seed: int) -> Split:
        """Two thirds to train on, one to measure with; scaled by what is trained on."""
        x, y = getattr(datasets, f"load_{self.data}")(return_X_y=True)
        x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=1 / 3, random_state=seed)
        mean, scale = x_train.mean(axis=0), x_train.std(axis=0) + 1e-6
        if y.dtype.kind == "f":
            center, spread = y_train.mean(), y_train.std()
            y_train, y_val = (y_train - center) / spread, (y_val - center) / spread
        kind = torch.float32 if y.dtype.kind == "f" else torch.int64
        return Split(
            x_train=torch.tensor((x_train - mean) / scale, dtype=torch.float32),
            x_val=torch.tensor((x_val - mean) / scale, dtype=torch.float32),
            y_train=torch.tensor(y_train, dtype=kind),
            y_val=torch.tensor(y_val, dtype=kind),
        )

    def model(self, params: Params, split: Split) -> nn.Module:
        act = (nn.ReLU, nn.Tanh)[params.activation]
        width, drop = params.width, nn.Dropout(params.dropout)
        n_out = 1 if split.y_train.is_floating_point() else int(split.y_train.max()) + 1
        if self.convolve:
            channels = max(2, width // 8)
            return nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, channels, 3), act(), nn.MaxPool2d(2),
                nn.Flatten(), drop, nn.Linear(channels * 9, n_out),
            )  # fmt: skip
        n_in = split.x_train.shape[1]
        return nn.Sequential(
            nn.Linear(n_in, width), act(), drop, nn.Linear(width, width), act(),
            nn.Linear(width, n_out),
        )  # fmt: skip


def error(output: Tensor, y: Tensor) -> Tensor:
    wrong = (output.argmax(dim=1) != y).float().mean()
    return wrong if output.isfinite().all() else torch.tensor(math.nan)


def squares(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.squeeze(1), y)


CROSS_ENTROPY = nn.functional.cross_entropy
TASKS = {
    "digits-mlp": Task("digits", "validation cross entropy", CROSS_ENTROPY, CROSS_ENTROPY),
    "digits-cnn": Task("digits", "validation error", CROSS_ENTROPY, error, convolve=True),
    "cancer-mlp": Task("breast_cancer", "validation cross entropy", CROSS_ENTROPY, CROSS_ENTROPY),
    "diabetes-mlp": Task("diabetes", "validation mean squared error", squares, squares),
}


def sample(rng: np.random.Generator) -> Params:
    """A random trial; many of the learning rates are too high."""
    return Params(
        optimizer=int(rng.integers(len(OPTIMIZERS))),
        lr=_log_uniform(rng, 1e-4, 3.0),
        momentum=float(rng.uniform(0.0, 0.99)),
        weight_decay=_log_uniform(rng, 1e-6, 1e-1),
        batch_size=int(2 ** rng.integers(4, 9)),
        width=round(_log_uniform(rng, 8, 128)),
        dropout=float(rng.uniform(0.0, 0.6)),
        activation=int(rng.integers(len(ACTIVATIONS))),
    )


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def train(
    task: Task, split: Split, params: Params, n_units: int
) -> tuple[list[float], list[float]]:
    """Values before the first epoch and after each, and the seconds of each."""
    model = task.model(params, split)
    parameters, decay = model.parameters(), params.weight_decay
    optimizer: torch.optim.Optimizer
    if OPTIMIZERS[params.optimizer] == "sgd":
        optimizer = torch.optim.SGD(parameters, params.lr, params.momentum, weight_decay=decay)
    else:
        betas = (params.momentum, 0.999)
        optimizer = torch.optim.Adam(parameters, params.lr, betas, weight_decay=decay)
    values, seconds = [_measured(task, split, model)], []
    for _ in range(n_units):
        # Processor time: what else the machine does must not show in the curves.
        start = time.process_time()
        _epoch(task, split, params, model, optimizer)
        values.append(_measured(task, split, model))
        seconds.append(max(time.process_time() - start, 1e-6))
    return values, seconds


def _epoch(
    task: Task, split: Split, params: Params, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    model.train()
    for batch in torch.randperm(len(split.x_train)).split(params.batch_size):
        optimizer.zero_grad()
        task.train_loss(model(split.x_train[batch]), split.y_train[batch]).backward()
        optimizer.step()


def _measured(task: Task, split: Split, model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(task.measure(model(split.x_val), split.y_val))


def hold(value: np.ndarray) -> np.ndarray:
    """Put a bound on the values; from the first one that is not finite on, they stay there."""
    ceiling = HOLD * np.median(value[:, 0])
    diverged = np.maximum.accumulate(~np.isfinite(value), axis=1)
    return np.where(diverged, ceiling, np.minimum(value, ceiling))


def record(name: str, n_trials: int, n_units: int, seed: int) -> dict[str, np.ndarray]:
    """The arrays of one task's file."""
    task = TASKS[name]
    split = task.load(seed)
    trials = [sample(np.random.default_rng([seed, number])) for number in range(n_trials)]
    curves = []
    for number, params in enumerate(trials):
        torch.manual_seed(1_000_003 * seed + number)
        curves.append(train(task, split, params, n_units))
    return {
        "value": hold(np.array([values for values, _ in curves])).astype(np.float32),
        "seconds": np.array([seconds for _, seconds in curves], dtype=np.float32),
        "length": np.full(n_trials, n_units, dtype=np.int32),
        "params": np.array(trials, dtype=np.float64),
        "param_names": np.array(NAMES),
        "meta": np.array(json.dumps(_meta(name, task, seed))),
    }


def _meta(name: str, task: Task, seed: int) -> dict[str, object]:
    return {
        "name": f"sklearn-{name}",
        "family": "sklearn",
        "metric": task.metric,
        "direction": "minimize",
        "source": f"examples/record_curves.py, seed {seed}, on load_{task.data} of scikit-learn "
        f"{sklearn.__version__}, torch {torch.__version__}",
        "licence": "curves: MIT; data: BSD-3-Clause, as shipped with scikit-learn",
        "measured": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Record learning curves on scikit-learn's data.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: every task")
    parser.add_argument("--trials", type=int, default=100, help="of each task (100)")
    parser.add_argument("--units", type=int, default=30, help="epochs of each trial (30)")
    parser.add_argument("--seed", type=int, default=0, help="of data, trials and training (0)")
    given = parser.parse_args()
    if given.trials < 1 or given.units < 1:
        parser.error("there must be a trial and a unit at least")
    torch.set_num_threads(1)  # the networks are small, and the values are the same every time
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.task or TASKS:
        arrays = record(name, given.trials, given.units, given.seed)
        path = given.out / f"sklearn-{name}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path}: {given.trials} trials, {arrays['seconds'].sum():.1f} s of training")


if __name__ == "__main__":
    main()
