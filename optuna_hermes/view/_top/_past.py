"""Leases of the last minutes by device, from pictures and from the ledger; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from optuna_hermes.view._history import Bar
from optuna_hermes.view._top._picture import Picture

NEW = -1
"""Stands for a trial that has no number yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """A trial on a device, from ``begin`` to ``end`` (wall clock seconds)."""

    trial: int
    begin: float
    end: float


class Past:
    """Leases by device and epoch.

    Args:
        seconds: age after which they are forgotten.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._stays: dict[str, dict[int, Stay]] = defaultdict(dict)

    def see(self, picture: Picture) -> None:
        """Add the present leases of a picture."""
        for device in picture.devices:
            if device.epoch:
                trial = NEW if device.trial is None else device.trial
                begin = picture.at - device.since_seconds
                stay = Stay(trial=trial, begin=begin, end=picture.at)
                self._stays[device.id][device.epoch] = stay
        self._forget(picture.at)

    def read(self, bars: Iterable[Bar], host: str, now: float) -> None:
        """Add ended leases of a ledger, in place of what pictures showed of them less exactly.

        Args:
            bars: of all hosts that work on the study.
            host: the one whose devices are shown.
            now: wall clock seconds.
        """
        for bar in bars:
            on, _, id_ = bar.device.partition("/")
            if on != host or bar.end is None or bar.end < now - self.seconds:
                continue
            trial = NEW if bar.trial is None else bar.trial
            self._stays[id_][bar.epoch] = Stay(trial=trial, begin=bar.begin, end=bar.end)

    def cells(self, device: str, now: float, width: int) -> list[int | None]:
        """The trial with most of each part of the time, None where there was no lease.

        Args:
            device: its id.
            now: wall clock seconds, at the right end.
            width: number of parts.
        """
        step = self.seconds / width
        begin = now - self.seconds
        shares: list[dict[int, float]] = [defaultdict(float) for _ in range(width)]
        for stay in self._stays[device].values():
            first = max(0, int((stay.begin - begin) / step))
            last = min(width - 1, int((stay.end - begin) / step))
            for cell in range(first, last + 1):
                left, right = begin + cell * step, begin + (cell + 1) * step
                shares[cell][stay.trial] += min(stay.end, right) - max(stay.begin, left)
        return [_most(share, step) for share in shares]

    def _forget(self, now: float) -> None:
        for device, stays in self._stays.items():
            kept = {epoch: s for epoch, s in stays.items() if s.end > now - self.seconds}
            self._stays[device] = kept


def _most(share: dict[int, float], step: float) -> int | None:
    """The trial with most of a part of the time; None if the device was free for most of it."""
    if sum(share.values()) < step / 2:
        return None
    return max(share, key=lambda trial: share[trial])
