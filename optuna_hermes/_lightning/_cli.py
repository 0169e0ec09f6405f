"""The callback by which Lightning's command line saves its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from optuna_hermes._lightning._namespace import ROOTS, LightningModule, Trainer, wrap

Begin = Callable[[Any, Trainer, LightningModule], bool]
"""Sets a trainer's ``HermesCallback`` up before a callback; True if its trial goes on."""


def watch_configurations(begin: Begin) -> None:
    """Wrap the callback, for trainers of trials that go on: their configuration is there.

    It refuses a file that is there, and it may come before the callback that finds the trial's
    checkpoint and log folder.
    """
    for root in ROOTS:
        module = sys.modules.get(f"{root}.cli")  # it takes long to import, and few have it
        if module is not None:
            wrap(module.SaveConfigCallback, "setup", _set_up, begin)


def _set_up(
    callback: Any,
    set_up: Callable[..., None],
    begin: Begin,
    /,
    trainer: Trainer,
    pl_module: LightningModule,
    stage: str,
) -> None:
    if stage == "fit" and begin(callback, trainer, pl_module):
        callback.already_saved = True
    set_up(callback, trainer, pl_module, stage)
