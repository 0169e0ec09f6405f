"""A worker process: waits for a lease, trains one trial over its leases, and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import optuna
from optuna.trial import TrialState

from optuna_hermes import _optuna
from optuna_hermes._heap import flush_files
from optuna_hermes.broker import StudySpec, TrialSession, connect, connect_with_retry, sessions
from optuna_hermes.broker._devices._visible import environment
from optuna_hermes.broker._election import WAY_OUT, runtime_dir
from optuna_hermes.broker._privacy import open_private
from optuna_hermes.broker._protocol import Grant, Ready, SetUp
from optuna_hermes.errors import (
    CheckpointError,
    CheckpointUnreachableError,
    HermesError,
    ObjectiveError,
    Suspended,
)
from optuna_hermes.model import TrialStatus
from optuna_hermes.suspend._state import end_entropy, seed_entropy, seed_everything, trial_seed
from optuna_hermes.suspend._tiers._disk import remove_copies
from optuna_hermes.suspend._tiers._saver import is_first
from optuna_hermes.workers import _once
from optuna_hermes.workers._fault import is_misuse, is_of_device, is_out_of_memory
from optuna_hermes.workers._objective import Objective
from optuna_hermes.workers._output import flush_streams, write_output_to
from optuna_hermes.workers._script_variables import ScriptVariables
from optuna_hermes.workers._signals import sent_to_all
from optuna_hermes.workers._words import (
    BEGAN,
    FAILED,
    GRANTED,
    LEFT,
    LONGEST_REASON,
    NOTE,
    NOTHING_LEFT,
    ONCE,
    STOP,
    WAITS,
    Say,
    sayer,
    text_of,
)

NOTES_SECONDS = 5.0
CHANGE_SECONDS = 5.0
"""Time in which a trial's state may change again before it is written: each write costs a commit.
"""
LEAVE_SECONDS = 1.0
"""Seconds in which a leaving worker writes its last values; else its checkpoint folder has them."""
_WANDB_SECONDS = 60.0
"""Seconds in which W&B may send what it has."""

_TERMINATED = 128 + signal.SIGTERM

_log = logging.getLogger("optuna_hermes.suspend")  # whose warnings are shown on the screen


@dataclass(frozen=True, kw_only=True)
class WorkerInput:
    """The common input of all workers of a study.

    Args:
        study: the study, pickled.
        spec: the broker's description of it.
        checkpoint_root: folder with one folder for each trial.
        checkpoint_url: its place in a store that other hosts reach, None if they see the folder.
        unwritable: the user was warned already that nothing can be written there.
        inherits: a fork of the fork server uses the study that the fork server has loaded.
        ids_return: its storage may give the ids of deleted trials to new ones.
    """

    study: bytes
    spec: StudySpec
    checkpoint_root: Path
    checkpoint_url: str | None = None
    unwritable: bool = False
    inherits: bool = False
    ids_return: bool = False

    def place_of(self, number: int) -> tuple[Path, str | None]:
        """The folder of a trial's checkpoints, and its URL."""
        name, url = _optuna.trial_folder(number), self.checkpoint_url
        return self.checkpoint_root / name, None if url is None else f"{url}/{name}"


def study_of(job: WorkerInput) -> optuna.Study:
    """The study of a job, as each of its processes has its own."""
    study: optuna.Study = _optuna.with_retry(cloudpickle.loads, job.study)
    return study


def serve(
    job: WorkerInput, objective: Objective, words_end: int, study: optuna.Study | None, shares: bool
) -> NoReturn:
    """Work, writing messages to ``words_end``; exit without cleaning up what was inherited.

    Args:
        words_end: of the pipe to the fork server.
        study: the job's, with the trials that the fork server has read; None to load it here.
        shares: later workers may inherit what this one computes by ``once``.
    """
    status, say = 1, sayer(words_end)
    _once.begin_worker(partial(say, ONCE) if shares else None, partial(say, NOTE))
    try:
        work(job, objective, say, study or study_of(job))
        status = 0
    except BaseException as error:
        say(FAILED, text_of(error))
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        try:
            # As Python does at its exit: the last one for files that nobody closes.
            for end in (_end_daemons, _end_idle_pools, flush_streams, flush_files):
                with contextlib.suppress(Exception):
                    end()
        finally:
            os._exit(status)  # nothing may return to the server's loop in a second process


