"""The event files of a TensorBoardLogger, put back to a moment."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

_PREFIX = "events.out.tfevents."
_SUFFIX = "filename_suffix"

_first: weakref.WeakKeyDictionary[TensorBoardLogger, str] = weakref.WeakKeyDictionary()
"""The first file that the run of a logger has written, whichever process that was."""


def state(logger: TensorBoardLogger) -> dict[str, Any]:
    """The files of all processes of the run with their sizes, and which was the first."""
    writer: Any = logger.experiment
    writer.flush()
    folder = Path(logger.log_dir)
    files = _files(writer)
    if files:
        _first.setdefault(logger, os.path.relpath(files[0], folder))
    first = _first.get(logger)
    if first is None:  # tensorboardX does not tell
        return {"files": {}, "first": None}
    writer.filename_suffix = _suffix(first)  # by which later files of this run are known
    files += folder.rglob(f"*{_suffix(first)}")
    sizes = {os.path.relpath(path, folder): path.stat().st_size for path in files if path.exists()}
    return {"files": sizes, "first": first}


def follow(logger: TensorBoardLogger) -> None:
    """Take along to the logger's folder what it has written in another one."""
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in _closed(logger):
        shutil.move(path, folder / path.name)
    _ = logger.experiment


def discard(logger: TensorBoardLogger) -> None:
    """Remove what it has written in this process."""
    for path in _closed(logger):
        path.unlink(missing_ok=True)


def reopen(logger: TensorBoardLogger, saved: dict[str, Any]) -> None:
    """Go on with a new file in the logger's folder, whose name says whom it belongs to."""
    if saved["first"] is not None:
        _first[logger] = saved["first"]
        logger._kwargs[_SUFFIX] = _suffix(saved["first"])
    _ = logger.experiment


def rewind(logger: TensorBoardLogger, saved: dict[str, Any]) -> None:
    """Cut its files to what they were, and remove those that were begun later."""
    if saved["first"] is None:
        return
    logger.experiment.close()  # it opens itself again
    folder = Path(logger.log_dir)
    for path in folder.rglob(f"*{_suffix(saved['first'])}"):
        if os.path.relpath(path, folder) not in saved["files"]:
            path.unlink()
    for name, size in saved["files"].items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)


def release(logger: TensorBoardLogger) -> None:
    """There is nothing that only a next process would need."""


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
