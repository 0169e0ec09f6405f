"""The driver, the process that calls ``optimize``: keeps workers alive until the study is done."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import optuna
from msgspec import structs
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes._surroundings import end_of_job, host_name, surroundings
from optuna_hermes.broker import (
    Connection,
    StudySpec,
    WatchedStudy,
    connect_or_start,
    with_other_devices,
)
from optuna_hermes.broker._client._connection import SILENT, SILENT_SECONDS
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.broker._imports import anywhere
from optuna_hermes.broker._privacy import private_folder
from optuna_hermes.broker._protocol import (
    Counted,
    Drain,
    FailureSummary,
    KeepWorkers,
    OpenStudy,
    StudyStatus,
    Welcome,
)
from optuna_hermes.errors import (
    BrokerConflictError,
    BrokerError,
    BrokerSilentError,
    DatabaseAwayError,
    HermesError,
    StudyDeletedError,
    StudyTakenError,
)
from optuna_hermes.ledger import FULL, Ledger, how_away, is_full, open_ledger
from optuna_hermes.sampler import seed_of
from optuna_hermes.suspend import _remote
from optuna_hermes.suspend._disk import why_unwritable
from optuna_hermes.suspend._saver import forget_warnings
from optuna_hermes.view.formats import plural
from optuna_hermes.view.progress import ProgressDisplay
from optuna_hermes.workers._notices import NOTED_SECONDS, DeviceNews, Losses
from optuna_hermes.workers._opening import descriptions, most_alive, opening
from optuna_hermes.workers._result import (
    OptimizeResult,
    best_of,
    failure_of,
    one_line,
    trial_results,
)
from optuna_hermes.workers._settings import OptimizeSettings
from optuna_hermes.workers._stops import LEAVE_SECONDS, Stops, suspending_seconds
from optuna_hermes.workers._taken import TAKEN, driver_of, wait_for_driver
from optuna_hermes.workers._words import NOTHING_LEFT, STOP, Starts
from optuna_hermes.workers._worker import WorkerInput
from optuna_hermes.workers._worker_pool import WorkerPool

READY_PER_DEVICE = 2
"""Workers kept ready for each device: one takes it, another is there before the next is forked."""

MAX_BROKERS = 10
"""Brokers in a row that may end within ``STEADY_SECONDS`` before the call gives up."""

STEADY_SECONDS = 1.0
"""Lifetime after which a broker's end no longer counts towards ``MAX_BROKERS``."""

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

MOST_FAILED_STARTS = 3
"""Workers in a row that may end before their trial begins; then the study is stopped."""

_IMPORT_NOTED_SECONDS = 5.0
"""Seconds after which the user is told what is waited for."""

_FAILED_START_SECONDS = 1.0
"""Pause before another one is forked: the cause of the failed start may be over by then."""

_MOST_REFUSED_STARTS = 60
"""Tries to start a worker while there is none: for about a minute."""

_REFUSED_SECONDS = 60.0
"""Time for which no more workers than the devices need are started once one was refused."""

_DELETED_SECONDS = 2.0
"""Interval at which a study is looked for in its file, in which another one may take its ids."""

TICK_SECONDS = 0.2
"""Longest time between two looks at the clock, at signals, and at ``study.stop()``."""

