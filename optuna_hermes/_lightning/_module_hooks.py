"""The hooks of a user's module for checkpoints: they do not decide what a trial comes back with.

They are written for the files that ``ModelCheckpoint`` makes. They may thin these out, round them
or reset them: a fit that begins with such a file is another training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from optuna_hermes._lightning._namespace import OF_LIGHTNING, LightningModule, Trainer, part
from optuna_hermes.suspend._tree import mapped

SAVE, LOAD = "on_save_checkpoint", "on_load_checkpoint"


@contextlib.contextmanager
def without_hook(module: LightningModule, hook: str) -> Iterator[None]:
    """Leave a hook out of what Lightning does within."""
    # Not for the whole fit: attributes of a module are saved and watched.
    own = {hook: vars(module)[hook]} if hook in vars(module) else {}
    vars(module)[hook] = None  # Lightning calls only what can be called
    try:
        yield
    finally:
        del vars(module)[hook]
        vars(module).update(own)


def saved_by_hook(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """A checkpoint as the module would have it in a file; None if nobody would read that."""
    module = trainer.lightning_module
    # A hook that exports weights to other files mostly has no counterpart.
    return _called(trainer, SAVE, checkpoint) if _is_own(module, SAVE) and loads(module) else None


def load_by_hook(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Call the module's ``on_load_checkpoint`` with what is in a file for it."""
    if loads(trainer.lightning_module):
        _called(trainer, LOAD, checkpoint)


def loads(module: LightningModule) -> bool:
    """True if a module has an ``on_load_checkpoint`` of its own."""
    return _is_own(module, LOAD)


def _called(trainer: Trainer, hook: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checkpoint, but for its tensors, with which a hook was called."""
    copy: dict[str, Any] = mapped(checkpoint, lambda leaf: leaf)
    part(trainer, "trainer.call")._call_lightning_module_hook(trainer, hook, copy)
    return copy


def _is_own(module: LightningModule, hook: str) -> bool:
    return not getattr(module, hook).__module__.startswith(OF_LIGHTNING)
