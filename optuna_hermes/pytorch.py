"""Suspend and resume a loop in plain PyTorch between any two batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar, TypeVar

from optuna_hermes._turns import Turns, session_of
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.suspend import Session, rng_state, set_rng_state
from optuna_hermes.suspend._beside import Beside
from optuna_hermes.suspend._locals import Locals, frames_of_user
from optuna_hermes.suspend._named import Named
from optuna_hermes.suspend._place import Place, is_stream
from optuna_hermes.suspend._streams import Streams
from optuna_hermes.suspend._unsaved import reachable
from optuna_hermes.suspend._values import Classes

Batch = TypeVar("Batch")


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


class Run(Turns):
    """A training loop that can be suspended; see ``suspendable``."""

    _way_out: ClassVar[str] = (
        "Keep it in run.kept, or give what holds it state_dict() and load_state_dict() and name it "
        "in suspendable()."
    )

    def __init__(self, trial: Any, named: dict[str, Any], session: Session | None) -> None:
        self._epoch = 0
        self._n_epochs: int | None = None
        self._place = Place()
        self._beside = Beside()
        self._streams = Streams()
        self._looped = self._due = self._warned = False
        self._whole = False
        self._epoch_rng: dict[str, Any] = {}
        self._locals = Locals()
        self._caller: FrameType | None = None
        classes = Classes.of_frames(frames_of_user(sys._getframe()))
        super().__init__(trial, Named(named, classes), session)

    # -- the loop ------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Which batch of its epoch this is, from 0. ``enumerate`` would not know of a return."""
        return self._place.batch

    @property
    def kept(self) -> dict[str, Any]:
        """Values, containers and objects of your classes that come back with the run."""
        return self._named.kept

    def epochs(self, number: int) -> Iterator[int]:
        """Go through ``range(number)``, from the epoch where the run is.

        An epoch without ``batches`` is one batch: others may have the device before the next.

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
        if self._session is not None:
            self._beside.begin()
        try:
            for epoch in range(self._epoch, number):
                self._begin(epoch)
                if self._session is not None:
                    self._locals.epoch(sys._getframe().f_back, self._known())
                if self._whole:
                    if self._session is not None:
                        self._watch(self._session, None)
                    self._pass(sys._getframe().f_back)
                yield epoch
                if self._due:
                    self._whole = True
                    self._batches += 1
        finally:
            self._leave()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Go through an epoch's batches, from the one where the run is.

        Args:
            loader: a ``DataLoader`` or ``StatefulDataLoader``, or a sequence. With others the run
                waits in memory only; over an iterable data set it is stored between epochs.

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
        self._due = self._whole = False
        iterator = self._iterate(loader)
        if self._session is not None:
            self._locals.batches(sys._getframe().f_back, self._known())
        self._pass(sys._getframe().f_back)
        for batch in iterator:
            yield batch
            del batch
            self._place.batch += 1
            self._batches += 1
            self._pass(sys._getframe().f_back)

    def report(self, value: float) -> None:
        """Report a value: after each epoch, or whenever there is one.

        Raises:
            InvalidInputError: outside of ``epochs``, where nothing was trained.
            TrialPruned: the study's pruner says so.
        """
        if not self._batches and not self._due:
            raise InvalidInputError(
                f"run.report() must come in the loop over run.epochs(), but {self._run} has "
                "trained nothing: others could never have its device."
            )
        if self._session is not None and self._restored is not None:
            return  # what stands before the batches of an epoch is run again: this is told
        if self._session is not None and not self._begun:
            self._watch(self._session, None)
            self._begin_training(self._session)
        super().report(value)

    def _units_left(self) -> int | None:
        """Known where each epoch until now had one report."""
        if self._n_epochs is None or self._unit != self._epoch + 1:
            return None
        return self._n_epochs - self._unit

    def _pass(self, caller: FrameType | None) -> None:
        """Pass a clean point; whoever waits for the next batch may hold what should be stored."""
        self._caller = caller
        try:
            self._pass_point()
        finally:
            self._caller = None

    def _known(self) -> set[int]:
        return reachable(self._named.roots())

    def _lost(self) -> list[str]:
        names = self._locals.lost(self._caller, self._known(), self._place.batch)
        lost = [*super()._lost(), *self._streams.lost]
        return [*lost, *(f"{name} (a local variable)" for name in sorted(names))]

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
        if not is_stream(loader):
            self._beside.release(loader)
        iterator = self._place.iterate(loader, None if restored is None else restored["place"])
        self._watch(session, self._place.problem)
        if self._place.only_whole:
            self._streams.follow(loader, self._known, self._run)
        return iterator

    def _stores_here(self) -> bool:
        return not (self._place.only_whole and self._place.batch)

    def _waits(self) -> bool:
        # What follows may need the last batch's loss, which would not come back.
        return self._place.batch == self._place.length

    # -- checkpoints ---------------------------------------------------------------------------

    def _warning(self) -> str | None:
        warning = None if self._warned else self._place.warning
        self._warned = self._warned or warning is not None
        return warning

    def _where(self) -> dict[str, Any]:
        return {
            "place": self._place.state_dict(),
            "epoch": self._epoch,
            "whole": self._whole,
            "epoch_rng": self._epoch_rng,
            "beside": self._beside.state(),
            "steps": self._beside.steps(),
            "streams": self._streams.state_dict(),
        }

    def _be_at(self, tree: dict[str, Any]) -> None:
        self._epoch, self._whole = tree["epoch"], tree["whole"]
        self._streams.load_state_dict(tree["streams"])

    def _restore(self) -> None:
        tree = self._restored
        super()._restore()
        if tree is not None:
            self._beside.load_state(tree["beside"])
            self._beside.load_steps(tree["steps"])

    def _leave(self) -> None:
        super()._leave()
        self._place.leave()
        self._beside.leave()
