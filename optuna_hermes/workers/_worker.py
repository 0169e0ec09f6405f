"""One worker process: it waits for a lease, trains one run for as long as it may, and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import filelock
import optuna
from optuna.trial import TrialState

from optuna_hermes import _optuna as private
from optuna_hermes.broker import RunSession, StudySpec, connect, connect_patiently, sessions
from optuna_hermes.broker._devices._source import environment
from optuna_hermes.broker._election import runtime_dir
from optuna_hermes.broker._protocol import Grant, Ready
from optuna_hermes.errors import HermesError, Suspended
from optuna_hermes.model import RunState
from optuna_hermes.suspend._seed import seed_everything, trial_seed
from optuna_hermes.workers._fault import is_misuse, is_of_device, is_out_of_memory
from optuna_hermes.workers._objective import Objective
from optuna_hermes.workers._output import write_output_to
from optuna_hermes.workers._signals import sent_to_all
from optuna_hermes.workers._words import BEGAN, GRANTED, LEFT, NOTHING_LEFT, STOP, WAITS, Say

NOTES_SECONDS = 5.0
LEAVE_SECONDS = 1.0
"""How long a worker that leaves waits for its last values; its checkpoint folder keeps them."""

_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of a study is given.

    Args:
        study: the study, pickled.
        spec: what a broker must know of it.
        seed: every trial's seed is derived from it.
        checkpoint_root: folder with one folder for each trial.
        unwritable: people know that nothing can be written there.
    """

    study: bytes
    spec: StudySpec
    seed: int
    checkpoint_root: Path
    unwritable: bool = False


def work(job: Job, objective: Objective, say: Say) -> None:
    """Serve one lease after another of one run; ``say`` how far it has come, and how it ends."""
    study: optuna.Study = private.patiently(cloudpickle.loads, job.study)
    private.rest(study)
    with private.patient(study), private.optimize_loop(study):
        _work(job, study, objective, say)


def _work(job: Job, study: optuna.Study, objective: Objective, say: Say) -> None:
    study.get_trials(deepcopy=False)  # what can be done before a device waits for it
    private.disconnect(study)
    ready = Ready(study=job.spec.key)
    connection = connect_patiently("worker")
    session = RunSession(connection, job.spec, ready, reconnect=partial(connect, "worker"))
    sessions.worker = session
    say(WAITS, "")
    grant = session.wait_for_grant()
    end = LEFT
    if grant is not None:
        say(GRANTED, "")
        os.environ.update(environment(grant.devices))
        engagement = _Engagement(job, study, session, say)
        engagement.serve(grant, objective)
        end = engagement.end
    session.close()
    say(end, "")


