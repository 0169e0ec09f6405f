"""The cooperative loop: the part that all trainings which yield at clean points share."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

from optuna_hermes._optuna import (
    hear,
    pruned,
    report,
    reported_steps,
    session_of,
    should_prune,
    sign,
)
from optuna_hermes.errors import CheckpointError, InvalidInputError, SuspendError
from optuna_hermes.suspend import (
    Session,
    StoredState,
    kept_rng,
    read,
    rng_state,
    set_rng_state,
)
from optuna_hermes.suspend._named import NamedObjects
from optuna_hermes.suspend._said import say_lost
from optuna_hermes.suspend._saver import Saver
from optuna_hermes.suspend._state import captured_graphs
from optuna_hermes.suspend._storages import Gauge
from optuna_hermes.suspend._tree import frozen

__all__ = ["Turns", "hear", "session_of"]

_BEAT_SECONDS = 1.0

log = logging.getLogger(__name__)

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


class Turns:
    """A training that reports values, and yields its device and resumes at clean points.

    A subclass gives its position by ``_where``, takes it up again in ``_be_at``, and calls
    ``_pass_point`` at each clean point.

    Args:
        trial: the ``optuna.Trial`` that trains.
        named: all objects that the training changes.
        session: of the trial; None if its trials are not scheduled.
    """

    _maker: ClassVar[str] = "suspendable()"
    """The user's call that makes it, as messages name it."""
    _way_out: ClassVar[str] = "Give what holds it state_dict() and load_state_dict()."
    """Advice about values that no checkpoint holds."""
    _moves = True
    """True if it holds only torch's tensors on its device, which may be moved."""

    def __init__(self, trial: Any, named: NamedObjects, session: Session | None) -> None:
        self.value: float | None = None
        """The value reported last."""
        self._trial = trial
        self._run = f"trial {getattr(trial, 'number', '?')}"
        self._named = named
        self._session = session
        self._batches = 0
        self._unit = 0
        self._reported: frozenset[int] = frozenset()
        self._restored: dict[str, Any] | None = None
        self._saver: Saver | None = None
        self._stores = self._begun = self._unsaved = False
        self._gauge = Gauge()
        self._busy = True
        self._next_beat = -math.inf
        if session is not None:
            self._own(session)
            self._reported = reported_steps(trial)
            self._resume(session)

    def report(self, value: float) -> None:
        """Report a value: after each epoch, or at any other time.

        Raises:
            TrialPruned: the study's pruner prunes the trial.
        """
        value = self._count(value)
        if self._unit not in self._reported:  # after a crash a unit may be trained again
            report(self._trial, value, self._unit)
        self._say(value)
        if should_prune(self._trial):
            raise pruned(f"Pruned after unit {self._unit} at {value}.")

    def _count(self, value: float) -> float:
        """Count a unit with this value."""
        self.value = float(value)
        self._unit += 1
        self._busy = self._unsaved = True
        return self.value

    def _say(self, value: float) -> None:
        """Report the unit that was counted last to the broker."""
        if self._session is None:
            return
        lower_is_better = sign(self._trial) * value
        self._session.report(
            unit=self._unit, step=self._unit, value=lower_is_better, units_left=self._units_left()
        )

    def beat(self) -> None:
        """Report progress; to be called within validations that take minutes."""
        session, now = self._session, time.monotonic()
        if session is None or now < self._next_beat:
            return
        self._next_beat = now + _BEAT_SECONDS
        session.beat(self._batches, self._gauge.read(self._named.roots()))

    # -- to be overridden ----------------------------------------------------------------------

    def _where(self) -> dict[str, Any]:
        """The training's position, as a tree of plain values and tensors."""
        raise NotImplementedError

    def _be_at(self, tree: dict[str, Any]) -> None:
        """Resume from a position that ``_where`` returned."""
        raise NotImplementedError

    def _maximizes(self) -> bool | None:
        """True if a higher value is better, None if the trial belongs to no study."""
        study = getattr(self._trial, "study", None)
        return None if study is None else sign(study) < 0

    def _units_left(self) -> int | None:
        """Units until the end, None if unknown."""
        return None

    def _stores_here(self) -> bool:
        """False at a clean point where a trial that can be stored elsewhere cannot be stored."""
        return True

    def _waits(self) -> bool:
        """True to go on to the next clean point, if the trial can be stored."""
        return False

    def _saves(self, saver: Saver) -> bool:
        """True to save the unit now, False to leave it to a later one."""
        return True

    def _warning(self) -> str | None:
        """A warning about what cannot be restored exactly, None if all can."""
        return None

    def _lost(self) -> list[str]:
        """Names of values that have changed and that no checkpoint holds."""
        return self._named.lost

    # -- at a clean point ----------------------------------------------------------------------

    def _watch(self, session: Session, problem: str | None) -> None:
        """Set the reason why the trial cannot be stored, None if it can."""
        if session.checkpoint_dir is None:
            problem = "it has no folder for checkpoints"
        if problem is not None and not self._begun:
            log.info("The run of %s can only wait in memory: %s.", self._run, problem)
        self._stores = problem is None
        if self._stores and self._saver is None:
            self._saver = Saver(session, self._run)

    def _pass_point(self) -> None:
        session = self._session
        if session is None:
            return
        if self._busy or session.must_yield:
            self._attend(session)
        if time.monotonic() >= self._next_beat:
            self.beat()

    def _attend(self, session: Session) -> None:
        if not self._begun:
            self._begin_training(session)
        saver = self._saver
        if saver is not None:
            saver.finish(wait=False)
        if self._stores and self._waits():
            return
        if session.must_yield:
            self._park(session)
        here = self._stores and self._stores_here()
        if self._unsaved and here and saver is not None and self._saves(saver):
            saver.begin(self._dump(rng_state()), units=self._unit)
            self._unsaved = False
        self._busy = saver is not None and (saver.busy or (self._unsaved and self._stores))

    def _begin_training(self, session: Session) -> None:
        self._begun = True
        self._restore()
        session.training(stores=self._stores)

    def _park(self, session: Session) -> None:
        with kept_rng() as rng:
            session.park(_LoopState(self, rng))
        if self._saver is not None and self._saver.behind:
            self._busy = self._unsaved = True
        session.training(stores=self._stores)

    # -- checkpoints ---------------------------------------------------------------------------

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        warning = self._warning()
        if warning is not None:
            log.warning("%s: %s", self._run.capitalize(), warning)
        tree = {
            "named": self._named.state_dict(),
            **self._where(),
            "batches": self._batches,
            "unit": self._unit,
            "value": self.value,
            "rng": rng,
        }
        assert self._session is not None
        say_lost(self._run, self._session.checkpoint_dir, self._lost(), self._way_out)
        return tree

    def _find(self, session: Session) -> tuple[StoredState, Any] | None:
        """The newest checkpoint that can be used."""
        return read(session.checkpoints, self._run, session.checkpoint_dir)

    def _resume(self, session: Session) -> None:
        found = self._find(session)
        if found is None:
            return
        state, tree = found
        try:
            self._load(frozen(tree))  # a copy: it is loaded again, right before the next batch
        except SuspendError as error:
            raise CheckpointError(
                f"Checkpoint {state.path} of {self._run} must fit the objects that are named, but "
                f"{error}. Make the same ones whenever the objective runs."
            ) from error
        self._restored = tree

    def _restore(self) -> None:
        """Load the checkpoint once more, to undo what the objective has done since."""
        tree, self._restored = self._restored, None
        if tree is not None:
            self._load(tree)
            set_rng_state(tree["rng"])
        self._named.begin()

    def _load(self, tree: dict[str, Any]) -> None:
        self._named.load_state_dict(tree["named"])
        self._be_at(tree)
        self._batches, self._unit, self.value = tree["batches"], tree["unit"], tree["value"]

    def _own(self, session: Session) -> None:
        if session in _sessions:
            raise InvalidInputError(
                f"{self._maker} must be called once in an objective, but {self._run} calls it "
                "again: name all objects in one call."
            )
        _sessions.add(session)

    def _leave(self) -> None:
        try:
            if self._saver is not None:
                self._saver.finish(wait=True)
        except CheckpointError as error:
            log.warning("%s", error)  # only logged: the training is over, perhaps by a worse error


class _LoopState:
    """A trial at a clean point (``suspend.TrialState``)."""

    def __init__(self, turns: Turns, rng: dict[str, Any]) -> None:
        self.name = turns._run
        self.units = turns._unit
        self.stores = turns._stores and turns._stores_here()
        self.moves = turns._moves and not captured_graphs()
        self._turns = turns
        self._rng = rng

    def ended(self) -> bool:
        return False

    def roots(self) -> Iterable[object]:
        return self._turns._named.roots()

    def dump(self) -> dict[str, Any]:
        if self._turns._saver is not None:
            self._turns._saver.finish(wait=True)  # files are numbered in the order of states
        return self._turns._dump(self._rng)
