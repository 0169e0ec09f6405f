"""The cooperative loop of boosting libraries, which call back around each round.

A trial resumed in another process begins at round 0 of its first training again: the rounds that it
has are replayed with their recorded evaluations, without training them, so that other callbacks
(early stopping, learning rates, prints) regain their state.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from optuna_hermes.cooperative import CooperativeLoop
from optuna_hermes.errors import InvalidInputError, MonitorError
from optuna_hermes.suspend import Session
from optuna_hermes.suspend._tiers._saver import Saver

log = logging.getLogger(__name__)

Booster = TypeVar("Booster")

_SAVE_SECONDS = 1.0
"""Least time between two checkpoints: writing one takes longer than many rounds."""
_SAVE_SHARE = 20
"""It is at least this many times what the last one took: models get larger."""


class BoostingLoop(CooperativeLoop):
    """The rounds of one trial: of its training, or of several after each other, such as folds.

    Raises:
        CheckpointError: the trial's checkpoints cannot be used.
    """

    maker: ClassVar[str] = "HermesCallback()"
    movable = False

    def __init__(self, trial: Any, session: Session | None) -> None:
        self._trainings = _Trainings()
        self._problem: str | None = None
        self._monitor = ""
        self._interval = 1
        self._end: int | None = None
        self._warned_of_uncut = False
        super().__init__(trial, {"boosters": self._trainings}, session)

    def begin_training(
        self,
        monitor: str,
        report_interval: int,
        save: Callable[[], bytes],
        problem: str | None,
        end: int | None = None,
    ) -> Training:
        """Begin the next training.

        Args:
            save: returns the booster, serialised.
            problem: the reason why the trial cannot be stored, None if it can.
            end: number of all rounds, None if unknown.
        """
        self.end_training()
        self._monitor, self._interval, self._end = monitor, report_interval, end
        training = self._trainings.begin(save)
        # What cannot be stored of one training cannot be replayed before the next one.
        self._problem = self._problem or problem
        self.begin(self._problem)
        return training

    def end_training(self) -> None:
        """Keep the booster of a training that is over: a new process of the trial replays it."""
        if not self._trainings.begun:
            return
        last = self._trainings.last
        if last.save is not None and self.can_store and len(last.history) > last.replayed:
            last.model = last.save()
        last.save = None

    def check_direction(self, name: str, higher_is_better: bool) -> None:
        """Refuse a monitored metric that the study would be optimised away from."""
        if name == self._monitor and self.maximizes() is (not higher_is_better):
            wanted = "maximize" if higher_is_better else "minimize"
            raise InvalidInputError(
                f"{name!r} is better {'higher' if higher_is_better else 'lower'}, but the study "
                f"does not {wanted}: create it with direction={wanted!r}, of several objectives "
                "that of the first one, or monitor another value."
            )

    def recorded(self, number: int) -> Any:
        """The recorded evaluation of a round of the last training; see ``Training.recorded``."""
        return self._trainings.last.recorded(number)

    def recorded_from(self, number: int) -> int:
        """The number of rounds to replay from this one on."""
        return max(0, self._trainings.last.replayed - number)

    @property
    def model(self) -> bytes | None:
        """The serialised booster that the last training goes on from; None if it is new."""
        return self._trainings.last.model

    def warn_of_uncut(self, kind: str) -> None:
        """Say once that callbacks are answered with rounds that come later."""
        if not self._warned_of_uncut:
            self._warned_of_uncut = True
            log.warning(
                "%s tells its callbacks of rounds that it has once more, and one of them asks the "
                "model: it answers with all its rounds, for a model of %s cannot be cut.",
                self._name.capitalize(),
                kind,
            )

    def begin_round(self, number: int) -> None:
        """Yield the device if asked to, before a round that is to be trained."""
        if self.recorded(number) is None:
            self.switch_point()

    def end_round(self, evaluation: Any, values: dict[str, float]) -> None:
        """Record the plain values of a round's evaluation, and report if it ends a unit.

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
        training = self._trainings.last
        training.history.append(evaluation)
        self.value = training.value = float(values[self._monitor])
        trained = len(training.history)
        if trained % self._interval == 0:
            self.report(self.value)
        if trained == self._end:
            self.leave()

    def units_left(self) -> int | None:
        # After one fold, the number of folds is not known either.
        if self._end is None or len(self._trainings.begun) > 1:
            return None
        return (self._end - len(self._trainings.begun[0].history)) // self._interval

    def saves_now(self, saver: Saver) -> bool:
        return not saver.busy

    def pause_seconds(self, save_seconds: float) -> float:
        return max(_SAVE_SECONDS, _SAVE_SHARE * save_seconds)

    def position(self) -> dict[str, Any]:
        return {}

    def go_to(self, tree: dict[str, Any]) -> None:
        """Do nothing: the replayed rounds restore the position."""


