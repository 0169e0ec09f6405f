"""``optuna-hermes top`` on a screen that is not there, with a source that is not a broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from msgspec import structs
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Static

from optuna_hermes.broker._protocol import DeviceStatus, TrialRow
from optuna_hermes.errors import BrokerError, InvalidInputError, LedgerOutageError
from optuna_hermes.model import TrialStatus
from optuna_hermes.view._top import _text as text
from optuna_hermes.view._top import _watch
from optuna_hermes.view._top._app import Top
from optuna_hermes.view._top._devices import Past, device_lines
from optuna_hermes.view._top._screens import Confirm, EventLog, Help, Policies
from optuna_hermes.view._top._trials import Trials
from optuna_hermes.view._top._watch import TopSource
from optuna_hermes.view.history import Bar
from optuna_hermes.view.picture import ORDERS, Picture, Power
from support.statuses import device_status

NARROW, WIDE = (80, 24), (160, 50)
STATES: tuple[TrialStatus, ...] = (
    "running",
    "running",
    "parked",
    "stored",
    "pending",
    "done",
    "failed",
)


def trial(number: int) -> TrialRow:
    """A trial of a study of many; the last of seven never reported."""
    state = STATES[number % len(STATES)]
    reported = state != "pending"
    value = 1.0 / (1 + number * 7 % 11)
    return TrialRow(
        number=number,
        state=state,
        override=None,
        held_bytes=None,
        host_bytes=0,
        device=None,
        value=value if reported else None,
        slope=-0.001 * (number * 5 % 13) if reported else None,
        curve=(2 * value, None, value) if reported else (),
        units=3 if reported else 0,
        units_trained=3,
        device_seconds=float(number * 3 % 17) if reported else 0.0,
        tier="host" if state == "parked" else "disk" if state == "stored" else None,
        slices=number,
        suspensions=number,
        watt_hours=None,
    )


def device(index: int, **fields: Any) -> DeviceStatus:
    known = {"since_seconds": 2.0, "left_seconds": 3.0, "slice_seconds": 5.0, "epoch": index + 1}
    holder = {"key": "k", "trial": index, **known, **fields.pop("holder", {})}
    return device_status(**{"id": f"cpu:{index}", "holder": holder, **fields})


def picture(count: int = 24, **fields: Any) -> Picture:
    trials = tuple(map(trial, range(count)))
    return Picture(
        **{
            "at": 1e9,
            "host": "box",
            "key": "k",
            "study": "digits",
            "studies": ("k",),
            "policy": "hermes",
            "devices": (device(0), device(1)),
            "counts": Counter(each.state for each in trials),
            "trials": trials,
            "best": (3, 0.0625),
            "device_seconds": 75.0,
            **fields,
        }
    )


class FakeSource(TopSource):
    """Shows one picture until it is given another; remembers what people wanted."""

    def __init__(self, shown: Picture) -> None:
        self.shown = shown
        self.wanted: list[tuple[object, ...]] = []
        self.refuses = ""
        self.gone = False
        self.closed = False

    def look(self, key: str) -> Picture:
        if self.gone:
            raise BrokerError("No broker runs on this host any more.")
        return replace(self.shown, key=key or self.shown.key)

    def past(self) -> Sequence[Bar]:
        return (Bar("box/cpu:0", 9, self.shown.at - 120, self.shown.at - 60, 100),)

    def override(self, key: str, number: int, override: Literal["held", "boosted"] | None) -> None:
        self._note("override", key, number, override)

    def finish(self, key: str, number: int) -> None:
        self._note("finish", key, number)

    def change_policy(self, key: str, policy: str) -> None:
        self._note("policy", key, policy)

    def event_log(self, key: str, number: int) -> Text:
        return Text(f"all of trial {number}")

    def close(self) -> None:
        self.closed = True

    def _note(self, *words: object) -> None:
        if self.refuses:
            raise InvalidInputError(self.refuses)
        self.wanted.append(words)


Act = Callable[[Top, "Pilot[None]", FakeSource], Awaitable[None]]


def play(act: Act, *, shown: Picture | None = None, size: tuple[int, int] = NARROW) -> FakeSource:
    """Let somebody use ``top``, once the first picture is there."""
    source = FakeSource(shown or picture())

    async def run() -> None:
        app = Top(source)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(app.query_one(Trials).numbers))
            await act(app, pilot, source)

    asyncio.run(asyncio.wait_for(run(), 60))
    return source


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait for what a thread of the screen will do; a test that waits in vain is timed out."""
    while not condition():
        await pilot.pause(0.01)


