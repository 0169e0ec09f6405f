"""k-fold: a model and a Trainer for each fold."""

import lightning.pytorch as pl
import numpy as np
import optuna
from modules import Net, make_trainer
from parts import TRAIN
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(1, verbose=False)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    losses = []
    for train, valid in KFold(3, shuffle=True, random_state=1).split(np.arange(len(TRAIN))):
        trainer = make_trainer(max_epochs=3)
        loader = DataLoader(Subset(TRAIN, train), batch_size=32, shuffle=True)
        trainer.fit(Net(lr), loader, DataLoader(Subset(TRAIN, valid), batch_size=64))
        losses.append(trainer.callback_metrics["val_loss"].item())
    return float(np.mean(losses))


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
