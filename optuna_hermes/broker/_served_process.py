"""Processes that a broker serves, as the next one has to know them. Pure, light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedProcess:
    """A process that serves a trial.

    Args:
        started: its start time, as the kernel counts.
        role: as in ``Hello``.
        number: of the trial; None for a new trial that has not begun.
        epoch: of its last lease.
        devices: which it holds, none if it is parked.
        energy_joules: what the counters of these said in all when they were granted, None if one
            has none.
    """

    pid: int
    started: int
    role: str
    study: str
    number: int | None
    epoch: int
    devices: tuple[str, ...]
    energy_joules: float | None = None


@dataclass(kw_only=True)
class RecoveringProcess:
    """A process that an earlier broker served, and that has not come back yet.

    Args:
        holder: the process, and what it may have.
        until: when others stop waiting for it.
        late: the wait is over, but what it has stays its own until it has ended.
        met: it has said hello, and is about to say what it has.
        ended: it ended after its hello: its last messages may still be unread.
    """

    holder: ServedProcess
    until: float
    late: bool = False
    met: bool = False
    ended: bool = False
