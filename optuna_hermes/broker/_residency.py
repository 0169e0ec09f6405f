"""Where a suspended run's state goes, pure.

A parked run keeps its process and, on a GPU, its memory; that is the cheapest way back. It goes
to disk when the study is drained, when the next run would not fit beside it, or when its process
is needed for another trial.
"""

from __future__ import annotations

from collections.abc import Sequence

from optuna_hermes.broker._book import Run
from optuna_hermes.model import Device, TierName

MEMORY_MARGIN = 1.2
"""The next run must fit into free memory this many times over, to stay beside a parked one."""


def tier_for(run: Run, device: Device, *, draining: bool, next_bytes: int | None) -> TierName:
    """The tier by which ``run`` leaves ``device``.

    Args:
        run: the run that yields.
        device: where it is.
        draining: everything is to be suspended so that processes can go.
        next_bytes: device memory the next run is expected to need, None if unknown.
    """
    if not run.stores:
        return "resident"
    if draining or not fits_beside(device, next_bytes):
        return "disk"
    return "resident"


def fits_beside(device: Device, next_bytes: int | None) -> bool:
    """Whether a run of ``next_bytes`` fits on ``device`` while others stay parked there.

    CPU slots share the host's memory, which ``max_alive`` bounds. On a GPU, unknown is no.
    """
    if device.kind == "cpu":
        return True
    if next_bytes is None or device.memory_free_bytes is None:
        return False
    return device.memory_free_bytes >= MEMORY_MARGIN * next_bytes


def to_evict(parked: Sequence[Run], *, needed: int, coming: int) -> list[Run]:
    """The parked runs that must go to disk so that ``needed`` processes become free.

    Args:
        parked: runs that could go, the one to go first at the front.
        needed: processes that wait to be filled by a stored run or a new trial.
        coming: processes that are free already, or will be without evicting anyone.
    """
    return list(parked[: max(0, needed - coming)])
