"""The cooperative loop of boosting libraries, which call back around each round.

A trial resumed in another process begins at round 0 again: the rounds that it has are replayed with
their recorded evaluations, without training them, so that other callbacks (early stopping, learning
rates, prints) regain their state.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from optuna_hermes.cooperative import CooperativeLoop
from optuna_hermes.errors import InvalidInputError, MonitorError
from optuna_hermes.suspend import Session
from optuna_hermes.suspend._saver import Saver

_SAVE_SECONDS = 1.0
"""Least time between two checkpoints: writing one takes longer than many rounds."""


class Rounds(CooperativeLoop):
    """The rounds of one trial.

    Args:
        trial: the ``optuna.Trial`` that trains.
        monitor: name of the value to report, ``DATA-METRIC``.
        report_interval: number of rounds in a unit.
        session: None for that of the trial, if it has one.

    Raises:
        InvalidInputError: the interval is not positive, or this is the trial's second callback.
        CheckpointError: the trial's checkpoints cannot be used.
    """

    maker: ClassVar[str] = "HermesCallback()"
    movable = False

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
        super().__init__(trial, {"booster": self._booster}, session)
        self._trained = self.n_batches  # rounds below this number are replayed

    @property
    def model(self) -> bytes | None:
        """The booster of the trial's earlier process, serialised; None for a new trial."""
        return self._booster.saved

    def begin_training(
        self, save: Callable[[], bytes], problem: str | None, end: int | None = None
    ) -> None:
        """Begin the training.

        Args:
            save: returns the booster, serialised.
            problem: the reason why the trial cannot be stored, None if it can.
            end: number of all rounds, None if unknown.

        Raises:
            InvalidInputError: it is called for the second time.
        """
        if self._used:
            raise InvalidInputError(
                f"A HermesCallback must be used in one training, but {self._name} uses it again: "
                "leave it out of the others."
            )
        self._used, self._booster.save, self._end = True, save, end
        self.begin(problem)

    def check_direction(self, name: str, higher_is_better: bool) -> None:
        """Refuse a monitored metric that the study would be optimised away from."""
        if name == self._monitor and self.maximizes() is (not higher_is_better):
            wanted = "maximize" if higher_is_better else "minimize"
            raise InvalidInputError(
                f"{name!r} is better {'higher' if higher_is_better else 'lower'}, but the study "
                f"does not {wanted}: create it with direction={wanted!r}, or monitor another value."
            )

    def recorded(self, number: int) -> Any:
        """The recorded evaluation of a round to replay, None if the round is to be trained."""
        return self._booster.history[number] if number < self._trained else None

    def begin_round(self, number: int) -> None:
        """Yield the device if asked to, before a round that is to be trained."""
        if number >= self._trained:
            self.switch_point()

    def end_round(self, evaluation: Any, values: dict[str, float]) -> None:
        """Record a trained round, and report if it ends a unit.

        Args:
            evaluation: the library's evaluation, in plain values.
            values: the evaluated values by name.

        Raises:
            MonitorError: the monitored one is not among them.
            TrialPruned: the study's pruner prunes the trial.
        """
        if self._monitor not in values:
            names = ", ".join(sorted(values)) or "none"
            raise MonitorError(
                f"HermesCallback(monitor={self._monitor!r}) needs a value of this name after each "
                f"round, but there are: {names}."
            )
        self._booster.history.append(evaluation)
        self.n_batches += 1
        self.value = float(values[self._monitor])
        if self.n_batches % self._interval == 0:
            self.report(self.value)
        if self.n_batches == self._end:
            self.leave()

    def units_left(self) -> int | None:
        return None if self._end is None else (self._end - self.n_batches) // self._interval

    def saves_now(self, saver: Saver) -> bool:
        now = time.monotonic()
        if saver.busy or now < self._next_save:
            return False
        self._next_save = now + _SAVE_SECONDS
        return True

    def position(self) -> dict[str, Any]:
        return {}

    def go_to(self, tree: dict[str, Any]) -> None:
        """Do nothing: the replayed rounds restore the position."""


class _Booster:
    """The state of a booster: its bytes, and the evaluation after each of its rounds."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.saved: bytes | None = None
        self.save: Callable[[], bytes] | None = None

    def state_dict(self) -> dict[str, Any]:
        assert self.save is not None
        return {"model": np.frombuffer(self.save(), np.uint8), "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.save is None:  # once training has begun the booster itself has this state
            self.saved, self.history = state["model"].tobytes(), list(state["history"])


watched: weakref.WeakKeyDictionary[Any, Rounds] = weakref.WeakKeyDictionary()
"""The rounds of each booster that is in training."""
