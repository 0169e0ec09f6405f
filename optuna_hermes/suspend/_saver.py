"""Checkpoints that are written while the run goes on: a disk takes longer than a copy."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from optuna_hermes.errors import UnwritableError
from optuna_hermes.suspend._base import Session
from optuna_hermes.suspend._disk import write
from optuna_hermes.suspend._tree import frozen

RETRY_SECONDS = 1.0
"""How long a checkpoint waits, at least, before it is tried again whether it can be written."""

_SHARE = 10
"""It waits this many times what trying takes: a disk has more to do than to be found full."""

log = logging.getLogger(__name__)


class Saver:
    """Writes one checkpoint after another on a thread, and tells the session of each.

    Where one cannot be written (no room, no permission), the run goes on and its last state waits
    in memory: until it can be, or until there is a later one.

    Args:
        session: has a folder for checkpoints.
        run: whose they are, as a message names it.
    """

    def __init__(self, session: Session, run: str) -> None:
        self.behind = False
        """Whether the last state was given up before it could be written."""
        self._session = session
        self._run = run
        self._saving: Future[None] | None = None
        self._give_up = threading.Event()
        self._unwritable = False

    @property
    def busy(self) -> bool:
        """Whether there is something to ``finish``."""
        return self._saving is not None

    def begin(self, tree: dict[str, Any], *, units: int) -> None:
        """Copy a state and begin to write it; a checkpoint that is being written comes first.

        Raises:
            CheckpointError: the one before holds what cannot be stored.
        """
        self.finish(wait=True)
        self.behind, self._give_up = False, threading.Event()
        thread = ThreadPoolExecutor(1, "hermes-save")
        self._saving = thread.submit(self._save, frozen(tree), units, self._give_up)
        thread.shutdown(wait=False)

    def finish(self, *, wait: bool) -> None:
        """See whether the checkpoint is safe.

        Args:
            wait: until it is, or until it has turned out that it cannot be written now.

        Raises:
            CheckpointError: it holds what cannot be stored.
        """
        saving = self._saving
        if wait:
            self._give_up.set()
        if saving is not None and (wait or saving.done()):
            self._saving = None
            saving.result()

    def _save(self, tree: dict[str, Any], units: int, give_up: threading.Event) -> None:
        session = self._session
        assert session.checkpoint_dir is not None
        while True:
            begin, known = time.monotonic(), session.checkpoints
            try:
                state = write(session.checkpoint_dir, tree, run=self._run, units=units, known=known)
            except UnwritableError as error:
                self._say(error)
                took = time.monotonic() - begin
                if give_up.wait(max(RETRY_SECONDS, _SHARE * took)):
                    self.behind = True
                    return
            else:
                self._unwritable = False
                session.saved(state)
                return

    def _say(self, error: UnwritableError) -> None:
        """Once for each time that the file system takes nothing."""
        if not self._unwritable:
            self._unwritable = True
            log.warning("%s goes on without a new checkpoint. %s", self._run.capitalize(), error)
