"""Rounds of boosting that take turns, in a library that keeps its loop to itself.

A library calls back before and after each round. A run that comes back in another process begins
at round 0 again: the rounds it has are told to the library as they were, without training them, so
that whatever else watches the rounds (early stopping, learning rates, prints) is where it was.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from optuna_hermes._turns import Turns, session_of
from optuna_hermes.errors import InvalidInputError, MonitorError
from optuna_hermes.suspend import Session
from optuna_hermes.suspend._named import Named
from optuna_hermes.suspend._saver import Saver

_SAVE_SECONDS = 1.0
"""Least time between two checkpoints: a disk takes longer for one than many rounds do."""


class Rounds(Turns):
    """The rounds of one trial.

    Args:
        trial: the ``optuna.Trial`` of this run.
        monitor: name of the value to report, ``DATA-METRIC``.
        report_interval: how many rounds are a unit.
        session: None for that of the trial, if it has one.

    Raises:
        InvalidInputError: the interval is not positive, or this is the trial's second callback.
        CheckpointError: the run's checkpoints cannot be used.
    """

    _maker: ClassVar[str] = "HermesCallback()"
    _moves = False

    def __init__(
        self, trial: Any, monitor: str, report_interval: int, session: Session | None
    ) -> None:
        if report_interval < 1:
            raise InvalidInputError(
                f"report_interval must be a number of rounds, 1 or more, but is {report_interval}."
            )
        self._monitor = monitor
        self._interval = report_interval
        self._booster = _Booster()
        self._trained = 0
        self._used = False
        self._end: int | None = None
        self._next_save = 0.0
        super().__init__(trial, Named({"booster": self._booster}), session or session_of(trial))
        self._trained = self._batches  # these are told again

    @property
    def model(self) -> bytes | None:
        """The booster of the process before, None if the run begins."""
        return self._booster.saved

    def begin(self, save: Callable[[], bytes], problem: str | None, end: int | None = None) -> None:
        """Training begins.

        Args:
            save: gives the booster as it is.
            problem: why the run cannot be stored, None if it can.
            end: how many rounds there will be, None if that is unknown.

        Raises:
            InvalidInputError: for the second time.
        """
        if self._used:
            raise InvalidInputError(
                f"A HermesCallback must be used in one training, but {self._run} uses it again: "
                "leave it out of the others."
            )
        self._used, self._booster.save, self._end = True, save, end
        if self._session is not None:
            self._watch(self._session, problem)

    def check_direction(self, name: str, higher_is_better: bool) -> None:
        """Refuse a monitored metric that the study would be optimised away from.

        Raises:
            InvalidInputError: the study minimises what is better higher, or the other way round.
        """
        if name == self._monitor and self._maximizes() is (not higher_is_better):
            wanted = "maximize" if higher_is_better else "minimize"
            raise InvalidInputError(
                f"{name!r} is better {'higher' if higher_is_better else 'lower'}, but the study "
                f"does not {wanted}: create it with direction={wanted!r}, or monitor another value."
            )

    def told(self, number: int) -> Any:
        """What the evaluation after a round has said, None if the round is to be trained."""
        return self._booster.history[number] if number < self._trained else None

    def begin_round(self, number: int) -> None:
        """Others may have the device before a round that is to be trained.

        Raises:
            Suspended: the run is on disk.
            CheckpointError: the run cannot be stored.
        """
        if number >= self._trained:
            self._pass_point()

    def end_round(self, said: Any, values: dict[str, float]) -> None:
        """A round is trained.

        Args:
            said: what the library's evaluation has said, in plain values.
            values: the same by name.

        Raises:
            MonitorError: the monitored one is not among them.
            TrialPruned: the study's pruner says so.
        """
        if self._monitor not in values:
            names = ", ".join(sorted(values)) or "none"
            raise MonitorError(
                f"HermesCallback(monitor={self._monitor!r}) needs a value of this name after each "
                f"round, but there are: {names}."
            )
        self._booster.history.append(said)
        self._batches += 1
        self.value = float(values[self._monitor])
        if self._batches % self._interval == 0:
            self.report(self.value)
        if self._batches == self._end:
            self._leave()

    def _units_left(self) -> int | None:
        return None if self._end is None else (self._end - self._batches) // self._interval

    def _saves(self, saver: Saver) -> bool:
        now = time.monotonic()
        if saver.busy or now < self._next_save:
            return False
        self._next_save = now + _SAVE_SECONDS
        return True

    def _where(self) -> dict[str, Any]:
        return {}

    def _be_at(self, tree: dict[str, Any]) -> None:
        """The rounds that are told again say it."""


class _Booster:
    """What is kept of a booster: its bytes, and what was said after each of its rounds."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.saved: bytes | None = None
        self.save: Callable[[], bytes] | None = None

    def state_dict(self) -> dict[str, Any]:
        assert self.save is not None
        return {"model": np.frombuffer(self.save(), np.uint8), "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.save is None:  # else it has them since training began
            self.saved, self.history = state["model"].tobytes(), list(state["history"])


watched: weakref.WeakKeyDictionary[Any, Rounds] = weakref.WeakKeyDictionary()
"""The rounds of each booster that is in training."""
