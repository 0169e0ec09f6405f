"""Warnings that are logged once per study, not once per trial."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

_MARK = "said-"
"""Prefix of the marker files, which lie beside the trials' folders."""

log = logging.getLogger(__name__)


def say_lost(run: str, folder: Path | None, names: Iterable[str], way_out: str) -> None:
    """Log a warning that names values which no checkpoint holds.

    Args:
        run: the trial, as messages name it.
        folder: of the trial's checkpoints; those of the study's other trials are beside it.
        names: of the values.
        way_out: advice that ends the message.
    """
    found = [name for name in sorted(names) if folder is None or _first(folder.parent, name)]
    if not found:
        return
    log.warning(
        "%s changes %s while it trains, and no checkpoint holds that: when the run comes back from "
        "disk it is as in the beginning. %s",
        run.capitalize(),
        ", ".join(found),
        way_out,
    )


def forget_said(folder: Path) -> None:
    """Remove the markers, so that the warnings are logged again.

    Args:
        folder: with the folders of a study's trials.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_MARK}*"):
            path.unlink()


def _first(folder: Path, name: str) -> bool:
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Exclusive creation: exactly one of the trials' processes succeeds, and logs.
        (folder / f"{_MARK}{digest}").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # rather a second warning than none
        return True
    return True
