"""The training is in a function that takes callbacks."""

import lightning.pytorch as pl
import optuna
from lightning.pytorch.callbacks import EarlyStopping
from modules import Net, fit


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(1, verbose=False)
    model = Net(trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    return fit(model, callbacks=[EarlyStopping("val_loss")])


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
