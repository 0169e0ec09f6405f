"""The driver, the process that calls ``optimize``: keeps workers alive until the study is done."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

import optuna
from msgspec import structs

from optuna_hermes import _optuna
from optuna_hermes._job_environment import end_of_job, job_environment
from optuna_hermes.broker import (
    Connection,
    StudySpec,
    WatchedStudy,
    connect_or_start,
    with_other_devices,
)
from optuna_hermes.broker._client._connection import SILENT, SILENT_SECONDS
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.broker._imports import absolute_policy_name
from optuna_hermes.broker._power_commands import powers_nothing
from optuna_hermes.broker._protocol import Drain, KeepWorkers, OpenStudy, StudyStatus, Welcome
from optuna_hermes.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerSilentError,
    DatabaseOutageError,
    HermesError,
    StudyDeletedError,
    StudyTakenError,
)
from optuna_hermes.ledger import Ledger, open_ledger, outage_phrase
from optuna_hermes.model import LIVE_STATES
from optuna_hermes.sampler import seed_of
from optuna_hermes.suspend._tiers._saver import forget_warnings
from optuna_hermes.view.formats import plural
from optuna_hermes.view.progress import ProgressDisplay
from optuna_hermes.workers._notices import (
    Callback,
    Callbacks,
    DatabaseNotices,
    DeviceNotices,
    Losses,
    Repeats,
)
from optuna_hermes.workers._open_study import (
    checkpoint_place,
    descriptions,
    few_files,
    most_alive,
    open_study_message,
)
from optuna_hermes.workers._result import OptimizeResult, best_of, failure_of, trial_results
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._stops import LEAVE_SECONDS, Stops, suspending_seconds
from optuna_hermes.workers._taken import TAKEN, driver_of, wait_for_driver
from optuna_hermes.workers._words import NOTHING_LEFT, STOP
from optuna_hermes.workers._worker import WorkerInput
from optuna_hermes.workers._worker_pool import ServerKilledError, WorkerPool

READY_PER_DEVICE = 2
"""Workers kept ready for each device: one takes it, another is there before the next is forked."""

MAX_BROKERS = 10
"""Brokers in a row that may end within ``STEADY_SECONDS`` before the call gives up."""

STEADY_SECONDS = 1.0
"""Lifetime after which a broker's end no longer counts towards ``MAX_BROKERS``."""

MOST_KILLED = 3
"""Fork servers that may be killed within an hour of each other: then memory runs out again and
again."""
_HOUR_SECONDS = 3600.0

_AWAY = (
    "The database {}, so every trial that could be was suspended to disk: bring it back, then run "
    "the same command again."
)

_HELD = (
    "Nothing is left but {} that somebody holds: let go with `optuna-hermes release`, then run the "
    "same command again."
)

_UNANSWERED = (
    "The broker has not answered for {:.0f} s, so trials that train could not be suspended: all "
    "workers are ended, and trials go on from the checkpoints that they have on disk."
)

_CUT_SHORT = (
    "{} had not left the objective in time, and the processes were ended: what `finally:` was "
    "still to do there, such as to close a tracker, is not done. --grace gives it longer."
)

_IMPORT_NOTED_SECONDS = 5.0
"""Seconds after which the user is told what is waited for."""

_DELETED_SECONDS = 2.0
"""Interval at which a study is looked for in its file, in which another one may take its ids."""

_POINTS_SECONDS = 0.5
"""Interval at which a brute force is asked for points that are left."""

TICK_SECONDS = 0.2
"""Longest time between two looks at the clock, at signals, and at ``study.stop()``."""


