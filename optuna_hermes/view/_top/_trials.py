"""The table of trials of ``top``: only its visible lines are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from optuna_hermes.broker._protocol import TrialRow
from optuna_hermes.view._top import _text as text
from optuna_hermes.view.picture import Picture, ordered


class Fitted(Message):
    """Message: the columns of the table of trials may have changed."""


class Trials(ScrollView, can_focus=True):
    """Trials in an order, with a cursor that stays with its trial while they move."""

    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="trials")
        self._picture = Picture(at=0.0)
        self._lines: list[TrialRow] = []
        self._shown: list[text.Column] = []
        self._chosen: int | None = None
        self._was_moved = False
        self.by = "trial"
        self.back = False

    @property
    def chosen(self) -> TrialRow | None:
        """The trial under the cursor, None if it is not listed any more."""
        place = self._place
        return None if place is None else self._lines[place]

    @property
    def numbers(self) -> list[int]:
        return [line.number for line in self._lines]

    @property
    def headings(self) -> Sequence[tuple[str, Style]]:
        return text.heading(self._shown, self.by, self.back)

    def show(self, picture: Picture) -> None:
        if picture.key != self._picture.key:
            self._chosen, self._was_moved = None, False
        self._picture = picture
        self._lines = ordered(picture.trials, self.by, maximize=picture.maximize, back=self.back)
        # Also before it is moved it stays with its trial: a key is for the one that is seen.
        if self._chosen is None and self._lines:
            self._chosen = self._lines[0].number
        self._fit()
        self.refresh()

    def sort(self, by: str) -> None:
        """Sort by a column; the other way round if it is sorted by that one already."""
        self.back = not self.back if by == self.by else False
        self.by = by
        if not self._was_moved:
            self._chosen = None  # the first of the new order
        self.show(self._picture)
        self._follow()

    # -- drawing -------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        place, width = y + self.scroll_offset.y, self._width
        ground = Style(bgcolor=text.GROUND)
        if place >= len(self._lines):
            return Strip.blank(width, ground)
        is_chosen = self._lines[place] is self.chosen and self.has_focus
        ground = Style(bgcolor=text.CHOSEN) if is_chosen else ground
        segments = [Segment(" ", ground)]
        for cell, style in text.row(self._shown, self._lines[place]):
            segments += [Segment(cell, ground + style), Segment(" ", ground)]
        return Strip(segments).adjust_cell_length(width, ground)

    def on_resize(self) -> None:
        self._fit()
        self.post_message(Fitted())

    def _fit(self) -> None:
        self._shown = text.columns(self._width, self._picture)
        self.virtual_size = Size(self._width, len(self._lines))

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    # -- the cursor ----------------------------------------------------------------------------

    @property
    def _place(self) -> int | None:
        # The cursor is a trial's number, so that it stays with the trial when lines move.
        for place, line in enumerate(self._lines):
            if line.number == self._chosen:
                return place
        return None

    def action_move(self, lines: int) -> None:
        if self._lines:
            # From where people look, if its trial is not there any more.
            begin = self.scroll_offset.y if self._place is None else self._place
            self._choose(min(len(self._lines) - 1, max(0, begin + lines)))
            self._follow()

    def action_page(self, pages: int) -> None:
        """Move the cursor by the visible height."""
        self.action_move(pages * max(1, self.size.height - 1))

    def on_click(self, event: Click) -> None:
        place = event.y + self.scroll_offset.y
        if place < len(self._lines):
            self._choose(place)
            self.refresh()

    def _choose(self, place: int) -> None:
        self._chosen, self._was_moved = self._lines[place].number, True

    def _follow(self) -> None:
        if self._place is not None:
            region = Region(0, self._place, self._width, 1)
            self.scroll_to_region(region, animate=False, force=True)
        self.refresh()
