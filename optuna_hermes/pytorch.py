"""Suspend and resume a loop in plain PyTorch between any two batches."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, ClassVar, Generic, TypeVar

from optuna_hermes.cooperative import CooperativeLoop, on_report, session_of
from optuna_hermes.errors import CheckpointError, InvalidInputError, SuspendError
from optuna_hermes.suspend import Session, kept_rng, rng_state, set_rng_state
from optuna_hermes.suspend._loaders._other_loaders import OtherLoaders
from optuna_hermes.suspend._loaders._position import LoaderPosition
from optuna_hermes.suspend._loop_code._code import Code, places
from optuna_hermes.suspend._loop_code._early_calls import EarlyCalls
from optuna_hermes.suspend._loop_code._iterators import (
    CountedOn,
    begun_anew,
    collecting,
    place_of,
)
from optuna_hermes.suspend._loop_code._locals import Locals, frames_of_user, variables
from optuna_hermes.suspend._modules._named_objects import NamedObjects
from optuna_hermes.suspend._tiers._saver import warn_of_inexact, warn_of_lost
from optuna_hermes.suspend._values._classes import Classes
from optuna_hermes.suspend._values._fingerprint import is_referred_to
from optuna_hermes.suspend._values._kept import can_keep
from optuna_hermes.suspend._values._tree import frozen

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Item = TypeVar("Item")


def suspendable(trial: Any, /, **named: Any) -> PyTorchLoop:
    """Let other trials have the device between two batches of a training loop.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    with the same losses and weights as if nothing had happened, in this process or in another one.
    Under plain Optuna ``run.report`` reports to the trial and asks the study's pruner.

    A trial resumed in another process begins its objective again. The loop over ``epochs`` restores
    the state of the named objects, and goes on at the batch where it was.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study, such as the last
            one with the best parameters: it reports nothing.
        named: all objects that the loop changes, by names of your choice: modules, optimizers,
            schedulers, gradient scalers, metrics, and anything else with ``state_dict`` and
            ``load_state_dict``. One that is None is left out.

    Raises:
        InvalidInputError: an object lacks these methods, or this is the trial's second call.
        CheckpointError: the trial's checkpoints cannot be used.

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
    named = {name: each for name, each in named.items() if each is not None}
    return PyTorchLoop(trial, named, session_of(trial))