def _end_daemons() -> None:
    for child in multiprocessing.active_children():
        if child.daemon and child._parent_pid == os.getpid():  # type: ignore[attr-defined]
            child.terminate()


def _end_idle_pools() -> None:
    """End joblib's pool, as joblib does at Python's exit: it would stay for 5 minutes.

    An objective cannot be asked to: scikit-learn begins one for ``n_jobs``, and says nothing.
    """
    for package in ("joblib.externals.loky", "loky"):
        pool = getattr(sys.modules.get(f"{package}.reusable_executor"), "_executor", None)
        manager = getattr(pool, "_executor_manager_thread", None)
        # That of the process that this one was forked from does not run here.
        if pool is not None and manager is not None and manager.is_alive():
            _call_within(LEAVE_SECONDS, partial(pool.shutdown, kill_workers=True))


def _call_within(seconds: float, call: Callable[[], object]) -> None:
    """Call on a thread, which may end by ``sys.exit()``, or wait for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def work(job: WorkerInput, objective: Objective, say: Say, study: optuna.Study) -> None:
    """Train one trial over its leases; ``say`` sends its progress and its end to the driver."""
    _optuna.rest(study)
    with _optuna.retrying(study), _optuna.optimize_loop(study), _optuna.stopped_by_copies(study):
        try:
            _work(job, study, objective, say)
        except KeyError:  # of Optuna's storage, for whatever it cannot find
            _leave_if_deleted(study, job)
            raise


def _work(job: WorkerInput, study: optuna.Study, objective: Objective, say: Say) -> None:
    _optuna.read_trials_once(study)  # fills the cache before a device waits for it
    # A server has room for few connections, and this wait may be long.
    _optuna.disconnect(study)
    ready = Ready(study=job.spec.key)
    connection = connect_with_retry("worker")
    session = TrialSession(connection, job.spec, ready, reconnect=partial(connect, "worker"))
    if job.checkpoint_url is not None:
        session.place_of = job.place_of
    sessions.worker = session
    say(WAITS, "")
    grant = session.wait_for_grant()
    end = LEFT
    if grant is not None:
        say(GRANTED, "")
        # Before the objective is called: CUDA reads it once, when it is initialised. A trial is
        # set up without a device only where there are no GPUs.
        os.environ.update(environment(grant.shown if isinstance(grant, Grant) else ()))
        execution = _TrialExecution(job, study, session, say)
        execution.serve(grant, objective)
        end = execution.end
    session.close()
    say(end, "")


class _TrialExecution:
    """The execution of a trial in this process, from its grant to its end or its suspension."""

    def __init__(
        self, job: WorkerInput, study: optuna.Study, session: TrialSession, say: Say
    ) -> None:
        self._job = job
        self._study = study
        self._session = session
        self._say = say
        self._stopped = False

    @property
    def end(self) -> str:
        """``STOP`` if the objective has stopped the study, ``NOTHING_LEFT`` if the sampler has."""
        if self._stopped:
            return STOP
        return NOTHING_LEFT if _optuna.asked_to_stop(self._study) else LEFT

    def serve(self, grant: Grant | SetUp, objective: Objective) -> None:
        trial = self._trial(grant)
        self._say(BEGAN, "")
        if self._ends(trial):  # a process died after it had told Optuna, but not yet the broker
            return
        folder, url = self._job.place_of(trial.number)
        if not write_output_to(folder / "output.log") and self._job.unwritable:
            _log.setLevel(logging.ERROR)  # once is enough
        faulthandler.enable(file=2, all_threads=False)  # a crash leaves a traceback there
        note = _optuna.Note(self._study, _optuna.trial_id(trial), self._session)
        notes = _Notes(note, partial(_optuna.disconnect, self._study))
        self._session.checkpoint_dir, self._session.checkpoint_url = folder, url
        self._session.find_journal()
        if not self._session.checkpoints:
            _optuna.forget_reports(trial)
        self._session.on_state = notes.put
        # By the trial's number: the order in which workers begin trials changes no value.
        given = len(trial.params)
        begun_with = _optuna.seed_of_trial(trial, self._job.spec.seed)
        _optuna.reseed(self._study.sampler, begun_with, trial.number, given)
        seed = trial_seed(begun_with, trial.number)
        seed_everything(seed)
        seed_entropy(seed)
        self._session.on_first_batch = end_entropy
        _once.begin_trial(seed)
        try:
            _optuna.keep_reports(self._study, _optuna.trial_id(trial), folder)
            self._train(trial, objective, notes)
        except Suspended:  # the session has reported it to the broker
            _optuna.flush_reports(self._study, LEAVE_SECONDS)
        except HermesError as error:
            traceback.print_exc()
            unreachable = isinstance(error, CheckpointUnreachableError)
            damaged = isinstance(error, CheckpointError) and not unreachable
            if unreachable or self._returns:
                _log.warning("Trial %d waits, or goes on on another host. %s", trial.number, error)
            self._session.release(
                f"Trial {trial.number}: {error}", unreachable=unreachable, final=damaged
            )
        finally:
            notes.close()

    def _ends(self, trial: optuna.Trial) -> bool:
        """End a trial that has ended in Optuna; False if it has not."""
        end = _optuna.end_of(self._study, _optuna.trial_id(trial))
        if end is not None:
            self._session.end(end)
        return end is not None

    def _trial(self, grant: Grant | SetUp) -> optuna.Trial:
        if isinstance(grant, SetUp) or grant.number is None or grant.trial_id is None:
            opening = partial(_optuna.opening, self._job.spec.key)
            name = opening(grant.name if isinstance(grant, SetUp) else grant.epoch)
            lost = [*map(opening, grant.lost)]
            # Two processes can take the same enqueued trial from SQLite, which locks no row.
            with _creation_lock(self._job.checkpoint_root):
                trial = _optuna.open_trial(
                    self._study,
                    name=name,
                    lost=lost,
                    listed_number=grant.listed_number,
                    seed=self._job.spec.seed,
                    check=self._leave_if_taken,
                )
        else:
            trial = _optuna.reattach(self._study, grant.trial_id)
            # One that goes on may run code again that has reported, and would say so each time.
            warnings.filterwarnings("ignore", "The reported value is ignored", UserWarning)
        self._session.describe = partial(_optuna.params_of, trial)
        self._session.begin(trial.number, _optuna.trial_id(trial))
        sessions.add(_optuna.identity(self._study), trial.number, self._session)
        return trial

    def _train(self, trial: optuna.Trial, objective: Objective, notes: _Notes) -> None:
        error: str | None = None
        values, state = None, None
        try:
            values = self._run(trial, objective)
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except (Exception, SystemExit) as raised:  # errors of the trial's own code mean FAIL
            if self._is_not_the_trial_s(raised):
                raise
            _refuse_sampler(raised)
            traceback.print_exc()
            if self._goes_on(trial.number, raised):
                return
            advice = _optuna.storage_advice(self._study, raised)
            state, error = TrialState.FAIL, text_of(raised) + advice
        self._leave_if_taken()
        if self._ends(trial):  # somebody has told it while it trained, so it takes no more
            return
        # Before tell(): Optuna changes no attribute of a finished trial.
        notes.put("failed" if state == TrialState.FAIL else "done")
        notes.close()
        self._tell(trial, values, state, error)

    def _goes_on(self, number: int, raised: BaseException) -> bool:
        """Release a trial that an error of its surroundings has ended; False if it has failed."""
        # A data loader, or a process that it talks to, may have ended by the signal.
        if sent_to_all():
            _die(f"Trial {number} goes on: a signal has ended what it needs.")
        if is_of_device(raised, os.environ.get("CUDA_VISIBLE_DEVICES", "")):
            _die(f"Trial {number} goes on elsewhere: its device has failed.")
        if is_out_of_memory(raised) and not self._session.alone:
            text = text_of(raised, str)
            reason = f"Trial {number} has outgrown its share of the device: {text}"
            self._session.release(reason, outgrown=True)
            return True
        # A trial with a checkpoint has been past this point before: an error of the script or
        # its surroundings would fail one suspended trial after the other.
        if self._returns:
            text = text_of(raised)[:LONGEST_REASON]
            problem = f"its objective raises {text} before it goes on"
            _log.warning(
                "Trial %d waits, or goes on on another host: %s, see its output.log. While "
                "others train it is tried three times here, a minute apart.",
                number,
                problem,
            )
            self._session.release(
                f"Trial {number} was suspended, and now {problem} (see its output.log): "
                "mend that, then run the same command again, or close the trial with "
                "`optuna-hermes finish`."
            )
            return True
        return False

    def _tell(
        self, trial: optuna.Trial, values: Any, state: TrialState | None, error: str | None
    ) -> None:
        """Tell Optuna and the broker that a trial has ended; ``state`` is None if it has values."""
        try:
            told = _optuna.tell(self._study, trial, values, state)
        except Exception as raised:
            end = _optuna.end_of(self._study, _optuna.trial_id(trial))
            if end is not None:
                # Optuna calls after_trial() once the trial has ended: a constraint's, for example.
                traceback.print_exc()
                if is_first(self._job.checkpoint_root, "after_trial"):
                    text = f"then its sampler raised {text_of(raised)}"
                    self._say(NOTE, f"Trial {trial.number} has ended, {text}")
                self._session.end(end, error)
                return
            if not isinstance(raised, (TypeError, OverflowError)):
                raise
            # Of a text, or of an integer that is too large.
            error = f"the objective returned {values!r}"
            told = _optuna.tell(self._study, trial, None, TrialState.FAIL)
        if self._session.checkpoint_url is not None and self._session.checkpoint_dir is not None:
            remove_copies(self._session.checkpoint_dir)
        end = _optuna.ending(told.state)
        if end == "failed" and error is None:
            error = f"the objective returned {values!r}"
        self._session.end(end, error)

    @property
    def _returns(self) -> bool:
        """True before the first batch of a trial that was suspended to disk."""
        return bool(self._session.checkpoints) and not self._session.trains

    def _leave_if_taken(self) -> None:
        """End at once if another study may have this one's ids: its trials are not written to."""
        if self._job.ids_return:
            _leave_if_deleted(self._study, self._job)

    def _is_not_the_trial_s(self, raised: BaseException) -> bool:
        """True if the error is not the trial's: its process must end, or the study cannot go on."""
        if isinstance(raised, SystemExit):
            # Raised where the process is to end: Lightning's subclass, or the session's status.
            return type(raised) is not SystemExit or raised.code == _TERMINATED
        if not isinstance(raised, HermesError):
            return False
        trials = self._study.get_trials(deepcopy=False)
        reported = any(trial.intermediate_values or trial.values for trial in trials)
        return not is_misuse(raised, anything_reported=reported)

    def _run(self, trial: optuna.Trial, objective: Objective) -> Any:
        process, status = os.getpid(), 1
        variables = ScriptVariables(objective)
        try:
            values = objective(trial)
            status = 0
            return values
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
            raise
        finally:
            if os.getpid() != process:  # a process that the objective has forked is no trial
                _leave_fork(status)
            _finish_wandb(sys.exc_info()[1])
            self._warn_of_changed(trial.number, variables.changed())
            # Read now: later study.tell() calls the sampler, which may stop the study too.
            self._stopped = _optuna.asked_to_stop(self._study)
            if self._session.left and not isinstance(sys.exc_info()[1], Suspended):
                self._warn_of_caught(trial.number)
                raise Suspended("The objective has caught what unwinds it.")

    def _warn_of_changed(self, number: int, names: list[str]) -> None:
        new = [each for each in names if is_first(self._job.checkpoint_root, f"changed {each}")]
        if new:
            _log.warning(
                "Trial %d changes %s in its own process: neither the script, nor the trial once it "
                "has come back from disk, has these changes. What is to be read later belongs into "
                "trial.set_user_attr(), a file or, in a loop, run.kept.",
                number,
                ", ".join(new),
            )

    def _warn_of_caught(self, number: int) -> None:
        if is_first(self._job.checkpoint_root, "caught"):
            _log.warning(
                "Trial %d is suspended and goes on later, but its objective has caught the "
                "exception by which it leaves its process: write `except Exception:` in place of "
                "`except:`, and no `return` in `finally:`.",
                number,
            )


