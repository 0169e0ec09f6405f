"""The cooperative loop of a Hugging Face ``Trainer``, hooked into its fetching of batches."""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, has_length
from transformers.utils.hub import PushToHubMixin

from optuna_hermes.cooperative import CooperativeLoop
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import Session, rng_state, set_rng_state
from optuna_hermes.suspend._loaders._attributes import LoaderAttributes
from optuna_hermes.suspend._loaders._position import LoaderPosition
from optuna_hermes.suspend._loaders._sampler import ResumableSampler, idle
from optuna_hermes.suspend._loop_code._code import classes_of
from optuna_hermes.suspend._modules._named_objects import NamedObjects
from optuna_hermes.suspend._modules._unsaved import Attributes, is_private, set_by
from optuna_hermes.suspend._values._fingerprint import CODE, DATA, outside
from optuna_hermes.suspend._values._generators import (
    FoundGenerators,
    GeneratorOwner,
    holders_in,
    set_states,
)

Fetch = Callable[[Iterator[Any], int, Any], Any]
"""``Trainer.get_batch_samples``: takes an iterator, a number of batches and a device."""

_STATE_FILE = "trainer_state.json"
_COUNTERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
"""Counters of a ``Trainer`` that its logged values are computed from."""
_STEPS = ("logging_steps", "eval_steps", "save_steps")
_LIMITS = ("max_steps", "num_train_epochs", *_STEPS)
"""Parts of a ``TrainerState`` that are the script's, unless the training changes them."""
_TRAINED = ("loss", "grad_norm", "learning_rate")
"""Values that a ``Trainer`` logs of its training."""
_GIVEN = (
    "data_collator",
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
)
"""Attributes with the functions and objects that a ``Trainer`` calls."""
_LIBRARIES = ("transformers.", "accelerate.", "optuna_hermes.")
_DATA_LIBRARIES = ("datasets.", "evaluate.", "evaluate_modules.", "tokenizers.")


