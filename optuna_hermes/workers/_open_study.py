"""Opening of a study by its driver: messages to the broker, and the place of its checkpoints."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import optuna
from msgspec import structs
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes._cgroups import available_bytes
from optuna_hermes._job_environment import host_name
from optuna_hermes.broker import OpenStudy, StudySpec
from optuna_hermes.broker._privacy import private_folder
from optuna_hermes.broker._protocol import Counted, Describe, Ending, Params, StudyStatus
from optuna_hermes.errors import BrokerConflictError
from optuna_hermes.ledger import Ledger
from optuna_hermes.model import LIVE_STATES, MOST_COUNT, MOST_SECONDS
from optuna_hermes.suspend._tiers import _remote
from optuna_hermes.suspend._tiers._disk import why_unwritable

DESCRIBED_AT_ONCE = 1_000_000
"""Characters of parameters in one message, whose bytes are limited."""

_WORKERS_PER_DEVICE = 16
"""A trial comes back to its process at once; one that is stored is set up anew."""
_WORKER_BYTES = {"cpu": 500_000_000, "gpu": 4_000_000_000}
"""Host memory in bytes that a worker may allocate itself, with some room for data."""

_WORKER_FILES, _BROKER_FILES = 2, 64
"""Open files of a broker for each worker, and for all else."""


def open_study_message(
    study: optuna.Study,
    spec: StudySpec,
    ledger: Ledger,
    instance: str,
    *,
    n_trials: int | None,
    max_alive: int,
    seconds_left: float | None = None,
    device_seconds: float | None = None,
    last: StudyStatus | None = None,
    again: bool = False,
) -> OpenStudy:
    """The message that opens a study: trials to come, and corrections from Optuna to its ledger.

    Args:
        instance: the broker; trials that others are about to begin are left to them.
        n_trials: number of trials that the study shall have in the end, None for no bound.
        max_alive: worker processes that will be kept alive.
        seconds_left, device_seconds: after which all trials are suspended, None for no bound.
        last: the status that an earlier broker has told this driver last, None if there was none.
    """
    trials = study.get_trials(deepcopy=False)
    # Read after the trials: a process that created one of them has a live lease by then, or has
    # recorded the trial.
    leases = ledger.load_leases(spec.key, live=True)
    others = (lease for lease in leases if lease.owner not in (None, instance))
    elsewhere = {_optuna.opening(spec.key, lease.epoch) for lease in others}
    known = {record.number: record for record in ledger.load_trials(spec.key)}
    ended: dict[int, Ending] = {}
    for trial in trials:
        record = known.get(trial.number)
        if record is not None and record.state in LIVE_STATES and trial.state.is_finished():
            ended[trial.number] = _optuna.ending(trial.state)
    adopted = {
        trial.number: _optuna.trial_id(trial)
        for trial in trials
        if _optuna.ours(trial)
        and trial.number not in known
        and not _optuna.opened_by(trial) & elsewhere
    }
    waiting = tuple(trial.number for trial in trials if trial.state.name == "WAITING")
    placed = {*known, *waiting, *adopted}
    foreign = tuple(trial.number for trial in trials if trial.number not in placed)
    left = _optuna.left_to_propose(study)
    if left is not None:
        most = len(trials) + left
        n_trials = most if n_trials is None else min(n_trials, most)
    if n_trials is not None:
        n_trials = min(n_trials, MOST_COUNT)
    unstarted = None if n_trials is None else n_trials - (len(trials) - len(waiting))
    counted = Counted() if again else None if last is None else _counted(last)
    if last is not None:  # the policy may have been changed while the study ran
        spec = structs.replace(spec, policy=last.policy, folders=last.policy_folders)
    return OpenStudy(
        study=spec,
        limit=None if n_trials is None else max(0, n_trials),
        max_alive=max_alive,
        fixed=_optuna.fixed_list(study, unstarted),
        ended=ended,
        adopted=adopted,
        foreign=foreign,
        waiting=waiting,
        counted=counted,
        seconds_left=_bounded(seconds_left),
        device_seconds=_bounded(device_seconds),
    )


def _counted(last: StudyStatus) -> Counted:
    """The counters of the previous broker, without the time of leases that had not ended."""
    return Counted(
        switches=last.switches,
        overhead_seconds=last.overhead_seconds,
        spent_seconds=max(0.0, last.spent_seconds - last.held_seconds),
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
    return max(len(devices) + 1, min(_most_of_memory(devices), _most_of_files()))


def few_files(devices: Sequence[str], n_trials: int | None) -> str | None:
    """A note if the limit of open files sends trials to disk that memory has room for."""
    most = most_alive(devices)
    useful = min(_most_of_memory(devices), MOST_COUNT if n_trials is None else n_trials)
    if most >= useful:
        return None
    needed = _BROKER_FILES + _WORKER_FILES * useful
    return (
        f"The limit of open files ({_file_limit()}) keeps {most} processes alive at most, so that "
        f"suspended trials go to disk sooner: have root raise `ulimit -Hn` to {needed}."
    )


def _most_of_memory(devices: Sequence[str]) -> int:
    """Processes that are of use, as far as host memory has room for them."""
    on_cpu = all(device.startswith("cpu:") for device in devices)
    room = available_bytes() // _WORKER_BYTES["cpu" if on_cpu else "gpu"]
    return min(_WORKERS_PER_DEVICE * len(devices), int(room))


def _most_of_files() -> int:
    """Processes that a broker has room for in the limit of open files."""
    files = _file_limit()
    if files == resource.RLIM_INFINITY:
        return MOST_COUNT
    return (files - _BROKER_FILES) // _WORKER_FILES


def _file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def checkpoint_place(
    study: optuna.Study, ledger: Ledger, chosen: str | Path | None, note: Callable[[str], None]
) -> tuple[Path, str | None, str | None]:
    """The folder of the study's checkpoints, its URL in a store, and why nothing is written."""
    url = None
    if chosen is None and ledger.shared:
        _note_if_hosts_share_no_folder(study, ledger, note)
    if chosen is not None and _remote.is_url(chosen):
        url, chosen = _optuna.checkpoint_url(study, str(chosen)), None
    folder = None if chosen is None else Path(chosen).expanduser()
    root = _optuna.checkpoint_root(study, folder)
    problem = why_unwritable(root)
    if problem is not None and url is not None:  # as where a user has no home
        with contextlib.suppress(BrokerConflictError):
            copies = private_folder(copies_folder(), "set TMPDIR to a folder of your own")
            root = _optuna.checkpoint_root(study, copies)
            problem = why_unwritable(root)
    if problem is None and url is not None:
        problem = _remote.why_unwritable(url)
    return root, url, problem


def copies_folder() -> Path:
    """The folder of what goes to a store where the folders of studies cannot be written."""
    return Path(tempfile.gettempdir()) / f"optuna-hermes-copies-{os.getuid()}"


def _note_if_hosts_share_no_folder(
    study: optuna.Study, ledger: Ledger, note: Callable[[str], None]
) -> None:
    rows = ledger.load_trials(_optuna.study_key(study))
    others = sorted({str(row.host) for row in rows if row.host} - {host_name()})
    if others:
        note(
            f"Checkpoints lie in a folder of this host, and {others[0]} has trials of this study "
            "too: without one --checkpoint-dir for all hosts, a folder that they share or a URL, "
            "no host can go on with another one's trials."
        )
