"""Log folders of a trial: one for all its processes, in which nothing is logged twice.

A logger of Lightning begins a new version in every process, before any callback is called. So the
next process points it back to the files of the first one, and once the trial is at the point of its
checkpoint, cuts off what was logged after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from optuna_hermes._lightning._namespace import (
    CSVLogger,
    TensorBoardLogger,
    Trainer,
    parts,
    wrap,
)

_PLACE = ("_root_dir", "_save_dir", "_name", "_version", "_sub_dir")
_COUNTED = "_hermes_counted"
"""An attribute of loggers that were given no version."""
_KINDS: dict[str, type[Any]] = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}

log = logging.getLogger(__name__)


def watch_versions() -> None:
    """Have loggers that are made from now on take versions which no other process has."""
    for loggers in parts("loggers"):
        for each in (loggers.CSVLogger, loggers.TensorBoardLogger):
            wrap(each, "_get_next_version", _take_version, None)


def _take_version(logger: Any, next_version: Callable[[Any], int], argument: None, /) -> int:
    # Lightning counts the folders that are there: trials that begin at once would log into one, and
    # ``_moved`` could remove it while the other trial begins to write.
    version = next_version(logger)
    vars(logger)[_COUNTED] = True
    # A logger expands ``~`` and variables when it writes.
    elsewhere = any(each in logger.root_dir for each in ("://", "~", "$"))
    if elsewhere or getattr(rank_zero_only, "rank", None):
        return version
    with contextlib.suppress(OSError):  # the logger says what is wrong with the folder
        os.makedirs(logger.root_dir, exist_ok=True)
        while not _is_made(os.path.join(logger.root_dir, f"version_{version}")):
            version += 1
    return version


def _is_made(folder: str) -> bool:
    try:
        os.mkdir(folder)
    except FileExistsError:
        return False
    return True


def own_root(trainer: Trainer, folder: Path) -> None:
    """Give a trial its own root folder if its Trainer uses the working directory; for ``setup``.

    Lightning then also logs and saves there by default, so that no trial finds another's files.
    """
    working, root = trainer.default_root_dir, str(folder)
    if working != os.getcwd():
        return
    with _profiler_follows(trainer):
        vars(trainer)["_default_root_dir"] = root
        for _, logger, logs in _file_loggers(trainer):
            # Loggers that ``restore_loggers`` has pointed elsewhere stay there, as the script's do.
            if logger.save_dir == working and _is_lightning_s(logger):
                place = {"_root_dir": root, "_save_dir": root, "_version": None}
                with _moved(logger, place):
                    logs.follow(logger)


def _is_lightning_s(logger: Any) -> bool:
    """True for a logger that Lightning has made, or one of a script that is like it."""
    # A number, as Lightning's SLURMEnvironment returns it.
    of_job = repr(logger.version) == os.environ.get("SLURM_JOB_ID")
    return logger.name == "lightning_logs" and (of_job or _COUNTED in vars(logger))


def logger_state(trainer: Trainer) -> dict[str, Any]:
    """State of the CSV and TensorBoard loggers and their files, in the order of the loggers."""
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
    """Point the loggers to the files of the earlier process; for ``setup``."""
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
    """Drop what was logged after the checkpoint; to be called before the first fetch."""
    for logger, logs, saved in _known(trainer, state):
        if logger.log_dir == saved["log_dir"]:
            logs.rewind(logger, saved)


def leave_open(trainer: Trainer) -> None:
    """Keep loggers from noting a failure, for a trial that goes on in another process."""
    others = [each for each in trainer.loggers if not isinstance(each, tuple(_KINDS.values()))]
    # Files first: others may still send when the next process begins, and cuts these.
    for logger in (*(logger for _, logger, _ in _file_loggers(trainer)), *others):
        try:
            _send(logger)
        except Exception:
            log.warning("%s could not send what it has.", type(logger).__name__, exc_info=True)
    for logger in others:  # those of files have no status
        vars(logger)["finalize"] = lambda status: None


def _send(logger: Any) -> None:
    """Let a logger write or send what it has: what sends for it ends with this process."""
    logger.save()
    experiment = vars(logger).get("_experiment")
    for name in ("flush", "end", "finish"):  # of Comet, W&B and SwanLab
        if callable(method := getattr(experiment, name, None)):
            method()


def _file_loggers(trainer: Trainer) -> list[tuple[str, Any, Any]]:
    """The loggers that write local files in this process: kind, logger and module for the kind."""
    return [
        (kind, logger, _logs_of(kind))
        for logger in trainer.loggers
        for kind, known in _KINDS.items()
        if isinstance(logger, known) and logger._experiment is not None
        if "://" not in logger._root_dir
    ]


def _logs_of(kind: str) -> Any:
    """The module for a kind of files, loaded on first use: a trial has one kind of logger."""
    if kind == "csv":
        from optuna_hermes._lightning import _csv_logs

        return _csv_logs
    from optuna_hermes._lightning import _event_logs

    return _event_logs


def _known(trainer: Trainer, state: dict[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The loggers with their states, without those whose kinds differ from the saved ones."""
    for (kind, logger, logs), saved in zip(_file_loggers(trainer), state["loggers"], strict=False):
        if kind == saved["kind"]:
            yield logger, logs, saved


@contextlib.contextmanager
def _moved(logger: Any, place: dict[str, Any]) -> Iterator[None]:
    """Move a logger to another place, and remove the folder before if it is empty."""
    begun = Path(logger.log_dir)
    vars(logger).update({name: value for name, value in place.items() if name in vars(logger)})
    yield
    if begun != Path(logger.log_dir):
        # Only an empty folder: others hold what a user has put there. Its parent stays, where
        # another trial may be about to make one.
        with contextlib.suppress(OSError):
            begun.rmdir()
            if vars(logger).get("_sub_dir"):  # its version's folder is one above
                begun.parent.rmdir()


@contextlib.contextmanager
def _profiler_follows(trainer: Trainer) -> Iterator[None]:
    """Let a profiler follow the first logger's folder, which it took before any callback ran."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # it is set by a function
    follows = profiler.dirpath is not None and profiler.dirpath == trainer.log_dir
    yield
    if follows:
        profiler.dirpath = trainer.log_dir
