"""Notices of a driver while its study runs: of losses, devices, the database, finished trials."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial

from optuna_hermes import _optuna
from optuna_hermes.broker._protocol import (
    DeviceStatus,
    GiveUp,
    StudyStatus,
    TrialCounts,
    TrialLoss,
)
from optuna_hermes.ledger import FULL, is_full, outage_phrase
from optuna_hermes.view.formats import printable
from optuna_hermes.workers._result import one_line
from optuna_hermes.workers._words import described

STATUS_SECONDS = 2.0
"""Seconds to wait for the exit status of a process."""

NOTED_SECONDS = 3.0
"""Shortest duration of a problem that is shown."""

_FIRST_TRIALS = 3
_MANY_ALIKE = 10
_LAST_LINES = 5
_LAST_BYTES = 16384
_CRASH = "Fatal Python error"
_FAILED_OUTSIDE = "another process has set it to FAIL in Optuna"

Callback = Callable[[optuna.Study, FrozenTrial], None]


class Losses:
    """Reports lost processes to the user, and to Optuna the trials that are given up for them.

    ``folder`` has one folder for each trial; ``status_of`` gives the exit status of a process, None
    while it is unknown.
    """

    def __init__(
        self,
        study: optuna.Study,
        folder: Path,
        status_of: Callable[[int], int | None],
        note: Callable[[str], None],
    ) -> None:
        self._study = study
        self._folder = folder
        self._status_of = status_of
        self._note = note
        # A trial's count begins anew with each unit: the process tells its losses apart.
        self._seen: dict[tuple[int, int, int | None], float] = {}
        self._said: set[tuple[int, int, int | None]] = set()
        self._failed: set[int] = set()
        self._said_failure = self._said_alike = False

    def update(self, key: str, lost: Sequence[TrialLoss]) -> list[GiveUp]:
        """Report new losses; the messages to the broker of trials that have ended in Optuna now."""
        settled = (each for each in lost if self._is_settled(each))
        return [self._give_up(key, each) for each in settled if self._say(each)]

    def say_first_failure(self, mine: StudyStatus) -> None:
        """Note the reason of the first failure, once: it may be the same for all trials."""
        first = mine.failures.first
        if first is None or self._said_failure:
            return
        self._said_failure = True
        if first not in self._failed:  # else noted already
            error = one_line(mine.failures.error)
            why = f"{error}. Its output.log has the rest" if error else _FAILED_OUTSIDE
            self._note(f"Trial {first} has failed: {why}; others go on.")

    def say_alike(self, mine: StudyStatus) -> None:
        """Note once that trials fail alike, and few others succeed: they do not end the study."""
        failures, done = mine.failures, mine.counts.done
        if self._said_alike or failures.hopeless or not done < failures.alike >= _MANY_ALIKE:
            return
        self._said_alike = True
        self._note(
            f"The last {failures.alike} trials that failed did so alike, and {done} succeeded: "
            "look into the output.log of one."
        )

    def _is_settled(self, loss: TrialLoss) -> bool:
        """True if the exit status is known, or was waited for long enough."""
        if loss.pid is None or self._status_of(loss.pid) is not None:
            return True
        now = time.monotonic()
        since = self._seen.setdefault((loss.trial, loss.losses, loss.pid), now)
        return now - since > STATUS_SECONDS

    def _say(self, loss: TrialLoss) -> bool:
        """Note the loss of a process, once; True if its trial is given up."""
        this = loss.trial, loss.losses, loss.pid
        if loss.given_up or this in self._said:
            return loss.given_up
        self._said.add(this)
        # No checkpoint: it only calls should_prune(), say.
        how = "goes on in another, from its checkpoint" if loss.stored else "begins anew in another"
        self._note(
            f"Trial {loss.trial} has lost its process ({self._how(loss)}), {loss.losses} of at "
            f"most {loss.most_losses} times without a new unit; it {how}."
        )
        return False

    def _give_up(self, key: str, loss: TrialLoss) -> GiveUp:
        """Set a trial to FAIL in Optuna, unless its last process has set its end."""
        number, id_ = loss.trial, loss.trial_id
        reason = (
            f"its process ended {loss.losses} times without a new unit, the last time by "
            f"{self._how(loss)}"
        )
        end = _optuna.end_of(self._study, id_)
        if end is None:
            _optuna.set_attributes(self._study, id_, {_optuna.STATE_ATTRIBUTE: "failed"})
            end = _optuna.fail_trial(self._study, id_)
            self._failed.add(number)
            self._note(_last_words(number, reason, self._folder / _optuna.trial_folder(number)))
        return GiveUp(study=key, number=number, reason=reason, state=end)

    def _how(self, loss: TrialLoss) -> str:
        """The cause of the end of the trial's last process, in words."""
        if loss.hung:
            return "SIGKILL, since it hung: see --hang-seconds"
        return described(None if loss.pid is None else self._status_of(loss.pid))


