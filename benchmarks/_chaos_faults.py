"""The faults of ``chaos.py``: each does harm, and makes good what does not heal by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from _chaos_disk import SmallDisk
from _chaos_postgres import Postgres
from _chaos_stage import N_TRIALS, POLL_SECONDS, Stage

SETTLE_SECONDS = 120.0
_LEDGER_SECONDS = 0.5
_REPORTING = 2


class StuckError(Exception):
    """The study does not go on after a fault."""


@dataclass(kw_only=True)
class Scene:
    """All that faults are done to.

    Args:
        stage: the study and its processes.
        postgres: its database.
        disk: where its checkpoints are.
        rng: every choice is drawn from it.
        hold_seconds: the least and the most that something is away.
    """

    stage: Stage
    postgres: Postgres
    disk: SmallDisk
    rng: np.random.Generator
    hold_seconds: tuple[float, float]
    damaged: list[tuple[int, float]] = field(default_factory=list)
    """Trials whose newest checkpoint was damaged, and when."""

    @property
    def finished(self) -> bool:
        return self.stage.finished()

    def hold(self, also: Callable[[], None] = lambda: None) -> str:
        """Leave things as they are for a while; says how long."""
        seconds = float(self.rng.uniform(*self.hold_seconds))
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.finished:
            also()
            time.sleep(POLL_SECONDS)
        return f"{seconds:.1f} s"

    def settle(self) -> float:
        """Wait until the study goes on as if nothing had happened; returns the seconds it took.

        A broker lives, some trials have reported since, and no trial would lose more than a unit
        if its process were lost now.

        Raises:
            StuckError: that does not come about.
        """
        begin, known = time.monotonic(), len(self.stage.records.reported())
        while not self.finished:
            if self._reports(known) and self._saved():
                break
            if time.monotonic() - begin > SETTLE_SECONDS:
                raise StuckError(
                    f"No progress within {SETTLE_SECONDS:.0f} s.\n{self.stage.last_words()}"
                )
            time.sleep(_LEDGER_SECONDS)
        return time.monotonic() - begin

    def _reports(self, known: int) -> bool:
        lines = self.stage.records.reported()
        epochs = self.stage.records.setting.epochs
        over = {line.trial for line in lines if line.unit == epochs}
        trained = {line.trial for line in lines[known:]}
        live = N_TRIALS - len(over - trained)
        return self.stage.broker() is not None and len(trained) >= min(_REPORTING, live)

    def _saved(self) -> bool:
        units: dict[int, int] = {}
        for line in self.stage.records.reported():
            units[line.trial] = line.unit
        with self.stage.ledger() as (ledger, key):
            saved = {each.number: each.units for each in ledger.load_checkpoints(key)}
        epochs = self.stage.records.setting.epochs
        behind = [unit - saved.get(trial, 0) for trial, unit in units.items() if unit < epochs]
        return max(behind, default=0) <= 1


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
    """Of a stored trial the newest one, which has an older one to fall back on."""
    with scene.stage.ledger() as (ledger, key):
        stored = {run.number for run in ledger.load_runs(key) if run.state == "stored"}
        newest: dict[int, list[Path]] = {number: [] for number in stored}
        for each in ledger.load_checkpoints(key):
            if each.number in stored:
                newest[each.number].append(Path(each.path))
    among = [number for number, paths in newest.items() if len(paths) > 1]
    if not among:
        return None
    number = int(scene.rng.choice(among))
    path = newest[number][-1]
    try:
        what = _damage(path, scene.rng)
    except OSError:  # it went on in this moment
        return None
    scene.damaged.append((number, time.time()))
    return f"{what} {path.name} of trial {number}"


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