class RoundsCallback:
    """A callback of a boosting library; all those of a trial share its rounds.

    Raises:
        InvalidInputError: the interval is not positive.
        CheckpointError: the trial's checkpoints cannot be used.
    """

    def __init__(
        self,
        trial: Any,
        monitor: str,
        *,
        report_interval: int = 10,
        _session: Session | None = None,
    ) -> None:
        super().__init__()
        if report_interval < 1:
            raise InvalidInputError(
                f"report_interval must be a number of rounds, 1 or more, but is {report_interval}."
            )
        # Kept by the trial itself, so that they live no longer.
        rounds = getattr(trial, "_hermes_rounds", None)
        if not isinstance(rounds, BoostingLoop) or _session not in (None, rounds._session):
            rounds = BoostingLoop(trial, _session)
            rounds._trial._hermes_rounds = rounds
        self._of_trial: BoostingLoop | None = rounds
        self._monitor = monitor
        self._interval = report_interval
        self._training: Training | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # as of a classifier that is cloned for each fold

    def __getstate__(self) -> dict[str, Any]:
        # A model that is pickled takes neither the trial along nor the database's password.
        return {**vars(self), "_of_trial": None, "_training": None}

    @property
    def _rounds(self) -> BoostingLoop:
        if self._of_trial is None:
            raise InvalidInputError(
                "A HermesCallback that was unpickled has no trial: train with a new one."
            )
        return self._of_trial

    @property
    def value(self) -> float | None:
        """The monitored value after the last round of this callback's last training."""
        return None if self._training is None else self._training.value

    def _single(self, model: object, kind: type[Booster]) -> Booster:
        """The booster in training; a library's ``cv``, which has several at once, is refused."""
        if not isinstance(model, kind):
            library = kind.__module__.partition(".")[0]
            raise InvalidInputError(
                f"HermesCallback must be given to {library}.train but is in a "
                f"{type(model).__name__}: {library}.cv cannot be suspended."
            )
        return model


@dataclass(kw_only=True)
class Training:
    """One training of a trial.

    Args:
        history: the evaluation after each of its rounds.
        model: the booster, serialised, in an earlier process or at the end; None before that.
        value: the monitored value after the last round.
        replayed: rounds of an earlier process, which are not trained again.
        save: returns the booster, serialised; None before the training and after it.
    """

    history: list[Any] = field(default_factory=list)
    model: bytes | None = None
    value: float | None = None
    replayed: int = 0
    save: Callable[[], bytes] | None = None

    def recorded(self, number: int) -> Any:
        """The recorded evaluation of a round to replay, None if the round is to be trained."""
        return self.history[number] if number < self.replayed else None

    def dump(self) -> dict[str, Any]:
        """The training as a tree of plain values and arrays."""
        model = self.model if self.save is None else self.save()
        assert model is not None, "trials that lack a model are not stored"
        return {
            "model": np.frombuffer(model, np.uint8),
            "history": list(self.history),
            "value": self.value,
        }


class _Trainings:
    """The trainings of a trial in their order: those that have begun, and those to be replayed."""

    def __init__(self) -> None:
        self.begun: list[Training] = []
        self._recorded: list[Training] = []

    @property
    def last(self) -> Training:
        """The training that has begun last; asked in one only."""
        return self.begun[-1]

    def begin(self, save: Callable[[], bytes]) -> Training:
        """Begin the next training: a new one, or the next that an earlier process has begun."""
        number = len(self.begun)
        known = number < len(self._recorded)
        training = self._recorded[number] if known else Training()
        training.replayed, training.save = len(training.history), save
        self.begun.append(training)
        return training

    def state_dict(self) -> dict[str, Any]:
        return {"trainings": [each.dump() for each in self.begun]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Loaded a second time before the first batch: then the booster itself has this state.
        if not self.begun:
            self._recorded = [
                Training(
                    history=list(each["history"]),
                    model=each["model"].tobytes(),
                    value=each["value"],
                )
                for each in state["trainings"]
            ]


watched: weakref.WeakKeyDictionary[Any, BoostingLoop] = weakref.WeakKeyDictionary()
"""The rounds of each booster that is in training."""
untold: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Rounds that a booster has, and of which the library is not told yet; others are to see none."""