def _last_words(number: int, reason: str, folder: Path) -> str:
    """The message that a trial has failed, with the last lines of its output."""
    words, log = f"Trial {number} has failed: {reason}.", folder / "output.log"
    lines = _last_lines(log)
    return "\n  ".join([f"{words} The end of {log}:", *lines]) if lines else words


def _last_lines(log: Path) -> list[str]:
    """The last lines of a trial's output, control characters escaped."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [printable(line).strip()[:200] for line in text.splitlines()]
    lines = [line for line in lines if line]
    crashes = [place for place, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:  # the first lines of a crash's traceback name its place
        return lines[crashes[-1] :][:_LAST_LINES]
    return lines[-_LAST_LINES:]


class DeviceNotices:
    """Notes once why a device cannot be leased, and once that it can again."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._said: dict[str, str] = {}
        self._seen: dict[str, tuple[str, float]] = {}

    def update(self, devices: Iterable[DeviceStatus], now: float) -> None:
        """Note changes in the devices' problems; ``now`` is in seconds of any clock."""
        for device in devices:
            id_, problem = device.id, device.problem
            before, since = self._seen.get(id_, ("", now))
            if problem != before:
                since = now
            self._seen[id_] = problem, since
            if problem != self._said.get(id_, "") and now - since >= NOTED_SECONDS:
                self._said[id_] = problem
                self._note(f"{id_}: {problem or 'all is well again'}.")


class DatabaseNotices:
    """Notes once that the database is away, and once that it is back."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._in_outage = False

    def update(self, seconds: float | None, reason: str = "") -> None:
        """Note a change; ``seconds`` and ``reason`` of the outage are those of the status."""
        if seconds is not None and seconds > NOTED_SECONDS and not self._in_outage:
            self._in_outage = True
            full = f"{FULL} " if is_full(reason) else ""
            self._note(
                f"The database {outage_phrase(reason)}; training goes on, and what is reported is "
                f"written when it is back. {full}".rstrip()
            )
        elif seconds is None and self._in_outage:
            self._in_outage = False
            self._note("The database is back.")


class Repeats:
    """Notes once that the first trials of a call have the same parameters.

    Each has a copy of the sampler as it was when the call began. One that is neither Optuna's nor
    this package's may draw from a state outside of it, or go through a list.
    """

    def __init__(self, study: optuna.Study, note: Callable[[str], None]) -> None:
        self._study = study
        self._note = note
        parts = _optuna.nested(study.sampler)
        own = (type(each).__name__ for each in parts if not _optuna.keeps_nothing(each))
        self._own = next(own, None)
        self._n_existing = 0
        self._counts: TrialCounts | None = None

    def pass_over(self) -> None:
        """Leave out the trials that are there: each call has its own copies."""
        if self._own is not None:
            self._n_existing = len(self._study.get_trials(deepcopy=False))

    def update(self, mine: StudyStatus) -> None:
        """Look at the trials if one has begun or ended, until the first ones are known."""
        if self._own is None or mine.counts == self._counts or mine.outage_seconds is not None:
            return
        self._counts = mine.counts
        new = self._study.get_trials(deepcopy=False)[self._n_existing :]
        first = [*filter(_optuna.is_proposed, new)][:_FIRST_TRIALS]
        if len(first) < _FIRST_TRIALS:
            return
        kind, self._own = self._own, None
        if _optuna.repeated(first):
            self._note(
                f"Trials {', '.join(str(trial.number) for trial in first)} have the same "
                f"parameters. Each has a copy of {kind} as it was when this call began: let it "
                "draw by a numpy.random.RandomState in an attribute, or choose by trial.number, "
                "or run study.optimize() in place of optimize()."
            )


class Callbacks:
    """The callbacks of one call, and the trials that they were called with."""

    def __init__(self, study: optuna.Study, callbacks: Sequence[Callback]) -> None:
        self.raised: Exception | SystemExit | KeyboardInterrupt | None = None
        """The error or exit of a callback, which is raised once the study is suspended."""
        self._study = study
        self._callbacks = callbacks
        self._called: set[int] = set()
        self._last_ended = 0

    def pass_over(self) -> None:
        """Call none for trials that are finished already: other calls trained them."""
        self._called = {trial.number for trial in self._finished()}

    def update(self, n_ended: int) -> None:
        """Call them for new trials if the number of ended ones has changed, until one raises."""
        if not self._callbacks or n_ended == self._last_ended or self.raised is not None:
            return
        self._last_ended = n_ended
        new = [trial for trial in self._finished() if trial.number not in self._called]
        try:
            for trial in map(copy.deepcopy, new):
                self._called.add(trial.number)
                for callback in self._callbacks:
                    callback(self._study, trial)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.raised = error

    def _finished(self) -> list[FrozenTrial]:
        return [t for t in self._study.get_trials(deepcopy=False) if t.state.is_finished()]
