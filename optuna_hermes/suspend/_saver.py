"""Checkpoints that are written while the run goes on: a disk takes longer than a copy."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from optuna_hermes.suspend._base import Session
from optuna_hermes.suspend._disk import write
from optuna_hermes.suspend._tree import frozen


class Saver:
    """Writes one checkpoint after another on a thread, and tells the session of each.

    Args:
        session: has a folder for checkpoints.
        run: whose they are, as a message names it.
    """

    def __init__(self, session: Session, run: str) -> None:
        self._session = session
        self._run = run
        self._saving: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something to ``finish``."""
        return self._saving is not None

    def begin(self, tree: dict[str, Any], *, units: int) -> None:
        """Copy a state and begin to write it; a checkpoint that is being written comes first.

        Raises:
            CheckpointError: the one before could not be written.
        """
        self.finish(wait=True)
        thread = ThreadPoolExecutor(1, "hermes-save")
        self._saving = thread.submit(self._save, frozen(tree), units)
        thread.shutdown(wait=False)

    def finish(self, *, wait: bool) -> None:
        """See whether the checkpoint is safe.

        Args:
            wait: until it is.

        Raises:
            CheckpointError: it could not be written.
        """
        saving = self._saving
        if saving is not None and (wait or saving.done()):
            self._saving = None
            saving.result()

    def _save(self, tree: dict[str, Any], units: int) -> None:
        session = self._session
        assert session.checkpoint_dir is not None
        known = session.checkpoints
        state = write(session.checkpoint_dir, tree, run=self._run, units=units, known=known)
        session.saved(state)
