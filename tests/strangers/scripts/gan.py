"""Two networks against each other, with manual optimisation."""

from typing import Any

import torch
from kit import Module, Points, callback, seed, trainer, work
from torch import nn
from torch.utils.data import DataLoader


class Gan(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        work()
        x, _ = batch
        generators, critics = self.optimizers()
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        judge = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(critics)
        made = self.generator(torch.randn(len(x), 2)).detach()
        loss = judge(self.critic(x), ones) + judge(self.critic(made), zeros)
        critics.zero_grad()
        self.manual_backward(loss)
        critics.step()
        self.untoggle_optimizer(critics)

        if batch_idx % 2 == 0:
            self.toggle_optimizer(generators)
            loss = judge(self.critic(self.generator(torch.randn(len(x), 2))), ones)
            generators.zero_grad()
            self.manual_backward(loss)
            generators.step()
            self.untoggle_optimizer(generators)
        self.log("g_loss", loss, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        made = self.generator(torch.randn(16, 2))
        self.log("val_loss", self.critic(made).mean().square())

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(each.parameters(), 0.01) for each in (self.generator, self.critic)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]


def objective(trial: Any) -> float:
    seed()
    pruning = callback(trial)
    loader = DataLoader(Points(), 4, shuffle=True)
    trainer(pruning).fit(Gan(), loader, DataLoader(Points(8), 4))
    return pruning.value
