"""The faults of ``chaos.py``: each does harm, and makes good what does not heal by itself."""

from __future__ import annotations

from collections.abc import Callable

import _chaos_process_faults as process
import _chaos_storage_faults as storage
import _chaos_trial_faults as trial
from _chaos_scene import Scene

FAULTS: dict[str, Callable[[Scene], str | None]] = {
    "worker-kill": process.kill_worker,
    "worker-stop": process.stop_worker,
    "broker-kill": process.kill_broker,
    "broker-stop": process.stop_broker,
    "broker-workers-kill": process.kill_broker_and_workers,
    "driver-kill": process.kill_driver,
    "group-term": process.end_group,
    "group-hup": process.hang_up_group,
    "trial-exit": trial.exit_trial,
    "trial-signal": trial.signal_trial,
    "trial-memory": trial.outgrow_memory,
    "trial-silent": trial.silence_trial,
    "disk-full": storage.fill_disk,
    "folder-read-only": storage.mount_read_only,
    "folder-immutable": storage.lock_folders,
    "checkpoint": storage.damage_checkpoint,
    "postgres-stop": storage.stop_postgres,
    "postgres-kill": storage.kill_postgres,
    "postgres-freeze": storage.freeze_postgres,
    "postgres-workers-kill": storage.kill_workers_without_postgres,
    "postgres-crowd": storage.crowd_postgres,
    "postgres-narrow": storage.narrow_postgres,
}
"""Each says what it has done; None if it could do nothing at this moment."""

ENDS_PROCESSES = frozenset(
    {"worker-kill", "broker-workers-kill", "postgres-workers-kill", "driver-kill", "checkpoint"}
    | {"trial-exit", "trial-signal", "trial-memory"}
)
"""Kinds that end processes that train: batches since their last checkpoint are trained again."""


def impossible(scene: Scene) -> dict[str, str]:
    """Kinds that cannot be had here, and why."""
    why = {}
    if not scene.disk.can_fill:
        why = dict.fromkeys(("disk-full", "folder-read-only"), "this user may not mount a tmpfs")
    if not scene.disk.can_lock:
        why["folder-immutable"] = "this user may not make files immutable"
    return why
