"""Callbacks of Lightning whose ``setup`` asks for what a trial's callback sets up.

They may come before it: an appended callback is behind those that the Trainer was made with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from optuna_hermes._lightning._namespace import ROOTS, LightningModule, Trainer, parts, wrap

Begin = Callable[[Any, Trainer, LightningModule], bool]
"""Sets a trainer's ``HermesCallback`` up before a callback; True if its trial goes on."""


def watch_checkpoints(begin: Begin) -> None:
    """Wrap ``ModelCheckpoint``, which asks for the folder of logs: it may be the trial's own."""
    for each in parts("callbacks"):
        wrap(each.ModelCheckpoint, "setup", _set_up, begin)


def watch_configurations(begin: Begin) -> None:
    """Wrap the command line's callback, for trials that go on: their configuration is there.

    It refuses a file that is there, and asks for the folder of logs.
    """

    def begin_with_configuration(
        callback: Any, trainer: Trainer, pl_module: LightningModule
    ) -> bool:
        goes_on = begin(callback, trainer, pl_module)
        if goes_on:
            callback.already_saved = True
        return goes_on

    for root in ROOTS:
        module = sys.modules.get(f"{root}.cli")  # it takes long to import, and few have it
        if module is not None:
            wrap(module.SaveConfigCallback, "setup", _set_up, begin_with_configuration)


def _set_up(
    callback: Any,
    set_up: Callable[..., None],
    begin: Begin,
    /,
    trainer: Trainer,
    pl_module: LightningModule,
    stage: str,
) -> None:
    if stage == "fit":
        begin(callback, trainer, pl_module)
    set_up(callback, trainer, pl_module, stage)
