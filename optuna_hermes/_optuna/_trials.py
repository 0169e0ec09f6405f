"""Trials: opened, resumed, reported, ended, and annotated for dashboards."""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import CategoricalDistribution, distribution_to_json
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb.models import TrialModel
from optuna.trial import FixedTrial, FrozenTrial, TrialState

from optuna_hermes import ledger
from optuna_hermes._optuna._retry import with_retry
from optuna_hermes._optuna._storages import at_once, backend_of, beside, is_late, line
from optuna_hermes.broker._protocol import Ending, Params
from optuna_hermes.errors import StorageError
from optuna_hermes.model import TrialStatus

if TYPE_CHECKING:
    from optuna_hermes.broker import TrialSession

STATE_ATTRIBUTE = "hermes:state"
SECONDS_ATTRIBUTE = "hermes:device_seconds"
_OPENED_ATTRIBUTE = "hermes:opened"
SEED_ATTRIBUTE = "hermes:seed"
"""Of a study, and of each trial the one that it was begun with."""


def open_trial(
    study: optuna.Study,
    *,
    name: str | None = None,
    lost: Collection[str] = (),
    listed_number: int | None = None,
    seed: int = 0,
    check: Callable[[], object] = lambda: None,
) -> optuna.Trial:
    """Create the next trial, or take the first that waits in the queue; as ``study.ask()``.

    The call is retried during an outage, without creating a second trial.

    Args:
        name: unique name of this opening; None draws one.
        lost: names of openings whose processes died; a trial that one of them left is taken first.
        listed_number: the number of the trial that is taken before others, if it waits.
        seed: the study's present one, which the trial keeps; see ``seed_of_trial``.
        check: called right before a trial is taken or created, which it prevents by an error.
    """
    # A name of this call alone: it tells our trial from those that other workers take meanwhile.
    name = name or uuid.uuid4().hex
    return with_retry(_open, study, name, frozenset(lost), listed_number, seed, check, set())


def _open(
    study: optuna.Study,
    name: str,
    lost: frozenset[str],
    listed_number: int | None,
    seed: int,
    check: Callable[[], object],
    missed: set[int],
) -> optuna.Trial:
    """Open a trial by this name, or return the one that an unanswered earlier call has opened.

    ``missed`` collects the ids of waiting trials that other processes took first.
    """
    storage, study_id = at_once(study), study._study_id
    study._thread_local.cached_all_trials = None
    trials = storage.get_all_trials(study_id, deepcopy=False)
    check()
    for trial in trials:
        if trial.state != TrialState.RUNNING:
            continue
        names = opened_by(trial)
        mine = name in names and trial._trial_id not in missed
        if mine or names & lost:
            storage.set_trial_system_attr(trial._trial_id, _OPENED_ATTRIBUTE, name)
            if SEED_ATTRIBUTE not in trial.system_attrs:  # it was taken, and no more
                storage.set_trial_system_attr(trial._trial_id, SEED_ATTRIBUTE, seed)
            _clear(storage, trial, _OPENED_ATTRIBUTE)
            return _opened(study, trial._trial_id, trials)
    # Stable: but for the one that is wanted they stay in order.
    for trial in sorted(trials, key=lambda trial: trial.number != listed_number):
        if trial.state == TrialState.WAITING and _take(storage, trial, name, missed):
            storage.set_trial_system_attr(trial._trial_id, SEED_ATTRIBUTE, seed)
            return _opened(study, trial._trial_id, trials)
    # Marked in the same transaction: a process that dies before it reaches the ledger leaves a
    # trial that can be found.
    named = {_OPENED_ATTRIBUTE: name, SEED_ATTRIBUTE: seed}
    template = optuna.trial.create_trial(state=TrialState.RUNNING, system_attrs=named)
    return _opened(study, storage.create_new_trial(study_id, template), trials)


def replace_params(trial: optuna.Trial, params: Mapping[str, float]) -> None:
    """Replace suggested numbers by others within their bounds; for a study in memory."""
    for name, value in params.items():
        distribution = trial.distributions[name]
        own = distribution.to_internal_repr(value)
        trial.study._storage.set_trial_param(trial._trial_id, name, own, distribution)


def _opened(study: optuna.Study, trial_id: int, trials: Sequence[FrozenTrial]) -> optuna.Trial:
    """A live handle of a trial that was opened when the study had these trials."""
    # The sampler would read all of them again, which takes as long as there are such trials.
    own = at_once(study).get_trial(trial_id)
    others = (trial for trial in trials if trial.number != own.number)
    known: Any = study._thread_local
    known.cached_all_trials = sorted([*others, own], key=attrgetter("number"))
    known.read_for = trial_id
    return optuna.Trial(study, trial_id)