def words(app: Top, id_: str) -> str:
    """The text of a line."""
    return str(app.query_one(f"#{id_}", Static).render())


def screen(app: Top) -> list[str]:
    """Return the text of the screen, line by line."""
    return [
        "".join(segment.text for segment in strip)
        for strip in app.screen._compositor.render_strips()
    ]


# -- what is seen ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [NARROW, WIDE])
@pytest.mark.parametrize("gpus", [False, True])
def test_nothing_is_cut_at_either_size(size: tuple[int, int], gpus: bool) -> None:
    """Head, devices, strip, columns and keys fit; wide screens have whole words."""
    many: dict[str, Any] = {}
    if gpus:
        fields: dict[str, Any] = {"memory_bytes": 80 << 30, "memory_free_bytes": 30 << 30}
        cards = [device(i, **fields, id=f"GPU-{i}a2b3c4d-{i}") for i in range(4)]
        power = {card.id: Power(joules=9.0, counted=0.0, watts=312.0) for card in cards}
        memory = {3: 3 << 29, 4: 5 << 20}
        many = {"devices": tuple(cards), "power": power, "watt_hours": 12.5, "memory": memory}

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        lines = screen(app)
        seen = "\n".join(lines)
        assert len(lines) == size[1]
        assert all(len(line) <= size[0] for line in lines)
        for word in ("digits", "policy hermes", "best 0.0625 trial 3", "24 trials", "8 running"):
            assert word in seen
        for word in ("trial", "state", "value", "slope", "curve", "units", "tier", "3 min ago"):
            assert word in seen
        assert lines[-1].rstrip().endswith("q quit")
        assert "…" not in "\n".join(lines[:2])
        assert ("312 W" in seen, "50.0/80 GiB" in seen) == (gpus, gpus)
        assert ("1.5 GiB" in seen, "5.0 MiB" in seen) == (gpus, gpus)
        whole = ("device time", "suspensions", "slices", "override")
        assert [word for word in whole if word in seen] == (list(whole) if size == WIDE else [])
        row = next(line for line in lines if line.split()[:2] == ["3", "stored"])
        assert "disk" in row
        assert "█·▁" in row

    play(act, size=size, shown=picture(**many))


def test_five_hundred_trials_are_scrolled_with_the_cursor() -> None:
    """Only what is seen is drawn, and the chosen trial is among it."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        table = app.query_one(Trials)
        assert len(table.numbers) == 500
        await pilot.press("end")
        assert table.chosen is not None
        assert table.chosen.number == 499
        await until(pilot, lambda: any(line.split()[:1] == ["499"] for line in screen(app)))
        await pilot.press("pageup", "up", "down", "home")
        assert table.chosen.number == 0
        await until(
            pilot, lambda: any(line.split()[:2] == ["0", "running"] for line in screen(app))
        )

    play(act, shown=picture(500))


def test_the_past_is_what_was_read_and_what_was_seen() -> None:
    """A lease of the ledger and the ones of now are blocks with the numbers of their trials."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        def lines() -> list[str]:
            return [line for line in screen(app) if " cpu:0" in line and "·" in line]

        await until(pilot, lines)
        (line, *_) = lines()
        strip = line[line.index("·") :]
        assert "9" in strip
        assert strip.index("9") < len(strip) * 0.7

    play(act)


def cell(of: TrialRow, name: str, width: int) -> str:
    shown = text.columns(width, picture())
    place = [column.name for column in shown].index(name)
    found, _ = text.row(shown, of)[place]
    assert len(found) == shown[place].width
    return found


@pytest.mark.parametrize("size", [NARROW, WIDE])
@pytest.mark.parametrize("value", [-123456.0, 123456.0, -1.23456e-5, -0.000123456, -9.87e300])
def test_a_value_loses_digits_but_no_exponent(size: tuple[int, int], value: float) -> None:
    """A number without its end would be another number."""
    found = cell(structs.replace(trial(0), value=value), "value", size[0])
    assert float(found) == pytest.approx(value, rel=0.05)


def test_a_number_that_does_not_fit_is_left_out() -> None:
    """Its first digits would be a wrong one; a text has its beginning."""
    row = structs.replace(trial(0), units=123456, device="cpu:0 cpu:1 cpu:2")
    assert cell(row, "units", WIDE[0]) == "    …"
    assert cell(row, "device", WIDE[0]) == "cpu:0…"