class Driver:
    """One call of ``optimize`` with a started worker pool; events go to ``progress``."""

    def __init__(
        self,
        study: optuna.Study,
        pool: WorkerPool,
        settings: OptimizeSettings,
        progress: ProgressDisplay,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._study = study
        self._settings = settings
        self._progress = progress
        self._note = progress.note
        self._warn = progress.warn
        self._callbacks = Callbacks(study, callbacks)
        self._repeats = Repeats(study, self._warn)
        self._pool = pool
        self._problem: str | None = None
        self._ended_by_outage = False
        self._import_seconds = 0.0
        self._stopped = False
        self._known = job_environment(os.environ)
        self._stops = Stops(
            began=pool.began,
            timeout=settings.timeout,
            known=self._known,
            grace_seconds=settings.grace or self._known.grace_seconds,
            note=self._note,
        )
        self._last: StudyStatus | None = None
        self._welcome: Welcome | None = None
        self._devices: tuple[str, ...] = ()
        self._silence_noted_at = -math.inf
        self._root: Path | None = None
        self._device_notices = DeviceNotices(self._warn)
        self._database_notices = DatabaseNotices(self._warn)
        self._taken_by: int | None = None
        self._broker: str | None = None  # the instance that serves the call
        self._key: str | None = None
        self._ids_return = False
        self._n_ended = 0
        self._n_killed, self._killed_at = 0, -math.inf
        self._check_at = -math.inf
        self._tries_all = _optuna.tries_all(study.sampler)
        self._points_at = -math.inf

    def run(self) -> OptimizeResult:
        """Run the study until it is done or told to stop.

        Raises:
            InvalidInputError: with nothing changed.
            BrokerError: the broker cannot be started or kept alive.
        """
        self._stops.expect_end_of_job(end_of_job(self._known))
        _optuna.with_retry(_optuna.claim_ledger, self._study, self._settings.ledger)
        with _optuna.retrying(self._study):
            return self._with_ledger()

    def _with_ledger(self) -> OptimizeResult:
        self._callbacks.pass_over()
        self._repeats.pass_over()
        url = _optuna.ledger_url(self._study)
        # A server has room for few connections: none is held while another one is waited for, nor
        # while the objective is imported.
        _optuna.disconnect(self._study)
        ledger = _optuna.with_retry(open_ledger, url)
        ledger.disconnect()
        try:
            with self._stops.heeds_signals():
                if self._is_imported():
                    with _optuna.optimize_loop(self._study):
                        live = partial(self._live_trials, ledger)
                        _optuna.fail_dead_trials(self._study, live)
                        self._serve(ledger)
                else:
                    self._taken_by = driver_of(_optuna.study_key(self._study))
            if self._callbacks.raised is not None:  # not in _serve, where a BrokerError is caught
                raise self._callbacks.raised
            return self._result(ledger, time.monotonic() - self._pool.began)
        except KeyError:  # of Optuna's storage, for whatever it cannot find
            self._refuse_deleted()
            raise
        finally:
            ledger.close()

    def _live_trials(self, ledger: Ledger) -> set[int]:
        """The numbers of the trials that are live in the ledger."""
        records = ledger.load_trials(_optuna.study_key(self._study))
        ledger.disconnect()
        return {record.number for record in records if record.state in LIVE_STATES}

    def _refuse_deleted(self) -> None:
        """End all workers if the study was deleted: its trials' ids may be another one's by now.

        Raises:
            StudyDeletedError: it was.
        """
        if _optuna.is_deleted(self._study, self._key):
            with contextlib.suppress(HermesError):  # they have ended with the fork server
                self._pool.kill_all()
            raise StudyDeletedError(
                f"Study {self._study.study_name} was deleted while it ran: make it anew, if that "
                "was not done, and run the same command again."
            )

    def _is_imported(self) -> bool:
        """Wait until the objective is imported; False if the call is to end before."""
        until, began = self._stops.at, self._pool.began
        try:
            in_time = self._pool.wait_until_ready(min(until, began + _IMPORT_NOTED_SECONDS))
            if not in_time and time.monotonic() < until:
                self._note("Importing the objective, with all that it imports.")
                in_time = self._pool.wait_until_ready(until)
        except KeyboardInterrupt:
            self._note("Interrupted during the import of the objective: nothing was changed.")
            if not self._stops.from_outside:
                raise
            self._stopped = True
            return False
        self._stops.nothing_begun = False
        self._import_seconds = time.monotonic() - began
        if not in_time:
            self._stopped = True
            time_of = "job" if self._stops.from_outside else "call"
            self._warn(
                f"The {time_of}'s time is over after {self._import_seconds:.1f} s, in which the "
                "objective was not even imported."
            )
        return in_time

    # -- the call ------------------------------------------------------------------------------

    def _serve(self, ledger: Ledger) -> None:
        spec = self._configure(ledger)
        failures = 0
        while True:
            begin = math.inf
            try:
                if not self._has_job():
                    return
                connecting = connect_or_start(
                    "driver",
                    self._settings.devices,
                    self._settings.power,
                    self._on_silence,
                    as_before=self._welcome,
                )
                with contextlib.closing(connecting) as connection:
                    begin = time.monotonic()
                    self._attend(connection, spec, ledger)
                return
            except StudyTakenError as error:
                if error.pid == os.getpid():
                    raise
                self._wait_for_driver(spec.key, error.pid)
                if self._stopped:
                    return
            except ServerKilledError as error:
                self._start_another_server(error, ledger)
            except BrokerConflictError:
                raise
            except BrokerSilentError as error:
                return self._give_up(str(error))
            except BrokerError as error:
                failures = 0 if time.monotonic() - begin > STEADY_SECONDS else failures + 1
                if failures == MAX_BROKERS:
                    raise BrokerError(
                        f"{error} That was the {MAX_BROKERS}th time in a row, so no other one is "
                        "started."
                    ) from error
                self._stops.note_signal()
                if self._is_over():
                    return self._give_up(f"{error} Not starting another one.")
                goes_on = "" if self._last is None else ": training goes on"
                self._warn(f"{error} Starting another one{goes_on}.")

    def _configure(self, ledger: Ledger) -> StudySpec:
        """Tell the worker pool what its workers are to do; the study as the broker knows it."""
        settings = self._settings
        study = _optuna.for_workers(self._study)
        seed = _optuna.study_seed(self._study, settings.seed, seed_of(self._study.sampler))
        spec = _optuna.study_spec(
            self._study,
            policy=settings.policy,
            slice_seconds=settings.slice_seconds,
            seed=seed,
            hang_seconds=settings.hang_seconds,
            sets_up=True,
        )
        self._key = spec.key
        self._ids_return = _optuna.ids_return(self._study)
        place = checkpoint_place(self._study, ledger, settings.checkpoint_dir, self._warn)
        self._root, url, problem = place
        forget_warnings(self._root)
        if problem is not None:
            self._warn(f"{problem} Until then suspended trials wait in memory only.")
        self._job = WorkerInput(
            study=study,
            spec=spec,
            checkpoint_root=self._root,
            checkpoint_url=url,
            unwritable=problem is not None,
            inherits=_optuna.is_inheritable(self._study),
            ids_return=self._ids_return,
        )
        self._losses = Losses(self._study, self._root, self._pool.status_of, self._warn)
        return spec

    def _has_job(self) -> bool:
        """Give a new fork server its job; False if the call is over before it can take it."""
        if self._pool.has_job:
            return True
        while not self._pool.wait_until_ready(time.monotonic() + TICK_SECONDS):
            self._stops.note_signal()
            if self._is_over():
                self._stopped = True
                return False
        self._pool.configure(self._job)
        return True

    def _start_another_server(self, error: ServerKilledError, ledger: Ledger) -> None:
        """Start another fork server, and say so, unless the call is over or many were killed."""
        self._stops.note_signal()
        now = time.monotonic()
        self._n_killed = self._n_killed + 1 if now - self._killed_at < _HOUR_SECONDS else 1
        self._killed_at = now
        ends = self._is_over() or self._stopped or (self._last is not None and self._last.draining)
        ledger.close()  # for a fork; its next use opens it
        if self._n_killed > MOST_KILLED or ends or not self._pool.restart(self._study):
            raise error
        if self._last is not None:  # what leases held counts as spent: they have ended
            self._last = structs.replace(self._last, held_seconds=0.0)
        self._warn(f"{error.ended}. Starting another one: trials go on from their checkpoints.")

    def _wait_for_driver(self, key: str, pid: int) -> None:
        """Wait until another process that optimizes the study has ended, or this call is over."""
        self._note(TAKEN.format(pid=pid))
        self._taken_by = wait_for_driver(key, pid, self._is_over)
        self._stopped = self._taken_by is not None
        self._callbacks.pass_over()

    def _give_up(self, text: str) -> None:
        """End without a broker, which nobody could tell the trials: they return to checkpoints."""
        self._warn(text)
        self._pool.kill_all()
        self._stopped = True

    def _on_silence(self, seconds: float) -> None:
        """Say that the broker is silent, and whether this call is to end; raise once it is late."""
        self._stops.note_signal()
        self._stops.is_over(self._import_seconds)
        now = time.monotonic()
        if seconds > SILENT_SECONDS and self._silence_noted_at < now - seconds:
            self._silence_noted_at = now
            self._warn(SILENT)
        if now > self._stops.late_at:
            raise BrokerSilentError(_UNANSWERED.format(seconds))

    def _is_over(self) -> bool:
        """True if the time is over, or the user or a callback has asked to stop."""
        return self._stops.is_over(self._import_seconds) or _optuna.asked_to_stop(self._study)

    def _attend(self, connection: Connection, spec: StudySpec, ledger: Ledger) -> None:
        self._pool.starts.forget()  # the broker's end may have been theirs
        first = self._welcome is None
        self._welcome, self._devices = connection.welcome, connection.welcome.device_ids
        if first and (note := powers_nothing(self._settings.policy, self._welcome.power)):
            self._warn(note)
        if first and (few := few_files(self._devices, self._settings.n_trials)):
            self._warn(few)
        self._note_other_devices(connection.welcome)
        self._broker = connection.welcome.instance
        max_alive = most_alive(self._devices)
        for described in descriptions(self._study, spec.key):
            connection.send(described)

        def open_(*, again: bool) -> OpenStudy:
            self._refuse_deleted()
            return _optuna.with_retry(
                open_study_message,
                self._study,
                spec,
                ledger,
                connection.welcome.instance,
                n_trials=self._settings.n_trials,
                max_alive=max_alive,
                seconds_left=self._stops.seconds_left(),
                device_seconds=self._settings.device_seconds,
                last=self._last,
                again=again,
            )

        connection.send(open_(again=False))
        # A server has room for few connections, and many hosts may have a driver each.
        _optuna.disconnect(self._study)
        ledger.disconnect()
        self._watch(WatchedStudy(connection, spec.key), max_alive, partial(open_, again=True))

    def _note_other_devices(self, welcome: Welcome) -> None:
        if self._settings.devices == "auto" and with_other_devices(welcome):
            devices = welcome.devices
            if devices == "auto":  # of another ``CUDA_VISIBLE_DEVICES``
                devices = ", ".join(welcome.device_ids)
            self._note(
                f"Trains on {devices}: the broker (process {welcome.pid}) was started with "
                "these devices, and another process uses it. For others wait until that is done, "
                f"or set another {RUNTIME_DIR_VARIABLE}."
            )

    def _watch(self, watched: WatchedStudy, max_alive: int, anew: Callable[[], OpenStudy]) -> None:
        """Keep the pool at size until the study is finished or suspended, or takes too long to be.

        A trial whose worker died before the broker knew of the trial is found at the end: the
        study is then opened ``anew``.
        """
        pool, starts = self._pool, self._pool.starts
        drained_at, pause, told = math.inf, 0.0, max_alive
        most = suspending_seconds(self._stops.grace_seconds)
        while True:
            mine = self._wait_for_change(watched, pause)
            pause = TICK_SECONDS
            self._check_deleted(mine)
            self._callbacks.update(mine.counts.ended)
            self._repeats.update(mine)
            if self._stops.signal and isinstance(self._callbacks.raised, KeyboardInterrupt):
                raise self._callbacks.raised  # the second Ctrl-C
            if given_up := self._losses.update(mine.key, mine.lost):
                watched.tell(*given_up)
            self._losses.say_first_failure(mine)
            self._losses.say_alike(mine)
            now = time.monotonic()
            if mine.draining:
                drained_at = min(drained_at, now)
            late = now - drained_at > most
            if mine.finished and not mine.draining and (again := anew()).adopted:
                watched.tell(again)
                told = max_alive
                continue
            if mine.finished or late:
                break
            if mine.draining:
                continue
            problem = starts.check(now, self._warn)
            self._problem = self._problem or problem
            # What is told is in the next status: it is not told again, nor said to the user again.
            if STOP in pool.said or self._should_stop(mine):
                watched.tell(Drain(study=mine.key))
                continue
            if mine.may_open and (NOTHING_LEFT in pool.said or self._is_exhausted(mine)):
                watched.tell(structs.replace(anew(), limit=0, adopted={}, ended={}))
                told = max_alive
            if (room := starts.room(max_alive, len(self._devices), now)) != told:
                told = room
                watched.tell(KeepWorkers(study=mine.key, max_alive=room))
            if now >= starts.again_at:
                pool.scale_to(min(max(room, len(self._devices)), self._wanted(mine)))
        self._problem = mine.problem or self._problem
        self._stopped = mine.draining
        if self._stopped:
            self._dismiss(watched, drained_at + most)

    def _wait_for_change(self, watched: WatchedStudy, pause: float) -> StudyStatus:
        """Wait for news of the broker or of the workers; show the study's status as progress."""
        if self._pool.wait(pause, watched):
            watched.receive_change()
        for text in self._pool.new_notes():
            self._warn(text)
        mine, devices = watched.status()
        self._last = mine
        self._ended_by_outage |= bool(mine.problem) and mine.outage_seconds is not None
        self._progress.update(devices, mine)
        self._database_notices.update(mine.outage_seconds, mine.outage_reason)
        self._device_notices.update(devices, time.monotonic())
        return mine

    def _check_deleted(self, mine: StudyStatus) -> None:
        """Refuse a deleted study, every few seconds and when a worker has ended."""
        now, n_ended = time.monotonic(), self._pool.n_ended
        due = now >= self._check_at or n_ended > self._n_ended
        if self._ids_return and due and mine.outage_seconds is None:
            self._n_ended, self._check_at = n_ended, now + _DELETED_SECONDS
            if not _optuna.is_locked(self._study):  # else notes and signals would wait for it
                self._refuse_deleted()

    def _is_exhausted(self, mine: StudyStatus) -> bool:
        """True if trials have begun at all points that the sampler tries, seen now and then."""
        now = time.monotonic()
        due = self._tries_all and now >= self._points_at and mine.outage_seconds is None
        if not due:
            return False
        self._points_at = now + _POINTS_SECONDS
        return _optuna.left_to_propose(self._study) == 0

    def _dismiss(self, watched: WatchedStudy, until: float) -> None:
        """End every worker, and wait until the broker has recorded the state of its trial.

        Workers whose trial is on disk end by themselves, once what is left of their objective has
        been executed (``finally``) and dashboards are told; they are given until ``until``.
        """
        with contextlib.suppress(BrokerError):  # the ledger has the states without it
            if (now := time.monotonic()) < until:
                until = max(until, now + LEAVE_SECONDS)
                parked = attrgetter("counts.parked")
                left = self._wait_for_workers(watched, parked, now + LEAVE_SECONDS)
                if left:
                    trials = plural(left, "suspended trial")
                    self._note(f"Waiting for {trials} to leave the objective (`finally:`).")
                    if left := self._wait_for_workers(watched, parked, until):
                        self._warn(_CUT_SHORT.format(plural(left, "suspended trial")))
            self._pool.kill_all()
            self._wait_for_workers(watched, lambda mine: 0, time.monotonic() + LEAVE_SECONDS)
        self._pool.kill_all()  # skipped above if the broker failed first

    def _wait_for_workers(
        self, watched: WatchedStudy, left: Callable[[StudyStatus], int], until: float
    ) -> int:
        """Wait for the broker to count at most ``left`` workers; by how many it counts more."""
        watched.tell()
        mine = self._wait_for_change(watched, 0.0)
        while mine.workers.alive > left(mine) and time.monotonic() < until:
            mine = self._wait_for_change(watched, TICK_SECONDS)
        return max(0, mine.workers.alive - left(mine))

    def _wanted(self, mine: StudyStatus) -> int:
        """The number of workers to keep: those at work, and a reserve for the next leases."""
        busy = mine.workers.alive - mine.workers.idle
        reserve = READY_PER_DEVICE * len(self._devices)
        if mine.unstarted is not None:
            reserve = min(reserve, mine.unstarted + mine.counts.pending + mine.counts.stored)
        return busy + max(reserve, len(self._devices))

    def _should_stop(self, mine: StudyStatus) -> bool:
        if self._problem is not None or self._callbacks.raised is not None:
            return True
        budget = self._settings.device_seconds
        spent = budget is not None and mine.spent_seconds >= budget
        if mine.failures.hopeless and best_of(self._study) is None:
            return True
        self._stops.note_signal()
        if mine.all_held:
            self._warn(_HELD.format(plural(len(mine.held), "trial")))
            return True
        return spent or self._is_over()

    def _result(self, ledger: Ledger, elapsed: float) -> OptimizeResult:
        last = self._last
        outage = last is not None and last.outage_seconds is not None  # no trial can be read
        if outage or self._ended_by_outage:
            reason = "" if last is None else last.outage_reason
            raise DatabaseOutageError(self._problem or _AWAY.format(outage_phrase(reason)))
        self._refuse_deleted()
        trials = _optuna.with_retry(
            trial_results,
            self._study,
            ledger,
            self._root,
            taken=self._taken_by is not None,
            broker=self._broker,
        )
        failures = None if last is None else last.failures
        policy = self._settings.policy
        if last is not None and last.policy != absolute_policy_name(policy):
            policy = last.policy  # another one was chosen since
        return OptimizeResult(
            study=self._study.study_name,
            policy=policy,
            devices=self._devices,
            elapsed_seconds=elapsed,
            device_seconds=sum(trial.device_seconds for trial in trials),
            spent_seconds=0.0 if last is None else last.spent_seconds,
            switches=0 if last is None else last.switches,
            overhead_fraction=0.0 if last is None else last.overhead_fraction,
            overhead_seconds={} if last is None else last.overhead_seconds,
            best=best_of(self._study),
            trials=trials,
            stopped=self._stopped,
            interrupted=self._stops.signal == signal.SIGINT,
            suspended=self._stopped and self._stops.from_outside,
            taken_by=self._taken_by,
            problem=self._problem,
            problem_may_pass=last is not None and last.problem_may_pass,
            failure=None if self._taken_by is not None else failure_of(trials, failures),
        )
