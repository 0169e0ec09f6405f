"""Leases of trials that plain Optuna runs: acquired, shared within a thread, and given back."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes._optuna._samplers import nested
from optuna_hermes._optuna._storages import backend_of, disconnect
from optuna_hermes._optuna._studies import identity, look_anew, study_spec
from optuna_hermes._optuna._trials import Note, end_of, ending, overwrite_notes, params_of_id
from optuna_hermes._optuna._waiting import Idleness, InsideError, Wait
from optuna_hermes.broker import (
    SessionEntry,
    StudyIdentity,
    connect_or_start,
    pending_endings,
    sessions,
)
from optuna_hermes.broker._protocol import Ending, Register
from optuna_hermes.errors import TrialTakenError

if TYPE_CHECKING:
    from optuna_hermes.broker import TrialSession

IDLE_SECONDS = 10.0
"""Idle seconds after which a trial made by ``study.ask`` loses its device: this or three times its
longest unit, whichever is longer."""

_POLL_SECONDS = 1.0
_PRUNED_ATTRIBUTE = "hermes:pruned"
"""System attribute of a trial that was pruned."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SharingTerms:
    """Terms on which the trials of a plain study take turns; see ``HermesSampler``."""

    devices: str
    policy: str
    slice_seconds: float


def begin_trial(study: optuna.Study, trial: FrozenTrial, terms: SharingTerms) -> bool:
    """Wait for the first lease of a trial whose objective is called next.

    A trial made by ``study.ask`` needs no device yet: see ``turn``. A trial that is made inside of
    another one trains on that one's device.

    Returns:
        False if the objective is called with another trial, which has begun: this one had been
        taken from the queue twice.

    Raises:
        BrokerError: no broker can be reached; the trial was set to FAIL, or is in the queue again.
        KeyboardInterrupt: the user has interrupted the wait, likewise.
    """
    if sessions.inside:
        return True
    made = _trial_being_made()
    if made is not None:
        _objects[made] = _alive.setdefault((identity(study), trial.number), _Referenced())
    preempts = getattr(study.pruner, "preempts", False)
    if not preempts or not study._thread_local.in_optimize_loop:
        return True
    outer = _outer()
    if outer is not None and not (outer.lazy and outer.study == identity(study)):
        return True
    given = bool(trial.params) or "fixed_params" in trial.system_attrs
    try:
        if outer is not None:
            _give_back(outer)
        # As Optuna begins it once the trial is made: whoever finds it dead tries it again.
        with get_heartbeat_thread(trial._trial_id, study._storage):
            _take(study, trial, terms, lazy=False)
            overwrite_notes(study._storage, trial)
        return True
    except BaseException as error:
        # SQLite locks no row: two threads, or processes, may take one trial from the queue at once.
        if not (isinstance(error, TrialTakenError) and given and made is not None):
            state = TrialState.WAITING if given else TrialState.FAIL
            with contextlib.suppress(Exception):  # the error raised below matters more
                study._storage.set_trial_state_values(trial._trial_id, state)
            raise
        _log.warning(
            "Trial %d had been taken from the queue before: another one is begun.", trial.number
        )
    _put_back(study, trial._trial_id)
    _become(made, study.ask())
    return False


def _put_back(study: optuna.Study, trial_id: int) -> None:
    """Let a trial be over again that had ended before it was taken for the second time."""
    found = backend_of(study).get_trial(trial_id)
    if found.state != TrialState.RUNNING or found.datetime_complete is None:
        return
    state = TrialState.COMPLETE if found.values else TrialState.FAIL
    if _PRUNED_ATTRIBUTE in found.system_attrs:  # which may have a value, too
        state = TrialState.PRUNED
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_state_values(trial_id, state, found.values)


def _become(made: optuna.Trial, other: optuna.Trial) -> None:
    """Let a trial whose constructor is running be another one."""
    vars(made).update(vars(other))
    _objects[made] = _objects[other]  # whose own object nobody refers to any more


