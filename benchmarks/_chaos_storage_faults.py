"""Faults of ``chaos.py`` that meet what a study keeps: its checkpoints and its database."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _chaos_scene import SETTLE_SECONDS, Scene, StuckError
from _chaos_stage import N_TRIALS, POLL_SECONDS

FEW_CONNECTIONS = 20


def fill_disk(scene: Scene) -> str | None:
    begin = time.monotonic()
    try:
        _hold_until_reported(scene, scene.disk.fill)  # somebody has to find no room
    finally:
        scene.disk.clear()
    return f"no room for checkpoints for {time.monotonic() - begin:.1f} s"


def mount_read_only(scene: Scene) -> str | None:
    begin = time.monotonic()
    scene.disk.mount_read_only()
    try:
        _hold_until_reported(scene)
    finally:
        scene.disk.unmount_read_only()
    return f"checkpoints on a read-only file system for {time.monotonic() - begin:.1f} s"


def lock_folders(scene: Scene) -> str | None:
    begin = time.monotonic()
    scene.disk.lock()
    try:
        _hold_until_reported(scene)
    finally:
        scene.disk.unlock()
    return f"checkpoints' folders immutable for {time.monotonic() - begin:.1f} s"


def _hold_until_reported(
    scene: Scene, also: Callable[[], None] = lambda: None, *, units: int = 1
) -> None:
    """Leave things as they are for a while, and at least until so many units are trained."""
    known = last = len(scene.stage.records.reported())
    also()
    scene.hold(also)
    begin = time.monotonic()
    while (count := len(scene.stage.records.reported())) < known + units:
        if scene.is_all_trained:
            return
        also()
        if count > last:
            last, begin = count, time.monotonic()
        if time.monotonic() - begin > SETTLE_SECONDS:
            raise StuckError(f"Nobody reports.\n{scene.stage.last_words()}")
        time.sleep(POLL_SECONDS)


def damage_checkpoint(scene: Scene) -> str | None:
    """Of a stored trial the newest one, which has an older one to fall back on.

    If no trial is stored, one loses its worker, and the checkpoint before another worker reads it.
    """
    before = ""
    among = scene.stored()
    if not among:
        before, among = _lose_one(scene)
    if not among:
        return None
    number = int(scene.rng.choice(list(among)))
    path = among[number][-1]
    try:
        what = _damage(path, scene.rng)
    except OSError:  # a newer one has taken its place in this moment
        return f"{before}nothing" if before else None
    scene.damaged.append((number, time.time()))
    scene.damaged_files.add(path)
    return f"{before}{what} {path.name} of trial {number}"


def _lose_one(scene: Scene) -> tuple[str, dict[int, list[Path]]]:
    with_two = scene.stored(("running",))
    holders = scene.stage.records.holders()
    pids = [pid for pid, trial in holders.items() if trial in with_two]
    if not pids:
        return "", {}
    pid = int(scene.rng.choice(pids))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"SIGKILL to worker {pid}, then ", {holders[pid]: with_two[holders[pid]]}


def stop_postgres(scene: Scene) -> str | None:
    scene.postgres.stop_at_once()
    return f"PostgreSQL: immediate shutdown, for {_away(scene)}"


def kill_postgres(scene: Scene) -> str | None:
    scene.postgres.kill()
    return f"PostgreSQL: SIGKILL to its postmaster, for {_away(scene)}"


def freeze_postgres(scene: Scene) -> str | None:
    scene.postgres.freeze()
    return f"PostgreSQL: SIGSTOP, for {_away(scene)}"


def kill_workers_without_postgres(scene: Scene) -> str | None:
    """Kill workers without PostgreSQL: what they have trained meanwhile is on disk only."""
    if not scene.stage.records.holders():
        return None
    scene.postgres.freeze()
    try:
        units = scene.train_on()
        holders = scene.stage.records.holders()
        for pid in holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        scene.hold()
    finally:
        scene.postgres.bring_back()
    return f"PostgreSQL: SIGSTOP; after {units} units SIGKILL to {len(holders)} workers"


def crowd_postgres(scene: Scene) -> str | None:
    """Others take every connection there is; sometimes also those that the study has."""
    cut = bool(scene.rng.integers(2))
    begin = time.monotonic()
    try:
        if cut:
            scene.postgres.cut_others()
        _hold_until_reported(scene, scene.postgres.crowd)
    finally:
        guests = scene.postgres.leave()
    words = ", those of the study cut," * cut
    return f"{guests} connections of others{words} for {time.monotonic() - begin:.1f} s"


def narrow_postgres(scene: Scene) -> str | None:
    """Few connections, for so long that everybody has a turn and connects."""
    scene.postgres.restart(connections=FEW_CONNECTIONS)
    try:
        _hold_until_reported(scene, units=N_TRIALS)
        seconds = scene.settle()
    finally:
        scene.postgres.restart(connections=None)
    return f"max_connections = {FEW_CONNECTIONS}: it took {seconds:.1f} s to go on with them"


def _away(scene: Scene) -> str:
    try:
        return scene.hold()
    finally:
        scene.postgres.bring_back()


def _damage(path: Path, rng: np.random.Generator) -> str:
    size = path.stat().st_size
    if rng.integers(2):
        os.truncate(path, int(rng.integers(size)))
        return "cut short:"
    with path.open("r+b", buffering=0) as file:
        place = int(rng.integers(size))
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << int(rng.integers(8))]))
    return f"a bit flipped at byte {place} of"
