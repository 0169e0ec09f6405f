"""Suspend and resume a loop in plain PyTorch between any two batches."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from optuna_hermes._optuna import pruned, reported_steps, sign
from optuna_hermes.broker import session_of
from optuna_hermes.errors import CheckpointError, InvalidInputError, SuspendError
from optuna_hermes.suspend import Session, kept_rng, read, rng_state, set_rng_state
from optuna_hermes.suspend._named import Named
from optuna_hermes.suspend._place import Place
from optuna_hermes.suspend._saver import Saver
from optuna_hermes.suspend._state import captured_graphs
from optuna_hermes.suspend._storages import Gauge
from optuna_hermes.suspend._tree import frozen

_BEAT_SECONDS = 1.0

Batch = TypeVar("Batch")

log = logging.getLogger(__name__)

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def suspendable(trial: Any, /, **named: Any) -> Run:
    """Let other runs have the device between two batches of a training loop.

    Under ``optuna_hermes.optimize`` the run is suspended when its slice is over and goes on later
    with the same losses and weights as if nothing had happened, in this process or in another one.
    Under plain Optuna it reports to the trial and asks the study's pruner.

    A run that comes back in another process begins its objective again. This call gives the named
    objects the state they had, and the loop goes on at the batch where it was.

    Args:
        trial: the ``optuna.Trial`` of this run.
        named: all that the loop changes, by names of your choice: modules, optimizers, schedulers,
            gradient scalers, metrics, whatever has ``state_dict`` and ``load_state_dict``.

    Raises:
        InvalidInputError: an object has not, or this is the trial's second call.
        CheckpointError: the run's checkpoints cannot be used.

    Example:
        ```python
        def objective(trial):
            model, optimizer = ...
            run = suspendable(trial, model=model, optimizer=optimizer)
            for epoch in run.epochs(30):
                for x, y in run.batches(loader):
                    ...
                run.report(validate(model))
            return run.value
        ```
    """
    return Run(trial, named, session_of(trial))


class Run:
    """A training loop that can be suspended; see ``suspendable``."""

    def __init__(self, trial: Any, named: dict[str, Any], session: Session | None) -> None:
        self.value: float | None = None
        """The value reported last."""
        self._trial = trial
        self._run = f"trial {getattr(trial, 'number', '?')}"
        self._named = Named(named)
        self._session = session
        self._epoch = 0
        self._n_epochs: int | None = None
        self._batches = 0
        self._unit = 0
        self._place = Place()
        self._looped = self._due = False
        self._epoch_rng: dict[str, Any] = {}
        self._reported: frozenset[int] = frozenset()
        self._restored: dict[str, Any] | None = None
        self._saver: Saver | None = None
        self._stores = self._begun = self._unsaved = self._warned = False
        self._gauge = Gauge()
        self._busy = True
        self._next_beat = -math.inf
        if session is not None:
            self._own(session)
            self._reported = reported_steps(trial)
            self._resume(session)

    # -- the loop ------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Which batch of its epoch this is, from 0. ``enumerate`` would not know of a return."""
        return self._place.batch

    @property
    def kept(self) -> dict[str, Any]:
        """What else shall come back with the run: numbers, text, tensors, lists, dictionaries."""
        return self._named.kept

    def epochs(self, number: int) -> Iterator[int]:
        """Go through ``range(number)``, from the epoch where the run is.

        What stands between here and ``batches`` is run again when a run comes back to the midst of
        an epoch: with the same random numbers, and what it does to the named objects is undone.

        Raises:
            InvalidInputError: for the second time.
        """
        if self._looped:
            raise InvalidInputError(
                f"run.epochs() must be used once in an objective, but {self._run} uses it again: "
                "train all its epochs in one loop."
            )
        self._looped = True
        self._n_epochs = number
        try:
            for epoch in range(self._epoch, number):
                self._begin(epoch)
                yield epoch
        finally:
            self._leave()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Go through an epoch's batches, from the one where the run is.

        Args:
            loader: a ``DataLoader`` or ``StatefulDataLoader``, or a sequence. With others the run
                waits in memory only.

        Raises:
            InvalidInputError: outside of ``epochs``, or for the second time in an epoch.
            Suspended: the run is on disk.
            CheckpointError: the run cannot be stored, or not be brought back.
        """
        if not self._due:
            raise InvalidInputError(
                f"run.batches() must be used once in each epoch of run.epochs(), but {self._run} "
                "uses it outside or again: iterate over other loaders as they are."
            )
        self._due = False
        iterator = self._iterate(loader)
        self._between_batches()
        for batch in iterator:
            yield batch
            del batch
            self._place.batch += 1
            self._batches += 1
            self._between_batches()

    def report(self, value: float) -> None:
        """Report a value: after each epoch, or whenever there is one.

        Raises:
            InvalidInputError: before the first batch.
            TrialPruned: the study's pruner says so.
        """
        if not self._batches:
            raise InvalidInputError(
                f"run.report() must come after a batch of run.batches(), but {self._run} has "
                "trained none: others could never have its device."
            )
        value = self.value = float(value)
        self._unit += 1
        self._busy = self._unsaved = True
        if self._unit not in self._reported:  # it may be trained again, after a crash
            self._trial.report(value, step=self._unit)
        if self._session is not None:
            lower_is_better = sign(self._trial) * value
            self._session.report(
                unit=self._unit,
                step=self._unit,
                value=lower_is_better,
                units_left=self._units_left(),
            )
        if self._trial.should_prune():
            raise pruned(f"Pruned after unit {self._unit} at {value}.")

    def _units_left(self) -> int | None:
        """Known where each epoch until now had one report."""
        if self._n_epochs is None or self._unit != self._epoch + 1:
            return None
        return self._n_epochs - self._unit

    def beat(self) -> None:
        """Say that the run is alive: for within a validation that takes minutes."""
        session, now = self._session, time.monotonic()
        if session is None or now < self._next_beat:
            return
        self._next_beat = now + _BEAT_SECONDS
        session.beat(self._batches, self._gauge.read(self._named.roots()))

    # -- between two batches -------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch, self._due = epoch, True
        if self._session is None:
            return
        if self._restored is not None:
            set_rng_state(self._restored["epoch_rng"])
        self._epoch_rng = rng_state()

    def _iterate(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        session, restored = self._session, self._restored
        if session is None:
            self._place.batch = 0
            return iter(loader)
        iterator = self._place.iterate(loader, None if restored is None else restored["place"])
        self._watch(session)
        return iterator

    def _watch(self, session: Session) -> None:
        problem = self._place.problem
        if session.checkpoint_dir is None:
            problem = "it has no folder for checkpoints"
        if problem is not None and not self._begun:
            log.info("The run of %s can only wait in memory: %s.", self._run, problem)
        self._stores = problem is None
        if self._stores and self._saver is None:
            self._saver = Saver(session, self._run)

    def _between_batches(self) -> None:
        session = self._session
        if session is None:
            return
        if self._busy or session.must_yield:
            self._attend(session)
        if time.monotonic() >= self._next_beat:
            self.beat()

    def _attend(self, session: Session) -> None:
        if not self._begun:
            self._begun = True
            self._restore()
            session.training(stores=self._stores)
        saver = self._saver
        if saver is not None:
            saver.finish(wait=False)
        if self._stores and self._place.batch == self._place.length:
            return  # what follows may need the last batch's loss, which would not come back
        if session.must_yield:
            self._park(session)
        if self._unsaved and self._stores and saver is not None:
            saver.begin(self._dump(rng_state()), units=self._unit)
            self._unsaved = False
        self._busy = saver is not None and saver.busy

    def _park(self, session: Session) -> None:
        with kept_rng() as rng:
            session.park(_Point(self, rng))
        if self._saver is not None and self._saver.behind:
            self._busy = self._unsaved = True
        session.training(stores=self._stores)

    # -- checkpoints ---------------------------------------------------------------------------

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        warning = self._place.warning
        if warning is not None and not self._warned:
            self._warned = True
            log.warning("%s: %s", self._run.capitalize(), warning)
        return {
            "named": self._named.state_dict(),
            "place": self._place.state_dict(),
            "epoch": self._epoch,
            "batches": self._batches,
            "unit": self._unit,
            "value": self.value,
            "epoch_rng": self._epoch_rng,
            "rng": rng,
        }

    def _resume(self, session: Session) -> None:
        found = read(session.checkpoints, self._run, session.checkpoint_dir)
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
        """Undo what the objective has done since."""
        tree, self._restored = self._restored, None
        if tree is not None:
            self._load(tree)
            set_rng_state(tree["rng"])

    def _load(self, tree: dict[str, Any]) -> None:
        self._named.load_state_dict(tree["named"])
        self._epoch, self._batches = tree["epoch"], tree["batches"]
        self._unit, self.value = tree["unit"], tree["value"]

    def _own(self, session: Session) -> None:
        if session in _sessions:
            raise InvalidInputError(
                f"suspendable() must be called once in an objective, but {self._run} calls it "
                "again: name all objects in one call."
            )
        _sessions.add(session)

    def _leave(self) -> None:
        try:
            if self._saver is not None:
                self._saver.finish(wait=True)
        except CheckpointError as error:
            log.warning("%s", error)  # the run has ended by itself, or with a worse error
        self._place.leave()


class _Point:
    """A run between two batches (``suspend.State``)."""

    def __init__(self, run: Run, rng: dict[str, Any]) -> None:
        self.name = run._run
        self.units = run._unit
        self.stores = run._stores
        self.moves = not captured_graphs()
        self._run = run
        self._rng = rng

    def ended(self) -> bool:
        return False

    def roots(self) -> Iterable[object]:
        return self._run._named.roots()

    def dump(self) -> dict[str, Any]:
        if self._run._saver is not None:
            self._run._saver.finish(wait=True)  # one checkpoint at a time, and in their order
        return self._run._dump(self._rng)