def _take(storage: BaseStorage, trial: FrozenTrial, name: str, missed: set[int]) -> bool:
    """Take a waiting trial; if another worker was faster, return False and withdraw the mark."""
    # A key for each name: two workers may mark one trial at once.
    trial_id, mark = trial._trial_id, f"{_OPENED_ATTRIBUTE}:{name}"
    # Marked before it is taken: a process that dies in between must not leave an unmarked trial.
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        storage.set_trial_system_attr(trial_id, mark, True)
        if storage.set_trial_state_values(trial_id, state=TrialState.RUNNING):
            _clear(storage, trial, mark)
            overwrite_notes(storage, trial)
            return True
        missed.add(trial_id)
        storage.set_trial_system_attr(trial_id, mark, False)
    return False


def _clear(storage: BaseStorage, trial: FrozenTrial, kept: str) -> None:
    """Clear the other processes' marks of creation: this process has the trial now."""
    for key, value in trial.system_attrs.items():
        if key.startswith(_OPENED_ATTRIBUTE) and key != kept and value:
            storage.set_trial_system_attr(trial._trial_id, key, False)


def overwrite_notes(storage: BaseStorage, trial: FrozenTrial) -> None:
    """Overwrite the notes of a trial that begins: Optuna copies those of a dead one to its retry.

    A trial is noted next when it is parked or has ended.
    """
    for key, value in {STATE_ATTRIBUTE: "running", SECONDS_ATTRIBUTE: 0.0}.items():
        if key in trial.user_attrs:
            storage.set_trial_user_attr(trial._trial_id, key, value)


def reattach(study: optuna.Study, trial_id: int) -> optuna.Trial:
    """A live handle of a trial that another process created."""
    study._thread_local.cached_all_trials = None
    study.get_trials(deepcopy=False)  # fills the cache that set_trial_param relies on
    return optuna.Trial(study, trial_id)


def forget_reports(trial: optuna.Trial) -> None:
    """Take the reports of earlier processes from the handle of a trial that begins anew.

    Optuna ignores what is reported for their steps, and shows them to pruners.
    """
    own = copy.copy(trial._cached_frozen_trial)  # a storage may have given its own object
    own.intermediate_values = {}
    trial._cached_frozen_trial = own


def seed_of_trial(trial: optuna.Trial, seed: int) -> int:
    """The seed of the study when a trial was begun; ``seed`` where it was not kept."""
    return int(trial._cached_frozen_trial.system_attrs.get(SEED_ATTRIBUTE, seed))


def no_trial() -> FixedTrial:
    """A trial of no study, for a training that is in none: it keeps no value, and is not pruned."""
    return FixedTrial({})


def report(trial: Any, value: float, step: int) -> None:
    """As ``trial.report``, for any trial; in a worker, written while training goes on."""
    # A trial of several objectives has no intermediate values in Optuna.
    if not _has_several_objectives(trial):
        with beside(getattr(trial, "study", None)):
            type(trial).report(trial, value, step=step)  # not the wrapper that ``on_report`` sets


def on_report(trial: Any, callback: Callable[[float], None]) -> None:
    """Call ``callback`` with each value that the objective itself gives to ``trial.report``."""
    own = trial.report

    def report(value: float, step: int) -> None:
        own(value, step)
        callback(float(value))

    trial.report = report


def should_prune(trial: Any) -> bool:
    """As ``trial.should_prune``; Optuna prunes no trial of several objectives."""
    return not _has_several_objectives(trial) and bool(trial.should_prune())


def _has_several_objectives(trial: Any) -> bool:
    study = getattr(trial, "study", None)  # a FixedTrial has none
    return study is not None and len(study.directions) > 1


def reported_steps(trial: Any) -> frozenset[int]:
    """The steps for which Optuna has a value already; empty for one that begins anew.

    And for a ``FixedTrial``.
    """
    if getattr(trial, "study", None) is None:
        return frozenset()
    return frozenset(trial._cached_frozen_trial.intermediate_values)


def params_of(trial: optuna.trial.BaseTrial) -> Params:
    """A trial's hyper-parameters as plain JSON; a choice that JSON lacks becomes its text."""
    return _plain_params(trial.params)


def listed_params(trial: FrozenTrial) -> Params:
    """The parameters that a trial in the queue was given when it was enqueued, or added to it."""
    return _plain_params({**trial.system_attrs.get("fixed_params", {}), **trial.params})


def params_of_id(study: optuna.Study, trial_id: int) -> Params:
    """As ``params_of``, for a trial's id."""
    return params_of(study._storage.get_trial(trial_id))


def _plain_params(given: Mapping[str, Any]) -> Params:
    return {_utf8(name): _plain(value) for name, value in given.items()}


def _plain(value: Any) -> float | int | bool | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Larger integers fit neither msgpack nor a database, and the largest are no float.
        if abs(value) >= 2**63:
            return float(value) if abs(value) <= sys.float_info.max else str(value)
        return int(value)
    return float(value) if isinstance(value, float) else _utf8(str(value))


