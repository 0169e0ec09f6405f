"""Three folds, each with a Trainer and a callback."""

from typing import Any

import numpy as np
from kit import Module, Points, callback, seed, trainer
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset


def objective(trial: Any) -> float:
    seed()
    data, values = Points(24), []
    for train, val in KFold(3, shuffle=True, random_state=1).split(np.arange(len(data))):
        pruning = callback(trial)
        loaders = DataLoader(Subset(data, train), 4, shuffle=True), DataLoader(Subset(data, val), 8)
        trainer(pruning, max_epochs=3).fit(Module(), *loaders)
        values.append(pruning.value)
    return float(np.mean(values))
