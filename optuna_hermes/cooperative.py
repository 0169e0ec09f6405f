"""The cooperative loop: the way to let trials of another framework share devices.

A training is a ``CooperativeLoop`` that says where it is, can go there again, and calls
``switch_point`` wherever another trial may have its device: between two batches, rounds or steps.
The loops of Lightning, plain PyTorch, Hugging Face, XGBoost and LightGBM are made of it.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from optuna_hermes._extras import needed
from optuna_hermes._optuna import (
    no_trial,
    on_report,
    pruned,
    report,
    reported_steps,
    session_of,
    settle_reports,
    should_prune,
    sign,
)
from optuna_hermes.errors import CheckpointError, InvalidInputError, SuspendError, require
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import (
    Session,
    kept_rng,
    read,
    rng_state,
    set_rng_state,
)
from optuna_hermes.suspend._modules._named_objects import NamedObjects
from optuna_hermes.suspend._tiers._accelerators import used_accelerator
from optuna_hermes.suspend._tiers._saver import (
    Saver,
    warn_of_inexact,
    warn_of_lost,
    warn_of_memory,
)
from optuna_hermes.suspend._tiers._tensor_storages import Gauge, settled
from optuna_hermes.suspend._values._tree import frozen

__all__ = ["CooperativeLoop", "on_report", "session_of"]

_BEAT_SECONDS = 1.0
_SAVE_SHARE = 10
"""The training goes on for this many times what a save took, before the next one."""
_SHORT_SAVE_SECONDS = 0.25
"""A save that takes less may be followed by the next one at once."""

log = logging.getLogger(__name__)

_loops: weakref.WeakKeyDictionary[Session, type[CooperativeLoop]] = weakref.WeakKeyDictionary()
"""The kinds of the loops that sessions have."""


class CooperativeLoop:
    """A training that reports values, and yields its device and resumes at clean points.

    A subclass returns its position from ``position``, takes it up again in ``go_to``, calls
    ``begin`` before the first clean point, ``switch_point`` at each of them, and ``leave`` at the
    end. The random states of Python, NumPy and torch are kept for it.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        objects: all objects that the training changes, by names of your choice, each with
            ``state_dict`` and ``load_state_dict``.
        session: None for that of the trial, which it has if its trials are scheduled.

    Raises:
        InvalidInputError: an object lacks these methods, or this is no trial, or one that has such
            a loop already.
        CheckpointError: the trial's checkpoints cannot be used.
    """

    maker: ClassVar[str] = "suspendable()"
    """The user's call that makes it, as messages name it."""
    instead: ClassVar[str] = "name all objects in one call"
    """Advice to who makes a second one."""
    remedy: ClassVar[str] = "Give what holds it state_dict() and load_state_dict()."
    """Advice about values that no checkpoint holds."""
    movable: ClassVar[bool] = True
    """True if it holds only torch's tensors on its device, which may be moved."""
    _begins_late: ClassVar[bool] = False
    """True if it claims its session by ``_claim`` itself, not when it is made."""

    def __init__(
        self,
        trial: Any,
        objects: NamedObjects | Mapping[str, Any],
        session: Session | None = None,
    ) -> None:
        # Scripts train with the best parameters in the loop that has tuned them.
        trial = no_trial() if trial is None else trial
        require(
            hasattr(trial, "should_prune"),
            f"{self.maker} must be given the trial first",
            trial,
            "write trial, which Optuna gives the objective",
        )
        self.value: float | None = None
        """The value reported last."""
        self.can_store = False
        """True if the trial can be suspended to disk."""
        self._trial = trial
        self._name = f"trial {getattr(trial, 'number', '?')}"
        named = objects if isinstance(objects, NamedObjects) else NamedObjects(dict(objects))
        self._named = named
        self._session: Session | None = None
        self._monitored = ""
        self._unit = 0
        self._reported: frozenset[int] = frozenset()
        self._restored: dict[str, Any] | None = None
        self._restored_path = ""
        self._saver: Saver | None = None
        self._begun = self._unsaved = self._saved_here = False
        self._warned_of_inexact = self._warned_of_kernels = False
        self._advised: set[str] = set()
        self._gauge = Gauge()
        self._busy = True
        self._next_beat = self._next_save = -math.inf
        self._save_seconds = 0.0
        if not self._begins_late:
            self._claim(session or session_of(trial))

    def __deepcopy__(self, memo: object) -> CooperativeLoop:
        """The loop itself: libraries train copies of a model with copies of its callbacks."""
        return self

    def _claim(self, session: Session | None) -> None:
        """Take the session, None without a broker, and find the checkpoint to resume from."""
        self._session = session
        if session is not None:
            if self._has_checkpoints:
                other = ", or `pip install safetensors`"
                with needed("Every checkpoint needs safetensors", extra="lightning", other=other):
                    # Here: without it a trial would fail once it has trained.
                    importlib.import_module("safetensors")
            self._check_single(session)
            self._reported = reported_steps(self._trial)
            self._resume(session)

    def report(self, value: float) -> None:
        """Report a value: after each epoch, or at any other time.

        Raises:
            InvalidInputError: it is no number.
            TrialPruned: the study's pruner prunes the trial.
        """
        value = self._count(value)
        if self._report_to_all(value):
            raise pruned(f"Pruned after unit {self._unit} at {self._monitored}{value}.")

    def _report_to_all(self, value: float) -> bool:
        """Report the unit that was counted last to all; return True if the trial is pruned."""
        # First: the decision is made while Optuna gets the value, and while the epoch ends.
        self._report_to_broker(value)
        # After a crash a unit may be trained again, but Optuna takes a step only once.
        if self._unit not in self._reported:
            report(self._trial, value, self._unit)
        return should_prune(self._trial)

    def _count(self, value: float) -> float:
        """Count a unit with this value."""
        # Torch warns of a loss that has a gradient, in the log of each trial.
        try:
            self.value = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._name.capitalize()} must report a number but got {value!r}: take the mean "
                "if these are several."
            ) from error
        self._unit += 1
        self._busy = self._unsaved = True
        return self.value

    def maximizes(self) -> bool | None:
        """True if a higher value is better, None if the trial belongs to no study."""
        study = getattr(self._trial, "study", None)
        return None if study is None else sign(study) < 0

    def _report_to_broker(self, value: float) -> None:
        """Report the unit that was counted last to the broker."""
        if self._session is None:
            return
        lower_is_better = sign(self._trial) * value
        self._session.report(
            unit=self._unit, step=self._unit, value=lower_is_better, units_left=self.units_left()
        )

    def beat(self) -> None:
        """Report progress; to be called within validations that take minutes."""
        session, now = self._session, time.monotonic()
        if session is not None and now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._beat(session)

    def _beat(self, session: Session) -> None:
        session.beat(self._gauge.read(self.roots()))

    # -- to be overridden ----------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """The training's position, as a tree of plain values and tensors."""
        raise NotImplementedError

    def go_to(self, tree: dict[str, Any]) -> None:
        """Take up a position that ``position`` has returned, in this or an earlier process."""
        raise NotImplementedError

    def roots(self) -> Iterable[object]:
        """Objects that lead to every tensor of the training."""
        return self._named.roots()

    def units_left(self) -> int | None:
        """Units until the end, None if unknown."""
        return None

    def can_store_here(self) -> bool:
        """False at a clean point where a trial that can be stored elsewhere cannot be stored."""
        return True

    def waits_for_next_point(self) -> bool:
        """True to go on to the next clean point: nothing can be done at this one."""
        return False

    def saves_now(self, saver: Saver) -> bool:
        """True to save the unit now, False to leave it to a later one."""
        return True

    def pause_seconds(self, save_seconds: float) -> float:
        """The least time before the next save, by what the last one took."""
        # The shorter of two: the first one imports what it needs, and each may be slow once.
        usual, self._save_seconds = min(save_seconds, self._save_seconds), save_seconds
        return _SAVE_SHARE * usual if usual > _SHORT_SAVE_SECONDS else 0.0

    def ended(self) -> bool:
        """True if the process was asked to end while the trial waits."""
        return False

    def inexact(self) -> str | None:
        """A warning about what cannot be restored exactly, None if all can; it is given once."""
        return None

    def _lost(self) -> list[str]:
        """Names of values that have changed and that no checkpoint holds."""
        return self._named.unsaved.lost

    # -- at a clean point ----------------------------------------------------------------------

    @property
    def _has_checkpoints(self) -> bool:
        """False if none is ever written or read: under plain Optuna, whose trials share loaders."""
        session = self._session
        if session is None:
            return False
        return session.checkpoint_dir is not None or bool(session.checkpoints)

    def begin(self, problem: str | None = None) -> None:
        """Prepare for the next clean point; to be called again when the answer changes.

        Args:
            problem: the reason why the trial cannot be stored from here on, None if it can.
        """
        session = self._session
        if session is None:
            return
        folder = session.checkpoint_dir
        if folder is not None and problem is None:
            problem = self._named.why_not_loadable
        if folder is not None and problem is not None:
            self._say_in_memory(problem)
        self.can_store = problem is None and folder is not None
        if self.can_store and self._saver is None:
            self._saver = self._new_saver(session)

    def _say_in_memory(self, problem: str, advice: str = "") -> None:
        """Say why the trial can only wait in memory, once with each advice on what it has done.

        On the console it is said once per study, and without the advice.
        """
        if advice in self._advised:
            return
        self._advised.add(advice)
        folder = None if self._session is None else self._session.checkpoint_dir
        if folder is not None:
            warn_of_memory(self._name, folder, problem)
        said = f" from here on: {problem}{advice}" if advice else f": {problem}."
        log.warning("%s can only wait in memory%s", self._name.capitalize(), said)

    def _new_saver(self, session: Session) -> Saver:
        # A checkpoint is never ahead of Optuna: its units are not trained, nor reported, again.
        return Saver(session, self._name, self._settle_reports)

    def _settle(self) -> None:
        """Wait until what was reported and copied is safe; to be called before a state is written.

        Raises:
            CheckpointError: the checkpoint before holds something that cannot be stored.
        """
        self._settle_reports()
        if self._saver is not None:
            self._saver.finish(wait=True)  # files are numbered in the order of states

    def _settle_reports(self) -> None:
        settle_reports(getattr(self._trial, "study", None))

    def switch_point(self) -> None:
        """Yield the device if asked to, and save the last unit; to be called at clean points.

        Raises:
            Suspended: the trial is on disk.
            CheckpointError: the trial cannot be stored.
        """
        session = self._session
        if session is None:
            return
        if self._busy or session.must_yield:
            self._yield_or_save(session)
        if time.monotonic() >= self._next_beat:
            self.beat()

    def _yield_or_save(self, session: Session) -> None:
        if not self._begun:
            self._begin_training(session)
        saver = self._saver
        if saver is not None:
            saver.finish(wait=False)
        if self.waits_for_next_point():
            session.wait_for_decision()
            return
        if not (session.must_yield or (saver is not None and saver.busy)):
            # Before the decision is waited for, which takes as long as copying a small state. If
            # the trial yields, this is its checkpoint.
            self._save()
        session.wait_for_decision()
        if session.must_yield:
            can_store = self.can_store and self.can_store_here() and not self._has_changed_shape()
            self._park(session, can_store=can_store)
        self._save()
        if saver is not None:
            saver.start()
        self._saved_here = False
        # If nothing is due, the next clean points skip this method.
        self._busy = saver is not None and (saver.busy or (self._unsaved and self.can_store))

    def _has_changed_shape(self) -> bool:
        """True if a checkpoint would not fit the named objects of the next process, said once."""
        changed = self._named.reshaped
        if changed:
            parts = "parameters, dtypes, layers or tied parts than when it was named"
            self.warn_of_shape(", ".join(changed), parts)
        return bool(changed) or self._has_unmade(self._named.unsaved.unmade())

    def _has_unmade(self, names: list[str]) -> bool:
        """True if attributes of these ``names`` keep a trial from being stored, said once."""
        if names:
            self._say_in_memory(
                f"its training has put into {', '.join(names)} what no checkpoint can hold",
                ", and what its next process would lack. Make it before the training begins (in "
                "Lightning, in setup or on_train_start), set it to None once it is done with, or "
                "give what holds it state_dict() and load_state_dict().",
            )
        return bool(names)

    def warn_of_shape(self, what: str, parts: str, advice: str = "") -> None:
        """Say once that ``what`` has other ``parts``, and what that means."""
        self._say_in_memory(
            f"{what} has other {parts}",
            f", so that its state does not fit the one that the next process makes.{advice}",
        )

    def _save(self) -> None:
        """Begin to save the unit, if it is due and can be saved here."""
        saver, began = self._saver, time.monotonic()
        if not self._unsaved or saver is None or began < self._next_save:
            return
        # Shapes last, which take long to compare: it may be due at each batch of an epoch.
        can_store = self.can_store and self.can_store_here()
        if can_store and self._has_changed_shape():
            self._unsaved = False  # asked again at the next unit
        elif can_store and self.saves_now(saver):
            asked = time.monotonic()
            settled(self.roots())  # what the device still computes is no part of the cost
            began += time.monotonic() - asked
            saver.copy(self._settled_dump(rng_state()), units=self._unit, since=began)
            self._unsaved, self._saved_here = False, True
        end = time.monotonic()
        if not self._unsaved or end - began > _SHORT_SAVE_SECONDS:  # else it was refused at once
            self._next_save = end + self.pause_seconds(end - began)

    def _begin_training(self, session: Session) -> None:
        self._begun = True
        late = self._has_trained()
        self._restore()
        self._train(session, late=late)

    def _has_trained(self) -> bool:
        """True if this process has trained before the first clean point."""
        return False

    def _train(self, session: Session, *, late: bool = False) -> None:
        session.training(can_store=self.can_store, late=late)

    def _park(self, session: Session, *, can_store: bool) -> None:
        if self._saver is not None:
            self._saver.free()  # it may be pinned, and this trial waits for long
        with kept_rng() as rng:
            session.park(_LoopCleanPoint(self, rng, can_store=can_store))
        # A save that was given up for the sake of the suspension is due again.
        if self._saver is not None and self._saver.gave_up:
            self._busy = self._unsaved = True
        self._train(session)

    # -- checkpoints ---------------------------------------------------------------------------

    def _settled_dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        # Reading a tensor waits for the current stream only, and others may still write to it.
        settled(self.roots())
        self._warn_of_kernels()
        warning = None if self._warned_of_inexact else self.inexact()
        if warning is not None:
            self._warned_of_inexact = True
            log.warning("%s: %s", self._name.capitalize(), warning)
        tree = self._dump(rng)
        assert self._session is not None
        warn_of_lost(self._name, self._session.checkpoint_dir, self._lost(), self.remedy)
        return tree

    def _warn_of_kernels(self) -> None:
        """Log what makes the device's kernels draw or round otherwise in the next process, once."""
        if self._warned_of_kernels or self._session is None:
            return
        self._warned_of_kernels = True
        used = used_accelerator()
        if used is not None:
            warn_of_inexact(self._name, self._session.checkpoint_dir, used.inexact(self.roots()))

    def _dump(self, rng: dict[str, Any]) -> dict[str, Any]:
        return {
            "named": self._named.state_dict(),
            **self.position(),
            "unit": self._unit,
            "value": self.value,
            "rng": rng,
        }

    def _find(self, session: Session) -> tuple[Checkpoint, Any] | None:
        """The newest checkpoint that can be used."""
        return read(session.checkpoints, self._name, session.checkpoint_dir, session.checkpoint_url)

    def _resume(self, session: Session) -> None:
        found = self._find(session)
        if found is None:
            return
        state, self._restored = found
        self._restored_path = state.path
        self._load_copy()

    def _load_copy(self) -> None:
        """Load the checkpoint as soon as it is found."""
        if self._restored is None:
            return
        try:
            # A copy: the tree is loaded again, right before the next batch.
            self._load(frozen(self._restored))
        except SuspendError as error:
            raise CheckpointError(
                f"Checkpoint {self._restored_path} of {self._name} must fit the objects that are "
                f"named, but {error}. Make the same ones whenever the objective runs, or close the "
                "trial with `optuna-hermes finish`."
            ) from error

    def _restore(self) -> None:
        """Load the checkpoint once more, to undo what the objective has done since."""
        tree, self._restored = self._restored, None
        if tree is not None:
            self._load(tree)
            set_rng_state(tree["rng"])
        self._named.unsaved.begin(resumed=tree is not None)

    def _load(self, tree: dict[str, Any]) -> None:
        self._named.load_state_dict(tree["named"])
        self._load_position(tree)

    def _load_position(self, tree: dict[str, Any]) -> None:
        self.go_to(tree)
        self._unit, self.value = tree["unit"], tree["value"]

    def _check_single(self, session: Session) -> None:
        if self._check_kind(session):
            raise InvalidInputError(
                f"{self.maker} must be called once in an objective, but {self._name} calls it "
                f"again: {self.instead}."
            )

    def _check_kind(self, session: Session) -> bool:
        """Refuse a second kind of loop, which would read the first one's checkpoints.

        Returns:
            True if the session has a loop of this kind already.
        """
        has_one, kind = session in _loops, _loops.setdefault(session, type(self))
        if kind is not type(self):
            raise InvalidInputError(
                f"{self._name.capitalize()} trains by {kind.maker} of one framework and by "
                f"{self.maker} of another, of which one alone can be suspended: leave one out, "
                "or train each in a study of its own."
            )
        return has_one

    def leave(self) -> None:
        """Wait until the last checkpoint is written; to be called when the training is over."""
        try:
            if self._saver is not None:
                self._saver.finish(wait=True)
        except CheckpointError as error:
            log.warning("%s", error)  # only logged: the training is over, perhaps by a worse error


class _LoopCleanPoint:
    """A trial at a clean point (``suspend.CleanPoint``)."""

    def __init__(self, loop: CooperativeLoop, rng: dict[str, Any], *, can_store: bool) -> None:
        self.name = loop._name
        self.units = loop._unit
        self.can_store = can_store
        used = used_accelerator()
        # Captured graphs hold addresses.
        self.can_offload = loop.movable and not (used is not None and used.captured_graphs())
        self.ended = loop.ended
        self.roots = loop.roots
        self._loop = loop
        self._rng = rng
        self._is_saved = loop._saved_here

    def dump(self) -> dict[str, Any]:
        return self._loop._settled_dump(self._rng)

    def waits(self) -> None:
        if self._loop._saver is not None:
            self._loop._saver.start()

    def saved(self) -> Checkpoint | None:
        self._loop._settle()
        saver = self._loop._saver
        return saver.last if saver is not None and self._is_saved else None
