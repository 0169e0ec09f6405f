"""A session whose grants and revocations are written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from optuna_hermes.errors import Suspended
from optuna_hermes.suspend import StoredState


class FakeSession:
    """A ``suspend.Session`` that revokes its lease after given numbers of batches.

    Args:
        yields: by number of batches since this session began, where the run shall wait.
        checkpoint_dir: see ``Session``.
        checkpoints: see ``Session``.
        while_parked: called when the run waits in this process, as if others trained meanwhile.
        evicts: a run that waits in this process is put on disk after ``while_parked``.
    """

    def __init__(
        self,
        yields: Mapping[int, Literal["resident", "disk"]] | None = None,
        *,
        checkpoint_dir: Path | None = None,
        checkpoints: tuple[StoredState, ...] = (),
        while_parked: Callable[[], None] = lambda: None,
        evicts: bool = False,
    ) -> None:
        self.must_yield = False
        self.checkpoint_dir = checkpoint_dir
        self.checkpoints = checkpoints
        self.trainings: list[bool] = []
        self.reports: list[tuple[int, int, float]] = []
        self.beats: list[int] = []
        self.parks: list[Literal["resident", "disk"]] = []
        self.states: list[StoredState] = []
        self.script = dict(yields or {})
        self._while_parked = while_parked
        self._evicts = evicts
        self._batches = 0
        self._asked: Literal["resident", "disk"] = "resident"

    def tick(self) -> None:
        """Say that a batch is trained: the test's own loop calls it."""
        self._batches += 1
        asked = self.script.pop(self._batches, None)
        if asked is not None:
            self._asked = asked
            self.must_yield = True

    def again(self, yields: Mapping[int, Literal["resident", "disk"]] | None = None) -> FakeSession:
        """The session of the next process of this run, which finds what this one has stored."""
        return FakeSession(
            yields,
            checkpoint_dir=self.checkpoint_dir,
            checkpoints=self.checkpoints,
            while_parked=self._while_parked,
        )

    def training(self, *, stores: bool) -> None:
        """See ``suspend.Session``."""
        self.trainings.append(stores)

    def report(self, *, unit: int, step: int, value: float) -> None:
        """See ``suspend.Session``."""
        self.reports.append((unit, step, value))

    def beat(self, batches: int) -> None:
        """See ``suspend.Session``."""
        self.beats.append(batches)

    def saved(self, state: StoredState) -> None:
        """See ``suspend.Session``."""
        self.states.append(state)
        self.checkpoints = (state, *self.checkpoints[:1])

    def park(self, store: Callable[[], StoredState] | None) -> None:
        """See ``suspend.Session``.

        Raises:
            Suspended: the script says so.
        """
        self.must_yield = False
        if self._asked == "disk" and store is not None:
            self._leave(store)
        self.parks.append("resident")
        self._while_parked()
        if self._evicts and store is not None:
            self._leave(store)

    def _leave(self, store: Callable[[], StoredState]) -> None:
        state = store()
        self.saved(state)
        self.parks.append("disk")
        raise Suspended(f"The run is stored in {state.path}.")
