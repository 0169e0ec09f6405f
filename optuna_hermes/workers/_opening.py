"""What a driver tells a broker when it takes charge of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import optuna

from optuna_hermes import _optuna as private
from optuna_hermes._cgroups import available_bytes
from optuna_hermes.broker import OpenStudy, StudySpec
from optuna_hermes.broker._protocol import Counted, Describe, Ending
from optuna_hermes.ledger import Ledger
from optuna_hermes.model import LIVE_STATES

DESCRIBED_AT_ONCE = 500
"""Trials whose parameters go into one message, which has a largest size."""

_WORKERS_PER_DEVICE = 8
_WORKER_BYTES = {"cpu": 500_000_000, "gpu": 4_000_000_000}
"""Host memory that a worker may come to hold of its own, with some room for data."""


def opening(
    study: optuna.Study,
    spec: StudySpec,
    ledger: Ledger,
    instance: str,
    *,
    n_trials: int | None,
    max_alive: int,
    counted: Counted | None = None,
) -> OpenStudy:
    """What is to come of a study, and what Optuna knows better than its ledger.

    Args:
        study: the study.
        spec: what the broker must know of it.
        ledger: of the study.
        instance: the broker; what others are just about to begin is left to them.
        n_trials: how many trials it shall have in the end, None for no bound.
        max_alive: worker processes that will be kept alive.
        counted: by earlier brokers for the same driver, None if there was none.
    """
    trials = study.get_trials(deepcopy=False)
    # Read after the trials: who has created one of them has a live lease, or has put it down.
    leases = ledger.load_leases(spec.key, live=True)
    elsewhere = {str(x.epoch) for x in leases if x.owner not in (None, instance)}
    known = {run.number: run for run in ledger.load_runs(spec.key)}
    ended: dict[int, Ending] = {}
    for trial in trials:
        run = known.get(trial.number)
        if run is not None and run.state in LIVE_STATES and trial.state.is_finished():
            ended[trial.number] = "failed" if trial.state.name == "FAIL" else "done"
    adopted = {
        trial.number: private.trial_id(trial)
        for trial in trials
        if private.ours(trial)
        and trial.number not in known
        and not private.opened_by(trial) & elsewhere
    }
    waiting = tuple(trial.number for trial in trials if trial.state.name == "WAITING")
    opened = len(trials) - len(waiting)
    placed = {*known, *waiting}
    foreign = [t for t in trials if t.number not in placed and not private.opened_by(t)]
    left = private.left_to_propose(study)
    if left is not None:
        most = len(trials) + left
        n_trials = most if n_trials is None else min(n_trials, most)
    unstarted = None if n_trials is None else max(0, n_trials - opened)
    return OpenStudy(
        study=spec,
        unstarted=unstarted,
        max_alive=max_alive,
        fixed=private.fixed_list(study, unstarted),
        ended=ended,
        adopted=adopted,
        trials=len(trials),
        waiting=waiting,
        counted=counted,
        limit=None if n_trials is None else max(0, n_trials - len(foreign)),
    )


def descriptions(study: optuna.Study, key: str) -> Iterator[Describe]:
    """What a broker would learn of suspended runs only when they train again."""
    trials = study.get_trials(deepcopy=False)
    known = [(trial.number, private.params_of(trial)) for trial in trials if trial.params]
    for begin in range(0, len(known), DESCRIBED_AT_ONCE):
        yield Describe(study=key, params=dict(known[begin : begin + DESCRIBED_AT_ONCE]))


def most_alive(devices: Sequence[str]) -> int:
    """Worker processes kept alive: enough to hold parked trials, as far as memory goes."""
    on_cpu = all(device.startswith("cpu:") for device in devices)
    room = available_bytes() // _WORKER_BYTES["cpu" if on_cpu else "gpu"]
    return max(len(devices) + 1, min(_WORKERS_PER_DEVICE * len(devices), int(room)))
