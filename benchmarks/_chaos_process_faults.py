"""Faults of ``chaos.py`` in its processes: killed, stopped, or ended by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
from _chaos_scene import SETTLE_SECONDS, Scene, StuckError
from _chaos_stage import END_SECONDS, POLL_SECONDS


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
    pid, group = scene.stage.driver_pid, bool(scene.rng.integers(2))
    scene.stage.kill_driver(group=group)
    scene.stage.start()
    return f"SIGKILL to {'the process group of ' * group}optimize, process {pid}, then again"


def kill_broker_and_workers(scene: Scene) -> str | None:
    """At the same moment, or after trials have trained on for some units without a broker."""
    broker = scene.stage.broker()
    if broker is None or not scene.stage.records.holders():
        return None
    words = ""
    with contextlib.ExitStack() as stack:
        if scene.rng.integers(2):
            # Nobody starts another one, and whoever trains has nobody to tell.
            stack.enter_context(_stopped([psutil.Process(scene.stage.driver_pid)]))
            broker.kill()
            words = f" after {scene.train_on()} units without one"
        pids = [broker.pid, *(worker.pid for worker in scene.stage.workers())]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return f"SIGKILL to the broker and {len(pids) - 1} workers{words}"


def end_group(scene: Scene) -> str | None:
    return _signal_group(scene, signal.SIGTERM)


def hang_up_group(scene: Scene) -> str | None:
    return _signal_group(scene, signal.SIGHUP)


def _signal_group(scene: Scene, number: signal.Signals) -> str:
    """As a shell does it, as ``timeout`` does it, or as a service manager does it; then again."""
    stage, pid = scene.stage, scene.stage.driver_pid
    to = str(scene.rng.choice(["its process group", "itself, then its group", "all processes"]))
    mine = stage.processes()
    _send(number, to, pid, mine)
    begin = time.monotonic()
    try:
        status = stage.wait_for_driver(SETTLE_SECONDS)
    except subprocess.TimeoutExpired:
        raise StuckError(f"optimize survives {number.name}.\n{stage.last_words()}") from None
    seconds = time.monotonic() - begin
    _wait_for_end(scene, {process.pid for process in mine})
    stage.start()
    return (
        f"{number.name} to optimize, process {pid}: to {to}; it ended with {status} after "
        f"{seconds:.1f} s; then again"
    )


def _send(number: signal.Signals, to: str, driver: int, processes: list[psutil.Process]) -> None:
    if to == "all processes":
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return
    with contextlib.suppress(ProcessLookupError):
        if to == "itself, then its group":
            os.kill(driver, number)
        os.killpg(driver, number)


def _wait_for_end(scene: Scene, pids: set[int]) -> None:
    """Until none of them is left but the broker."""
    end = time.monotonic() + END_SECONDS
    broker = scene.stage.broker()
    pids -= {broker.pid if broker else 0}
    while left := [p for p in scene.stage.processes() if p.pid in pids]:
        if time.monotonic() > end:
            raise StuckError(f"Left of optimize: {left}.\n{scene.stage.last_words()}")
        time.sleep(POLL_SECONDS)


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
