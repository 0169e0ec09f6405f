"""The user's hooks for checkpoints: they do not decide what a trial comes back with.

Those of a module and of callbacks are written for the files that ``ModelCheckpoint`` makes. They
may thin these out, round them, replace their weights by averages or reset them: a fit that begins
with such a file is another training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from optuna_hermes._lightning._namespace import ROOTS, LightningModule, Trainer, callbacks_of, part
from optuna_hermes.suspend._values._tree import mapped

SAVE, LOAD = "on_save_checkpoint", "on_load_checkpoint"
_BASES = {f"{root}.{name}" for root in ROOTS for name in ("core.hooks", "callbacks.callback")}
"""Modules of Lightning's own hooks, which do nothing."""


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
