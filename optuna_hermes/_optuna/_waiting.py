"""Waits of plain Optuna's trials for a device: notices, and detection of waits without an end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import optuna

from optuna_hermes._optuna._studies import identity
from optuna_hermes.broker import SessionEntry, StudyIdentity, broker_status, sessions
from optuna_hermes.errors import HermesError

if TYPE_CHECKING:
    import psutil

    from optuna_hermes.broker._protocol import HolderStatus

NOTICE_SECONDS = 5.0
"""Seconds of waiting after which the holders of the devices are logged."""

WARNING_SECONDS = 60.0
"""Seconds between further notices, which are warnings."""

SHARE_SECONDS = 2.0
"""Idle seconds of an outer trial after which a trial inside of it trains on its device."""

OLDER_SHARE_SECONDS = 60.0
"""The same where its thread is older than the outer trial: of a pool that is kept, or of no part.

In the first case nothing else would end the wait; in the second the studies take turns until then.
"""

_POLL_SECONDS = 0.5

_STALE_SECONDS = 10.0

# Share of a core below which a thread counts as idle: one that waits still wakes to look.
_IDLE_SHARE = 0.05

log = optuna.logging.get_logger("optuna.hermes")


class InsideError(Exception):
    """Raised if a trial is part of another one that has a device and waits for it."""


class Idleness:
    """Idle times of threads of this process, and of other processes."""

    def __init__(self) -> None:
        self._looks: dict[object, tuple[float, float, float]] = {}

    def seconds(self, who: object, cpu_seconds: float | None) -> float:
        """Seconds in which the processor time of a thread or process has hardly grown.

        They are 0 at its first look, and once it is gone: then ``cpu_seconds`` is None.
        """
        now = time.monotonic()
        since, at, had = self._looks.get(who, (now, now, math.inf))
        spent = math.inf if cpu_seconds is None else cpu_seconds
        stale = now - at > _STALE_SECONDS  # it may have worked in between
        if stale or not 0 <= spent - had <= _IDLE_SHARE * (now - at):
            since = now
        self._looks[who] = since, now, spent
        return now - since

    def of_threads(self, helds: list[SessionEntry]) -> dict[SessionEntry, float]:
        """Idle seconds of the threads of sessions; infinite for a thread that has ended."""
        spent = _thread_seconds() if helds else {}
        return {
            held: self.seconds(
                (held.thread.name, held.thread.native_id), spent.get(held.thread.native_id or 0)
            )
            if held.thread.is_alive()
            else math.inf
            for held in helds
        }


def _thread_seconds() -> dict[int, float]:
    """The processor time of each thread of this process."""
    import psutil  # here: few trials wait long enough

    with contextlib.suppress(psutil.Error):
        return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    return {}


class Wait:
    """Follows a trial that waits for a device; ``rest`` is called when a wait begins."""

    def __init__(
        self, study: optuna.Study, key: str, number: int, rest: Callable[[], None]
    ) -> None:
        self.is_first = True
        """True while it waits for its first lease."""
        self._study = identity(study)
        self._name = study.study_name
        self._key = key
        self._number = number
        self._rest = rest
        self._seconds = math.inf
        self._next_look = self._next_look_above = 0.0
        self._next_notice = NOTICE_SECONDS

    def __call__(self, seconds: float) -> None:
        """Check a wait that has lasted for so many seconds, and log a notice if one is due.

        Raises:
            InsideError: a trial that this one is part of has the device, and waits for it.
        """
        if seconds < self._seconds:  # another wait has begun
            self._next_notice = NOTICE_SECONDS
            self._rest()  # a trial that waits needs no database connection
        self._seconds = seconds
        if self.is_first and seconds >= self._next_look:
            self._next_look = seconds + _POLL_SECONDS
            if self._is_inside_of_thread() or self._is_inside_of_process(seconds):
                _notices.say_shared(self._name)
                raise InsideError
        if seconds >= self._next_notice:
            _notices.say(self._name, self._number, seconds)
            self._next_notice = seconds + WARNING_SECONDS

    def _is_inside_of_thread(self) -> bool:
        """True if an idle trial of another study has a device, and may wait for this thread."""
        me = threading.current_thread()
        others = [h for h in sessions.all() if h.study != self._study and h.session.holds]
        if any(_outer.get(held) == self._study for held in others):
            return True
        for held, seconds in _idleness.of_threads(others).items():
            if seconds >= (OLDER_SHARE_SECONDS if me in held.older else SHARE_SECONDS):
                _outer[held] = self._study
                return True
        return False

    def _is_inside_of_process(self, seconds: float) -> bool:
        """True if a trial of another study holds a device in an idle ancestor of this process."""
        if self._key in _inside:
            return True
        if seconds < self._next_look_above:
            return False
        # Seldom, and ever more so, since each look asks the broker.
        self._next_look_above = max(_POLL_SECONDS, 2 * seconds)
        above = {process.pid: process for process in _ancestors()}
        outer = [
            above[holder.pid]
            for _, holder in _holders()
            if holder.pid in above and holder.key != self._key
        ]
        waits = [_idleness.seconds(each.pid, _cpu_seconds(each)) for each in outer]
        if max(waits, default=0.0) < SHARE_SECONDS:
            return False
        _inside.add(self._key)
        return True


_idleness = Idleness()

# What was found once holds for a study's further trials, which then do not wait for it again: keys
# of studies that run inside of an ancestor of this process, and sessions with the study inside.
_inside: set[str] = set()
_outer: weakref.WeakKeyDictionary[SessionEntry, StudyIdentity] = weakref.WeakKeyDictionary()


def _ancestors() -> list[psutil.Process]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process().parents()
    return []


def _cpu_seconds(process: psutil.Process) -> float | None:
    import psutil

    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return None


def _holders() -> Iterator[tuple[str, HolderStatus]]:
    """The devices of this host that are held, with their holders."""
    with contextlib.suppress(HermesError):
        status = broker_status(trials=False)
        for device in () if status is None else status.devices:
            if device.holder is not None:
                yield device.id, device.holder


class _Notices:
    """Rate-limited log of waiting trials, shared by all waits of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = -math.inf
        self._shared = False

    def say_shared(self, study: str) -> None:
        """Warn once of a study that trains on the device of another one's trial."""
        with self._lock:
            if self._shared:
                return
            self._shared = True
        log.warning(
            "Study %r trains on the device of another study's trial, which is idle and taken for "
            "the one that it is a part of. If it is not, start each study by a command of its own.",
            study,
        )

    def say(self, study: str, number: int, seconds: float) -> None:
        """Log why a trial waits, unless another notice was logged within ``NOTICE_SECONDS``."""
        warns = seconds >= WARNING_SECONDS
        with self._lock:
            now = time.monotonic()
            if now - self._last < NOTICE_SECONDS:
                return
            self._last = now
        has = ", ".join(
            f"{device} has trial {holder.trial} of study {holder.study!r} (process {holder.pid})"
            for device, holder in _holders()
        )
        words = (
            f"Trial {number} of study {study!r} has waited {seconds:.0f} s for a device: "
            f"{has or 'none is free'}. `optuna-hermes status` shows more."
        )
        (log.warning if warns else log.info)(words)


_notices = _Notices()
