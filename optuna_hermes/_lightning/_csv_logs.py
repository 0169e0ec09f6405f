"""The file of a CSVLogger, and its restoration to an earlier point."""

from __future__ import annotations

import csv
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from optuna_hermes._lightning._namespace import CSVLogger
from optuna_hermes.suspend._state import plain

_KEPT = ".metrics.csv"
"""Second name of the file: a new logger with a fixed version removes the first one.

It stays, since no fit knows that it is a trial's last: the trial may go on after an error, too.
"""

log = logging.getLogger(__name__)


def state(logger: CSVLogger) -> dict[str, Any]:
    """Its columns, the rows that are not written yet, and the size of the file."""
    writer: Any = logger.experiment
    # Rows that wait stay in memory: Lightning numbers a row without a step by how many wait.
    if not plain(writer.metrics):
        writer.save()
    file = Path(writer.metrics_file_path)
    _keep(file)
    return {
        "columns": list(writer.metrics_keys),
        "rows": [dict(row) for row in writer.metrics],
        "size": file.stat().st_size if file.exists() else 0,
    }


def follow(logger: CSVLogger) -> None:
    """Let the writer go on in the logger's present folder, after that has changed."""
    # The same writer, in another place: a new one would remove the file.
    writer: Any = logger.experiment
    before, writer.log_dir = Path(writer.log_dir), logger.log_dir
    writer.metrics_file_path = os.path.join(writer.log_dir, writer.NAME_METRICS_FILE)
    os.makedirs(writer.log_dir, exist_ok=True)
    if writer.hparams and before != Path(writer.log_dir):
        (before / writer.NAME_HPARAMS_FILE).unlink(missing_ok=True)
        writer.log_hparams({})


def discard(logger: CSVLogger) -> None:
    """Do nothing: ``rewind`` drops what was logged in this process."""


def reopen(logger: CSVLogger, saved: dict[str, Any]) -> None:
    """Go on with the file in the logger's folder, for ``rewind`` to cut."""
    follow(logger)
    writer: Any = logger.experiment
    writer.metrics_keys = list(saved["columns"])
    file = Path(writer.metrics_file_path)
    kept = file.with_name(_KEPT)
    if kept.exists() and not file.exists():
        shutil.copyfile(kept, file)


def rewind(logger: CSVLogger, saved: dict[str, Any]) -> None:
    """Cut the file to its earlier size, without columns that were added later."""
    writer: Any = logger.experiment
    writer.metrics = [dict(row) for row in saved["rows"]]
    writer.metrics_keys = list(saved["columns"])
    file = Path(writer.metrics_file_path)
    if saved["size"] == 0:
        file.unlink(missing_ok=True)
        return
    if not file.exists():
        log.warning("The metrics in %s are gone: it begins anew.", file)
        return
    partial = file.with_name(f"{_KEPT}.partial")
    with file.open(newline="") as old, partial.open("w", newline="") as new:
        rows = csv.DictWriter(new, saved["columns"], extrasaction="ignore")
        rows.writeheader()
        rows.writerows(csv.DictReader(old))
    if partial.stat().st_size < saved["size"]:
        log.warning("Of the metrics in %s the last ones are missing.", file)
    else:
        os.truncate(partial, saved["size"])
    os.replace(partial, file)


def _keep(file: Path) -> None:
    """Give the file a second name, so that its content survives the removal of the first one."""
    kept = file.with_name(_KEPT)
    if not file.exists() or (kept.exists() and kept.samefile(file)):
        return
    partial = file.with_name(f"{_KEPT}.partial")
    # By a partial name and a rename: a crash in between leaves the second name as it was.
    partial.unlink(missing_ok=True)
    try:
        os.link(file, partial)
    except OSError:  # a file system without links
        shutil.copyfile(file, partial)
    os.replace(partial, kept)
