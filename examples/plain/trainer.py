"""The Trainer is made elsewhere."""

import lightning.pytorch as pl
import optuna
from modules import Data, Net, make_trainer


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(1, verbose=False)
    model = Net(trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    trainer = make_trainer()
    trainer.fit(model, datamodule=Data())
    return trainer.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
