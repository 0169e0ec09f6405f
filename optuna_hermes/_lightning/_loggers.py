"""Where a run logs to: one folder for all its processes, and nothing there twice.

A logger of Lightning begins something new in every process, and has done so before any callback is
asked. So the next process points it back to what the first one began, and once the run stands where
its checkpoint was taken, cuts off what was logged after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from optuna_hermes._lightning import _csv_logs, _event_logs

_PLACE = ("_root_dir", "_save_dir", "_name", "_version", "_sub_dir")
_KINDS: dict[str, tuple[type[Any], Any]] = {
    "csv": (CSVLogger, _csv_logs),
    "tensorboard": (TensorBoardLogger, _event_logs),
}

log = logging.getLogger(__name__)


def own_root(trainer: Trainer, folder: Path) -> None:
    """Give a run a folder of its own, if its Trainer has the working directory; for ``setup``.

    What Lightning logs and saves by itself goes there too, and no run finds the files of another.
    To be called after ``restore_loggers``: loggers that have a place by then stay there.
    """
    working, root = trainer.default_root_dir, str(folder)
    if working != os.getcwd():
        return
    with _profiler_follows(trainer):
        vars(trainer)["_default_root_dir"] = root
        for _, logger, logs in _file_loggers(trainer):
            if logger.save_dir == working:
                place = {"_root_dir": root, "_save_dir": root, "_version": None}
                with _moved(logger, place):
                    logs.follow(logger)


def logger_state(trainer: Trainer) -> dict[str, Any]:
    """What the CSV and TensorBoard loggers have written until now, in the order of the loggers."""
    return {
        "loggers": [
            {
                "kind": kind,
                "log_dir": logger.log_dir,
                "place": {name: vars(logger)[name] for name in _PLACE if name in vars(logger)},
                **logs.state(logger),
            }
            for kind, logger, logs in _file_loggers(trainer)
        ]
    }


def restore_loggers(trainer: Trainer, state: dict[str, Any]) -> None:
    """Point the loggers to the files of the process before; for ``setup``."""
    with _profiler_follows(trainer):
        for logger, logs, saved in _known(trainer, state):
            if not Path(saved["log_dir"]).is_dir():
                log.warning(
                    "The logs in %s are not on this host: they begin anew in %s.",
                    saved["log_dir"],
                    logger.log_dir,
                )
                continue
            logs.discard(logger)
            with _moved(logger, saved["place"]):
                logs.reopen(logger, saved)


def rewind_loggers(trainer: Trainer, state: dict[str, Any]) -> None:
    """Forget what was logged after the state was taken; to be called before the first fetch."""
    for logger, logs, saved in _known(trainer, state):
        if logger.log_dir == saved["log_dir"]:
            logs.rewind(logger, saved)


def release_loggers(trainer: Trainer) -> None:
    """Remove what only a next process would need; for a run that has ended."""
    for _, logger, logs in _file_loggers(trainer):
        logs.release(logger)


def _file_loggers(trainer: Trainer) -> list[tuple[str, Any, Any]]:
    """The loggers that write to local files in this process, each with its kind."""
    return [
        (kind, logger, logs)
        for logger in trainer.loggers
        for kind, (known, logs) in _KINDS.items()
        if isinstance(logger, known) and logger._experiment is not None
        if "://" not in logger._root_dir
    ]


def _known(trainer: Trainer, state: dict[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The loggers with their states, as far as an objective has the same ones in each process."""
    for (kind, logger, logs), saved in zip(_file_loggers(trainer), state["loggers"], strict=False):
        if kind == saved["kind"]:
            yield logger, logs, saved


@contextlib.contextmanager
def _moved(logger: Any, place: dict[str, Any]) -> Iterator[None]:
    """Put a logger into another place, and let no empty folder stay in the one before."""
    begun = Path(logger.log_dir)
    vars(logger).update({name: value for name, value in place.items() if name in vars(logger)})
    yield
    if begun != Path(logger.log_dir):
        with contextlib.suppress(OSError):  # there is more in it
            begun.rmdir()
            begun.parent.rmdir()


@contextlib.contextmanager
def _profiler_follows(trainer: Trainer) -> Iterator[None]:
    """It was told the folder of the first logger before any callback was asked."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # it is set by a function
    follows = profiler.dirpath is not None and profiler.dirpath == trainer.log_dir
    yield
    if follows:
        profiler.dirpath = trainer.log_dir
