"""Plain Optuna as a contestant of ``race.py``: a process for each device, over SQLite."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import optuna
from _race_plain import train
from _race_tasks import UNITS, Contest, first_configurations, load_task, suggest
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)

CONTEST = Contest.of_environment()
TASK = load_task(CONTEST.task)
STUDY = "race"
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "optuna": NopPruner,
    "optuna-median": MedianPruner,
    "optuna-halving": lambda: SuccessiveHalvingPruner(min_resource=1),
    "optuna-hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=UNITS),
}


def objective(trial: optuna.Trial) -> float:
    values: list[float] = []

    def report(value: float, save: Callable[[Path], None]) -> None:
        values.append(value)
        trial.report(value, len(values))
        if trial.should_prune():
            raise optuna.TrialPruned

    train(TASK, trial.number, suggest(TASK.SPACE, trial), report)
    return values[-1] if math.isfinite(values[-1]) else math.inf


def work(index: int, asking: Lock) -> None:
    """Train trials until the end; with equal seeds two processes would propose alike.

    ``study.optimize`` would do, but for a race of Optuna's over SQLite: two processes that ask at
    once may get the same enqueued trial, and one of them then fails.
    """
    study = optuna.load_study(
        study_name=STUDY,
        storage=CONTEST.storage,
        sampler=optuna.samplers.TPESampler(seed=1000 * CONTEST.seed + index),
        pruner=PRUNERS[CONTEST.contestant](),
    )
    while time.time() < CONTEST.ends:
        with asking:
            trial = study.ask()
        try:
            study.tell(trial, objective(trial))
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)


def main() -> None:
    study = optuna.create_study(study_name=STUDY, storage=CONTEST.storage)
    for params in first_configurations(TASK.SPACE, CONTEST):
        study.enqueue_trial(params)
    context: Any = multiprocessing.get_context("fork")  # imports and data are there already
    asking = context.Lock()
    workers = [
        context.Process(target=work, args=(index, asking)) for index in range(CONTEST.devices)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("A process of plain Optuna has failed.")


if __name__ == "__main__":
    main()
