"""Faults that trials of ``chaos.py`` commit themselves: in a batch or validation, as a file says.

An order is obeyed once: its file is gone before. ``obeyed`` has a line when a trial begins, and
another one when it goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from _chaos_records import append_line, lines_of

BLOCK_BYTES = 1 << 20
MOST_BYTES = 1 << 30
"""A trial whose memory is bounded by nobody grows no further."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One fault that a trial shall commit."""

    deed: str  # a key of ``DEEDS``
    where: str  # "batch" or "validation"
    status: int = 0  # for those who exit
    seconds: float = 0.0  # for those who are silent, or wait for an alarm
    procs: str = ""  # file that puts a process into a control group, if there is one


@dataclass(frozen=True, kw_only=True)
class Obeyed:
    """A trial has begun to obey, or has lived through it."""

    trial: int
    pid: int
    over: bool


class Orders:
    """The files, in the folder of the records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._obeyed = folder / "obeyed"

    def prepare(self) -> None:
        self._obeyed.touch()

    def give(self, trial: int, order: Order) -> None:
        new = self._folder / "order.new"
        new.write_text(json.dumps(asdict(order)))
        new.replace(self._path(trial))

    def withdraw(self, trial: int) -> bool:
        """Withdraw the order; True if the trial had not begun to obey it, and so will not."""
        try:
            self._path(trial).unlink()
        except FileNotFoundError:
            return False
        return True

    def obeyed(self) -> list[Obeyed]:
        return [Obeyed(**line) for line in lines_of(self._obeyed)]

    def obey(self, trial: int, where: str) -> None:
        """Called by the trial, wherever an order may say."""
        try:
            order = Order(**json.loads(self._path(trial).read_text()))
            if order.where != where:
                return
            self._path(trial).unlink()
        except FileNotFoundError:
            return
        line = Obeyed(trial=trial, pid=os.getpid(), over=False)
        append_line(self._obeyed, asdict(line))
        DEEDS[order.deed](order)
        append_line(self._obeyed, {**asdict(line), "over": True})

    def _path(self, trial: int) -> Path:
        return self._folder / f"order-{trial}"


def _exit(order: Order) -> None:
    os._exit(order.status)


def _alarm(order: Order) -> None:
    """Goes on until the alarm, whatever the trial does then."""
    signal.setitimer(signal.ITIMER_REAL, order.seconds)


def _segfault(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _abort(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def _grow(order: Order) -> None:
    """Take memory until the kernel ends the process; where it does not, do what it would."""
    if order.procs:
        Path(order.procs).write_text(str(os.getpid()))
        hoard = []
        while len(hoard) * BLOCK_BYTES < MOST_BYTES:
            hoard.append(b"x" * BLOCK_BYTES)
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(order: Order) -> None:
    time.sleep(order.seconds)


def _compute(order: Order) -> None:
    import torch

    matrix, end = torch.eye(128), time.monotonic() + order.seconds
    while time.monotonic() < end:
        matrix = matrix @ matrix


def _block(order: Order) -> None:
    """As an extension that computes under the interpreter's lock: no other thread runs."""
    left = round(order.seconds)
    while left > 0:
        left = ctypes.PyDLL(None).sleep(left)


DEEDS: dict[str, Callable[[Order], None]] = {
    "os._exit": _exit,
    "alarm": _alarm,
    "segfault": _segfault,
    "abort": _abort,
    "grow": _grow,
    "sleep": _sleep,
    "compute": _compute,
    "block": _block,
}
