"""Progress of a study that runs: a live screen on a terminal, plain lines elsewhere.

Everything goes to standard error: standard output belongs to results. Notebooks: ``notebook``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from optuna_hermes.view import formats

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from optuna_hermes.broker._protocol import DeviceStatus, StudyStatus
    from optuna_hermes.view.notebook import Cell

LEGEND = (
    "live: not finished; of these parked: suspended in memory, stored: suspended on disk; "
    "best: of all reports, also of live trials."
)

# Between two plain lines: they end up in log files.
LINE_SECONDS = 5.0


def make_progress(show: bool) -> ProgressDisplay:
    """The progress that fits a notebook, or else standard error; False for warnings only."""
    # Here, since it imports this module: it draws what is written here.
    from optuna_hermes.view.notebook import Cell, in_notebook

    # None as by `2>&-`; a script may have put an object in its place that can only be written to.
    if not show or sys.stderr is None or getattr(sys.stderr, "closed", False):
        return ProgressDisplay(None)
    if in_notebook():
        return ProgressDisplay(Cell())
    return ProgressDisplay(Screen() if is_screen(sys.stderr) else Lines())


def is_screen(stream: TextIO) -> bool:
    """True for a terminal on which lines can be drawn anew."""
    # Those names are rich's too, which draws nothing there.
    is_terminal = hasattr(stream, "isatty") and stream.isatty()
    return is_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class ProgressDisplay:
    """Display of a study that ends with the first error of its stream; without one it logs text."""

    # A study outlives its terminal, or the ``tee`` that Ctrl-C ends too.

    def __init__(self, shown: Cell | Screen | Lines | None) -> None:
        self._shown = shown

    def update(self, devices: Sequence[DeviceStatus], study: StudyStatus) -> None:
        """Show the current state of the broker's devices, and of this study."""
        self._try(lambda shown: shown.update(devices, study))

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._say(logging.INFO, text)

    def warn(self, text: str) -> None:
        """Show a line about what is lost, or keeps a study from going on well."""
        self._say(logging.WARNING, text)

    def close(self) -> None:
        """End the display."""
        self._try(lambda shown: shown.close())

    def _say(self, level: int, text: str) -> None:
        if self._shown is not None:
            self._try(lambda shown: shown.note(text))
            return
        with contextlib.suppress(OSError, ValueError):  # logging lets a closed stream's error pass
            # Made here: ``logging.config`` disables the loggers that were there before it.
            logging.getLogger("optuna_hermes.optimize").log(level, "%s", text)

    def _try(self, show: Callable[[Cell | Screen | Lines], None]) -> None:
        try:
            if self._shown is not None:
                show(self._shown)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._shown = None


class Total:
    """The number of trials that a study comes to, without those of plain Optuna."""

    def __init__(self) -> None:
        self._most = 0

    def of(self, study: StudyStatus) -> int | None:
        """The number as of this status; None if the study has no bound."""
        if study.unstarted is None:
            return None
        # A trial that is just being opened is neither counted nor left: the most ever has it.
        counted = study.counts.ended + study.counts.live
        self._most = max(self._most, counted + max(0, study.unstarted))
        return self._most


class Lines:
    """A plain line when something has changed, at most every ``LINE_SECONDS``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = Total()
        self._clock = clock
        self._shown: object = None
        self._next = 0.0
        self._due: str | None = None

    def update(self, devices: Sequence[DeviceStatus], study: StudyStatus) -> None:
        """Print the study's line if it is time, and counts or best value are new."""
        now, total = self._clock(), self._total.of(study)
        state = (study.counts, study.best)
        is_new = state != self._shown
        self._due = study_line(study, total) if is_new else None
        if not is_new or now < self._next:
            return
        if self._shown is None:
            self.note(LEGEND)
        self._shown, self._next = state, now + LINE_SECONDS
        self._print_due()

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print the last line: a log ends with what there was in the end."""
        self._print_due()

    def _print_due(self) -> None:
        if self._due is not None:
            line, self._due = self._due, None
            self.note(line)


class Screen:
    """A live screen: a line for each device and one for the study."""

    def __init__(self) -> None:
        from rich.console import Console

        self._total = Total()
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None

    def update(self, devices: Sequence[DeviceStatus], study: StudyStatus) -> None:
        """Draw anew."""
        view = live_view(devices, study, self._total.of(study))
        if self._live is None:
            from rich.live import Live

            self.note(LEGEND)
            # Transient: the final table takes its place. Standard output belongs to results.
            self._live = Live(
                view,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start(refresh=True)
        self._live.update(view, refresh=True)

    def note(self, text: str) -> None:
        """Print a line above the screen."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the screen's lines from the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def study_line(study: StudyStatus, total: int | None) -> str:
    """The state of a study in a line."""
    counts, best = study.counts, study.best
    parts = [
        f"{counts.ended} ended" if total is None else f"{counts.ended} of {total} ended",
        f"{counts.live} live",
        f"{counts.parked} parked",
        f"{counts.stored} stored",
    ]
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    if best is not None:
        parts.append(f"best {formats.number(best.value)} (trial {best.trial})")
    parts.append(f"{study.device_seconds:.1f} device-seconds")
    return f"{formats.printable(study.name)}: {', '.join(parts)}"


def device_lines(devices: Sequence[DeviceStatus]) -> list[tuple[str, str, str]]:
    """Name, activity and its duration, for every device of a broker."""
    lines = []
    for device in devices:
        holder = device.holder
        if holder is None:
            lines.append((device.id, formats.idle(device), ""))
            continue
        what = "a new trial" if holder.trial is None else f"trial {holder.trial}"
        if holder.state == "yielding":
            what += ", being suspended"
        lines.append((device.id, what, formats.duration(holder.since_seconds)))
    return lines


def live_view(
    devices: Sequence[DeviceStatus], study: StudyStatus, total: int | None
) -> RenderableType:
    """The content of ``Screen``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(min_width=24)
    table.add_column(justify="right")
    for line in device_lines(devices):
        table.add_row(*map(Text, line))
    # First: of more lines than the terminal has the last ones are not shown.
    return Group(Text(study_line(study, total), style="bold"), table)