Callback = Callable[[optuna.Study, FrozenTrial], None]


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
        self._callbacks = callbacks
        self._pool = pool
        self._problem: str | None = None
        self._ended_by_outage = False
        self._called_back: set[int] = set()
        self._raised: Exception | SystemExit | None = None
        """The error or exit of a callback, which is raised once the study is suspended."""
        self._last_done = 0
        self._began = pool.began
        self._import_seconds = 0.0
        self._stopped = False
        self._known = surroundings(os.environ)
        self._stops = Stops(
            began=self._began,
            timeout=settings.timeout,
            known=self._known,
            grace_seconds=settings.grace or self._known.grace_seconds,
            note=progress.note,
        )
        self._last: StudyStatus | None = None
        self._devices: tuple[str, ...] = ()
        self._away = False
        self._silence_noted_at = -math.inf
        self._root: Path | None = None
        self._news = DeviceNews(progress.note)
        self._failed_said = False
        self._taken_by: int | None = None
        self._failed_starts = 0
        self._refused_starts = 0
        self._refused_at = -math.inf
        self._start_again_at = -math.inf
        self._key: str | None = None
        self._looks = False
        self._n_ended = 0
        self._look_at = -math.inf

    def run(self) -> OptimizeResult:
        """Run the study until it is done or told to stop.

        Raises:
            InvalidInputError: with nothing changed.
            BrokerError: the broker cannot be started or kept alive.
        """
        self._stops.expect_end_of_job(end_of_job(self._known))
        _optuna.patiently(_optuna.claim_ledger, self._study, self._settings.ledger)
        with _optuna.patient(self._study):
            return self._with_ledger()

    def _with_ledger(self) -> OptimizeResult:
        self._take_as_called_back()
        url = _optuna.ledger_url(self._study)
        # A server has room for few connections: none is held while another one is waited for, nor
        # while the objective is imported.
        _optuna.disconnect(self._study)
        ledger = _optuna.patiently(open_ledger, url)
        ledger.disconnect()
        try:
            with self._stops.heeds_signals():
                if self._is_imported():
                    with _optuna.optimize_loop(self._study):
                        self._serve(self._pool, ledger)
                else:
                    self._taken_by = driver_of(_optuna.study_key(self._study))
            if self._raised is not None:  # not in _serve: a BrokerError would be its broker's end
                raise self._raised
            return self._result(ledger, time.monotonic() - self._began)
        except KeyError:  # of Optuna's storage, for whatever it cannot find
            self._refuse_deleted()
            raise
        finally:
            ledger.close()

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
        until = self._stops.at
        try:
            in_time = self._pool.wait_until_ready(min(until, self._began + _IMPORT_NOTED_SECONDS))
            if not in_time and time.monotonic() < until:
                self._progress.note("Importing the objective, with all that it imports.")
                in_time = self._pool.wait_until_ready(until)
        except KeyboardInterrupt:
            self._progress.note(
                "Interrupted during the import of the objective: nothing was changed."
            )
            if not self._stops.from_outside:
                raise
            self._stopped = True
            return False
        self._stops.nothing_begun = False
        self._import_seconds = time.monotonic() - self._began
        if not in_time:
            self._stopped = True
            time_of = "job" if self._stops.from_outside else "call"
            self._progress.note(
                f"The {time_of}'s time is over after {self._import_seconds:.1f} s, in which the "
                "objective was not even imported."
            )
        return in_time

    def _checkpoint_place(self, ledger: Ledger) -> tuple[Path, str | None, str | None]:
        """The folder of the study's checkpoints, its URL in a store, and why nothing is written."""
        chosen, url = self._settings.checkpoint_dir, None
        if chosen is None and ledger.shared:
            self._say_if_hosts_share_no_folder(ledger)
        if chosen is not None and _remote.is_url(chosen):
            url, chosen = _optuna.checkpoint_url(self._study, str(chosen)), None
        folder = None if chosen is None else Path(chosen).expanduser()
        root = _optuna.checkpoint_root(self._study, folder)
        problem = why_unwritable(root)
        if problem is not None and url is not None:  # as where a user has no home
            with contextlib.suppress(BrokerConflictError):
                root = _optuna.checkpoint_root(self._study, _folder_of_copies())
                problem = why_unwritable(root)
        if problem is None and url is not None:
            problem = _remote.why_unwritable(url)
        return root, url, problem

    def _say_if_hosts_share_no_folder(self, ledger: Ledger) -> None:
        rows = ledger.load_trials(_optuna.study_key(self._study))
        others = sorted({str(row.host) for row in rows if row.host} - {host_name()})
        if others:
            self._progress.note(
                f"Checkpoints lie in a folder of this host, and {others[0]} has trials of this "
                "study too: without one --checkpoint-dir for all hosts, a folder that they share "
                "or a URL, no host can go on with another one's trials."
            )

    # -- the call ------------------------------------------------------------------------------

    def _serve(self, pool: WorkerPool, ledger: Ledger) -> None:
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
        self._looks = _optuna.ids_return(self._study)
        root, url, problem = self._checkpoint_place(ledger)
        self._root = root
        forget_warnings(root)
        if problem is not None:
            self._progress.note(f"{problem} Until then suspended trials wait in memory only.")
        job = WorkerInput(
            study=study,
            spec=spec,
            seed=seed,
            checkpoint_root=root,
            checkpoint_url=url,
            unwritable=problem is not None,
            inherits=_optuna.is_inheritable(self._study),
            ids_return=self._looks,
        )
        pool.configure(job)
        self._losses = Losses(self._study, root, pool.status_of, self._progress.note)
        hasty = 0
        while True:
            begin = math.inf
            try:
                connecting = connect_or_start(
                    "driver", settings.devices, settings.power, self._look_while_silent
                )
                with contextlib.closing(connecting) as connection:
                    begin = time.monotonic()
                    self._attend(connection, pool, spec, ledger)
                return
            except StudyTakenError as error:
                if error.pid == os.getpid():
                    raise
                self._outlast(error.pid, spec.key)
                if self._stopped:
                    return
            except BrokerConflictError:
                raise
            except BrokerSilentError as error:
                self._progress.note(str(error))
                pool.kill_all()
                self._stopped = True
                return
            except BrokerError as error:
                hasty = 0 if time.monotonic() - begin > STEADY_SECONDS else hasty + 1
                if hasty == MAX_BROKERS:
                    raise BrokerError(
                        f"{error} That was the {MAX_BROKERS}th time in a row, so no other one is "
                        "started."
                    ) from error
                self._progress.note(f"{error} Starting another one: training goes on.")

    def _look_while_silent(self, seconds: float) -> None:
        """Say that the broker is silent, and whether this call is to end; raise once it is late."""
        self._stops.note_signal()
        self._stops.is_over(self._import_seconds)
        now = time.monotonic()
        if seconds > SILENT_SECONDS and self._silence_noted_at < now - seconds:
            self._silence_noted_at = now
            self._progress.note(SILENT)
        if now > self._stops.late_at:
            raise BrokerSilentError(_UNANSWERED.format(seconds))

    def _outlast(self, pid: int, key: str) -> None:
        """Wait until another driver has left the study, or until this call is to end."""
        self._progress.note(TAKEN.format(pid=pid))
        self._taken_by = wait_for_driver(key, pid, self._is_over)
        self._stopped = self._taken_by is not None
        self._take_as_called_back()

    def _is_over(self) -> bool:
        """True if the time is over, or the user or a callback has asked to stop."""
        over = self._stops.is_over(self._import_seconds)
        return over or _optuna.asked_to_stop(self._study)

    def _take_as_called_back(self) -> None:
        """Call no callbacks for trials that are finished already: other calls trained them."""
        finished = (t for t in self._study.get_trials(deepcopy=False) if t.state.is_finished())
        self._called_back = {trial.number for trial in finished}

    def _attend(
        self, connection: Connection, pool: WorkerPool, spec: StudySpec, ledger: Ledger
    ) -> None:
        pool.starts.forget()  # the broker's end may have been theirs
        self._devices = connection.welcome.device_ids
        self._say_if_devices_are_others(connection.welcome)
        max_alive = most_alive(self._devices)
        for described in descriptions(self._study, spec.key):
            connection.send(described)
        counted = _counted(self._last) if self._last is not None else None

        def open_(counted: Counted | None) -> OpenStudy:
            self._refuse_deleted()
            return _optuna.patiently(
                opening,
                self._study,
                self._in_force(spec),
                ledger,
                connection.welcome.instance,
                n_trials=self._settings.n_trials,
                max_alive=max_alive,
                seconds_left=self._stops.seconds_left(),
                device_seconds=self._settings.device_seconds,
                counted=counted,
            )

        connection.send(open_(counted))
        # A server has room for few connections, and many hosts may have a driver each.
        _optuna.disconnect(self._study)
        ledger.disconnect()
        watched = WatchedStudy(connection, spec.key)
        self._watch(watched, pool, spec.key, max_alive, partial(open_, Counted()))

    def _say_if_devices_are_others(self, welcome: Welcome) -> None:
        if self._settings.devices == "auto" and with_other_devices(welcome):
            self._progress.note(
                f"Trains on {welcome.devices}: the broker (process {welcome.pid}) was started with "
                "these devices, and another process uses it. For others wait until that is done, "
                f"or set another {RUNTIME_DIR_VARIABLE}."
            )

    def _in_force(self, spec: StudySpec) -> StudySpec:
        """The spec with the policy now in force: it may have been changed while the study ran."""
        mine = self._last
        if mine is None:
            return spec
        return structs.replace(spec, policy=mine.policy, folders=mine.policy_folders)

    def _watch(
        self,
        watched: WatchedStudy,
        pool: WorkerPool,
        key: str,
        max_alive: int,
        anew: Callable[[], OpenStudy],
    ) -> None:
        """Keep the pool at size until the study is finished or suspended, or takes too long to be.

        A trial whose worker died before the broker knew of the trial is found at the end: the
        study is then opened ``anew``.
        """
        drained_at, pause, told = math.inf, 0.0, max_alive
        most = suspending_seconds(self._stops.grace_seconds)
        while True:
            mine = self._wait_for_change(watched, pool, pause)
            pause = TICK_SECONDS
            self._look_at_study(mine, pool.n_ended)
            self._call_back(mine)
            if given_up := self._losses.look(key, mine.lost):
                watched.tell(*given_up)
            self._say_first_failure(mine.failures)
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
            self._look_at_starts(pool.starts, now)
            # What is told is in the next status: it is not told again, nor said to the user again.
            if STOP in pool.said or self._should_stop(mine):
                watched.tell(Drain(study=key))
                continue
            if NOTHING_LEFT in pool.said and mine.may_open:
                watched.tell(structs.replace(anew(), unstarted=0, limit=0, adopted={}, ended={}))
                told = max_alive
            if (room := self._room(pool.starts, max_alive, now)) != told:
                told = room
                watched.tell(KeepWorkers(study=key, max_alive=room))
            if now >= self._start_again_at:
                pool.scale_to(min(max(room, len(self._devices)), self._wanted(mine)))
        self._problem = mine.problem or self._problem
        self._stopped = mine.draining
        if self._stopped:
            self._dismiss(watched, pool, at_once=late)

    def _wait_for_change(
        self, watched: WatchedStudy, pool: WorkerPool, pause: float
    ) -> StudyStatus:
        """Wait for news of the broker or of the workers; show the study's status as progress."""
        if pool.wait(pause, watched):
            watched.receive_change()
        for text in pool.new_notes():
            self._progress.note(text)
        mine, devices = watched.status()
        self._last = mine
        self._ended_by_outage |= bool(mine.problem) and mine.away_seconds is not None
        self._progress.update(devices, mine)
        self._say_if_away(mine.away_seconds, mine.away_reason)
        self._news.look(devices, time.monotonic())
        return mine

    def _look_at_study(self, mine: StudyStatus, n_ended: int) -> None:
        """Refuse a deleted study, every few seconds and when a worker has ended."""
        now = time.monotonic()
        due = now >= self._look_at or n_ended > self._n_ended
        if self._looks and due and mine.away_seconds is None:
            self._n_ended, self._look_at = n_ended, now + _DELETED_SECONDS
            self._refuse_deleted()

    def _say_first_failure(self, failures: FailureSummary) -> None:
        """Note the reason of the first failure, once: it may be the same for all trials."""
        if failures.first is not None and not self._failed_said:
            self._failed_said = True
            if failures.first in self._losses.failed:
                return  # noted by Losses already
            self._progress.note(
                f"Trial {failures.first} has failed: {one_line(failures.error)}. Its "
                "output.log has the rest; others go on."
            )

    def _look_at_starts(self, starts: Starts, now: float) -> None:
        """Pause after a worker that ended before its trial began; stop the study after several."""
        failed, before = starts.failed_in_a_row, self._failed_starts
        self._failed_starts = failed
        if starts.n_refused > self._refused_starts:
            self._refused_starts = starts.n_refused
            self._refused_at, self._start_again_at = now, now + _FAILED_START_SECONDS
        if starts.refused_in_a_row >= _MOST_REFUSED_STARTS and self._problem is None:
            self._problem = (
                f"The system starts no worker ({one_line(starts.why_refused)}): raise the limit of "
                "processes or of memory, then run the same command again."
            )
        if failed > before:
            self._start_again_at = now + _FAILED_START_SECONDS
            if failed < MOST_FAILED_STARTS:
                self._progress.note(
                    f"A worker has ended before its trial began: {one_line(starts.reason)}. "
                    "Another one is started."
                )
        if failed >= MOST_FAILED_STARTS and self._problem is None:
            self._problem = (
                f"{failed} workers in a row have ended before their trials began, the last by "
                f"{one_line(starts.reason)}: look at the sampler, the study and what is printed "
                "above, then run the same command again."
            )

    def _room(self, starts: Starts, max_alive: int, now: float) -> int:
        """Workers that the system has room for: while it refuses more, parked trials go to disk.

        Where there are enough for all devices one fewer is kept, for what trials start themselves.
        """
        alive = starts.alive_when_refused
        if not alive or now - self._refused_at >= _REFUSED_SECONDS:
            return max_alive
        return max(min(alive, len(self._devices)), alive - 1)

    def _say_if_away(self, seconds: float | None, reason: str = "") -> None:
        """Note the beginning of a database outage once, and its end once."""
        if seconds is not None and seconds > NOTED_SECONDS and not self._away:
            self._away = True
            full = f"{FULL} " if is_full(reason) else ""
            self._progress.note(
                f"The database {how_away(reason)}; training goes on, and what is reported is "
                f"written when it is back. {full}".rstrip()
            )
        elif seconds is None and self._away:
            self._away = False
            self._progress.note("The database is back.")

    def _dismiss(self, watched: WatchedStudy, pool: WorkerPool, *, at_once: bool = False) -> None:
        """End every worker, and wait until the broker has recorded the state of its trial.

        Workers whose trial is on disk end by themselves, once they have noted it for dashboards.
        """
        with contextlib.suppress(BrokerError):  # the ledger has the states without it
            if not at_once:
                self._wait_for_workers(watched, pool, lambda mine: mine.counts.parked)
            pool.kill_all()
            self._wait_for_workers(watched, pool, lambda mine: 0)
        pool.kill_all()  # skipped above if the broker failed first

    def _wait_for_workers(
        self,
        watched: WatchedStudy,
        pool: WorkerPool,
        left: Callable[[StudyStatus], int],
    ) -> None:
        """Wait until the broker counts at most ``left`` workers, or for ``LEAVE_SECONDS``."""
        end = time.monotonic() + LEAVE_SECONDS
        watched.tell()
        mine = self._wait_for_change(watched, pool, 0.0)
        while mine.workers.alive > left(mine) and time.monotonic() < end:
            mine = self._wait_for_change(watched, pool, TICK_SECONDS)

    def _wanted(self, mine: StudyStatus) -> int:
        """The number of workers to keep: those at work, and a reserve for the next leases."""
        busy = mine.workers.alive - mine.workers.idle
        reserve = READY_PER_DEVICE * len(self._devices)
        if mine.unstarted is not None:
            reserve = min(reserve, mine.unstarted + mine.counts.pending + mine.counts.stored)
        return busy + max(reserve, len(self._devices))

    def _should_stop(self, mine: StudyStatus) -> bool:
        if self._problem is not None or self._raised is not None:
            return True
        budget = self._settings.device_seconds
        spent = budget is not None and mine.spent_seconds >= budget
        if mine.failures.hopeless and best_of(self._study) is None:
            return True
        self._stops.note_signal()
        if mine.all_held:
            self._progress.note(_HELD.format(plural(len(mine.held), "trial")))
            return True
        return spent or self._is_over()

    def _call_back(self, mine: StudyStatus) -> None:
        done = mine.counts.ended == self._last_done
        if not self._callbacks or done or self._raised is not None:
            return
        self._last_done = mine.counts.ended
        finished = (t for t in self._study.get_trials(deepcopy=False) if t.state.is_finished())
        new = [trial for trial in finished if trial.number not in self._called_back]
        try:
            for trial in map(copy.deepcopy, new):
                self._called_back.add(trial.number)
                for callback in self._callbacks:
                    callback(self._study, trial)
        except (Exception, SystemExit) as error:
            self._raised = error

    def _last_policy(self) -> str:
        asked, last = self._settings.policy, self._last
        return asked if last is None or last.policy == anywhere(asked) else last.policy

    def _result(self, ledger: Ledger, elapsed: float) -> OptimizeResult:
        last = self._last
        away = last is not None and last.away_seconds is not None  # no trial can be read
        if away or self._ended_by_outage:
            reason = "" if last is None else last.away_reason
            raise DatabaseAwayError(self._problem or _AWAY.format(how_away(reason)))
        self._refuse_deleted()
        trials = _optuna.patiently(
            trial_results, self._study, ledger, self._root, taken=self._taken_by is not None
        )
        failures = None if last is None else last.failures
        return OptimizeResult(
            study=self._study.study_name,
            policy=self._last_policy(),
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


def _folder_of_copies() -> Path:
    """A folder of this user for copies of what is in a store.

    Raises:
        BrokerConflictError: it cannot be used.
    """
    path = Path(tempfile.gettempdir()) / f"optuna-hermes-copies-{os.getuid()}"
    return private_folder(path, "set TMPDIR to a folder of your own")


def _counted(mine: StudyStatus) -> Counted:
    """The counters of the previous broker, without the time of leases that had not ended."""
    return Counted(
        switches=mine.switches,
        overhead_seconds=mine.overhead_seconds,
        spent_seconds=max(0.0, mine.spent_seconds - mine.held_seconds),
    )
