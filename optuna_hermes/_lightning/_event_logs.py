"""The event files of a TensorBoardLogger, and their restoration to an earlier point."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from optuna_hermes._lightning._namespace import TensorBoardLogger

_PREFIX = "events.out.tfevents."
_SUFFIX = "filename_suffix"

_first: weakref.WeakKeyDictionary[TensorBoardLogger, str] = weakref.WeakKeyDictionary()
"""First event file of a trial, by logger; an earlier process may have written it."""


def state(logger: TensorBoardLogger) -> dict[str, Any]:
    """The event files of all processes of the trial with their sizes, and the first one's name."""
    writer: Any = logger.experiment
    writer.flush()
    folder = Path(logger.log_dir)
    files = _files(writer)
    if files:
        _first.setdefault(logger, os.path.relpath(files[0], folder))
    first = _first.get(logger)
    # tensorboardX does not expose the name of its file: nothing can be cut then.
    if first is None:
        return {"files": {}, "first": None}
    # Marks later files as this trial's: a folder may have those of other loggers, too.
    writer.filename_suffix = _suffix(first)
    files += folder.rglob(f"*{_suffix(first)}")
    sizes = {os.path.relpath(path, folder): path.stat().st_size for path in files if path.exists()}
    return {"files": sizes, "first": first}


def follow(logger: TensorBoardLogger) -> None:
    """Move the files to the logger's present folder, after that has changed."""
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in _closed(logger):
        shutil.move(path, folder / path.name)
    _ = logger.experiment


def discard(logger: TensorBoardLogger) -> None:
    """Remove the files that were written in this process."""
    for path in _closed(logger):
        path.unlink(missing_ok=True)


def reopen(logger: TensorBoardLogger, saved: dict[str, Any]) -> None:
    """Go on with a new file in the logger's folder, with the suffix of the trial's files."""
    if saved["first"] is not None:
        _first[logger] = saved["first"]
        logger._kwargs[_SUFFIX] = _suffix(saved["first"])
    _ = logger.experiment


def rewind(logger: TensorBoardLogger, saved: dict[str, Any]) -> None:
    """Cut the files to their earlier sizes, and remove those that were begun later."""
    if saved["first"] is None:
        return
    logger.experiment.close()  # its next write opens a new file
    folder = Path(logger.log_dir)
    for path in folder.rglob(f"*{_suffix(saved['first'])}"):
        if os.path.relpath(path, folder) not in saved["files"]:
            path.unlink()
    for name, size in saved["files"].items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)


def _closed(logger: TensorBoardLogger) -> list[Path]:
    writer: Any = logger.experiment
    files = _files(writer)
    writer.close()
    logger._experiment = None
    return files


def _files(writer: Any) -> list[Path]:
    writers = (writer.all_writers or {}).values()
    names = [getattr(each.event_writer, "_file_name", None) for each in writers]
    return [Path(name) for name in names if name is not None]


def _suffix(first: str) -> str:
    return f".after.{Path(first).name.removeprefix(_PREFIX)}"
