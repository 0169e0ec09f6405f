"""This project as a contestant of ``race.py``; a script as one of its users would write it."""

from __future__ import annotations

import time

import optuna
from _race_tasks import Contest, Params, first_configurations, load_task, suggest
from _race_watch import Watch

from optuna_hermes import HermesPruner, HermesSampler, optimize

CONTEST = Contest.of_environment()
TASK = load_task(CONTEST.task)
if TASK.KIND == "lightgbm":
    from optuna_hermes.lightgbm import HermesCallback
elif TASK.KIND == "lightning":
    from optuna_hermes.lightning import HermesCallback  # type: ignore[assignment]
else:
    from optuna_hermes import suspendable

POLICIES = {"hermes-asha": "asha", "hermes-fifo": "fifo"}


def objective(trial: optuna.Trial) -> float | None:
    return _KINDS[TASK.KIND](trial, suggest(TASK.SPACE, trial))


def _train_loop(trial: optuna.Trial, params: Params) -> float | None:
    training = TASK.begin(params)
    watch = Watch.start(trial.number, params, len(training.loader))
    run = suspendable(trial, model=training.model, optimizer=training.optimizer)
    training.train(watch, run.report, epochs=run.epochs, batches=run.batches)
    return run.value


def _train_lightning(trial: optuna.Trial, params: Params) -> float | None:
    hermes = HermesCallback(trial, TASK.MONITOR)
    TASK.fit(params, Watch.start(trial.number, params, TASK.n_batches(params)), [hermes])
    return hermes.value


def _train_lightgbm(trial: optuna.Trial, params: Params) -> float | None:
    hermes = HermesCallback(trial, TASK.MONITOR, report_interval=TASK.ROUNDS)
    TASK.boost(params, Watch.start(trial.number, params, TASK.n_batches(params)), [hermes])
    return hermes.value


_KINDS = {"loop": _train_loop, "lightning": _train_lightning, "lightgbm": _train_lightgbm}


def _sampler() -> HermesSampler:
    if CONTEST.contestant == "hermes":
        return HermesSampler(seed=CONTEST.seed)
    return HermesSampler(optuna.samplers.TPESampler(seed=CONTEST.seed))


def main() -> None:
    study = optuna.create_study(
        study_name="race",
        storage=CONTEST.storage,
        sampler=_sampler(),
        pruner=HermesPruner(),
    )
    for params in first_configurations(TASK.SPACE, CONTEST):
        study.enqueue_trial(params)
    optimize(
        study,
        objective,
        timeout=CONTEST.ends - time.time(),
        devices=f"cpu:{CONTEST.devices}",
        policy=POLICIES.get(CONTEST.contestant, "hermes"),
        seed=CONTEST.seed,
        show_progress=False,
    )


if __name__ == "__main__":
    main()
