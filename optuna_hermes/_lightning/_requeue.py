"""Lightning's requeueing of a job of SLURM, which is the study's business and not a trial's."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from optuna_hermes._lightning._namespace import Trainer
from optuna_hermes.suspend._tiers._saver import is_first

log = logging.getLogger(__name__)

_SWITCHED_OFF = (
    "Lightning's requeueing under SLURM is switched off: it saves one trial, and other trials of "
    "the next job would load it. `optuna-hermes optimize --requeue` suspends all, and requeues."
)


def switch_requeueing_off(trainer: Trainer, folder: Path | None) -> None:
    """Let a Trainer set no handler for SLURM's signal, and say so once; for ``setup``."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return
    environment.auto_requeue = False  # type: ignore[attr-defined]  # it is a SLURMEnvironment
    if folder is None:
        _say_once()
    elif is_first(folder.parent, _SWITCHED_OFF):
        log.warning(_SWITCHED_OFF)


@functools.cache
def _say_once() -> None:
    log.warning(_SWITCHED_OFF)
