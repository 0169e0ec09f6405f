"""Lightning's command line."""

import optuna
from lightning.pytorch.cli import LightningCLI
from modules import Data, Net


def objective(trial: optuna.Trial) -> float:
    options = {"max_epochs": 6, "accelerator": "cpu", "enable_progress_bar": False}
    words = {"model": {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}, "trainer": options}
    cli = LightningCLI(Net, Data, seed_everything_default=1, run=False, args=words)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli.trainer.callback_metrics["val_loss"].item()


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=4)
    print(study.best_params)