def end_trial(study: optuna.Study, trial: FrozenTrial, state: TrialState) -> None:
    """Give the device of a trial that has ended back."""
    if sessions.inside:
        return
    own = identity(study)
    _alive.pop((own, trial.number), None)
    # None if it has shared the device of a trial around it, or never needed one.
    session = sessions.pop(own, trial.number)
    if session is not None:
        if state == TrialState.PRUNED:
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                study._storage.set_trial_system_attr(trial._trial_id, _PRUNED_ATTRIBUTE, True)
        ended = ending(state)
        session.end(ended)
        if session.trains:  # a trial that never trained has no state on the dashboard
            session.on_state(ended)
        session.close()


@contextlib.contextmanager
def turn(study: optuna.Study, trial: FrozenTrial) -> Iterator[tuple[TrialSession | None, bool]]:
    """The session under which a trial trains, and True if it is its own.

    A trial made by ``study.ask`` waits for its first lease here, unless its thread has a lease: a
    loop that trains several trials side by side does so on one device.
    """
    try:
        own, number = identity(study), trial.number
        with sessions.using(own, number) as held:
            if held is not None or sessions.inside:
                yield (None if held is None else held.session), True
                return
        outer = _outer()
        if outer is not None:
            own, number = outer.study, outer.number
        elif (terms := _terms(study)) is not None:
            _take(study, trial, terms, lazy=True)
        with sessions.using(own, number) as held:
            yield (None if held is None else held.session), outer is None
    finally:
        _signs.last_at = time.monotonic()


def session_of(trial: Any) -> TrialSession | None:
    """The session of an ``optuna.Trial`` whose training begins; None if it is not scheduled.

    A trial made by ``study.ask`` waits for its first lease here.
    """
    study = getattr(trial, "study", None)
    if study is None:
        return None
    session = sessions.get(identity(study), trial.number)
    terms = _terms(study)
    if session is not None or sessions.inside or terms is None:
        return session
    outer = sessions.of_thread()
    # A trial within a training uses that one's device: another would wait for its own end.
    if outer is not None and not outer.lazy:
        return None
    if outer is not None:
        _give_back(outer)
    _take(study, study._storage.get_trial(trial._trial_id), terms, lazy=True)
    return sessions.get(identity(study), trial.number)


def wait_for_device(trial: optuna.Trial) -> None:
    """Wait until a trial has its device, in an objective that computes before its first batch.

    ``optimize`` calls an objective before a device is free, as far as its first batch. Data that
    are loaded and models that are made there cost no device time; but what computes for long, such
    as a training before the one that is suspended, should have its device by then.

    Args:
        trial: as the objective got it; one that is not scheduled does not wait.
    """
    session = session_of(trial)
    if session is not None:
        session.wait_for_device()


def _terms(study: Any) -> SharingTerms | None:
    """The terms of a study's sampler, or of one that it wraps, if its pruner preempts."""
    preempts = getattr(getattr(study, "pruner", None), "preempts", False)
    for each in nested(study.sampler) if preempts else ():
        terms = getattr(each, "terms", None)
        if isinstance(terms, SharingTerms):
            return terms
    return None


def _take(study: optuna.Study, trial: FrozenTrial, terms: SharingTerms, *, lazy: bool) -> None:
    """Wait for a trial's first lease; it gets no session if it trains on another one's device."""
    from optuna_hermes.broker import TrialSession  # here: a process that calls `optimize` has none

    look_anew()
    spec = study_spec(study, policy=terms.policy, slice_seconds=terms.slice_seconds)
    number, trial_id = trial.number, trial._trial_id
    unit_seconds = _since_last_sign(trial) if lazy else 0.0
    join = partial(connect_or_start, "plain", terms.devices)
    pending_endings.tell(join)
    ask = Register(study=spec, number=number, trial_id=trial_id)
    connection = join()
    again = partial(join, as_before=connection.welcome)
    session = TrialSession(connection, spec, ask, reconnect=again)
    session.on_state = Note(study, trial_id, session)
    session.describe = partial(params_of_id, study, trial_id)
    session.on_wait = wait = Wait(study, spec.key, number, rest=partial(disconnect, study))
    try:
        session.wait_for_grant()
    except InsideError:
        session.hang_up()
        return
    except BaseException:
        session.hang_up()
        raise
    wait.is_first = False
    held = sessions.add(
        identity(study),
        number,
        session,
        lazy=lazy,
        longest_seconds=unit_seconds,
        fate=partial(_fate, study, trial_id),
    )
    _watch.look_after(held)


