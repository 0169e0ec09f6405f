"""What people are told once, however many trials of a study have it to say."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

_MARK = "said-"
"""What the names of the files begin with that mark it, beside the trials' folders."""

log = logging.getLogger(__name__)


def say_lost(run: str, folder: Path | None, names: Iterable[str], way_out: str) -> None:
    """Say which values no checkpoint holds.

    Args:
        run: whose they are, as a message names it.
        folder: of the run's checkpoints; those of the study's other runs are beside it.
        names: of the values.
        way_out: what to do.
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
    """Let people be told again.

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
        (folder / f"{_MARK}{digest}").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # better twice than not at all
        return True
    return True
