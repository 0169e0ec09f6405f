"""Faults of ``chaos.py`` that one trial commits: it ends its own process, or is silent for long."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
from _chaos_orders import Order
from _chaos_scene import SETTLE_SECONDS, Scene, StuckError
from _chaos_stage import POLL_SECONDS

STATUSES = (0, 1, 2, 10, 11, 255)
"""Of those who exit: any may mean something to somebody."""
ALARM_SECONDS = 2.0
SILENT_SECONDS = (32.0, 45.0)
"""Longer than somebody who is impatient would wait."""


def exit_trial(scene: Scene) -> str | None:
    status = int(scene.rng.choice(STATUSES))
    order = Order(deed="os._exit", where=_where(scene), status=status)
    return _end(scene, order, f"os._exit({status})")


def signal_trial(scene: Scene) -> str | None:
    deed = str(scene.rng.choice(["alarm", "segfault", "abort"]))
    seconds = float(scene.rng.uniform(0.01, ALARM_SECONDS))
    return _end(scene, Order(deed=deed, where=_where(scene), seconds=seconds), deed)


def outgrow_memory(scene: Scene) -> str | None:
    order = Order(deed="grow", where=_where(scene), procs=scene.memory.procs)
    return _end(scene, order, f"out of memory, {'killed' if order.procs else 'as if killed'},")


def silence_trial(scene: Scene) -> str | None:
    deed = str(scene.rng.choice(["sleep", "compute", "block"]))
    seconds = float(scene.rng.uniform(*SILENT_SECONDS))
    order = Order(deed=deed, where=_where(scene), seconds=seconds)
    begun = _begun(scene, order)
    if begun is None:
        return None
    number, pid = begun
    with scene.slowed():  # or the others would be through before the next fault
        _wait_for(lambda: _is_over(scene, pid) or not _alive(pid), seconds + SETTLE_SECONDS, scene)
    what = f"trial {number} silent in a {order.where} for {seconds:.0f} s: {deed}"
    if _is_over(scene, pid):
        return what
    scene.killed_in_silence.append(what)
    return f"{what}, and its process {pid} did not survive"


def _end(scene: Scene, order: Order, words: str) -> str | None:
    begun = _begun(scene, order)
    if begun is None:
        return None
    number, pid = begun
    _wait_for(lambda: not _alive(pid), SETTLE_SECONDS, scene)
    return f"{words} in a {order.where} of trial {number}, process {pid}"


def _begun(scene: Scene, order: Order) -> tuple[int, int] | None:
    """Give the order to a trial that trains; it and its process, once it has begun to obey."""
    orders, among = scene.stage.orders, sorted(scene.unhurt().values())
    if not among:
        return None
    number = int(scene.rng.choice(among))
    known = len(orders.obeyed())
    orders.give(number, order)
    end = time.monotonic() + SETTLE_SECONDS
    while not (new := orders.obeyed()[known:]):
        late = scene.finished or number in scene.trained() or time.monotonic() > end
        if late and orders.withdraw(number):
            return None
        time.sleep(POLL_SECONDS)
    scene.hurt(number)
    return number, new[0].pid


def _where(scene: Scene) -> str:
    return str(scene.rng.choice(["batch", "validation"]))


def _is_over(scene: Scene, pid: int) -> bool:
    return any(line.over and line.pid == pid for line in scene.stage.orders.obeyed())


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for(condition: Callable[[], bool], within_seconds: float, scene: Scene) -> None:
    end = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() > end:
            raise StuckError(f"A trial does not go on.\n{scene.stage.last_words()}")
        time.sleep(POLL_SECONDS)
