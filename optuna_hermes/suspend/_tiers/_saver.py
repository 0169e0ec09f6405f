"""Checkpoints written while the trial goes on, and warnings about what they lack."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_hermes.errors import UnwritableError
from optuna_hermes.suspend._base import Session
from optuna_hermes.suspend._tiers._disk import call_into, write

if TYPE_CHECKING:
    from optuna_hermes.model import Checkpoint
    from optuna_hermes.suspend._tiers._copies import Copies, Copy

RETRY_SECONDS = 1.0
"""Least delay before writing a checkpoint is tried again."""

_SHARE = 10
"""The delay is at least this many times the duration of an attempt, to spare a full disk."""

_MARK = "warned-"
"""Prefix of the marker files, which lie beside the trials' folders."""

log = logging.getLogger(__name__)


class Saver:
    """Writes one checkpoint after another on a thread, and reports each to the session.

    While a checkpoint cannot be written (no room, no permission), the trial goes on and its last
    state waits in memory: until it can be written, or until there is a later one.

    Args:
        session: is told of each checkpoint.
        trial: its name in messages.
        before: called on the thread before each: what is to be safe first.
    """

    def __init__(
        self, session: Session, trial: str, before: Callable[[], None] = lambda: None
    ) -> None:
        self.gave_up = False
        """True if the last state was given up before it could be written."""
        self.last: Checkpoint | None = None
        """The checkpoint of the last state, None until it is written."""
        self._session = session
        self._name = trial
        self._before = before
        self._saving: Future[None] | None = None
        self._copied: tuple[Copy, int] | None = None
        self._give_up = threading.Event()
        self._unwritable = False
        self._copies: Copies | None = None
        self._blocked_seconds = 0.0

    @property
    def busy(self) -> bool:
        """True if a checkpoint is to be written, or its result was not yet seen by ``finish``."""
        return self._saving is not None or self._copied is not None

    def begin(self, tree: dict[str, Any], *, units: int) -> None:
        """Copy a state and begin to write it: see ``copy``."""
        self.copy(tree, units=units)
        self.start()

    def copy(self, tree: dict[str, Any], *, units: int, since: float | None = None) -> None:
        """Copy a state, after finishing the checkpoint before; ``start`` writes it.

        Args:
            since: when the training stopped for it, by ``time.monotonic``; None for now.

        Raises:
            CheckpointError: the checkpoint before holds something that cannot be stored.
        """
        began = time.monotonic() if since is None else since
        # Loaded on first use, as it needs torch.
        from optuna_hermes.suspend._tiers._copies import Copies

        copies = self._copies = self._copies or Copies()
        if not copies.of_device(tree):
            # A copy beside the one that is written would only take memory.
            self.finish(wait=True)
        copy = copies.copy(tree)
        try:
            self.finish(wait=True)
        except BaseException:
            copy.release()
            raise
        self.last, self.gave_up, self._give_up = None, False, threading.Event()
        self._blocked_seconds += time.monotonic() - began
        self._copied = copy, units

    def start(self) -> None:
        """Begin to write the state that was copied, if there is one.

        Not part of ``copy``: the thread takes time from whoever has to yield a device first.
        """
        if self._copied is None:
            return
        (copy, units), self._copied = self._copied, None
        # An executor, unlike in ``_disk``: the interpreter joins its thread at exit.
        thread = ThreadPoolExecutor(1, "hermes-save")
        work = partial(self._save, copy, units, self._give_up)
        try:
            self._saving = thread.submit(work)
        except RuntimeError:  # a limit of processes is reached, for this moment
            self._give_up.set()  # one attempt: else the trial would wait for room
            self._saving = Future()
            call_into(self._saving, work)
        thread.shutdown(wait=False)

    def free(self) -> None:
        """Give back host memory, that of a checkpoint which is being written once it is."""
        if self._copies is not None:
            self._copies.free()

    def finish(self, *, wait: bool) -> None:
        """Take the result of the checkpoint that is being written.

        Args:
            wait: until it is safe, or until an attempt to write it has failed.

        Raises:
            CheckpointError: it holds something that cannot be stored.
        """
        if wait:
            self.start()
            # Else this would wait for as long as the disk is full.
            self._give_up.set()
        saving = self._saving
        if saving is not None and (wait or saving.done()):
            self._saving = None
            saving.result()

    def _save(self, copy: Copy, units: int, give_up: threading.Event) -> None:
        try:
            self._write(copy.tree, units, give_up)
        finally:
            copy.release()

    def _write(self, tree: dict[str, Any], units: int, give_up: threading.Event) -> None:
        session = self._session
        assert session.checkpoint_dir is not None
        self._before()
        while True:
            begin, known = time.monotonic(), session.checkpoints
            try:
                state = write(
                    session.checkpoint_dir,
                    tree,
                    trial=self._name,
                    units=units,
                    known=known,
                    url=session.checkpoint_url,
                )
            except UnwritableError as error:
                self._warn(error)
                took = time.monotonic() - begin
                if give_up.wait(max(RETRY_SECONDS, _SHARE * took)):
                    self.gave_up = True
                    return
            else:
                self._unwritable = False
                blocked, self._blocked_seconds = self._blocked_seconds, 0.0
                session.saved(state, blocked_seconds=blocked)
                self.last = state
                return

    def _warn(self, error: UnwritableError) -> None:
        """Log a warning, once per period in which nothing can be written."""
        if not self._unwritable:
            self._unwritable = True
            log.warning("%s goes on without a new checkpoint. %s", self._name.capitalize(), error)


