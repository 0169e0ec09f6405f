"""Cost of Hermes to a training loop, per batch, when there is nothing to do.

Run it with ``python benchmarks/hook_cost.py [--json]``. It fits a network of four weights, stops
before a batch in the second epoch, and times there, over and over, what Lightning calls before it
fetches a batch: once with Hermes, once without. The difference is the cost. Exit status 1 if it is
above 2 microseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

import lightning
import optuna
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.lightning import HermesCallback
from optuna_hermes.testing import FakeSession

LIMIT_MICROSECONDS = 2.0
SEED = 0


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(Callback):
    """Times the call before a fetch, once, when the trial is under way."""

    def __init__(self, rounds: int, calls: int) -> None:
        self._rounds = rounds
        self._calls = calls
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 9:
            before_fetch = trainer.fit_loop.epoch_loop._on_before_fetch
            self.seconds = [self._once(before_fetch) for _ in range(self._rounds)]

    def _once(self, call: Callable[[], None]) -> float:
        return timeit.timeit(call, number=self._calls) / self._calls


def measure(rounds: int, calls: int, *, hermes: bool) -> float:
    """Median seconds of what Lightning calls before it fetches a batch."""
    seed_everything(SEED, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(6, 4)), batch_size=1)
    clock = Clock(rounds, calls)
    callbacks: list[Callback] = [clock]
    if hermes:
        trial = optuna.create_study().ask()
        callbacks.append(HermesCallback(trial, "val_loss", _session=FakeSession()))
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Line(), data, data)
    return statistics.median(clock.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=5_000, help="calls per round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    without = 1e6 * measure(options.rounds, options.calls, hermes=False)
    with_hermes = 1e6 * measure(options.rounds, options.calls, hermes=True)
    result = {
        "microseconds_per_batch": round(with_hermes - without, 3),
        "limit_microseconds": LIMIT_MICROSECONDS,
        "with_hermes": round(with_hermes, 3),
        "without": round(without, 3),
        "rounds": options.rounds,
        "calls": options.calls,
        "seed": SEED,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "machine": platform.machine(),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    return int(with_hermes - without > LIMIT_MICROSECONDS)


if __name__ == "__main__":
    sys.exit(main())