def test_the_head_counts_trials_that_are_not_listed() -> None:
    """Of very many a broker lists some: they are not all there are."""
    many = picture(12, counts={"running": 4, "done": 9000})
    second = str(text.head(many, 120)).splitlines()[1]
    assert second.split("  ")[:4] == [" 9004 trials", "12 listed", "4 running", "9000 done"]
    assert "listed" not in str(text.head(picture(), 120))


@pytest.mark.parametrize("width", range(40, 80))
@pytest.mark.parametrize("memory", [{}, {0: 3 << 30}])
def test_on_a_narrow_screen_columns_are_left_out_whole(width: int, memory: dict[int, int]) -> None:
    """A number that is cut at the screen's end would be another number."""
    row = structs.replace(trial(0), units=12345, device_seconds=7384.0)
    shown = picture(memory=memory)
    cells = [found for found, _ in text.row(text.columns(width, shown), row)]
    assert cells[0] == "     0"
    assert len(" " + " ".join(cells)) <= width
    card = device(0, memory_bytes=80 << 30, memory_free_bytes=30 << 30)
    power = {card.id: Power(joules=9.0, counted=0.0)}
    lines = device_lines(replace(shown, devices=(card,), power=power), Past(180.0), shown.at, width)
    for line in str(lines).splitlines():
        assert len(line.rstrip()) <= width


def test_the_reason_why_a_device_is_free_is_cut_with_a_mark() -> None:
    """A process id that is cut would be another one."""
    why = "process 12345 (python of ada) computes on it: wait for it, or end it"
    card = device_status(problem=why)
    for width, begin in ((80, "process 12345 (python …"), (160, "process 12345 (python of ad…")):
        lines = str(device_lines(replace(picture(), devices=(card,)), Past(180.0), 50.0, width))
        assert begin in lines


def test_another_studys_trials_have_no_numbers() -> None:
    """The table has those of one study, which they would be taken for."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        seen = "\n".join(screen(app))
        assert " cpu:1  other running" in seen
        assert "7777" not in seen
        source.shown = replace(source.shown, key="l")
        await until(pilot, lambda: any(" cpu:1   7777" in line for line in screen(app)))
        assert any(" cpu:0  other" in line for line in screen(app))

    lines = (device(0), device(1, holder={"key": "l", "trial": 7777, "since_seconds": 100.0}))
    play(act, shown=picture(devices=lines, studies=("k", "l")))


# -- sorting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
def test_trials_are_sorted_by_each_column_and_back(maximize: bool) -> None:
    """The best first, what is unknown last either way, and the cursor stays with its trial."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        table = app.query_one(Trials)
        await pilot.press("down", "down", "down")
        trials = {t.number: t for t in source.shown.trials}
        for by, key in zip(ORDERS, "nvlts", strict=True):
            if by != "trial":  # by which they are sorted at first
                await pilot.press(key)
            assert table.chosen is not None
            assert table.chosen.number == 3
            shown = [trials[number] for number in table.numbers]
            assert "↓" in words(app, "columns")
            if by in ("value", "slope"):
                known = [getattr(t, by) for t in shown if getattr(t, by) is not None]
                assert known == sorted(known, reverse=maximize)
                assert all(getattr(t, by) is None for t in shown[len(known) :])
            elif by == "time":
                assert [t.device_seconds for t in shown] == sorted(
                    (t.device_seconds for t in shown), reverse=True
                )
            elif by == "state":
                assert (shown[0].state, shown[-1].state) == ("running", "failed")
            before = list(table.numbers)
            await pilot.press(key)
            known_count = sum(t.value is not None for t in shown)
            if by in ("value", "slope"):
                assert trials[table.numbers[0]].value is not None
                assert set(table.numbers[:known_count]) == set(before[:known_count])
            else:
                assert table.numbers == before[::-1]
            assert "↑" in words(app, "columns")

    play(act, shown=picture(maximize=maximize))