def warn_of_lost(trial: str, folder: Path | None, names: Iterable[str], way_out: str) -> None:
    """Log a warning that names values which no checkpoint holds, once per study.

    What that means is said with the first of them only.

    Args:
        folder: of the trial's checkpoints; those of the study's other trials are beside it.
    """
    found = [name for name in sorted(names) if folder is None or is_first(folder.parent, name)]
    if not found:
        return
    meaning = ", either."
    if folder is None or is_first(folder.parent, "meaning of lost"):
        meaning = (
            ": when the trial comes back from disk it is as in the beginning, which harms a "
            f"training only if it reads it. {way_out}"
        )
    log.warning(
        "%s changes %s while it trains, and no checkpoint holds that%s",
        trial.capitalize(),
        ", ".join(found),
        meaning,
    )


def warn_of_memory(trial: str, folder: Path, reason: str) -> None:
    """Log a warning that a trial can wait in memory only, once per study.

    Args:
        folder: of the trial's checkpoints; those of the study's other trials are beside it.
    """
    if is_first(folder.parent, "memory"):
        log.warning(
            "%s can only wait in memory: %s. While that is so, no checkpoint holds what it trains, "
            "which is lost when its process ends, also by Ctrl-C.",
            trial.capitalize(),
            reason,
        )


def warn_of_inexact(trial: str, folder: Path | None, reasons: Mapping[str, str]) -> None:
    """Log reasons why a trial differs once it comes back from disk, each once per study.

    Args:
        folder: of the trial's checkpoints; those of the study's other trials are beside it.
        reasons: by a name that tells them apart.
    """
    for name, reason in reasons.items():
        if folder is None or is_first(folder.parent, name):
            log.warning(
                "%s is not exact when it comes back from disk: %s", trial.capitalize(), reason
            )


def forget_warnings(folder: Path) -> None:
    """Remove the markers, so that the warnings are logged again."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_MARK}*"):
            path.unlink()


def is_first(folder: Path, name: str) -> bool:
    """True if a warning of this name has not been logged for a study, in any of its processes."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Exclusive creation: exactly one of the trials' processes succeeds, and logs.
        (folder / f"{_MARK}{digest}").open("x").close()
    except FileExistsError:
        return False
    except OSError:
        pass  # rather a second warning than none
    return True