class HuggingFaceLoop(CooperativeLoop):
    """The steps of one training."""

    maker: ClassVar[str] = "HermesCallback.train()"
    instead: ClassVar[str] = "train the other Trainers without it"
    remedy: ClassVar[str] = (
        "Keep it in numbers, arrays, tensors, lists and dictionaries, give what holds it "
        "state_dict() and load_state_dict(), or give the callback state()."
    )

    def __init__(
        self,
        trial: Any,
        trainer: Trainer,
        session: Session | None,
        found: tuple[Checkpoint, Any] | None,
        monitor: str,
    ) -> None:
        self.begun = False
        """True once the first step has begun."""
        self._trainer = trainer
        self._found = found
        self._monitor = monitor
        self._position = LoaderPosition(lambda: (), f"trial {getattr(trial, 'number', '?')}")
        self._epoch_rng: dict[str, Any] = {}
        self._epoch = -1
        self._left_out = 0  # steps, by epochs that a callback has ended early
        self._trainer_iterator: Any = None
        self._own_iterator: Iterator[Any] = iter(())
        self._fetched = 0
        self._data_seed: int | None = None
        self._code = FoundGenerators()
        self._evaluation: dict[str, ResumableSampler | LoaderAttributes] = {}
        self._evaluation_before: dict[str, Any] = {}
        owners = {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "loop": _Loop(trainer),
        }
        if trainer.accelerator.scaler is not None:
            owners["scaler"] = trainer.accelerator.scaler
        others = {} if session is None else _attributes_of(trainer)
        super().__init__(trial, NamedObjects(owners, others=others), session)
        if self._session is not None:
            self._named.unsaved.start()
        if self._has_checkpoints:
            get = functools.partial(self._evaluation_loader, trainer.get_eval_dataloader)
            vars(trainer)["get_eval_dataloader"] = get

    def next_step(self, fetch: Fetch, iterator: Any, number: int, device: Any) -> Any:
        """Yield the device if asked to; then fetch the batches of the next step."""
        if iterator is not self._trainer_iterator:
            self._begin_epoch(iterator)
        self._position.batch += self._fetched
        self.begun = True
        self.switch_point()
        samples, items = fetch(self._own_iterator, number, device)
        self._fetched = len(samples)
        return samples, items

    def _begin_epoch(self, iterator: Any) -> None:
        """Iterate over the plain loader inside of Accelerate's."""
        # Accelerate's fetches a batch ahead, and so draws random numbers before the point where
        # the trial may be suspended.
        self._trainer_iterator, self._fetched = iterator, 0
        loader: Any = self._trainer.callback_handler.train_dataloader
        restored, session = self._restored, self._session
        if restored is not None:
            set_rng_state(restored["epoch_rng"])
            # Before the loader, whose data may draw from the same.
            set_states(_code_of(self._trainer), restored["code"])
        if session is not None:
            self._epoch_rng = rng_state()
        if restored is not None:
            self._epoch, self._left_out = restored["number"], restored["left_out"]
        else:
            self._epoch += 1  # not by the Trainer's count, which is less where epochs end early
            if has_length(loader):
                steps = -(-len(loader) // self._trainer.args.gradient_accumulation_steps)
                self._left_out = self._epoch * steps - self._trainer.state.global_step
        # The Trainer does it, but not for a loader whose first batches it leaves out.
        if restored is not None and hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epoch)
        place = None if restored is None else restored["position"]
        inner = getattr(loader, "base_dataloader", loader)
        problem: str | None = None
        if not ResumableSampler.fits(inner):
            self._own_iterator, problem = iterator, "its training data are no map-style data set"
        else:
            self._seed(inner)
            if self._has_checkpoints:
                self._own_iterator = self._position.iterate(inner, place)
                problem = self._position.problem
            else:  # without hooks, in which threads of a plain study would meet
                self._own_iterator = iter(inner)
        self.begin(problem)

    def _seed(self, loader: Any) -> None:
        """Let the sampler draw what it would have drawn in the trial's first process."""
        sampler = getattr(loader.batch_sampler, "sampler", None)
        if not isinstance(sampler, SeedableRandomSampler):
            return
        # It would make one with its first number; either is seeded before each epoch.
        if sampler.generator is None:
            sampler.generator = torch.Generator()
        if self._restored is not None:
            sampler.initial_seed = self._restored["data_seed"]
        self._data_seed = sampler.initial_seed

    def _evaluation_loader(self, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = get(*args, **kwargs)
        # The Trainer has here, by name, those whose workers persist from one to the next.
        for name, each in vars(self._trainer).get("_eval_dataloaders", {}).items():
            if name not in self._evaluation:
                self._evaluation[name] = idle(getattr(each, "base_dataloader", each))
                self._restore_evaluation(name)
        return loader

    def _restore_evaluation(self, name: str) -> None:
        if name in self._evaluation_before:
            self._evaluation[name].load_idle_state(self._evaluation_before[name])

    def _find(self, session: Session) -> tuple[Checkpoint, Any] | None:
        found, self._found = self._found, None
        return found

    def units_left(self) -> int | None:
        """Units until the end; None if reports follow neither the Trainer's steps nor epochs."""
        state, args = self._trainer.state, self._trainer.args
        now, end = state.global_step, state.max_steps
        evaluated, trained = self._monitor.startswith("eval_"), self._monitor in _TRAINED
        strategy = args.eval_strategy if evaluated else args.logging_strategy
        if not (evaluated or trained) or strategy == IntervalStrategy.NO:
            if not now:  # logged within the first step
                return None
            left, rest = divmod((end - now) * self._unit, now)
            return left if rest == 0 else None
        if strategy == IntervalStrategy.STEPS:
            if trained:
                return end // state.logging_steps - now // state.logging_steps
            # The last step is evaluated, too.
            return math.ceil(end / state.eval_steps) - math.ceil(now / state.eval_steps)
        is_sized = has_length(self._trainer.callback_handler.train_dataloader)
        return state.num_train_epochs - self._epoch - 1 if is_sized else None

    def inexact(self) -> str | None:
        return self._position.warning()

    def position(self) -> dict[str, Any]:
        return {
            "position": self._position.state_dict(),
            # The Trainer finds its epoch by it, as if each one before had had all its steps.
            "step": self._trainer.state.global_step + self._left_out,
            "epoch_rng": self._epoch_rng,
            "number": self._epoch,
            "left_out": self._left_out,
            "data_seed": self._data_seed,
            "code": self._code.states(functools.partial(_code_of, self._trainer)),
            "evaluation": {
                **self._evaluation_before,
                **{name: each.idle_state() for name, each in self._evaluation.items()},
            },
        }

    def go_to(self, tree: dict[str, Any]) -> None:
        """Restore the loaders for evaluation; the trainer got its step from ``position``."""
        self._evaluation_before = tree["evaluation"]
        for name in self._evaluation:
            self._restore_evaluation(name)

    def leave(self) -> None:
        super().leave()
        self._position.leave()
        vars(self._trainer).pop("get_eval_dataloader", None)
        for each in self._evaluation.values():
            each.unwrap()


class _Loop:
    """State of a trainer beside its model: counters, and callbacks that export a state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        for name, value in self._limits().items():
            if 0 < value < 1:  # of all steps, as in the arguments: see ``position``
                setattr(trainer.state, name, math.ceil(value * trainer.state.max_steps))
        self._first = self._limits()
        self._restored: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {field.name: getattr(trainer.state, field.name) for field in fields(TrainerState)}
        del state["stateful_callbacks"]
        return {
            "state": state,
            "limits": self._changed(),
            "loss": trainer._tr_loss,
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "callbacks": [each.state()["attributes"] for each in self.remembering()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        self._restored = saved["limits"]
        others = {name: each for name, each in saved["state"].items() if name not in _LIMITS}
        vars(trainer.state).update(others | self._restored)
        trainer._tr_loss = saved["loss"].to(trainer.args.device, copy=True)
        vars(trainer).update(saved["counters"])
        for each, attributes in zip(self.remembering(), saved["callbacks"], strict=True):
            vars(each).update(attributes)

    def _limits(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.state, name) for name in _LIMITS}

    def _changed(self) -> dict[str, Any]:
        """The limits that the training has changed, in this process or in an earlier one."""
        limits = self._limits().items()
        return {n: each for n, each in limits if n in self._restored or each != self._first[n]}

    def remembering(self) -> list[ExportableState]:
        every = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in every if isinstance(each, ExportableState)]


def _attributes_of(trainer: Trainer) -> dict[str, Attributes]:
    """Attributes of a trainer, its arguments, and the user's callbacks and other code it calls."""
    owners = {name: getattr(trainer, name, None) for name in _GIVEN}
    for number, callback in enumerate(trainer.callback_handler.callbacks):
        if not _has_own_state(callback):
            owners[f"callback {number} {type(callback).__qualname__}"] = callback
    own = {key: each for key, each in owners.items() if _is_a_user_s(each)}
    given, known = _given_to_callbacks(trainer), _known(trainer)
    parts = {
        key: Attributes(type(each).__qualname__, each, _ignores(type(each), given), known)
        for key, each in {**own, "trainer": trainer}.items()
    }
    return {**parts, "args": Attributes("args", trainer.args, is_private, known)}


def _code_of(trainer: Trainer) -> list[GeneratorOwner]:
    """The generators that the code of a training draws from, and those of evaluation's data.

    This is the code of classes of the user's, and of the functions that the trainer is given.
    """
    model: Any = trainer.model
    given = {name: getattr(trainer, name, None) for name in _GIVEN}
    functions = [GeneratorOwner(n, each) for n, each in given.items() if isinstance(each, CODE)]
    data = GeneratorOwner("eval_dataset", trainer.eval_dataset)
    callbacks = trainer.callback_handler.callbacks
    every = (trainer, *model.modules(), *callbacks, *given.values())
    return holders_in(*functions, *classes_of(every), data)


def _has_own_state(callback: object) -> bool:
    """True if a user's class says what the state of its callbacks is."""
    kinds = (kind for kind in type(callback).__mro__ if "state" in vars(kind))
    return isinstance(callback, ExportableState) and not next(kinds).__module__.startswith(
        _LIBRARIES
    )


def _is_a_user_s(each: object) -> bool:
    is_library_s = type(each).__module__.startswith(_LIBRARIES)
    return hasattr(each, "__dict__") and not outside(each) and not is_library_s


def _ignores(kind: type, given: set[int]) -> Callable[[str, Any], bool]:
    names = set_by(kind, _LIBRARIES)
    of_trainer = issubclass(kind, Trainer)

    def ignores(name: str, value: Any) -> bool:
        replaced = of_trainer and hasattr(Trainer, name)  # a method, by one of ours
        return name in names or replaced or id(value) in given or _is_apart(value)

    return ignores


def _is_apart(value: object) -> bool:
    """True for data, and for tokenizers and their like, which serve a training unchanged."""
    if isinstance(value, nn.Module):
        return False
    apart = isinstance(value, (*DATA, PushToHubMixin))
    return apart or type(value).__module__.startswith(_DATA_LIBRARIES)


def _given_to_callbacks(trainer: Trainer) -> set[int]:
    """Ids of a trainer and of the objects that it gives to its callbacks in each event."""
    handler = trainer.callback_handler
    every = [trainer, trainer.args, trainer.state, trainer.control, handler, *handler.callbacks]
    every += [trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler]
    return {id(each) for each in every if each is not None}


def _known(trainer: Trainer) -> set[int]:
    """Ids of objects that are not the user's own, or that are saved with the trainer."""
    model: Any = trainer.model
    wrapped = (trainer.optimizer, trainer.lr_scheduler)
    inner = [getattr(each, "optimizer", getattr(each, "scheduler", None)) for each in wrapped]
    every = [*model.modules(), *model.parameters(), *model.buffers(), *inner]
    return _given_to_callbacks(trainer) | {id(each) for each in every if each is not None}


@contextlib.contextmanager
def own_batches(trainer: Any, next_step: Callable[[Fetch, Any, int, Any], Any]) -> Iterator[None]:
    """Let ``next_step``, which gets the original function, fetch the batches of a step."""
    original = trainer.get_batch_samples
    trainer.get_batch_samples = functools.partial(next_step, original)
    try:
        yield
    finally:
        del trainer.get_batch_samples


@contextlib.contextmanager
def position(trainer: Any, found: tuple[Checkpoint, Any] | None) -> Iterator[str | None]:
    """A folder in the trainer's checkpoint format that holds the next step, and nothing else."""
    if found is None:
        yield None
        return
    # With ignore_data_skip the trainer would count the steps of the resumed epoch from 0.
    skips, trainer.args.ignore_data_skip = trainer.args.ignore_data_skip, False
    trainer._load_from_checkpoint = lambda *args, **kwargs: None  # weights come with the rest
    try:
        with tempfile.TemporaryDirectory(prefix="hermes-") as folder:
            loop = found[1]["named"]["owners"]["loop"]["state"]["state"]
            plain = {"global_step": found[1]["step"]}
            plain |= {name: loop[name] for name in ("epoch", "train_batch_size")}
            # Of the script; the Trainer sets the other limits, but of these takes what is there.
            steps = {name: getattr(trainer.args, name) for name in _STEPS}
            plain |= {name: each for name, each in steps.items() if each is not None}
            plain["stateful_callbacks"] = _Loop(trainer).remembering()
            TrainerState(**plain).save_to_json(str(Path(folder) / _STATE_FILE))
            yield folder
    finally:
        trainer.args.ignore_data_skip = skips
        del trainer._load_from_checkpoint
