"""A language model of characters, whose hidden state goes on from batch to batch."""

from typing import Any

import torch
from kit import EPOCHS, loop, seed, work
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it " * 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 6)
        self.lstm = nn.LSTM(6, 10, dropout=0.1, num_layers=2)
        self.out = nn.Linear(10, 27)

    def forward(self, x: Any, hidden: Any) -> Any:
        made, hidden = self.lstm(self.embedding(x), hidden)
        return self.out(made), hidden


def objective(trial: Any) -> float:
    seed()
    codes = torch.tensor([0 if each == " " else ord(each) - 96 for each in TEXT])
    columns = codes[: len(codes) // 4 * 4].view(4, -1).t().contiguous()
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    run = loop(trial, model=model, optimizer=optimizer)
    run.kept.setdefault("hidden", None)
    value = 0.0
    for _ in run.epochs(EPOCHS):
        run.kept["hidden"] = None
        for start in run.batches(range(0, len(columns) - 17, 16)):
            work()
            x, y = columns[start : start + 16], columns[start + 1 : start + 17]
            hidden = run.kept["hidden"]
            made, hidden = model(x, hidden)
            run.kept["hidden"] = tuple(each.detach() for each in hidden)
            loss = nn.functional.cross_entropy(made.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = loss.item()
        run.report(value)
    return value
