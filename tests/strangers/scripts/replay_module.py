"""Q-learning in Lightning: a data set draws from the buffer that the module has."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from kit import callback, seed, trainer, work
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Buffer:
    def __init__(self) -> None:
        self.steps: deque[Any] = deque(maxlen=40)

    def sample(self, number: int) -> Any:
        return random.sample(list(self.steps), number)


class Drawn(IterableDataset[Any]):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        yield from self.buffer.sample(16)


class Agent:
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.state = np.zeros(2, dtype=np.float32)

    @torch.no_grad()
    def play(self, net: nn.Module, chance: float) -> float:
        old = self.state.copy()
        best = int(net(torch.from_numpy(old)).argmax())
        action = random.randrange(3) if random.random() < chance else best
        self.state = (0.8 * old + np.random.normal(action - 1, 0.3, 2)).astype(np.float32)
        reward = -float(np.abs(self.state).sum())
        self.buffer.steps.append((old, action, np.float32(reward), self.state))
        return reward


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = nn.Linear(2, 3), nn.Linear(2, 3)
        self.buffer = Buffer()
        self.agent = Agent(self.buffer)
        self.total = 0.0
        for _ in range(20):
            self.agent.play(self.net, 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        work()
        self.total += self.agent.play(self.net, max(0.1, 1 - self.global_step / 30))
        old, action, reward, after = batch
        wanted = reward + 0.9 * self.target(after).max(1).values.detach()
        loss = nn.functional.mse_loss(self.net(old).gather(1, action[:, None]).squeeze(1), wanted)
        if self.global_step % 5 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.log("loss", loss, on_epoch=True, on_step=False)
        self.log("total", -self.total, on_epoch=True, on_step=False)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Drawn(self.buffer), 4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def objective(trial: Any) -> float:
    seed()
    pruning, model = callback(trial, "total"), Learner()
    trainer(pruning).fit(model)
    return model.total