def test_before_it_is_moved_the_cursor_stays_with_its_trial_too() -> None:
    """Trials move with each look: a key is for the one that was seen under the cursor."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        table = app.query_one(Trials)
        await pilot.press("v")
        first, second = table.numbers[:2]
        assert table.chosen is not None
        assert table.chosen.number == first
        trials = [
            structs.replace(each, value=-1.0 if each.number == second else each.value)
            for each in source.shown.trials
        ]
        source.shown = replace(source.shown, trials=tuple(trials))
        await until(pilot, lambda: table.numbers[0] == second)
        await pilot.press("h")
        await until(pilot, lambda: source.wanted)
        assert source.wanted == [("override", "k", first, "held")]

    play(act)


def test_a_trial_that_is_not_listed_any_more_is_not_replaced_by_another() -> None:
    """Of a large study those without a process are left out; the cursor goes on from there."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        table = app.query_one(Trials)
        await pilot.press("down", "down")
        trials = tuple(each for each in source.shown.trials if each.number != 2)
        source.shown = replace(source.shown, trials=trials)
        await until(pilot, lambda: 2 not in table.numbers)
        for key in ("h", "b", "f", "enter"):
            app._show_line("")
            await pilot.press(key)
            assert "not listed any more" in words(app, "word")
            assert len(app.screen_stack) == 1
        await pilot.press("down")
        assert table.chosen is not None

    assert play(act).wanted == []


def test_the_answer_to_a_key_stays_when_the_next_picture_comes() -> None:
    """There is one each second: it would be gone before it is read."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        def leave_out(number: int) -> None:
            trials = tuple(each for each in source.shown.trials if each.number != number)
            source.shown = replace(source.shown, trials=trials)

        table = app.query_one(Trials)
        await pilot.press("down", "down")
        leave_out(2)
        await until(pilot, lambda: 2 not in table.numbers)
        await pilot.press("h")
        leave_out(1)
        await until(pilot, lambda: 1 not in table.numbers)
        assert "not listed any more" in words(app, "word")

    play(act)


# -- keys --------------------------------------------------------------------------------------


def test_keys_hold_boost_and_let_go() -> None:
    """The same key takes back what it did, and what was done is said in a line."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("down", "down", "h")
        await until(pilot, lambda: "Trial 2 is held." in words(app, "word"))
        trials = [
            structs.replace(t, override="held" if t.number == 2 else None)
            for t in source.shown.trials
        ]
        source.shown = replace(source.shown, trials=tuple(trials))
        table = app.query_one(Trials)
        await until(pilot, lambda: table.chosen is not None and table.chosen.override == "held")
        assert any("‖" in line for line in screen(app))
        await pilot.press("b")
        await until(pilot, lambda: "boosted" in words(app, "word"))
        await pilot.press("h")
        await until(pilot, lambda: "no longer held" in words(app, "word"))

    wanted = play(act).wanted
    assert wanted == [
        ("override", "k", 2, "held"),
        ("override", "k", 2, "boosted"),
        ("override", "k", 2, None),
    ]


def test_finishing_is_asked_about_first() -> None:
    """``n`` leaves the trial as it is, ``y`` closes it; what has ended is not asked about."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("f")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        assert source.wanted == []
        await pilot.press("f", "y")
        await until(pilot, lambda: "is finished" in words(app, "word"))
        await pilot.press("s", "s", "f")
        assert not isinstance(app.screen, Confirm)
        assert "has ended" in words(app, "word")

    assert play(act).wanted == [("finish", "k", 0)]


def test_a_trial_may_be_finished_at_an_infinite_value() -> None:
    """It has reported, so whether it can be closed is not the screen's to say."""
    infinite = structs.replace(trial(0), value=None)
    silent = structs.replace(trial(1), value=None, units=0)

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("f")
        assert any("at its last value, which is not finite?" in line for line in screen(app))
        await pilot.press("y")
        await until(pilot, lambda: "is finished" in words(app, "word"))
        await pilot.press("down", "f")
        assert "has reported no value" in words(app, "word")
        assert not isinstance(app.screen, Confirm)

    assert play(act, shown=picture(trials=(infinite, silent))).wanted == [("finish", "k", 0)]


def test_another_policy_is_chosen_from_a_list() -> None:
    """The list says which one decides now; to choose that one again changes nothing."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("p")
        assert isinstance(app.screen, Policies)
        assert any("hermes  (now)" in line for line in screen(app))
        await pilot.press("enter")
        await pilot.press("p", "down", "down", "enter")
        await until(pilot, lambda: "Policy fifo decides" in words(app, "word"))

    assert play(act).wanted == [("policy", "k", "fifo")]


def test_an_event_log_and_the_help_are_opened_and_left() -> None:
    """Enter shows the chosen trial's, ``?`` of the keys, escape goes back."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, EventLog))
        assert any("all of trial 1" in line for line in screen(app))
        await pilot.press("escape", "question_mark")
        assert isinstance(app.screen, Help)
        seen = "\n".join(screen(app))
        assert all(word in seen for word in ("hold", "boosted", "stored", "slope"))
        await pilot.press("escape")
        assert not isinstance(app.screen, Help)

    play(act)


