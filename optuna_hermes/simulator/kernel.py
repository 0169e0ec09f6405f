"""The event queue of the simulators: a clock and a heap."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Agenda(Generic[Event]):
    """A queue of events in the order of time, then of priority, then of planning.

    Example:
        >>> agenda = Agenda[str]()
        >>> agenda.plan(2.0, "later")
        >>> agenda.plan(1.0, "second", priority=1)
        >>> agenda.plan(1.0, "first", priority=0)
        >>> [agenda.next() for _ in range(3)], agenda.now
        (['first', 'second', 'later'], 2.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._planned = 0

    def plan(self, time: float, event: Event, priority: int = 0) -> None:
        """Add ``event`` at ``time``.

        Args:
            time: seconds, not before ``now``.
            event: the event, returned by ``next``.
            priority: order of events at the same time, the smallest first.

        Raises:
            ValueError: ``time`` is before ``now``.
        """
        if not time >= self.now:
            raise ValueError(f"An event must be at {self.now} or later but got {time}.")
        # The counter makes the order of ties deterministic, and events need no comparison.
        heapq.heappush(self._heap, (time, priority, self._planned, event))
        self._planned += 1

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def next(self) -> Event:
        """Advance the clock to the next event, and return it.

        Raises:
            IndexError: there is none.
        """
        self.now, _, _, event = heapq.heappop(self._heap)
        return event
