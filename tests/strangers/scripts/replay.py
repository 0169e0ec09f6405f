"""Q-learning with a replay buffer and an environment, in a loop without a loader."""

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from kit import EPOCHS, loop, seed, work
from torch import nn


class Walk:
    """A walk on seven places, with a reward at the last."""

    def __init__(self) -> None:
        self.place = 3
        self.rng = np.random.default_rng(5)

    def step(self, action: int) -> tuple[int, float]:
        slip = self.rng.random() < 0.1
        self.place += (1 if action else -1) * (-1 if slip else 1)
        done = self.place in (0, 6)
        reward = float(self.place == 6)
        if done:
            self.place = 3
        return self.place, reward


def objective(trial: Any) -> float:
    seed()
    model, target = nn.Embedding(7, 2), nn.Embedding(7, 2)
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    run = loop(trial, model=model, target=target, optimizer=optimizer)
    run.kept.setdefault("buffer", deque(maxlen=50))
    run.kept.setdefault("walk", Walk())
    run.kept.setdefault("won", 0.0)
    for epoch in run.epochs(EPOCHS):
        for step in run.batches(range(8)):
            work()
            walk, buffer = run.kept["walk"], run.kept["buffer"]
            place = walk.place
            with torch.no_grad():
                best = int(model(torch.tensor(place)).argmax())
            action = random.randrange(2) if random.random() < 0.3 else best
            after, reward = walk.step(action)
            run.kept["won"] += reward
            buffer.append((place, action, reward, after))
            chosen = random.sample(list(buffer), min(8, len(buffer)))
            places, actions, rewards, nexts = map(torch.tensor, zip(*chosen, strict=True))
            with torch.no_grad():
                wanted = rewards + 0.9 * target(nexts).max(1).values
            got = model(places).gather(1, actions[:, None]).squeeze(1)
            loss = nn.functional.smooth_l1_loss(got, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (epoch * 8 + step) % 5 == 0:
                target.load_state_dict(model.state_dict())
        run.report(loss.item() - run.kept["won"])
    return loss.item() - run.kept["won"]
