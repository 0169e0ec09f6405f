"""Modal screens of ``top``: help, a trial's event log, choice of a policy, confirmation."""

from __future__ import annotations

from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from optuna_hermes.view._top import _text as text

_BOX = f"""
align: center middle; background: {text.GROUND} 60%;
& Static {{ width: auto; }}
& > .box {{
    width: auto; max-width: 100%; height: auto; max-height: 100%;
    padding: 0 2; background: {text.RAISED}; border: round {text.FAINT};
    border-title-color: {text.COOL}; border-title-style: bold;
    border-subtitle-color: {text.DIM};
}}
"""

_KEYS = (
    ("", "look"),
    ("↑ ↓  j k", "choose a trial; PageUp, PageDown, Home, End too"),
    ("n v l t s", "sort by number, value, slope, time, state; again: backwards"),
    ("enter", "show the chosen trial's event log"),
    ("tab", "show the next study, if this host serves several"),
    ("q  ctrl+c", "leave; nothing that trains is touched"),
    ("", "overrule the policy"),
    ("h", "hold: no device until h again; one that trains is suspended"),
    ("b", "boost: the next device, until b again"),
    ("f", "finish: close the trial at its last value"),
    ("p", "let another policy decide"),
)
_WORDS = (
    ("running", "has a device"),
    ("parked", "suspended in memory: resident on its device, or in the host's"),
    ("stored", "suspended on disk, no process"),
    ("pending", "has no state: no device yet, or begins anew"),
)


class Help(ModalScreen[None]):
    """The help: keys, states and marks."""

    CSS = f"Help {{ {_BOX} }}"
    BINDINGS: ClassVar = [Binding("escape,enter,question_mark,f1", "dismiss")]

    def compose(self) -> ComposeResult:
        lines = Text()
        for key, words in _KEYS:
            if not key:
                lines.append(f"{words}\n", f"bold {text.INK}")
                continue
            lines.append(f"  {key:<10}", f"bold {text.COOL}").append(f"{words}\n", text.DIM)
        lines.append("states and marks\n", f"bold {text.INK}")
        for state, words in _WORDS:
            lines.append(f"  {state:<10}", text.STATE_COLOURS[state])
            lines.append(f"{words}\n", text.DIM)
        lines.append("  ")
        for override, mark in text.OVERRIDE_MARKS.items():
            lines.append(f"{mark} {override}   ", text.OVERRIDE_COLOURS[override])
        lines.append("slope: change of value in a unit", text.DIM)
        yield _box(VerticalScroll(Static(lines), classes="box"), "help", "esc back")


class EventLog(ModalScreen[None]):
    """The event log of a trial, as rich prints it."""

    CSS = f"""
    EventLog {{ {_BOX} & > .box {{ width: 100%; height: 100%; }} & Static {{ width: 100%; }} }}
    """
    BINDINGS: ClassVar = [Binding("escape,enter", "dismiss")]

    def __init__(self, number: int, log: RenderableType) -> None:
        super().__init__()
        self._number = number
        self._log_shown = log

    def compose(self) -> ComposeResult:
        scroll = VerticalScroll(Static(self._log_shown), classes="box")
        yield _box(scroll, f"trial {self._number}", "↑ ↓ scroll   esc back")


class Policies(ModalScreen[str]):
    """The choice of a policy."""

    CSS = f"""
    Policies {{ {_BOX} & > .box {{ width: 34; }} }}
    Policies OptionList {{
        background: {text.RAISED}; color: {text.INK}; border: none; height: auto; padding: 0;
        & > .option-list--option-highlighted {{ background: {text.CHOSEN}; color: {text.INK}; }}
    }}
    """
    BINDINGS: ClassVar = [Binding("escape", "dismiss")]

    def __init__(self, names: tuple[str, ...], now: str) -> None:
        super().__init__()
        self._names = names
        self._now = now

    def compose(self) -> ComposeResult:
        options = [
            Option(f"{name}  (now)" if name == self._now else name, id=name) for name in self._names
        ]
        box = Vertical(OptionList(*options), classes="box")
        yield _box(box, "policy", "enter choose   esc back")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(str(event.option.id))


class Confirm(ModalScreen[bool]):
    """The question before an action that cannot be undone."""

    CSS = f"Confirm {{ {_BOX} }}"
    BINDINGS: ClassVar = [
        Binding("y", "dismiss(True)"),
        Binding("n,escape", "dismiss(False)"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield _box(Vertical(Static(self._question), classes="box"), "finish", "y yes   n no")


def _box(box: Vertical | VerticalScroll, title: str, keys: str) -> Vertical | VerticalScroll:
    box.border_title, box.border_subtitle = title, keys
    return box