class PyTorchLoop(CooperativeLoop):
    """A training loop that can be suspended; see ``suspendable``."""

    instead: ClassVar[str] = (
        "name all objects in one call, and train them in one loop over run.epochs()"
    )
    remedy: ClassVar[str] = (
        "Keep it in run.kept where that can hold it, or give what holds it state_dict() and "
        "load_state_dict() and name it in suspendable()."
    )

    def __init__(self, trial: Any, named: dict[str, Any], session: Session | None) -> None:
        self._epoch = 0
        self._numbers: range | None = None
        """Of all epochs."""
        self._first_numbers: tuple[int, int] | None = None
        """Start and step of the range in the trial's first process."""
        self._position = LoaderPosition(
            lambda: self._named.stored(), f"trial {getattr(trial, 'number', '?')}"
        )
        self._other_loaders = OtherLoaders()
        self._looped = self._batches_due = False
        self._trains = False
        """True once the loop, or a pass over ``loader``, has begun."""
        self._thread = 0
        self._around_epochs: str | None = None
        self._without_batches = False
        self._epoch_rng: dict[str, Any] = {}
        self._epoch_state: dict[str, Any] = {}
        self._epoch_modules: dict[str, Any] | None = None
        """States of the modules at the epoch's begin, if code before its batches calls one."""
        self._early_calls = EarlyCalls(self._copy_modules)
        self._epoch_code: list[Any] = []
        self._code = Code()
        self._locals = Locals()
        self._variables: dict[str, str] = {}
        self._around: dict[tuple[tuple[CodeType, int], ...], str | None] = {}
        """Names of what is around ``batches`` and would begin anew, by where the user's code is."""
        self._caller: FrameType | None = None
        self._reports = False
        self._due: Callable[[], float] | None = None
        classes = Classes.of_frames(frames_of_user(sys._getframe()))
        super().__init__(trial, NamedObjects(named, classes), session)
        if session is not None:
            on_report(trial, self._count_own_report)

    # -- the loop ------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Number of this batch in its epoch, from 0, also once resumed."""
        return self._position.batch

    @property
    def kept(self) -> dict[str, Any]:
        """Values, containers and objects that are stored with the trial.

        Objects of installed packages are restored where your code puts them here before the loop.
        """
        return self._named.kept

    def epochs(self, number: int | range) -> Iterable[int]:
        """Iterate over ``range(number)``, or a range, from the trial's present epoch.

        Its length is that of the whole range. If the number is not known, give one that is large
        enough, and leave the loop with ``break``.

        An epoch without ``batches`` counts as one batch: the trial may yield before the next.

        Code between here and ``batches`` runs again when a trial is resumed within an epoch: with
        the same random numbers, schedules, settings of optimizers, numbers in attributes of named
        modules and small kept values as then, and its effects on the named objects are undone. If
        it calls a named module, that has the weights that it had, too; else they are those of the
        present batch.

        Raises:
            InvalidInputError: it is neither a number nor a range, or this is the second loop.
        """
        try:
            numbers = number if isinstance(number, range) else range(number)
        except TypeError as error:
            raise InvalidInputError(
                f"run.epochs() takes a number or a range, but got {number!r}: give a number that "
                "is large enough, and leave the loop with break."
            ) from error
        if self._first_numbers is not None:
            # An objective that resumes by itself, too, begins its range where it has come to.
            start, step = self._first_numbers
            numbers = range(start, numbers.stop, step)
        return _LoaderPasses(
            numbers, lambda: self._counted_on(self._rest_of_epochs(numbers), lambda: self._epoch)
        )

    def _counted_on(self, items: Iterator[Item], before: Callable[[], int]) -> Iterator[Item]:
        """These items; ``enumerate`` around those of a resumed loop counts the others before."""
        return items if self._restored is None else CountedOn(items, before)

    def _rest_of_epochs(self, numbers: range) -> Iterator[int]:
        if self._looped:
            raise InvalidInputError(
                f"run.epochs() must be used once in an objective, but {self._name} uses it again: "
                "train all in one loop, such as `for epoch in run.epochs(a + b):` with "
                "`if epoch < a:` in it."
            )
        self._looped = True
        self._numbers = numbers
        self._thread = threading.get_ident()
        if self._session is not None:
            collected = collecting(sys._getframe())
            if collected is not None:
                self._around_epochs = f"{collected} is around run.epochs(), and would begin anew"
            self._named.note_kept()
            super()._load_copy()
            if self._restored is not None:
                self._locals.resume(self._restored["variables"], {**self._named.kept})
                self._warn_of_fewer_epochs(self._session, len(numbers))
            self._named.note_classes()
        if self._has_checkpoints:
            self._other_loaders.begin(places(sys._getframe()))
        try:
            for place in range(self._epoch, len(numbers)):
                self._begin(place)
                if self._has_checkpoints:
                    self._locals.epoch(sys._getframe().f_back, self._named.stored())
                if self._without_batches:
                    self._warn_of_unset(sys._getframe().f_back)
                    self.begin(self._around_epochs or self._other_loaders.problem())
                    self._switch_point(sys._getframe().f_back)
                yield numbers[place]
                if self._batches_due:
                    self._without_batches = True
        finally:
            self.leave()

    def _warn_of_fewer_epochs(self, session: Session, number: int) -> None:
        """Say that the loop ends before the epoch where the trial was."""
        if self._epoch >= number:
            reason = (
                f"its loop now has {number} epochs, and ends before the one in which the trial "
                "was. Give run.epochs() the same number in each process, and leave out a "
                "resumption of your own."
            )
            warn_of_inexact(self._name, session.checkpoint_dir, {"fewer epochs": reason})

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """An epoch's batches, from the trial's present one, with the loader's other attributes.

        Args:
            loader: a ``DataLoader`` or ``StatefulDataLoader``, or a sequence. With others the trial
                waits in memory only.

        Raises:
            InvalidInputError: it is called outside of ``epochs``, or twice in an epoch.
            Suspended: the trial is on disk.
            CheckpointError: the trial cannot be stored, or cannot be resumed.
        """
        return _LoaderPasses(
            loader,
            lambda: self._counted_on(self._rest_of_epoch(loader), lambda: self._position.batch),
        )

    def _rest_of_epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        if not self._batches_due:
            raise InvalidInputError(
                f"run.batches() must be used once in each epoch of run.epochs(), but {self._name} "
                "uses it outside or again: iterate over other loaders as they are."
            )
        self._batches_due = self._without_batches = False
        self._early_calls.batches()
        if not self._early_calls.called:
            self._epoch_modules = None
        iterator = self._iterate(loader)
        if self._has_checkpoints:
            self._locals.batches(sys._getframe().f_back, self._named.stored())
            self._warn_of_unset(sys._getframe().f_back)
        self._switch_point(sys._getframe().f_back)
        for batch in iterator:
            yield batch
            # Else its memory would stay in use while the trial waits.
            del batch
            self._position.batch += 1
            self._switch_point(sys._getframe().f_back)
        self._position.end()

    def loader(
        self, loader: Iterable[Batch], report: Callable[[], float] | None = None
    ) -> Iterable[Batch]:
        """A loader for a function that contains both loops: each pass over it is an epoch.

        The position in such a function cannot be restored: its trial waits in memory only, and
        begins anew if its process ends.

        Args:
            loader: the loader; the trial may yield between two of its batches.
            report: returns the value to report after each pass, and leaves no trace in the random
                states, nor in the modes of named modules (``eval``); None if the function calls
                ``trial.report``. If a pass is left before its end, but not in its first batch, it
                is called when the next pass begins.

        Raises:
            CheckpointError: the trial was stored in a loop over ``epochs``.
        """
        if self._restored is not None:
            raise CheckpointError(
                f"{self._name.capitalize()} was stored in a loop over run.epochs(), but goes on in "
                "run.loader(): bring that loop back, or remove the folder of its checkpoints."
            )
        self._thread = threading.get_ident()
        return _LoaderPasses(loader, functools.partial(self._pass_over, loader, report))

    def _pass_over(
        self, loader: Iterable[Batch], report: Callable[[], float] | None
    ) -> Iterator[Batch]:
        due, self._due = self._due, None
        self._report_pass(due)
        self.begin("its loops are in a function, which begins anew")
        self._switch_point(None)
        self._trains, n_batches = True, 0
        try:
            for batch in loader:
                yield batch
                del batch
                n_batches += 1
                self._switch_point(None)
        except GeneratorExit:
            # Not now: no error, pruning included, can leave from here. Who leaves a pass in its
            # first batch has only looked at that.
            if report is not None and n_batches:
                self._due = report
            raise
        self._report_pass(report)

    def _report_pass(self, report: Callable[[], float] | None) -> None:
        """Report what this returns, and train on as if it had not been called."""
        if report is None:
            return
        modes = {part: part.training for each in self._named.modules for part in each.modules()}
        with kept_rng():
            value = report()
        for part, training in modes.items():
            part.training = training
        self.report(value)

    def report(self, value: float) -> None:
        """Report a value: after each epoch, or at any other time.

        Raises:
            InvalidInputError: it is no number, or called outside of ``epochs``, where nothing was
                trained.
            TrialPruned: the study's pruner prunes the trial.
        """
        if not self._trains:
            raise InvalidInputError(
                f"run.report() must come in the loop over run.epochs(), but {self._name} has "
                "trained nothing: others could never have its device."
            )
        if self._session is not None and self._restored is not None:
            # Code before an epoch's batches runs again: this value was reported before.
            return
        self._begin_before_batches()
        self._reports = True
        super().report(value)

    def _count_own_report(self, value: float) -> None:
        """Count a value that a loop without ``report`` has passed to ``trial.report``."""
        if self._reports or self._restored is not None or not self._trains:
            return
        self._begin_before_batches()
        self._report_to_broker(self._count(value))

    def _begin_before_batches(self) -> None:
        """Begin the training for a value that comes before the first clean point."""
        if self._session is not None and not self._begun:
            self.begin()
            self._begin_training(self._session)

    def _has_trained(self) -> bool:
        # That an epoch has no batches is only known at its end.
        return self._batches_due and self._restored is None

    def units_left(self) -> int | None:
        """Units until the end; known if each epoch until now had one report."""
        if self._numbers is None or self._unit != self._epoch + 1:
            return None
        return len(self._numbers) - self._unit

    def _switch_point(self, caller: FrameType | None) -> None:
        """Pass a clean point; the local variables of ``caller`` are checked for lost state.

        Raises:
            InvalidInputError: another thread than that of the loop asks for batches.
        """
        if self._session is not None and self._thread != threading.get_ident():
            raise InvalidInputError(
                f"{self._name.capitalize()} asks for its batches in another thread than that of "
                "its loop, which would train on while it is suspended: prefetch within the loader, "
                "by num_workers, or wrap the loader, not run.batches()."
            )
        self._caller = caller
        try:
            self.switch_point()
        finally:
            self._caller = None

    def _lost(self) -> list[str]:
        names = self._locals.lost(self._caller, self._named.stored(), self._position.batch)
        lost = [*super()._lost(), *self._position.streams.lost]
        return [*lost, *map(self._variable, sorted(names))]

    def _variable(self, name: str) -> str:
        """The words for a lost variable of the loop; the same in each message: it is given once."""
        if name.startswith("self."):
            return name
        if name not in self._variables:
            frames = [variables(frame) for frame in frames_of_user(self._caller)]
            values = [each[name] for each in frames if name in each]
            stored = self._named.stored()
            note = ""
            if any(is_referred_to(each, stored) for each in values):
                note = ": set it in each epoch, by its number"
            elif not all(id(each) not in stored and can_keep(each) for each in values):
                note = ", which run.kept cannot hold"
            self._variables[name] = f"{name} (a variable of the loop{note})"
        return self._variables[name]

    def _warn_of_unset(self, caller: FrameType | None) -> None:
        """Name the variables that referred to kept values before the trial came back from disk."""
        if self._session is None:
            return
        words = (
            f"{variable} (a variable of the loop: set it to run.kept[{name!r}] before that)"
            for variable, name in self._locals.unset(caller, self._named.kept).items()
        )
        warn_of_lost(self._name, self._session.checkpoint_dir, words, self.remedy)

    # -- between two batches -------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position.batch = epoch, 0
        self._trains = self._batches_due = True
        if self._session is None:
            return
        self._early_calls.end()
        self._epoch_modules = None
        self._code.enter(sys._getframe())
        if self._restored is not None:
            # Code before the epoch's batches runs again, and must draw what it drew.
            set_rng_state(self._restored["epoch_rng"])
            self._code.set_states(sys._getframe(), self._restored["epoch_code"])
            self._named.load_small_state(frozen(self._restored["epoch_state"]))
            self._named.load_modules_state(self._restored["epoch_modules"] or {})
        if self._session.checkpoint_dir is not None:  # else no checkpoint will hold them
            self._epoch_rng = rng_state()
            self._epoch_state = self._named.small_state()
            self._epoch_code = self._code.states(sys._getframe())
            # An epoch without batches is stored at its begin, and may be followed by one with them.
            self._early_calls.begin(self._named.modules, copies=not self._without_batches)

    def _copy_modules(self) -> None:
        self._epoch_modules = self._named.modules_state()

    def _iterate(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        if not self._has_checkpoints:
            self.begin()
            return iter(loader)
        restored = self._restored
        idle = self._other_loaders.release(loader)
        self._code.enter(sys._getframe())
        if restored is not None:  # before the loader, whose data may draw from the same
            self._code.set_states(sys._getframe(), restored["code"])
        position = None if restored is None else restored["position"]
        iterator = self._position.iterate(loader, position, idle)
        problem = self._position.problem or self._other_loaders.problem(loader)
        self.begin(self._around_epochs or problem)
        return iterator

    def can_store_here(self) -> bool:
        """See ``CooperativeLoop``: a stream, or what is around it, may hold what no file can."""
        # Before its first batch an epoch's code has mostly left all weights as they were.
        early, batch = self._early_calls, self._position.batch
        exact = not (early.missed if batch else early.changed)
        can_store = self._batches_due or (exact and self._position.can_store_here())
        return can_store and not self._would_begin_anew()

    def _would_begin_anew(self) -> bool:
        """True within an epoch of ``zip(run.batches(loader), others)`` and the like; said once."""
        if self._batches_due or not self._position.batch:
            return False
        place = tuple((each.f_code, place_of(each)) for each in frames_of_user(self._caller))
        if place not in self._around:  # once: it takes a tenth of a second
            frame = sys._getframe()
            found = self._around[place] = collecting(frame) or begun_anew(frame)
            if found is not None:
                log.warning(
                    "%s is stored between epochs only, and waits in memory within them: %s is "
                    "around run.batches(), and would begin anew. To have it stored there, too, "
                    "count by run.batch, and read from one loader.",
                    self._name.capitalize(),
                    found,
                )
        return self._around[place] is not None

    def waits_for_next_point(self) -> bool:
        """See ``CooperativeLoop``: true after the last batch of an epoch, if it can be stored."""
        # After an epoch's last batch the loop may still use its loss, which would not be restored.
        return self.can_store and not self._batches_due and self._position.ends_here()

    # -- checkpoints ---------------------------------------------------------------------------

    def inexact(self) -> str | None:
        """See ``CooperativeLoop``: a warning about the loaders, once."""
        return self._position.warning() or self._other_loaders.warning()

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        return super()._dump(rng if self._batches_due else self._position.rng_state(rng))

    def position(self) -> dict[str, Any]:
        """See ``CooperativeLoop``: the epoch, and where it is in its loader."""
        assert self._numbers is not None  # a checkpoint is made in the loop
        return {
            "position": self._position.state_dict(),
            "epoch": self._epoch,
            "numbers": [self._numbers.start, self._numbers.step],
            "variables": self._locals.kept(self._caller, self._named.stored(), self._named.kept),
            "without_batches": self._without_batches,
            "epoch_rng": self._epoch_rng,
            "epoch_state": self._epoch_state,
            "epoch_code": self._epoch_code,
            "epoch_modules": None if self._batches_due else self._epoch_modules,
            "copies_modules": self._early_calls.at_once,
            "code": self._code.states(self._caller),
            **self._other_loaders.state(self._position.idle(between=self._batches_due)),
        }

    def go_to(self, tree: dict[str, Any]) -> None:
        """See ``CooperativeLoop``: the loader goes there when its next pass begins."""
        self._epoch, self._without_batches = tree["epoch"], tree["without_batches"]
        start, step = tree["numbers"]
        self._first_numbers = start, step
        self._early_calls.at_once = tree["copies_modules"]
        self._position.misjudged = tree["position"].get("misjudged", False)

    def _load_copy(self) -> None:
        """Load what the code before the loop may use; the rest is loaded when that begins.

        Copies of the first weights that this code makes are then the same in each process.
        """
        if self._restored is None:
            return
        try:
            self._named.load_kept(frozen(self._restored["named"]))
        except SuspendError:  # a value is a part of a state that is to be loaded
            super()._load_copy()
        else:
            self._load_position(self._restored)

    def _restore(self) -> None:
        tree = self._restored
        super()._restore()
        if tree is not None:
            if self._batches_due:  # else they were restored with the position
                self._position.streams.load_state_dict(tree["position"]["streams"])
            self._other_loaders.load_state(tree)

    def leave(self) -> None:
        """See ``CooperativeLoop``; the loaders are released, too."""
        super().leave()
        self._early_calls.end()
        self._position.leave()
        self._other_loaders.leave()


class _LoaderPasses(Generic[Batch]):
    """Stands in for a loader, or a range of epochs; its items come from a function.

    Args:
        loader: provides the length and all other attributes.
        begin: returns the items of the next pass.
    """

    def __init__(self, loader: Iterable[Batch], begin: Callable[[], Iterator[Batch]]) -> None:
        self._loader = loader
        self._begin = begin

    def __iter__(self) -> Iterator[Batch]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # of a loader without one, an error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)