def test_what_is_refused_is_said() -> None:
    """The broker's words are shown, and nothing ends."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        source.refuses = "The database is away."
        await pilot.press("h")
        await until(pilot, lambda: "database is away" in words(app, "word"))

    assert play(act).wanted == []


def test_read_only_says_so_and_wants_nothing() -> None:
    """Keys change nothing and are not offered where no broker of ours serves the study."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        assert "read-only" in words(app, "head")
        assert "hold" not in words(app, "foot")
        for key in "hbfp":
            await pilot.press(key)
            assert words(app, "word") == "not yours"
            assert len(app.screen_stack) == 1

    shown = picture(read_only="not yours", host="", devices=(), policy="")
    assert play(act, shown=shown).wanted == []


def test_a_broker_that_ends_leaves_what_was_seen() -> None:
    """The trials stay, read-only, and a line says why."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        source.gone = True
        await until(pilot, lambda: "No broker runs on this host any more" in words(app, "word"))
        assert "read-only" in words(app, "head")
        assert len(app.query_one(Trials).numbers) == 24

    play(act)


def test_a_database_that_is_away_leaves_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past leases cannot be read: pictures come, and the broker takes orders."""

    def past(self: FakeSource) -> Sequence[Bar]:
        raise LedgerOutageError("The database does not answer.")

    monkeypatch.setattr(FakeSource, "past", past)
    monkeypatch.setattr(_watch, "READ_SECONDS", 0.0)

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        assert "read-only" not in words(app, "head")
        await pilot.press("h")
        await until(pilot, lambda: "Trial 0 is held." in words(app, "word"))

    assert play(act).wanted == [("override", "k", 0, "held")]


def test_an_unexpected_error_is_said_and_the_next_look_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line of it: a traceback would go over the screen, and the picture stay for ever."""
    errors: list[Exception] = [OSError("no file\nat all"), KeyError("key")]
    look = FakeSource.look

    def failing(self: FakeSource, key: str) -> Picture:
        if self.gone and errors:
            raise errors.pop()
        return look(self, key)

    def past(self: FakeSource) -> Sequence[Bar]:
        raise OSError

    def hold(self: FakeSource, *words: object) -> None:
        raise OSError("not now")

    for name, call in (("look", failing), ("past", past), ("override", hold)):
        monkeypatch.setattr(FakeSource, name, call)
    monkeypatch.setattr(_watch, "LOOK_SECONDS", 0.05)

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        await pilot.press("h")
        await until(pilot, lambda: words(app, "word") == "OSError: not now.")
        source.gone = True
        await until(pilot, lambda: not errors)
        source.gone, source.shown = False, replace(source.shown, study="other")
        await until(pilot, lambda: "other" in words(app, "head"))

    play(act)


def test_tab_shows_the_next_study() -> None:
    """Each study that the broker serves has its turn."""

    async def act(app: Top, pilot: Pilot[None], source: FakeSource) -> None:
        assert "tab study" in words(app, "foot")
        source.shown = replace(source.shown, study="other")
        await pilot.press("tab")
        await until(pilot, lambda: "other" in words(app, "head"))

    play(act, shown=picture(studies=("k", "l")))


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@pytest.mark.parametrize("over", [[], ["question_mark"], ["p"]])
def test_leaving_is_at_once(key: str, over: list[str]) -> None:
    """Whatever is open, and although the broker does not answer."""
    waits, answers = threading.Event(), threading.Event()

    class Silent(FakeSource):
        def look(self, key: str) -> Picture:
            if self.wanted:
                waits.set()
                answers.wait()
            return super().look(key)

    async def run() -> None:
        source = Silent(picture())
        app = Top(source)
        async with app.run_test(size=NARROW) as pilot:
            await until(pilot, lambda: bool(app.query_one(Trials).numbers))
            await pilot.press("h", *over)
            await until(pilot, waits.is_set)
            await pilot.press(key)
            assert app._exit
        assert source.closed

    try:
        asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        answers.set()
