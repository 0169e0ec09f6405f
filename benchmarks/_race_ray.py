"""Ray Tune as a contestant of ``race.py``, in a Python that has it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ray's own CSV, JSON and TensorBoard files would only slow it down; set before it is imported.
os.environ.update(
    TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1",
    TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    # Else its workers give way to the processes of all contestants beside it.
    RAY_worker_niceness="0",
)

import ray
from _race_plain import train
from _race_tasks import UNITS, Contest, Space, first_configurations, load_task, suggest
from ray import tune

STORE_BYTES = 100_000_000
"""Of Ray's object store, the least it takes."""


def trainable(config: dict[str, Any]) -> None:
    contest = Contest.of_environment()
    task = load_task(contest.task)
    params = {name: each.clean(config[name]) for name, each in task.SPACE.items()}
    saves = contest.contestant == "ray-bohb"  # the other never pauses a trial

    def report(value: float, save: Callable[[Path], None]) -> None:
        if not saves:
            tune.report({"loss": value})
            return
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder))
            tune.report({"loss": value}, checkpoint=tune.Checkpoint.from_directory(folder))

    name, checkpoint = tune.get_context().get_trial_id(), tune.get_checkpoint()
    if checkpoint is None:
        train(task, name, params, report)
    else:
        with checkpoint.as_directory() as folder:
            train(task, name, params, report, Path(folder))


def _propose(trial: Any) -> None:
    """Of the module, for Ray pickles it with its search."""
    suggest(load_task(Contest.of_environment().task).SPACE, trial)


def _asha(contest: Contest, space: Space) -> tuple[Any, Any]:
    import optuna
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    search = OptunaSearch(
        _propose,
        metric="loss",
        mode="min",
        points_to_evaluate=first_configurations(space, contest),
        sampler=optuna.samplers.TPESampler(seed=contest.seed),
    )
    return search, ASHAScheduler(max_t=UNITS, grace_period=1)


def _bohb(contest: Contest, space: Space) -> tuple[Any, Any]:
    import ConfigSpace
    from ray.tune.schedulers import HyperBandForBOHB
    from ray.tune.search.bohb import TuneBOHB

    configurations = ConfigSpace.ConfigurationSpace(seed=contest.seed)
    for name, each in space.items():
        kind = ConfigSpace.Integer if each.whole else ConfigSpace.Float
        bounds = each.clean(each.low), each.clean(each.high)
        configurations.add(kind(name, bounds, log=each.log))
    search = TuneBOHB(
        configurations,
        metric="loss",
        mode="min",
        points_to_evaluate=first_configurations(space, contest),
        seed=contest.seed,
    )
    return search, HyperBandForBOHB(max_t=UNITS, reduction_factor=3)


_SEARCHES = {"ray-asha": _asha, "ray-bohb": _bohb}


def main() -> None:
    contest = Contest.of_environment()
    task = load_task(contest.task)
    ray.init(
        address="local",
        num_cpus=contest.devices,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        _temp_dir=str(Path(contest.folder, "ray")),
    )
    search, scheduler = _SEARCHES[contest.contestant](contest, task.SPACE)
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=search,
            scheduler=scheduler,
            num_samples=-1,
            time_budget_s=contest.ends - time.time(),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(Path(contest.folder, "tune")),
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