def _utf8(text: str) -> str:
    """The text; what UTF-8 lacks, as of a file name in another encoding, becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def trial_states(study: optuna.Study) -> dict[int, TrialState]:
    """The state of each trial by its number."""
    # Read alone from a database: the other columns are slow to read.
    backend = backend_of(study)
    if not isinstance(backend, RDBStorage):
        return {trial.number: trial.state for trial in study.get_trials(deepcopy=False)}
    with backend.scoped_session() as session:
        found = session.query(TrialModel.number, TrialModel.state)
        return dict(map(tuple, found.filter(TrialModel.study_id == study._study_id)))


def ending(state: TrialState) -> Ending:
    """The end of a trial in this final state."""
    return "failed" if state == TrialState.FAIL else "done"


def end_of(study: optuna.Study, trial_id: int) -> Ending | None:
    """The end of a trial, None if it has not ended."""
    state = study._storage.get_trial(trial_id).state
    return ending(state) if state.is_finished() else None


def trial_id(trial: Any) -> int:
    """Optuna's id of a trial."""
    return int(trial._trial_id)


def opening(key: str, name: object) -> str:
    """The name of an opening by what brokers name it: the epoch of a lease, say.

    With the study's key: epochs begin anew in the ledger of a copied study, which has the marks.
    """
    return f"{key}:{name}"


def opened_by(trial: FrozenTrial) -> frozenset[str]:
    """The names of the openings by which ``open_trial`` created or took a trial; else empty."""
    start = f"{_OPENED_ATTRIBUTE}:"
    marks = [(key, mark) for key, mark in trial.system_attrs.items() if mark]
    queued = {key.removeprefix(start) for key, _ in marks if key.startswith(start)}
    return frozenset(queued | {mark for key, mark in marks if key == _OPENED_ATTRIBUTE})


def ours(trial: FrozenTrial) -> bool:
    """True if a RUNNING trial was opened by ``open_trial``."""
    return trial.state == TrialState.RUNNING and bool(opened_by(trial))


class Note:
    """Writes a trial's state to its user attributes, which optuna-dashboard shows."""

    def __init__(self, study: optuna.Study, trial_id: int, session: TrialSession) -> None:
        self._study = study
        self._trial_id = trial_id
        self._session = session

    def __call__(self, state: TrialStatus) -> None:
        """Write ``state`` and the device time until now; nothing during an outage."""
        if is_late(self._study):
            return
        seconds = round(self._session.device_seconds, 3)
        attributes = {STATE_ATTRIBUTE: state, SECONDS_ATTRIBUTE: seconds}
        try:
            set_attributes(self._study, self._trial_id, attributes)
        except Exception as error:
            if not ledger.is_transient(error):
                raise


def set_attributes(study: optuna.Study, trial_id: int, attributes: dict[str, Any]) -> None:
    """Set user attributes of a trial, unless it has just been finished."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        for key, value in attributes.items():
            at_once(study).set_trial_user_attr(trial_id, key, value)


def write_value(study: optuna.Study, trial: FrozenTrial, step: int, value: float) -> None:
    """Write a value that an unfinished trial has reported earlier."""
    study._storage.set_trial_intermediate_value(trial._trial_id, step, value)


def complete_trial(study: optuna.Study, trial: FrozenTrial, value: float) -> None:
    """Set an unfinished trial to COMPLETE in Optuna.

    Raises:
        StorageError: another process has finished it.
    """
    set_attributes(study, trial._trial_id, {STATE_ATTRIBUTE: "done"})
    try:
        study.tell(trial.number, value)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError) as error:
        raise StorageError(
            f"Trial {trial.number} cannot be finished: {line(error)} Leave it out."
        ) from error


def fail_trial(study: optuna.Study, trial_id: int) -> Ending:
    """Set a trial to FAIL in Optuna unless it has ended; return its end."""
    # Not by tell(): the sampler may stop the study then, or raise, where others go on.
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        with_retry(study._storage.set_trial_state_values, trial_id, TrialState.FAIL)
    return end_of(study, trial_id) or "failed"


def pruned(message: str) -> Exception:
    """The exception that an objective raises when its wrapped pruner has stopped it."""
    return optuna.TrialPruned(message)


def storage_advice(study: optuna.Study, error: BaseException) -> str:
    """Advice, to append to an error, about values that no storage keeps; else nothing."""
    called = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if distribution_to_json.__code__ in called:
        return (
            " (a storage keeps choices as JSON: write numbers as float(x) or int(x), and let "
            "others be keys of a dictionary)"
        )
    if isinstance(error, TypeError) and optuna.Trial.set_user_attr.__code__ in called:
        return (
            " (a storage keeps attributes as JSON: write numbers as float(x) or int(x), and save "
            "others to a file, whose name is set)"
        )
    if not (isinstance(error, ValueError) and "dynamic value space" in str(error)):
        return ""
    distributions = (
        each for trial in study.get_trials(deepcopy=False) for each in trial.distributions.values()
    )
    listed = any(
        isinstance(choice, (list, tuple))
        for each in distributions
        if isinstance(each, CategoricalDistribution)
        for choice in each.choices
    )
    return " (a storage gives tuples back as lists: let choices be text)" if listed else ""
