"""Trainings on the simulated accelerator, and what they are at their end, to the bit."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import optuna
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.accelerator._device_module import KIND
from support.accelerator.lightning import SimulatedAccelerator

DEVICE = os.environ.get("TRAININGS_DEVICE", f"{KIND}:0")
"""``benchmarks/gpu.py`` trains on a GPU."""
EPOCHS, BATCHES, SIZE = 3, 6, 16
Bits = dict[str, bytes]


def digits(n_batches: int = BATCHES) -> TensorDataset:
    data = load_digits()
    count = n_batches * SIZE
    x = torch.tensor(data.images[:count], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(x, torch.tensor(data.target[:count]))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 10),
    )


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(8, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rows(x.squeeze(1))[0][:, -1])
        return out


class SideStream:
    """An average of the weights that is kept up to date on a stream of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._average = [weight.detach().clone() for weight in model.parameters()]
        self._stream = torch.Stream(DEVICE)
        self._taken: list[torch.Tensor] = []

    def update(self) -> None:
        main = torch.accelerator.current_stream(DEVICE)
        main.wait_stream(self._stream)  # which has read what is to be freed now
        self._taken = [weight.detach().clone() for weight in self._model.parameters()]
        self._stream.wait_stream(main)
        with self._stream:
            for kept, weight in zip(self._average, self._taken, strict=True):
                kept.mul_(0.9).add_(weight, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept, saved in zip(self._average, state["average"], strict=True):
            kept.copy_(saved)


def bits(values: dict[str, Any]) -> Bits:
    return {
        name: torch.as_tensor(value).detach().cpu().contiguous().numpy().tobytes()
        for name, value in values.items()
    }


def new_trial() -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study().ask()


def loop(session: FakeSession, model: Callable[[], nn.Module]) -> Bits:
    """A loop of one's own; the losses stay on the device until the end of an epoch."""
    seed(1)
    net = model().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    average = SideStream(net)
    loader = DataLoader(digits(), SIZE, shuffle=True, pin_memory=True)
    if session.checkpoints:
        seed(2)
    run = PyTorchLoop(
        new_trial(), {"model": net, "optimizer": optimizer, "average": average}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(EPOCHS):
        run.kept["total"] = torch.zeros((), device=DEVICE)
        for x, y in run.batches(loader):
            out = net(x.to(DEVICE, non_blocking=True))
            loss = nn.functional.cross_entropy(out, y.to(DEVICE, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update()
            run.kept["total"] += loss.detach()
            session.tick()
        losses.append(run.kept["total"].item())
        run.report(losses[-1])
    noise = torch.rand(4, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    kept = {f"average {n}": each for n, each in enumerate(average.state_dict()["average"])}
    return bits({**net.state_dict(), **kept, "losses": losses, "noise": noise})


class Lit(pl.LightningModule):
    def __init__(self, session: FakeSession, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = model()
        self._session = session

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert batch[0].device == torch.device(DEVICE)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self._session.tick()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def lightning(
    session: FakeSession, model: Callable[[], nn.Module], precision: Any = "32-true"
) -> Bits:
    seed(1)
    module = Lit(session, model)
    loader = DataLoader(digits(), SIZE, shuffle=True, pin_memory=True)
    if session.checkpoints:
        seed(2)
    hermes = HermesCallback(new_trial(), "val_loss", _session=session)
    where: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
    if DEVICE.startswith(KIND):
        strategy = SingleDeviceStrategy(torch.device(DEVICE))
        where = {"accelerator": SimulatedAccelerator(), "strategy": strategy}
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        precision=precision,
        **where,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes],
    )
    trainer.fit(module, loader, DataLoader(digits(2), SIZE))
    metrics = {name: trainer.callback_metrics[name] for name in ("loss", "val_loss")}
    noise = torch.rand(4, device=DEVICE)
    return bits({**module.state_dict(), **metrics, "value": hermes.value, "noise": noise})


class Classifier(nn.Module):
    """A network with the signature that Hugging Face's Trainer calls."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Items(Dataset[dict[str, torch.Tensor]]):
    """The digits with names."""

    def __init__(self, n_batches: int = BATCHES) -> None:
        self._pairs = digits(n_batches)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, label = self._pairs[index]
        return {"x": x, "labels": label}


def huggingface(session: FakeSession, model: Callable[[], nn.Module]) -> Bits:
    """Hugging Face's Trainer, which Accelerate tells where its device is."""
    import transformers

    from optuna_hermes.huggingface import HermesCallback

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            session.tick()

    seed(1)
    module = Classifier(model)
    told = patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": DEVICE})
    with tempfile.TemporaryDirectory() as folder, told:
        args = transformers.TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=SIZE,
            learning_rate=0.01,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        assert args.device == torch.device(DEVICE)
        hermes = HermesCallback(new_trial(), "eval_loss", _session=session)
        trainer = transformers.Trainer(
            module, args, train_dataset=Items(), eval_dataset=Items(2), callbacks=[Ticks(), hermes]
        )
        if session.checkpoints:
            seed(2)
        output = hermes.train(trainer)
    noise = torch.rand(4, device=DEVICE)
    ends = {"value": hermes.value, "loss": output.training_loss, "noise": noise}
    return bits({**module.state_dict(), **ends})


TRAININGS: dict[str, tuple[Callable[..., Bits], Callable[[], nn.Module]]] = {
    "loop": (loop, network),
    "loop-recurrent": (loop, Rows),
    "lightning": (lightning, network),
    "lightning-recurrent": (lightning, Rows),
    "huggingface": (huggingface, network),
}


def train(session: FakeSession, kind: str) -> Bits:
    training, model = TRAININGS[kind]
    return training(session, model)


@functools.cache
def expected(kind: str) -> Bits:
    """The end of the training that is never suspended."""
    return train(FakeSession(), kind)


def seed(number: int = 5) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def others_train() -> None:
    """Others use the device, its memory and the random numbers meanwhile."""
    seed()
    torch.rand(4, device=DEVICE)
    others_allocate()


def others_allocate() -> None:
    """Others use the device and its memory meanwhile."""
    for size in (1 << 12, 1 << 16, 1 << 18):
        torch.ones(size, device=DEVICE).mul_(2)


def suspended(session: FakeSession, kind: str) -> FakeSession:
    """Train until the trial is on disk, and give the session of its next process.

    Raises:
        AssertionError: it was not put there.
    """
    try:
        train(session, kind)
    except Suspended:
        return session.again()
    raise AssertionError(f"{kind} was not put on disk.")
