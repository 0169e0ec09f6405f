"""The screen of ``optuna-hermes top``: devices and trials, live, with keys for overrides."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from optuna_hermes.broker._protocol import TrialRow
from optuna_hermes.policies import POLICIES
from optuna_hermes.view import formats
from optuna_hermes.view._top import _text as text
from optuna_hermes.view._top._devices import Past, device_lines
from optuna_hermes.view._top._screens import Confirm, EventLog, Help, Policies
from optuna_hermes.view._top._trials import Trials
from optuna_hermes.view._top._watch import (
    EventLogRead,
    NewPicture,
    Notice,
    SourceLost,
    TopSource,
    Watcher,
)
from optuna_hermes.view.picture import ENDED, Picture

# Between redraws that count slices down, for pictures come less often.
_COUNT_SECONDS = 0.25

# For so long an answer to a key stands above the keys, then the study's problem again.
NOTICE_SECONDS = 5.0

# Of past leases that are shown for each device.
PAST_SECONDS = 180.0


class Top(App[None]):
    """The screen of ``top``."""

    TITLE = "optuna-hermes top"
    ENABLE_COMMAND_PALETTE = False
    CSS = f"""
    Screen {{ background: {text.GROUND}; color: {text.INK}; layers: base; }}
    #head {{ height: 2; background: {text.RAISED}; }}
    #devices {{ height: auto; max-height: 40%; margin-top: 1; }}
    #columns {{ height: 1; margin-top: 1; }}
    #trials {{ height: 1fr; scrollbar-gutter: stable; }}
    #devices, #trials {{
        overflow-x: hidden; scrollbar-size-vertical: 1;
        scrollbar-background: {text.GROUND}; scrollbar-color: {text.FAINT};
    }}
    #word {{ height: 1; padding: 0 1; }}
    #foot {{ height: 1; background: {text.RAISED}; }}
    """
    BINDINGS: ClassVar = [
        Binding("q,ctrl+c,ctrl+q", "quit", priority=True),
        Binding("h", "override('held')"),
        Binding("b", "override('boosted')"),
        Binding("f", "finish"),
        Binding("p", "policy"),
        Binding("enter", "event_log"),
        Binding("n", "sort('trial')"),
        Binding("v", "sort('value')"),
        Binding("l", "sort('slope')"),
        Binding("t", "sort('time')"),
        Binding("s", "sort('state')"),
        Binding("tab", "study", priority=True),
        Binding("question_mark,f1", "help"),
    ]

    def __init__(self, source: TopSource) -> None:
        super().__init__()
        self._source = source
        self._watcher = Watcher(source, self.post_message)
        self._past = Past(PAST_SECONDS)
        self._picture = Picture(at=time.time())
        self._seen_at = 0.0
        self._notice_until = 0.0
        self._head, self._foot = Static(id="head"), Static(id="foot")
        self._lines, self._columns = Static(id="lines"), Static(id="columns")
        self._trials, self._line = Trials(), Static(id="word")

    def compose(self) -> ComposeResult:
        yield self._head
        yield VerticalScroll(self._lines, id="devices", can_focus=False)
        yield self._columns
        yield self._trials
        yield self._line
        yield self._foot

    def on_mount(self) -> None:
        self._trials.focus()
        self._show_line("Looking ...")
        self.set_interval(_COUNT_SECONDS, self._draw_devices)
        self._watcher.start()
        # They are raised where this is not the main thread, as in tests.
        with contextlib.suppress(ValueError, RuntimeError):
            # By default they would end the process without restoring the terminal.
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)

    def on_unmount(self) -> None:
        self._watcher.end()

    # -- pictures ------------------------------------------------------------------------------

    def on_new_picture(self, message: NewPicture) -> None:
        self._picture, self._seen_at = message.picture, time.monotonic()
        self._past.read(message.bars, self._picture)
        self._past.see(self._picture)
        self._trials.show(self._picture)
        self._draw()

    def on_source_lost(self, message: SourceLost) -> None:
        # The last picture stays, read-only: it is better than an empty screen.
        self._picture = replace(self._picture, host="", read_only=message.text)
        self._draw()

    def _draw(self) -> None:
        picture, width = self._picture, self.size.width
        self._head.update(text.head(picture, width))
        self._foot.update(text.foot(picture, width))
        self._draw_columns()
        self._draw_devices()
        if time.monotonic() > self._notice_until:
            self._show_line(picture.problem or picture.read_only, bad=bool(picture.problem))

    def on_fitted(self) -> None:
        self._draw_columns()

    def _draw_columns(self) -> None:
        line = Text(" ", no_wrap=True)
        for name, style in self._trials.headings:
            line.append(name, style).append(" ")
        self._columns.update(line)

    def _draw_devices(self) -> None:
        # Without a broker nothing is known to go on: slices stand still.
        age = time.monotonic() - self._seen_at if self._picture.host else 0.0
        now = self._picture.at + age
        width = self.size.width - 1  # the scrollbar
        self._lines.update(device_lines(self._picture, self._past, now, width))

    def on_resize(self) -> None:
        # The widgets have their new widths only then.
        self.call_after_refresh(self._draw)

    # -- the line above the keys ---------------------------------------------------------------

    def on_notice(self, message: Notice) -> None:
        self._say(message.text, bad=message.bad)

    def _say(self, words: str, *, bad: bool = False) -> None:
        """Show words that the next pictures leave there for a while."""
        self._notice_until = time.monotonic() + NOTICE_SECONDS
        self._show_line(words, bad=bad)

    def _show_line(self, words: str, *, bad: bool = False) -> None:
        line = Text(words, text.BAD if bad else text.DIM, no_wrap=True, overflow="ellipsis")
        self._line.update(line)

    # -- keys ----------------------------------------------------------------------------------

    def action_sort(self, by: str) -> None:
        self._trials.sort(by)
        self._draw_columns()

    def action_study(self) -> None:
        keys = self._picture.studies
        if len(keys) > 1:
            self._watcher.look_now(keys[(keys.index(self._picture.key) + 1) % len(keys)])

    def action_override(self, override: Literal["held", "boosted"]) -> None:
        # The same key releases a trial again.
        trial, key = self._live_trial(), self._picture.key
        if trial is not None:
            new = None if trial.override == override else override
            words = f"Trial {trial.number} is {new or f'no longer {override}'}."
            self._do(words, self._source.override, key, trial.number, new)

    def action_finish(self) -> None:
        trial, key = self._live_trial(), self._picture.key
        if trial is None:
            return
        # Kept now: the cursor may be on another trial when the answer comes.
        number = trial.number
        if not trial.units:
            self._say(f"Trial {number} has reported no value to be finished with.", bad=True)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._say(f"Trial {number} is being finished ...")
                self._do(f"Trial {number} is finished.", self._source.finish, key, number)

        value = "which is not finite" if trial.value is None else formats.number(trial.value)
        question = f"Finish trial {number} at its last value, {value}?\nIt cannot go on afterwards."
        self.push_screen(Confirm(question), answered)

    def action_policy(self) -> None:
        if self._picture.read_only or not self._picture.key:
            self._say(self._picture.read_only or "There is no study.", bad=True)
            return
        key, now = self._picture.key, self._picture.policy

        def chosen(name: str | None) -> None:
            if name is not None and name != now:
                words = f"Policy {name} decides from the next slice on."
                self._do(words, self._source.change_policy, key, name)

        self.push_screen(Policies(tuple(POLICIES), now), chosen)

    def action_event_log(self) -> None:
        # Read on a thread: a database may take its time.
        trial, key = self._chosen_trial(), self._picture.key
        if trial is not None:
            number = trial.number
            self._watcher.do(lambda: EventLogRead(number, self._source.event_log(key, number)))

    def on_event_log_read(self, message: EventLogRead) -> None:
        self.push_screen(EventLog(message.number, message.log))

    def action_help(self) -> None:
        self.push_screen(Help())

    def _chosen_trial(self) -> TrialRow | None:
        """The chosen trial; None if it is not listed, with a message on the screen."""
        trial = self._trials.chosen
        if trial is None and self._picture.trials:
            # Of a large study the broker lists only trials that have a process.
            self._say("The chosen trial is not listed any more: choose another.", bad=True)
        return trial

    def _live_trial(self) -> TrialRow | None:
        """The chosen trial if it can be overridden; else None, with a message on the screen."""
        if self._picture.read_only:
            self._say(self._picture.read_only, bad=True)
            return None
        trial = self._chosen_trial()
        if trial is not None and trial.state in ENDED:
            self._say(f"Trial {trial.number} has ended ({trial.state}).", bad=True)
            return None
        return trial

    def _do(self, words: str, call: Callable[..., None], *arguments: object) -> None:
        """Call a function on a thread, and show ``words`` once it has returned."""

        def work() -> Notice:
            call(*arguments)
            return Notice(words)

        self._watcher.do(work)
