"""The user's hooks for checkpoints: they do not decide what a trial comes back with.

Those of a module and of callbacks are written for the files that ``ModelCheckpoint`` makes. They
may thin these out, round them, replace their weights by averages or reset them: a fit that begins
with such a file is another training.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from optuna_hermes._lightning._namespace import ROOTS, LightningModule, Trainer, callbacks_of, part
from optuna_hermes.errors import CheckpointError
from optuna_hermes.suspend._values._tree import NUMBERS, Reference, leaves, mapped, of_unknown_class

SAVE, LOAD = "on_save_checkpoint", "on_load_checkpoint"
_BASES = {f"{root}.{name}" for root in ROOTS for name in ("core.hooks", "callbacks.callback")}
"""Modules of Lightning's own hooks, which do nothing."""

_MADE = "made as "
"""Begins the names of references to objects that each process makes."""


@contextlib.contextmanager
def without_hook(owners: Iterable[Any], hook: str) -> Iterator[None]:
    """Leave a hook of a module or of callbacks out of what Lightning does within."""
    # Not for the whole fit: attributes are saved and watched.
    changed = [(each, {n: own for n, own in vars(each).items() if n == hook}) for each in owners]
    for each, _ in changed:
        vars(each)[hook] = _nothing
    try:
        yield
    finally:
        for each, own in changed:
            vars(each).pop(hook, None)
            vars(each).update(own)


def savers(trainer: Trainer) -> list[Any]:
    """The module and callbacks whose ``on_save_checkpoint`` does something."""
    return [each for each in _owners(trainer) if _does_something(each, SAVE)]


def saved_by_hooks(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """A checkpoint as the hooks would have it in a file; None if nobody would read that."""
    module, saving = trainer.lightning_module, savers(trainer)
    # A hook that exports weights to other files mostly has no counterpart.
    if not loads(module):
        saving = [each for each in saving if each is not module]
    if not (saving and any(_does_something(each, LOAD) for each in _owners(trainer))):
        return None
    copy, call = _copy(checkpoint), part(trainer, "trainer.call")
    call._call_callbacks_on_save_checkpoint(trainer, copy)
    if module in saving:
        call._call_lightning_module_hook(trainer, SAVE, copy)
    return copy


def with_names(hooked: Any) -> Any:
    """A copy of the hooks' values, with the class in the place of each object of unknown class.

    Such objects are mostly those that each process makes: losses, scalers of the data, transforms.
    """
    kind = type(hooked)
    if kind is dict:
        return {key: with_names(item) for key, item in hooked.items()}
    if kind in (list, tuple) and not NUMBERS.issuperset(map(type, hooked)):
        return kind(map(with_names, hooked))
    return Reference(name=_name(hooked)) if of_unknown_class(hooked) else hooked


def with_objects(trainer: Trainer, hooked: dict[str, Any], checkpoint: dict[str, Any]) -> Any:
    """A copy of the hooks' values, with the objects that they put there in this process.

    Raises:
        CheckpointError: they put none of its class in the place of one.
    """
    if not any(map(_is_name, leaves(hooked))):
        return hooked
    with without_hook(savers(trainer), SAVE):  # for hyper-parameters, which may be objects as well
        begun = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    return _filled(hooked, saved_by_hooks(trainer, {**begun, **checkpoint}), ())


def _filled(hooked: Any, made: Any, place: tuple[Any, ...]) -> Any:
    kind = type(hooked)
    others: Any
    if kind is dict:
        others = made if type(made) is dict else {}
        return {key: _filled(item, others.get(key), (*place, key)) for key, item in hooked.items()}
    if kind in (list, tuple) and not NUMBERS.issuperset(map(type, hooked)):
        others = made if type(made) is kind else ()
        pairs = itertools.zip_longest(hooked, others[: len(hooked)])
        return kind(_filled(*pair, (*place, index)) for index, pair in enumerate(pairs))
    if _is_name(hooked) and hooked.name != _name(made):
        raise CheckpointError(
            f"What {SAVE} puts into a checkpoint as {' / '.join(map(str, place))} must be plain "
            f"values, or an object that each process makes before the fit, but it was "
            f"{hooked.name.removeprefix(_MADE)} and is now {_name(made).removeprefix(_MADE)}: make "
            "it before the fit, or write plain values."
        )
    return made if _is_name(hooked) else hooked


def _name(value: Any) -> str:
    # Not its module: that of a script is __main__ or not, by how it was started.
    return f"{_MADE}{type(value).__qualname__}"


def _is_name(value: Any) -> bool:
    return type(value) is Reference and value.name.startswith(_MADE)


def load_by_module(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Call the module's ``on_load_checkpoint`` with what is in a file for it."""
    if loads(trainer.lightning_module):
        call = part(trainer, "trainer.call")
        call._call_lightning_module_hook(trainer, LOAD, _copy(checkpoint))


def load_by_callbacks(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Call the callbacks' ``on_load_checkpoint`` with what is in a file for them."""
    part(trainer, "trainer.call")._call_callbacks_on_load_checkpoint(trainer, _copy(checkpoint))


def loads(module: LightningModule) -> bool:
    """True if a module has an ``on_load_checkpoint`` of its own."""
    return _does_something(module, LOAD)


def _owners(trainer: Trainer) -> list[Any]:
    return [trainer.lightning_module, *callbacks_of(trainer)]


def _copy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint, but for its tensors."""
    copy: dict[str, Any] = mapped(checkpoint, lambda leaf: leaf)
    return copy


def _does_something(owner: Any, hook: str) -> bool:
    return getattr(owner, hook).__module__ not in _BASES


def _nothing(*args: Any) -> None:
    """Do nothing, in the place of a hook."""