@contextlib.contextmanager
def _creation_lock(root: Path) -> Iterator[None]:
    """Lock the opening of trials of this study against other workers of its broker."""
    # Not in ``root``, which hosts may share: one that hangs must not hold up the others. A study in
    # SQLite has one broker, and other databases lock the row of a trial that waits.
    path = runtime_dir() / f"open-{root.name}.lock"
    with os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT, WAY_OUT), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of the open file: a cleaner may remove its folder
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a sampler has forked a process


def _leave_if_deleted(study: optuna.Study, job: WorkerInput) -> None:
    """End at once if the study was deleted: another one may have its trials' ids by now."""
    if _optuna.is_deleted(study, job.spec.key):
        os._exit(1)  # its driver says why


def _refuse_sampler(raised: BaseException) -> None:
    """End the call if a package is missing that its sampler imports: all trials need it.

    Raises:
        ObjectiveError: that is so.
    """
    sampler = _optuna.raised_in(raised) if isinstance(raised, ImportError) else None
    if sampler is not None:
        raise ObjectiveError(
            f"its sampler {type(sampler).__name__} raises {text_of(raised)[:LONGEST_REASON]}: "
            "install what that needs, then run the same command again."
        ) from raised


def _die(words: str) -> NoReturn:
    """End as if killed: the trial goes on from its last checkpoint and does not fail."""
    print(words, flush=True)
    # Cleaning up could wait for what the signal or the device has taken away.
    os._exit(1)