class _Signs(threading.local):
    """The time of a thread's last activity, under any trial."""

    last_at = -math.inf


_signs = _Signs()


def _since_last_sign(trial: FrozenTrial) -> float:
    """An upper bound of a trial's unit in seconds; its thread may have trained others before."""
    began = trial.datetime_start
    age = math.inf if began is None else (datetime.datetime.now() - began).total_seconds()
    seconds = min(age, time.monotonic() - _signs.last_at)
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _fate(study: optuna.Study, trial_id: int) -> Ending | None:
    """The end of a trial, perhaps set by another process; None if it has not ended."""
    with contextlib.suppress(Exception):  # an outage, or it is deleted: callers ask again later
        return end_of(study, trial_id)
    return None


# -- giving it back ----------------------------------------------------------------------------


class _Referenced:
    """Mark that lives as long as one of a trial's Python objects, of which there may be several."""


_objects: weakref.WeakKeyDictionary[optuna.Trial, _Referenced] = weakref.WeakKeyDictionary()

# The trials of which an object is still referenced, by study and number.
_alive: weakref.WeakValueDictionary[tuple[StudyIdentity, int], _Referenced] = (
    weakref.WeakValueDictionary()
)
# What is referenced to the end of the interpreter is not to be looked up in the midst of it.
atexit.register(_alive.clear)


def _trial_being_made() -> optuna.Trial | None:
    """The trial whose constructor is calling the sampler."""
    # Optuna passes a frozen one; only the stack has the object whose life is followed.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is optuna.Trial.__init__.__code__:
            made = frame.f_locals["self"]
            return made if isinstance(made, optuna.Trial) else None
    return None


def _outer() -> SessionEntry | None:
    """The session under which the calling thread trains, unless its trial is over."""
    outer = sessions.of_thread()
    if outer is not None and outer.lazy and (_watch.is_gone(outer) or outer.fate() is not None):
        _give_back(outer)
        return None
    return outer


def _give_back(held: SessionEntry) -> None:
    """End a session whose trial is over or abandoned; an abandoned one can get a lease again."""
    if sessions.take_away(held):
        ended = held.fate()
        if ended is None:
            held.session.hang_up()
        else:
            held.session.end(ended)
            held.session.close()


class _Watch:
    """Gives back the devices of trials that were abandoned, on a thread of its own."""

    def __init__(self) -> None:
        self._idleness = Idleness()
        self._known: weakref.WeakSet[SessionEntry] = weakref.WeakSet()
        self._any = threading.Event()
        self._pid: int | None = None

    def look_after(self, held: SessionEntry) -> None:
        """Give a session's device back when its trial is abandoned."""
        # Only of an object that was seen can it be said that it is gone.
        if (held.study, held.number) in _alive:
            self._known.add(held)
        if self._pid != os.getpid():  # a fork has no threads
            self._pid, self._any = os.getpid(), threading.Event()
            threading.Thread(target=self._work, name="hermes-watch", daemon=True).start()
        self._any.set()

    def _work(self) -> None:
        while True:
            self._any.wait()
            time.sleep(_POLL_SECONDS)
            # Before the look: a session that is added during it sets the event again.
            self._any.clear()
            helds = sessions.all()
            for held in self._abandoned(helds):
                _give_back(held)
            if helds:
                self._any.set()

    def _abandoned(self, helds: list[SessionEntry]) -> list[SessionEntry]:
        lazy = [held for held in helds if held.lazy and held.session.holds and not held.in_use]
        idle = self._idleness.of_threads(lazy)
        now = time.monotonic()
        return [
            held
            for held in helds
            if self.is_gone(held)
            or min(idle.get(held, 0.0), now - held.seen_at)
            >= max(IDLE_SECONDS, 3 * held.longest_seconds)
        ]

    def is_gone(self, held: SessionEntry) -> bool:
        """True if no reference to an object of the trial is left."""
        return held in self._known and (held.study, held.number) not in _alive


_watch = _Watch()
