"""Reasons to suspend a whole study: a signal, the end of the call's time, the end of its job."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from optuna_hermes._job_environment import JobEnvironment
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view.formats import plural
from optuna_hermes.workers._signals import LEFT_TO_DRIVER

LEAVE_SECONDS = 5.0
"""Seconds for a worker to end and for the broker to notice that."""

_SAME_SECONDS = 0.3
"""Two SIGINT within this time are one Ctrl-C, sent by the terminal and by a parent program."""

_CTRL_C = "Suspending every live trial; press Ctrl-C again to end at once."


def suspending_seconds(grace_seconds: float) -> float:
    """Time in which all trials are to be suspended; the rest of the grace period is to leave."""
    return grace_seconds - min(LEAVE_SECONDS, grace_seconds / 3)


class Stops:
    """The reasons for which a call of ``optimize`` suspends its study before it is done.

    Args:
        began: when the call began, on the monotonic clock.
        timeout: seconds from then on after which all trials are suspended; None for no bound.
        grace_seconds: time from a signal to the end of all processes.
    """

    def __init__(
        self,
        *,
        began: float,
        timeout: float | None,
        known: JobEnvironment,
        grace_seconds: float,
        note: Callable[[str], None],
    ) -> None:
        self.signal: int | None = None
        """The first signal that asked for an end, None if there was none."""
        self.nothing_begun = True
        """True while a signal may end the call at any point."""
        self.grace_seconds = grace_seconds
        self._known = known
        self._note = note
        self._began = began
        self._call_ends = math.inf if timeout is None else began + timeout
        self._job_ends = math.inf
        self._signal_at = -math.inf
        self._asked_at = math.inf
        self._signal_noted = self._end_noted = False

    def expect_end_of_job(self, ends_at: float | None) -> None:
        """Suspend all a grace period before the end of the job, and say so.

        Args:
            ends_at: in seconds since 1970, None if it is not known.

        Raises:
            InvalidInputError: the whole job is not longer than its grace period. Begun again it
                would train nothing again.
        """
        if self._known.job is None:
            return
        words = f"Job {self._known.job} of SLURM"
        if self._known.node:
            words += f" on {self._known.node}"
        if self._known.restarts:
            words += f", begun again {plural(self._known.restarts, 'time')}"
        if ends_at is not None:
            began_at = self._known.began_at
            if began_at is not None and ends_at - began_at <= self.grace_seconds:
                raise InvalidInputError(
                    f"A job must last longer than its grace period of {self.grace_seconds:g} s, "
                    f"but job {self._known.job} lasts {ends_at - began_at:.0f} s: give a longer "
                    "--time, of which SLURM takes 2:00 for two minutes, or a shorter --grace."
                )
            self._job_ends = time.monotonic() + ends_at - time.time()
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ends_at))
            self._note(
                f"{words}: all is suspended {self.grace_seconds:g} s before its end, {clock}."
            )
        else:
            self._note(f"{words}: its end is not known, so end the call with --timeout before it.")

    @property
    def at(self) -> float:
        """Time of the monotonic clock to suspend all at; infinite if no time is set."""
        return min(self._call_ends, self._job_ends - self.grace_seconds)

    @property
    def late_at(self) -> float:
        """Time of the monotonic clock at which trials that are not suspended by then are ended."""
        return min(self._asked_at, self.at) + suspending_seconds(self.grace_seconds)

    @property
    def from_outside(self) -> bool:
        """True if what has ended the call was neither its user's Ctrl-C nor its own bound."""
        return self.signal not in (None, signal.SIGINT) or self._job_is_over

    @property
    def _job_is_over(self) -> bool:
        return time.monotonic() >= self._job_ends - self.grace_seconds

    def seconds_left(self) -> float | None:
        """Seconds until then, None for no bound."""
        return None if self.at == math.inf else self.at - time.monotonic()

    def is_over(self, import_seconds: float) -> bool:
        """True if all is to be suspended now; the reason is noted once."""
        now = time.monotonic()
        if now < self.at:
            return self.signal is not None
        if not self._end_noted:
            self._end_noted = True
            if self._job_is_over:
                left = max(0.0, self._job_ends - now)
                text = f"Job {self._known.job} ends in {left:.0f} s."
            else:
                text = (
                    f"The time is over: {now - self._began:.1f} s, {import_seconds:.1f} s of it "
                    "until the objective was imported."
                )
            self._note(f"{text} Suspending every live trial.")
        return True

    def note_signal(self) -> None:
        """Tell the user once that a signal has come, and what is done."""
        if self.signal is None or self._signal_noted:
            return
        self._signal_noted = True
        if self.signal == signal.SIGINT:
            self._note(_CTRL_C)
            return
        within = suspending_seconds(self.grace_seconds)
        name = signal.Signals(self.signal).name
        self._note(f"{name}: suspending every live trial, within {within:g} s.")

    def interrupt(self, number: int) -> None:
        """Ask for every trial to be suspended; a second Ctrl-C ends the call at once.

        While nothing is begun, any signal does.

        Only SIGINT can do so, since other signals come twice by themselves: ``timeout`` sends
        SIGTERM to its child and to the group, a shell and a closed terminal both send SIGHUP.
        """
        now = time.monotonic()
        again = now - self._signal_at > _SAME_SECONDS
        if self.signal is not None and number == signal.SIGINT and again:
            raise KeyboardInterrupt
        self.signal = number if self.signal is None else self.signal
        self._signal_at, self._asked_at = now, min(self._asked_at, now)
        # Not twice: the second would interrupt what the first has left to be cleaned up.
        if self.nothing_begun and again:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def heeds_signals(self) -> Iterator[None]:
        """Call ``interrupt`` on signals, which would otherwise end the process at any point.

        SIGINT and SIGTERM are always handled: a shell makes its background jobs ignore SIGINT,
        lest they be killed, but to suspend loses nothing. Other signals are handled only where
        they have their default action: ``nohup`` ignores SIGHUP, and a script may have handlers
        of its own. Those of a program that embeds Python are kept, since Python cannot set them
        again.
        """
        # Python sets signal handlers only in the main thread.
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: FrameType | None) -> None:
            self.interrupt(number)

        ours = [number for number in LEFT_TO_DRIVER if _is_to_be_handled(number)]
        before = {number: signal.signal(number, handler) for number in ours}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)


def _is_to_be_handled(number: int) -> bool:
    handler = signal.getsignal(number)
    if number in (signal.SIGINT, signal.SIGTERM):
        return handler is not None
    return handler == signal.SIG_DFL
