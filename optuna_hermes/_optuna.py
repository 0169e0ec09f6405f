"""The only place that touches what Optuna does not promise; each piece is pinned by a test."""

from __future__ import annotations

import contextlib
import copy
import math
import shlex
import uuid
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import platformdirs
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes.broker import RunSession, StudySpec
from optuna_hermes.broker._imports import anywhere, folders
from optuna_hermes.broker._protocol import Params
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.model import RunState

STATE_ATTRIBUTE = "hermes:state"
SECONDS_ATTRIBUTE = "hermes:device_seconds"
_KEY_ATTRIBUTE = "hermes:key"
_SEED_ATTRIBUTE = "hermes:seed"
_OPENED_ATTRIBUTE = "hermes:opened"


# -- studies -----------------------------------------------------------------------------------


def load_study(storage: str, name: str, **parts: Any) -> optuna.Study:
    """Load a study that exists.

    Args:
        storage: Optuna's storage URL.
        name: the study's name.
        parts: ``sampler`` and ``pruner``, as for ``optuna.load_study``.

    Raises:
        StorageError: the storage cannot be reached, or has no such study.
    """
    with _storage_errors(storage):
        backend = optuna.storages.get_storage(storage)
        names = [study.study_name for study in backend.get_all_studies()]
    if name not in names:
        raise no_such_study(storage, name, names)
    return optuna.load_study(study_name=name, storage=backend, **parts)


def no_such_study(storage: str, name: str, names: list[str]) -> StorageError:
    """The error of a study that is not among ``names``, with the command that makes it."""
    shown = hidden(storage)
    make = shlex.join(["optuna-hermes", "create-study", "--storage", shown, "--study-name", name])
    there = ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "")
    return StorageError(
        f"No study {name!r} in {shown} (there: {there or 'none'}): create it with `{make}`."
    )


def create_study(storage: str, name: str, **parts: Any) -> optuna.Study:
    """Load a study, or create it if there is none of this name.

    Raises:
        StorageError: the storage cannot be reached.
    """
    with _storage_errors(storage):
        return optuna.create_study(study_name=name, storage=storage, load_if_exists=True, **parts)


