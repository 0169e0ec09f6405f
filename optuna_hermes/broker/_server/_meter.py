"""Measurements of a broker's own work."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Event, Received

BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the bins of a histogram; the last bin has none."""


@dataclass(kw_only=True)
class Times:
    """A histogram of durations: one count for each of ``BOUNDS_SECONDS``, and one beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds


@dataclass(kw_only=True)
class Meter:
    """Measurements since the broker began.

    Args:
        reports: values that trials have reported.
        decisions: from an event that may move a device to the answer.
        ledger_writes: transactions with a ledger.
    """

    reports: int = 0
    decisions: Times = field(default_factory=Times)
    ledger_writes: Times = field(default_factory=Times)

    def handled(self, event: Event, seconds: float) -> None:
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, wire.Report):
            self.reports += 1
        elif not isinstance(message, (wire.Beat, wire.GetStatus)):
            self.decisions.add(seconds)
