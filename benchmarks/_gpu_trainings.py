"""Trainings that only a GPU can run; importing this adds them to those of the tests, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _gpu_exact import NO_CUDNN
from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.accelerator import trainings


def mixed_precision(session: FakeSession, model: Callable[[], nn.Module]) -> trainings.Bits:
    """Half precision with a scaler of gradients, and two processes that load."""
    return _loop(session, model, dtype=torch.float16, workers=2)


def compiled(session: FakeSession, model: Callable[[], nn.Module]) -> trainings.Bits:
    """Kernels that torch.compile makes."""
    return _loop(session, model, wrap=torch.compile)


def captured(session: FakeSession, model: Callable[[], nn.Module]) -> trainings.Bits:
    """Forward and backward as captured graphs, which hold addresses."""

    def capture(net: nn.Module) -> Any:
        example = torch.zeros(trainings.SIZE, 1, 8, 8, device=trainings.DEVICE)
        return torch.cuda.make_graphed_callables(net, (example,))

    return _loop(session, model, wrap=capture)


def plain_network() -> nn.Module:
    """Without batch statistics or dropout, which a graph would capture while it warms up."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def _loop(
    session: FakeSession,
    model: Callable[[], nn.Module],
    *,
    dtype: torch.dtype = torch.float32,
    workers: int = 0,
    wrap: Callable[[nn.Module], Any] = lambda net: net,
) -> trainings.Bits:
    trainings.seed(1)
    device = trainings.DEVICE
    net = model().to(device)
    call = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    loader = DataLoader(
        trainings.digits(), trainings.SIZE, shuffle=True, pin_memory=True, num_workers=workers
    )
    if session.checkpoints:
        trainings.seed(2)
    named = {"model": net, "optimizer": optimizer, "scaler": scaler}
    run = PyTorchLoop(trainings.new_trial(), named, session)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(trainings.EPOCHS):
        for x, y in run.batches(loader):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                out = call(x.to(device, non_blocking=True))
                loss = nn.functional.cross_entropy(out, y.to(device, non_blocking=True))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            session.tick()
        losses.append(loss.item())
        run.report(losses[-1])
    noise = torch.rand(4, device=device)
    ends = {"losses": losses, "noise": noise, "scale": scaler.get_scale()}
    return trainings.bits({**net.state_dict(), **ends})


trainings.TRAININGS |= {
    name + NO_CUDNN: training
    for name, training in trainings.TRAININGS.items()
    if "recurrent" in name
}
trainings.TRAININGS |= {
    "half precision, two loaders": (mixed_precision, trainings.network),
    "compiled": (compiled, trainings.network),
    "captured graph": (captured, plain_network),
}
trainings.TRAININGS |= {
    f"lightning {precision}": (
        partial(trainings.lightning, precision=precision),
        trainings.network,
    )
    for precision in ("16-mixed", "bf16-mixed")
}
