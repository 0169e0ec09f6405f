"""Durations of batches, by their size."""

from __future__ import annotations

import time


class Stopwatch:
    """Measures the time from the end of a batch to the end of the next one."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[int, float]] = {}
        self._last_end: float | None = None

    @property
    def seconds(self) -> dict[int, float]:
        """Mean seconds of a batch, by the sizes that were trained."""
        return {size: spent / batches for size, (batches, spent) in self._spent.items()}

    def batch_ended(self, size: int) -> None:
        """Measure the time of a batch; the first one after an interruption does not count."""
        now = time.monotonic()
        if self._last_end is not None:
            batches, spent = self._spent.get(size, (0, 0.0))
            self._spent[size] = batches + 1, spent + now - self._last_end
        self._last_end = now

    def interrupted(self) -> None:
        """Stop the watch: something other than training comes next."""
        self._last_end = None
