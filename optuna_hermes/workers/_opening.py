"""Messages with which a driver opens a study at a broker."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence

import optuna
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes._cgroups import available_bytes
from optuna_hermes.broker import OpenStudy, StudySpec
from optuna_hermes.broker._protocol import Counted, Describe, Ending, Params
from optuna_hermes.ledger import Ledger
from optuna_hermes.model import LIVE_STATES, MOST_COUNT, MOST_SECONDS

DESCRIBED_AT_ONCE = 1_000_000
"""Characters of parameters in one message, whose bytes are limited."""

_WORKERS_PER_DEVICE = 16
"""A trial comes back to its process at once; one that is stored is set up anew."""
_WORKER_BYTES = {"cpu": 500_000_000, "gpu": 4_000_000_000}
"""Host memory in bytes that a worker may allocate itself, with some room for data."""

_WORKER_FILES, _BROKER_FILES = 2, 64
"""Open files of a broker for each worker, and for all else."""


def opening(
    study: optuna.Study,
    spec: StudySpec,
    ledger: Ledger,
    instance: str,
    *,
    n_trials: int | None,
    max_alive: int,
    seconds_left: float | None = None,
    device_seconds: float | None = None,
    counted: Counted | None = None,
) -> OpenStudy:
    """The message that opens a study: trials to come, and corrections from Optuna to its ledger.

    Args:
        study: the study.
        spec: the broker's description of it.
        ledger: of the study.
        instance: the broker; trials that others are about to begin are left to them.
        n_trials: number of trials that the study shall have in the end, None for no bound.
        max_alive: worker processes that will be kept alive.
        seconds_left, device_seconds: after which all trials are suspended, None for no bound.
        counted: by earlier brokers for the same driver, None if there was none.
    """
    trials = study.get_trials(deepcopy=False)
    # Read after the trials: a process that created one of them has a live lease by then, or has
    # recorded the trial.
    leases = ledger.load_leases(spec.key, live=True)
    elsewhere = {str(x.epoch) for x in leases if x.owner not in (None, instance)}
    known = {record.number: record for record in ledger.load_trials(spec.key)}
    ended: dict[int, Ending] = {}
    for trial in trials:
        record = known.get(trial.number)
        if record is not None and record.state in LIVE_STATES and trial.state.is_finished():
            ended[trial.number] = "failed" if trial.state.name == "FAIL" else "done"
    adopted = {
        trial.number: _optuna.trial_id(trial)
        for trial in trials
        if _optuna.ours(trial)
        and trial.number not in known
        and not _optuna.opened_by(trial) & elsewhere
    }
    waiting = tuple(trial.number for trial in trials if trial.state.name == "WAITING")
    opened = len(trials) - len(waiting)
    placed = {*known, *waiting}
    foreign = [t for t in trials if t.number not in placed and not _optuna.opened_by(t)]
    left = _optuna.left_to_propose(study)
    if left is not None:
        most = len(trials) + left
        n_trials = most if n_trials is None else min(n_trials, most)
    if n_trials is not None:
        n_trials = min(n_trials, MOST_COUNT)
    unstarted = None if n_trials is None else max(0, n_trials - opened)
    return OpenStudy(
        study=spec,
        unstarted=unstarted,
        max_alive=max_alive,
        fixed=_optuna.fixed_list(study, unstarted),
        ended=ended,
        adopted=adopted,
        n_existing=len(trials),
        waiting=waiting,
        counted=counted,
        limit=None if n_trials is None else max(0, n_trials - len(foreign)),
        seconds_left=_bounded(seconds_left),
        device_seconds=_bounded(device_seconds),
    )


def _bounded(seconds: float | None) -> float | None:
    return None if seconds is None else min(max(0.0, seconds), MOST_SECONDS)


def descriptions(study: optuna.Study, key: str) -> Iterator[Describe]:
    """Messages with the parameters of trials, which suspended ones do not send themselves."""
    trials = study.get_trials(deepcopy=False)
    described: dict[int, Params] = {}
    length = 0
    for number, params in ((trial.number, _params(trial)) for trial in trials):
        own = len(repr(params))
        if described and length + own > DESCRIBED_AT_ONCE:
            yield Describe(study=key, params=described)
            described, length = {}, 0
        if params:
            described[number] = params
            length += own
    if described:
        yield Describe(study=key, params=described)


def _params(trial: FrozenTrial) -> Params:
    waits = trial.state.name == "WAITING"
    return _optuna.listed_params(trial) if waits else _optuna.params_of(trial)


def most_alive(devices: Sequence[str]) -> int:
    """The most worker processes to keep alive, parked trials' included.

    As many as host memory allows, and the limit of open files, which a broker raises to its most.
    """
    on_cpu = all(device.startswith("cpu:") for device in devices)
    room = available_bytes() // _WORKER_BYTES["cpu" if on_cpu else "gpu"]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY:
        room = min(room, (files - _BROKER_FILES) // _WORKER_FILES)
    return max(len(devices) + 1, min(_WORKERS_PER_DEVICE * len(devices), int(room)))
