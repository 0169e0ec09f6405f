"""Two fits: the last layer first, then all of it."""

import lightning.pytorch as pl
import optuna
from modules import Data, Net, make_trainer


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(1, verbose=False)
    model = Net(trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    model.net[0].requires_grad_(False)
    make_trainer(max_epochs=3).fit(model, datamodule=Data())
    model.net[0].requires_grad_(True)
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, datamodule=Data())
    return trainer.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
