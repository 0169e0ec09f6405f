"""Ray Tune's switch between two trials, in a process of its own: ``switch_cost.py`` starts it.

Two trials of a class ``Trainable`` take turns on one CPU; each is paused after every step. Saving
is ``torch.save`` of parameters and optimizer state into Ray's folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from _switch_runs import Batches, Net, adamw, train_step
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Trained(tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config["run"])
        self._batches = Batches(config["batches"])
        self._model = Net(config["state_bytes"]).to(DEVICE)
        self._optimizer = adamw(self._model)
        self._run = config["run"]
        self._inputs = torch.ones(1, 1, device=DEVICE)

    def step(self) -> dict[str, Any]:
        start = time.monotonic()
        train_step(self._model, self._optimizer, self._inputs)
        self._batches.add(self._run, start, time.monotonic())
        return {}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, Path(checkpoint_dir) / "state.pt")

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        state = torch.load(Path(checkpoint_dir) / "state.pt", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._run = new_config["run"]
        return True


class TakeTurns(FIFOScheduler):
    """Pauses a trial after each step, and goes on with the one that has had fewer."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        return TrialScheduler.PAUSE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        waiting = [t for t in tune_controller.get_trials() if t.status in ("PENDING", "PAUSED")]
        return min(waiting, key=_steps_done, default=None)


def _steps_done(trial: Trial) -> int:
    return int((trial.last_result or {}).get("training_iteration", 0))


def main() -> None:
    """``_switch_ray.py BATCHES STATE_BYTES STEPS MODE FOLDER``: ``STEPS`` of each trial."""
    batches, state_bytes, steps, mode, folder = sys.argv[1:]
    # Ray's own CSV, JSON and TensorBoard files would only slow it down.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
    gpus = int(DEVICE == "cuda")
    ray.init(num_cpus=1, num_gpus=gpus, include_dashboard=False)
    tuner = tune.Tuner(
        tune.with_resources(Trained, {"cpu": 1, "gpu": gpus}),
        param_space={
            "run": tune.grid_search([0, 1]),
            "batches": batches,
            "state_bytes": int(state_bytes),
        },
        tune_config=tune.TuneConfig(scheduler=TakeTurns(), reuse_actors=mode == "reuse_actors"),
        run_config=tune.RunConfig(
            storage_path=folder,
            stop={"training_iteration": int(steps)},
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            verbose=0,
        ),
    )
    results = tuner.fit()
    ray.shutdown()
    if results.num_errors:
        raise SystemExit(f"Ray's trials failed: {results.errors[0]}")


if __name__ == "__main__":
    main()