def _finish_wandb(raised: BaseException | None) -> None:
    """Let W&B write and send what it has, as at Python's exit: without it a whole run is lost.

    An error of the package's own, ``raised`` in the objective, fails no trial.
    """
    failed = isinstance(raised, (Exception, SystemExit))
    failed = failed and not isinstance(raised, (optuna.TrialPruned, HermesError))
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    # The script's own, which a fork inherits, is not ended here.
    if getattr(getattr(setup, "_singleton", None), "_pid", None) == os.getpid():
        _call_within(_WANDB_SECONDS, partial(sys.modules["wandb"].teardown, int(failed)))


def _leave_fork(status: int) -> NoReturn:
    """End a process that the objective has forked, without what its parent alone may clean up."""
    if status == 1 and sys.exc_info()[1] is not None:
        traceback.print_exc()
    flush_streams()
    os._exit(status)


class _Notes:
    """Writes notes for the dashboard on a thread, so that they cost no device time.

    ``disconnect`` is called when the trial is parked: a process that waits needs no connection.
    """

    def __init__(self, note: _optuna.Note, disconnect: Callable[[], None]) -> None:
        self._note = note
        self._disconnect = disconnect
        self._queue: queue.SimpleQueue[TrialStatus | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="hermes-notes", daemon=True)
        # A limit of processes may be reached: no notes then.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def put(self, state: TrialStatus) -> None:
        self._queue.put(state)

    def close(self) -> None:
        """Wait until all is written, at most ``NOTES_SECONDS``: only a dashboard would miss it."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(NOTES_SECONDS)

    def _write(self) -> None:
        closed = False
        while not closed and (state := self._queue.get()) is not None:
            end = time.monotonic() + CHANGE_SECONDS
            with contextlib.suppress(queue.Empty):
                while not closed:
                    self._rest(state)
                    later = self._queue.get(timeout=max(0.0, end - time.monotonic()))
                    closed, state = later is None, later or state
            self._note(state)
            self._rest(state)

    def _rest(self, state: TrialStatus) -> None:
        # At once: of many trials that take turns in short slices all have been parked lately.
        if state == "parked":
            self._disconnect()
