"""The faults of ``chaos.py``: each does harm, and makes good what does not heal by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from _chaos_scene import SETTLE_SECONDS, Scene, StuckError
from _chaos_stage import POLL_SECONDS

_STORED_SECONDS = 5.0


def kill_worker(scene: Scene) -> str | None:
    holders = scene.stage.records.holders()
    others = [worker.pid for worker in scene.stage.workers() if worker.pid not in holders]
    if not holders:
        return None
    pid = int(scene.rng.choice(list(holders)))
    if others and scene.rng.random() < 0.2:
        pid = int(scene.rng.choice(others))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    what = f"trains trial {holders[pid]}" if pid in holders else "waits"
    return f"SIGKILL to worker {pid}, which {what}"


def stop_worker(scene: Scene) -> str | None:
    holders = scene.stage.records.holders()
    if not holders:
        return None
    pid = int(scene.rng.choice(list(holders)))
    with _stopped([psutil.Process(pid)]):
        held = scene.hold()
    return f"SIGSTOP to worker {pid}, which trains trial {holders[pid]}, for {held}"


def kill_broker(scene: Scene) -> str | None:
    broker = scene.stage.broker()
    if broker is None:
        return None
    broker.kill()
    return f"SIGKILL to the broker, process {broker.pid}"


def stop_broker(scene: Scene) -> str | None:
    broker = scene.stage.broker()
    if broker is None:
        return None
    with _stopped([broker]):
        held = scene.hold()
    return f"SIGSTOP to the broker, process {broker.pid}, for {held}"


def kill_driver(scene: Scene) -> str | None:
    assert scene.stage.driver is not None
    pid, group = scene.stage.driver.pid, bool(scene.rng.integers(2))
    scene.stage.kill_driver(group=group)
    scene.stage.start()
    return f"SIGKILL to {'the process group of ' * group}optimize, process {pid}, then again"


def fill_disk(scene: Scene) -> str | None:
    begin, known = time.monotonic(), len(scene.stage.records.reported())
    try:
        scene.disk.fill()
        scene.hold(scene.disk.fill)
        while len(scene.stage.records.reported()) == known and not scene.finished:
            scene.disk.fill()  # somebody has to find no room
            if time.monotonic() - begin > SETTLE_SECONDS:
                raise StuckError(f"Nobody reports on a full disk.\n{scene.stage.last_words()}")
            time.sleep(POLL_SECONDS)
    finally:
        scene.disk.clear()
    return f"no room for checkpoints for {time.monotonic() - begin:.1f} s"


def damage_checkpoint(scene: Scene) -> str | None:
    """Of a stored trial the newest one, which has an older one to fall back on.

    If no trial is stored, one is made so by the loss of its worker.
    """
    before = ""
    among = scene.stored()
    if not among:
        before, among = _store_one(scene)
    if not among:
        return None
    number = int(scene.rng.choice(list(among)))
    path = among[number][-1]
    try:
        what = _damage(path, scene.rng)
    except OSError:  # it went on in this moment
        return None
    scene.damaged.append((number, time.time()))
    scene.damaged_files.add(path)
    return f"{before}{what} {path.name} of trial {number}"


def _store_one(scene: Scene) -> tuple[str, dict[int, list[Path]]]:
    with_two = scene.stored(("running",))
    holders = scene.stage.records.holders()
    pids = [pid for pid, trial in holders.items() if trial in with_two]
    if not pids:
        return "", {}
    pid = int(scene.rng.choice(pids))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _STORED_SECONDS
    while not (found := scene.stored()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return f"SIGKILL to worker {pid}, then ", found


def stop_postgres(scene: Scene) -> str | None:
    scene.postgres.stop_at_once()
    return f"PostgreSQL: immediate shutdown, for {_away(scene)}"


def kill_postgres(scene: Scene) -> str | None:
    scene.postgres.kill()
    return f"PostgreSQL: SIGKILL to its postmaster, for {_away(scene)}"


def freeze_postgres(scene: Scene) -> str | None:
    scene.postgres.freeze()
    return f"PostgreSQL: SIGSTOP, for {_away(scene)}"


FAULTS: dict[str, Callable[[Scene], str | None]] = {
    "worker-kill": kill_worker,
    "worker-stop": stop_worker,
    "broker-kill": kill_broker,
    "broker-stop": stop_broker,
    "driver-kill": kill_driver,
    "disk-full": fill_disk,
    "checkpoint": damage_checkpoint,
    "postgres-stop": stop_postgres,
    "postgres-kill": kill_postgres,
    "postgres-freeze": freeze_postgres,
}
"""Each says what it has done; None if it could do nothing at this moment."""


@contextlib.contextmanager
def _stopped(processes: list[psutil.Process]) -> Iterator[None]:
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


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
