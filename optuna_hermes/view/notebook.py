"""Progress in a notebook: one output of the cell, which is replaced in place."""

from __future__ import annotations

import html
import io
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from optuna_hermes.view.progress import LEGEND, Total, device_lines, study_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optuna_hermes.broker._protocol import DeviceStatus, StudyStatus

# Between two drawings: each goes through the kernel's socket into the browser.
DRAW_SECONDS = 0.5
MOST_NOTES = 5

# Shows texts by their MIME types, and returns the function that replaces them.
Draw = Callable[[dict[str, str]], Callable[[dict[str, str]], None]]


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook."""
    # Not imported here: a kernel has done that, and others shall not wait for it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Cell:
    """Devices, the study and the last notes, as the output of the running cell."""

    def __init__(
        self,
        draw: Draw | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = Total()
        self._draw = draw or _display
        self._clock = clock
        self._replace: Callable[[dict[str, str]], None] | None = None
        self._next = 0.0
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._last: tuple[Sequence[DeviceStatus], StudyStatus, int | None] | None = None

    def update(self, devices: Sequence[DeviceStatus], study: StudyStatus) -> None:
        """Draw anew, at most every ``DRAW_SECONDS``."""
        self._last = devices, study, self._total.of(study)
        now = self._clock()
        if now >= self._next:
            self._next = now + DRAW_SECONDS
            self._show(device_lines(devices))

    def note(self, text: str) -> None:
        """Add a line below, and draw at once."""
        self._notes.append(text)
        self._show([] if self._last is None else device_lines(self._last[0]))

    def close(self) -> None:
        """Draw the last state of the study, without devices."""
        if self._last is not None or self._notes:
            self._show([])

    def _show(self, devices: list[tuple[str, str, str]]) -> None:
        text, parts = [" ".join(each) for each in devices], []
        if self._last is not None:
            _, study, total = self._last
            line = study_line(study, total)
            text.append(line)
            if total:
                ended = study.counts.ended
                parts.append(f'<progress value="{ended}" max="{total}" style="width:100%">')
                parts.append("</progress>")
            parts.append(f'<div title="{LEGEND}"><b>{html.escape(line)}</b></div>')
        if devices:
            cells = (
                "".join(f"<td style='text-align:left'>{html.escape(part)}</td>" for part in each)
                for each in devices
            )
            parts.append("<table>" + "".join(f"<tr>{each}</tr>" for each in cells) + "</table>")
        parts += [f"<div>{html.escape(note)}</div>" for note in self._notes]
        texts = {"text/plain": "\n".join([*text, *self._notes]), "text/html": "".join(parts)}
        if self._replace is None:
            self._replace = self._draw(texts)
        else:
            self._replace(texts)


def shown(view: RenderableType, width: int = 110) -> dict[str, str]:
    """The output of a terminal, by the MIME types that a notebook asks for."""
    from rich.console import Console

    # Without force_jupyter=False rich would display the view in the cell itself.
    console = Console(record=True, file=io.StringIO(), width=width, force_jupyter=False)
    console.print(view)
    code = '<pre style="overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'
    return {
        "text/plain": console.export_text(clear=False),
        "text/html": console.export_html(code_format=code, inline_styles=True),
    }


def _display(texts: dict[str, str]) -> Callable[[dict[str, str]], None]:
    from IPython.display import display

    handle: Any = display(texts, raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return lambda new: handle.update(new, raw=True)
