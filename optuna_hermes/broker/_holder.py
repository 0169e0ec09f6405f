"""Whom a broker serves, as the next one has to know it. Pure, and light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that serves a run.

    Args:
        pid: its process.
        started: when that began, as the kernel counts.
        role: as in ``Hello``.
        study: key of the run's study.
        number: of the run; None for a new trial that has not begun.
        epoch: of its last lease.
        device: which it holds, None if it is parked.
    """

    pid: int
    started: int
    role: str
    study: str
    number: int | None
    epoch: int
    device: str | None