class _Engagement:
    """A run in this process, from its grant to its end or its suspension."""

    def __init__(self, job: Job, study: optuna.Study, session: RunSession, say: Say) -> None:
        self._job = job
        self._study = study
        self._session = session
        self._say = say
        self._stopped = False

    @property
    def end(self) -> str:
        """See ``STOP``: who calls it after the objective has ended is the sampler."""
        if self._stopped:
            return STOP
        return NOTHING_LEFT if private.asked_to_stop(self._study) else LEFT

    def serve(self, grant: Grant, objective: Objective) -> None:
        trial = self._trial(grant)
        self._say(BEGAN, "")
        end = private.end_of(self._study, private.trial_id(trial))
        if end is not None:  # whoever told Optuna died before it told the broker
            self._session.end("failed" if end == TrialState.FAIL else "done")
            return
        folder = self._job.checkpoint_root / f"trial-{trial.number:05d}"
        if not write_output_to(folder / "output.log") and self._job.unwritable:
            logging.getLogger("optuna_hermes.suspend").setLevel(logging.ERROR)  # once is enough
        faulthandler.enable(file=2, all_threads=False)  # a crash leaves a traceback there
        note = private.Note(self._study, private.trial_id(trial), self._session)
        notes = _Notes(note, partial(private.disconnect, self._study))
        self._session.checkpoint_dir = folder
        self._session.find()
        self._session.noted = notes.put
        private.reseed(self._study.sampler, self._job.seed, trial.number)
        seed_everything(trial_seed(self._job.seed, trial.number))
        try:
            private.keep_reports(self._study, private.trial_id(trial), folder / "unwritten.json")
            self._train(trial, objective, notes)
        except Suspended:  # the session has said so
            private.flush_reports(self._study, LEAVE_SECONDS)
        except HermesError as error:
            traceback.print_exc()
            self._session.release(f"Trial {trial.number}: {error}")
        finally:
            notes.close()

    def _trial(self, grant: Grant) -> optuna.Trial:
        if grant.number is None or grant.trial_id is None:
            # Two processes can take the same enqueued trial from SQLite, which locks no row.
            with _opening(self._job.checkpoint_root):
                trial = private.open_trial(
                    self._study,
                    name=str(grant.epoch),
                    lost=tuple(map(str, grant.lost)),
                )
        else:
            trial = private.reattach(self._study, grant.trial_id)
        self._session.describe = partial(private.params_of, trial)
        self._session.begin(trial.number, private.trial_id(trial))
        sessions.add(self._study.study_name, trial.number, self._session)
        return trial

    def _train(self, trial: optuna.Trial, objective: Objective, notes: _Notes) -> None:
        error: str | None = None
        values, state = None, None
        try:
            values = self._run(trial, objective)
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except (Exception, SystemExit) as raised:  # the trial's own code: that is what FAIL means
            if self._is_not_the_trial_s(raised):
                raise
            traceback.print_exc()
            if sent_to_all():
                _die(f"Trial {trial.number} goes on: a signal has ended what it needs.")
            if is_of_device(raised, os.environ.get("CUDA_VISIBLE_DEVICES", "")):
                _die(f"Trial {trial.number} goes on elsewhere: its device has failed.")
            if is_out_of_memory(raised) and not self._session.alone:
                reason = f"Trial {trial.number} has outgrown its share of the device: {raised}"
                self._session.release(reason, outgrown=True)
                return
            state, error = TrialState.FAIL, repr(raised)
        notes.put("failed" if state == TrialState.FAIL else "done")
        notes.close()
        told = private.tell(self._study, trial, values, state)
        failed = told.state == TrialState.FAIL
        if failed and error is None:
            error = f"the objective returned {values!r}"
        self._session.end("failed" if failed else "done", error)

    def _is_not_the_trial_s(self, raised: BaseException) -> bool:
        """Whether the trial stays as it was: it is suspended, or all of its study cannot go on."""
        if isinstance(raised, SystemExit):
            # What says that its process is told to end: Lightning's kind of it, or the session's.
            return type(raised) is not SystemExit or raised.code == _TERMINATED
        if not isinstance(raised, HermesError):
            return False
        trials = self._study.get_trials(deepcopy=False)
        reported = any(trial.intermediate_values or trial.values for trial in trials)
        return not is_misuse(raised, anything_reported=reported)

    def _run(self, trial: optuna.Trial, objective: Objective) -> Any:
        try:
            return objective(trial)
        finally:
            self._stopped = private.asked_to_stop(self._study)


@contextlib.contextmanager
def _opening(root: Path) -> Iterator[None]:
    """Wait until no other process opens a trial of this study, on this host at least."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / "open.lock")
        lock.acquire()
    except OSError:  # nothing can be written there
        lock = filelock.FileLock(runtime_dir() / f"open-{root.name}.lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _die(words: str) -> NoReturn:
    """End as if killed: the run is taken from its last checkpoint, and no trial has failed."""
    print(words, flush=True)
    os._exit(1)


class _Notes:
    """Takes notes on a thread: what the dashboard shows must not cost the device time.

    Args:
        note: writes one.
        disconnect: called when the run is parked: a process that waits needs no connection.
    """

    def __init__(self, note: private.Note, disconnect: Callable[[], None]) -> None:
        self._note = note
        self._disconnect = disconnect
        self._queue: queue.SimpleQueue[RunState | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="hermes-notes", daemon=True)
        self._thread.start()

    def put(self, state: RunState) -> None:
        """Write this state soon."""
        self._queue.put(state)

    def close(self) -> None:
        """Wait until all is written, or not for long: no more than a dashboard misses it."""
        self._queue.put(None)
        self._thread.join(NOTES_SECONDS)

    def _write(self) -> None:
        while (state := self._queue.get()) is not None:
            self._note(state)
            if state == "parked":
                self._disconnect()