@contextlib.contextmanager
def _storage_errors(storage: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except (ImportError, ValueError, OSError) as error:
        raise StorageError(f"Storage {hidden(storage)} cannot be used: {_line(error)}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("sqlalchemy", "optuna", "alembic"):
            raise
        raise StorageError(
            f"Storage {hidden(storage)} cannot be reached: {_line(error)} Check the URL and that "
            "its folder or server is there."
        ) from error


def _line(error: Exception) -> str:
    text = str(error.__cause__ or error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".") + "."


def hidden(url: str) -> str:
    """A storage URL without its password."""
    scheme, separator, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    if not at or ":" not in user:
        return url
    return f"{scheme}{separator}{user.split(':', 1)[0]}:***@{host}"


def study_key(study: optuna.Study) -> str:
    """The study's key: given once, so that a study made again under a name is another one."""
    storage, study_id = study._storage, study._study_id
    known = storage.get_study_system_attrs(study_id).get(_KEY_ATTRIBUTE)
    if known is None:
        storage.set_study_system_attr(study_id, _KEY_ATTRIBUTE, uuid.uuid4().hex[:16])
        known = storage.get_study_system_attrs(study_id)[_KEY_ATTRIBUTE]
    return str(known)


def study_seed(study: optuna.Study, seed: int | None) -> int:
    """The seed every trial's own is derived from: ``seed``, the one used before, or a fresh one."""
    storage, study_id = study._storage, study._study_id
    known = storage.get_study_system_attrs(study_id).get(_SEED_ATTRIBUTE)
    if seed is None and known is not None:
        return int(known)
    fresh = int(np.random.SeedSequence().generate_state(1)[0])
    chosen = fresh if seed is None else seed
    if chosen != known:
        storage.set_study_system_attr(study_id, _SEED_ATTRIBUTE, chosen)
    return chosen


def study_spec(
    study: optuna.Study, *, policy: str, slice_seconds: float, seed: int = 0
) -> StudySpec:
    """What a broker must know of a study."""
    return StudySpec(
        key=study_key(study),
        name=study.study_name,
        ledger_url=ledger_url(study),
        policy=anywhere(policy),
        folders=folders() if ":" in policy else (),
        slice_seconds=slice_seconds,
        seed=seed,
        maximize=sign(study) < 0,
    )


def ledger_url(study: optuna.Study) -> str:
    """Where the study's ledger is: in its own database, or in a file for storages without one."""
    url = _database_url(study)
    if url is None:
        return f"sqlite:///{state_dir() / 'ledgers' / study_key(study)}.db"
    if url.get_backend_name() == "sqlite":
        url = url.set(database=str(Path(url.database).absolute()))
    return str(url.render_as_string(hide_password=False))


def checkpoint_root(study: optuna.Study, chosen: Path | None = None) -> Path:
    """The folder of a study's checkpoints, its own also where several studies share ``chosen``.

    The default is beside an SQLite file, else among the user's own.
    """
    url = _database_url(study)
    if chosen is not None:
        folder = chosen
    elif url is not None and url.get_backend_name() == "sqlite":
        folder = Path(url.database + ".hermes")
    else:
        folder = state_dir() / "checkpoints"
    return folder.absolute() / study_key(study)


def state_dir() -> Path:
    """The user's own folder for ledgers and checkpoints that have no better place."""
    return Path(platformdirs.user_state_path("optuna-hermes"))


def _database_url(study: optuna.Study) -> Any:
    """The SQLAlchemy URL of a study's database; None for storages without a file or a server."""
    storage = study._storage
    backend = storage._backend if isinstance(storage, _CachedStorage) else storage
    if not isinstance(backend, RDBStorage):
        return None
    url = backend.engine.url
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        return None
    return url


def sign(study_or_trial: Any) -> float:
    """1.0 where lower is better, -1.0 where values are maximised."""
    study = getattr(study_or_trial, "study", study_or_trial)
    directions = study.directions
    return -1.0 if directions[0] == StudyDirection.MAXIMIZE else 1.0


def pruned(message: str) -> Exception:
    """The exception by which an objective says that its wrapped pruner stopped it."""
    return optuna.TrialPruned(message)


# -- trials ------------------------------------------------------------------------------------


def open_trial(study: optuna.Study) -> optuna.Trial:
    """Create the next trial, or take the first that waits in the queue.

    As ``study.ask()``, but the trial is marked as ours in the same transaction: whoever dies
    between here and the ledger leaves a trial that the next ``optimize`` finds.
    """
    storage, study_id = study._storage, study._study_id
    study._thread_local.cached_all_trials = None
    waiting = storage.get_all_trials(study_id, deepcopy=False, states=(TrialState.WAITING,))
    for trial in waiting:
        storage.set_trial_system_attr(trial._trial_id, _OPENED_ATTRIBUTE, True)
        if storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING):
            return optuna.Trial(study, trial._trial_id)
    template = optuna.trial.create_trial(
        state=TrialState.RUNNING, system_attrs={_OPENED_ATTRIBUTE: True}
    )
    return optuna.Trial(study, storage.create_new_trial(study_id, template))


def reattach(study: optuna.Study, trial_id: int) -> optuna.Trial:
    """A live handle of a trial that another process created."""
    study._thread_local.cached_all_trials = None
    study.get_trials(deepcopy=False)  # fills the cache that set_trial_param relies on
    return optuna.Trial(study, trial_id)


def reported_steps(trial: Any) -> frozenset[int]:
    """Steps that Optuna has a value for, from before this process; none for a ``FixedTrial``."""
    study = getattr(trial, "study", None)
    trials = [] if study is None else study.get_trials(deepcopy=False)
    found = (frozen for frozen in trials if frozen.number == trial.number)
    return frozenset(step for frozen in found for step in frozen.intermediate_values)


def params_of(trial: optuna.trial.BaseTrial) -> Params:
    """A trial's hyper-parameters as plain JSON; a choice that is none is its text."""
    return {name: _plain(value) for name, value in trial.params.items()}


def params_of_id(study: optuna.Study, trial_id: int) -> Params:
    """As ``params_of``, of a trial that is known by its id."""
    return params_of(study._storage.get_trial(trial_id))


def _plain(value: Any) -> float | int | bool | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else float(value)
    return float(value) if isinstance(value, float) else str(value)


def end_of(study: optuna.Study, trial_id: int) -> TrialState | None:
    """How a trial has ended, None if it has not."""
    state = study._storage.get_trial(trial_id).state
    return state if state.is_finished() else None


def trial_id(trial: Any) -> int:
    """Optuna's id of a trial."""
    return int(trial._trial_id)


def ours(trial: FrozenTrial) -> bool:
    """Whether an unfinished trial was opened by ``open_trial``."""
    return trial.state == TrialState.RUNNING and _OPENED_ATTRIBUTE in trial.system_attrs


class Note:
    """Writes a run's state where optuna-dashboard shows it: among its trial's user attributes.

    Args:
        study: of the trial.
        trial_id: Optuna's id of the trial; one that is finished keeps what it has.
        session: knows the run's device time.
    """

    def __init__(self, study: optuna.Study, trial_id: int, session: RunSession) -> None:
        self._study = study
        self._trial_id = trial_id
        self._session = session

    def __call__(self, state: RunState) -> None:
        """Write ``state`` and the device time until now."""
        seconds = round(self._session.device_seconds, 3)
        attributes = {STATE_ATTRIBUTE: state, SECONDS_ATTRIBUTE: seconds}
        set_attributes(self._study, self._trial_id, attributes)


def set_attributes(study: optuna.Study, trial_id: int, attributes: dict[str, Any]) -> None:
    """Set user attributes of a trial, unless it has just been finished."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        for key, value in attributes.items():
            study._storage.set_trial_user_attr(trial_id, key, value)


# -- samplers ----------------------------------------------------------------------------------


def reseed(sampler: optuna.samplers.BaseSampler, seed: int, number: int) -> None:
    """Give every random state inside ``sampler`` a seed made of ``seed`` and a trial's number."""
    states = _random_states(sampler, set())
    words = np.random.SeedSequence([seed, number]).generate_state(max(1, len(states)))
    for state, word in zip(states, words, strict=False):
        state.rng.seed(int(word))


def _random_states(owner: Any, seen: set[int]) -> list[LazyRandomState]:
    if id(owner) in seen:
        return []
    seen.add(id(owner))
    found: list[LazyRandomState] = []
    for value in vars(owner).values():
        if isinstance(value, LazyRandomState):
            found.append(value)
        elif isinstance(value, optuna.samplers.BaseSampler):
            found.extend(_random_states(value, seen))
    return found


_BLIND_SAMPLERS = (
    optuna.samplers.BruteForceSampler,
    optuna.samplers.GridSampler,
    optuna.samplers.QMCSampler,
    optuna.samplers.RandomSampler,
)


def fixed_list(study: optuna.Study, unstarted: int | None) -> bool:
    """Whether the next ``unstarted`` trials do not depend on what is reported until then.

    That is so if all of them are enqueued, or if the sampler does not learn. Without a bound there
    is no list.
    """
    if unstarted is None:
        return False
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    # A subclass may learn.
    return len(waiting) >= unstarted or type(_proposer(study.sampler)) in _BLIND_SAMPLERS


def _proposer(sampler: optuna.samplers.BaseSampler) -> optuna.samplers.BaseSampler:
    """The sampler at the bottom of those that wrap others."""
    base = getattr(sampler, "base", None) or getattr(sampler, "_base_sampler", None)
    return _proposer(base) if isinstance(base, optuna.samplers.BaseSampler) else sampler


class StudyView(optuna.Study):
    """A study in which every unfinished trial that has reported is COMPLETE at its last value.

    TPE counts RUNNING trials as bad ones. Here most trials are unfinished for most of the time,
    the good ones among them, and their last values are what is known.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__dict__ = study.__dict__

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        trials = super()._get_trials(deepcopy=False, states=None, use_cache=use_cache)
        shown = [as_seen(trial, self.directions) for trial in trials]
        if states is not None:
            shown = [trial for trial in shown if trial.state in states]
        return copy.deepcopy(shown) if deepcopy else shown


def as_seen(trial: FrozenTrial, directions: list[StudyDirection]) -> FrozenTrial:
    """A trial as a sampler should see it; see ``StudyView``."""
    reported = trial.intermediate_values
    if trial.state != TrialState.RUNNING or not reported or len(directions) != 1:
        return trial
    value = reported[max(reported)]
    if math.isnan(value):
        value = -math.inf if directions[0] == StudyDirection.MAXIMIZE else math.inf
    seen = copy.copy(trial)
    seen.state = TrialState.COMPLETE
    seen.values = [value]
    seen.datetime_complete = trial.datetime_start
    return seen


# -- the loop ----------------------------------------------------------------------------------


@contextlib.contextmanager
def optimize_loop(study: optuna.Study) -> Iterator[None]:
    """Let callbacks call ``study.stop()`` inside of this block, as in ``study.optimize``."""
    study._stop_flag = False
    study._thread_local.in_optimize_loop = True
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = False


def asked_to_stop(study: optuna.Study) -> bool:
    """Whether ``study.stop()`` was called."""
    return bool(study._stop_flag)


def shared(study: optuna.Study) -> bool:
    """Whether other processes can reach the study's storage."""
    storage = study._storage
    if isinstance(storage, optuna.storages.InMemoryStorage):
        return False
    backend = storage._backend if isinstance(storage, _CachedStorage) else storage
    return not isinstance(backend, RDBStorage) or _database_url(study) is not None


# -- the command line --------------------------------------------------------------------------

Study = optuna.Study
"""For the annotations of those who have no other business with Optuna."""


def study_names(storage: str) -> list[str]:
    """The names of all studies of a storage.

    Raises:
        StorageError: the storage cannot be reached.
    """
    with _storage_errors(storage):
        return sorted(optuna.get_all_study_names(storage))


def delete_study(study: optuna.Study) -> None:
    """Take a study out of its storage."""
    study._storage.delete_study(study._study_id)


def sqlite_file(storage: str) -> Path | None:
    """The file of an SQLite URL; None for every other storage."""
    scheme, separator, path = storage.partition(":///")
    if not separator or scheme.split("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0])


def known_key(study: optuna.Study) -> str | None:
    """The study's key, None if it never met this package; gives it none."""
    key = study._storage.get_study_system_attrs(study._study_id).get(_KEY_ATTRIBUTE)
    return None if key is None else str(key)


def complete_trial(study: optuna.Study, trial: FrozenTrial, value: float) -> None:
    """Tell an unfinished trial COMPLETE.

    Raises:
        StorageError: it was finished by someone else meanwhile.
    """
    set_attributes(study, trial._trial_id, {STATE_ATTRIBUTE: "done"})
    try:
        study.tell(trial.number, value)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError) as error:
        raise StorageError(f"Trial {trial.number} cannot be finished: {_line(error)}") from error


def log_warnings_only() -> None:
    """Keep Optuna's own lines about every trial off the screen."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def optuna_verbs() -> frozenset[str]:
    """The verbs of Optuna's own command line, some of two words."""
    import optuna.cli

    return frozenset(optuna.cli._COMMANDS)


def run_optuna_cli(*samplers: type[optuna.samplers.BaseSampler]) -> int:
    """Run Optuna's own command line on ``sys.argv``.

    Args:
        samplers: more samplers that ``ask --sampler NAME`` shall know.

    Raises:
        InvalidInputError: what Optuna would show as a traceback.
    """
    import optuna.cli

    for sampler in samplers:
        setattr(optuna.samplers, sampler.__name__, sampler)
    try:
        return int(optuna.cli.main() or 0)
    except KeyError as error:
        raise InvalidInputError(str(error.args[0]) if error.args else repr(error)) from error
    except (ImportError, ValueError, OSError) as error:
        raise InvalidInputError(_line(error)) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("sqlalchemy", "optuna", "alembic"):
            raise
        raise InvalidInputError(_line(error)) from error
