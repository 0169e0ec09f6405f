"""The content of the web page, and the changes that are sent of it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.broker._protocol import BrokerStatus
from optuna_hermes.ledger import TrialRecord
from optuna_hermes.view import formats
from optuna_hermes.view._web import _feed, _source
from optuna_hermes.view._web._feed import UNREAD, Feed, delta
from optuna_hermes.view._web._page import (
    MOST_BARS,
    MOST_CURVES,
    MOST_POINTS,
    PageBuilder,
    PageInput,
    rounded,
)
from optuna_hermes.view._web._source import PageReader
from optuna_hermes.view.formats import short_devices
from optuna_hermes.view.history import Bar, Point, StudyHistory, TrialHistory
from support.statuses import broker_status, device_status, study_status

RECORD = TrialRecord(
    study="key", number=3, trial_id=3, state="parked", tier="host", device_seconds=4.0
)
TRIAL = TrialHistory(
    number=3,
    state="parked",
    record=RECORD,
    points=(Point(1, 0.5, 1.0, 101.0), Point(2, 0.25, 2.0, 102.0)),
)
HISTORY = StudyHistory(
    key="key", trials=(TRIAL,), bars=(Bar("vm/cpu:0", 3, 100.0, 104.0, 7),), position=2
)
ENTRY: dict[str, Any] = {
    "key": "key",
    "name": "digits",
    "unstarted": 4,
    "counts": {"running": 1},
    "device_seconds": 6.0,
    "held_seconds": 2.0,
    "spent_seconds": 6.0,
    "overhead_seconds": {
        "idle": 0.0,
        "opening": 0.06,
        "resuming": 0.02,
        "saving": 0.0,
        "suspending": 0.02,
    },
    "switches": 2,
    "best": {"trial": 3, "value": 0.25},
    "trials": [
        {
            "trial": 3,
            "state": "running",
            "device": "cpu:0",
            "units": 2,
            "value": 0.25,
            "slices": 2,
            "suspensions": 1,
            "device_seconds": 4.0,
            "override": "boosted",
        }
    ],
}
HOLDER = {
    "key": "key",
    "study": "digits",
    "trial": 3,
    "epoch": 8,
    "since_seconds": 2.0,
    "left_seconds": 1.0,
}
BROKER = broker_status(study_status(**ENTRY), devices=[device_status(holder=HOLDER)])
INPUT = PageInput(name="digits", history=HISTORY, broker=BROKER, now=110.0)


def test_a_live_study_is_as_broker_and_ledger_know_it() -> None:
    """States are the broker's, curves and bars the ledger's, and each device has its holder."""
    page = PageBuilder().build(INPUT)
    assert page["live"] == {"is": "live", "text": "Training"}
    assert page["trials"]["3"]["state"] == "running"
    assert page["trials"]["3"]["override"] == "boosted"
    assert page["curves"] == {"3": {"units": [1, 2], "values": [0.5, 0.25]}}
    assert page["bars"] == {"7 vm/cpu:0": ["vm/cpu:0", 3, 0.0, 4.0]}
    assert page["path"] == [[1.0, 0.5, 3], [2.0, 0.25, 3]]
    assert page["devices"][0]["holder"]["since"] == 108.0
    assert page["totals"]["device_seconds"] == 4.0
    assert page["study"]["commands"] is True


def test_it_says_what_the_study_waits_for() -> None:
    """In the words of the command line and of ``top``: suspended, released."""
    entry = ENTRY | {"draining": True, "all_held": True}
    page = PageBuilder().build(replace(INPUT, broker=broker_status(study_status(**entry))))
    assert page["live"] == {"is": "live", "text": "Being suspended"}
    assert page["notes"] == ["Every trial that could train is held: release one, and it trains."]


def test_an_ended_study_needs_no_broker() -> None:
    """All of it is in the ledger; nothing can be done to its trials."""
    history = replace(HISTORY, trials=(replace(TRIAL, state="done"),))
    page = PageBuilder().build(PageInput(name="digits", history=history, was_served=True))
    assert page["live"]["is"] == "ended"
    assert page["notes"] == []
    assert page["best"] == {"trial": 3, "value": 0.25}
    assert page["totals"]["device_seconds"] == 4.0


def test_it_says_when_the_broker_is_away() -> None:
    """One that was there and does not answer, with trials that are not over."""
    page = PageBuilder().build(PageInput(name="digits", history=HISTORY, was_served=True))
    assert page["live"]["is"] == "away"
    assert "No broker answers" in page["notes"][0]
    never = PageBuilder().build(
        PageInput(
            name="digits",
            named=True,
            history=replace(HISTORY, trials=(replace(TRIAL, state="stored"),)),
        )
    )
    assert never["live"]["text"] == "Not running"
    nothing = PageBuilder().build(PageInput(name=None))
    assert nothing["live"]["text"] == "No broker runs on this host"
    assert (never["live"]["is"], never["notes"]) == ("still", [])


def test_it_says_when_the_broker_does_not_answer() -> None:
    """Also if it never has: its trials may train, whatever else is known."""
    source = PageInput(name="digits", history=HISTORY, silence=formats.SILENT)
    page = PageBuilder().build(source)
    assert page["live"] == {"is": "away", "text": "The broker does not answer"}
    assert page["notes"] == ["The broker does not answer: trials may train."]
    over = replace(HISTORY, trials=(replace(TRIAL, state="done"),))
    page = PageBuilder().build(replace(source, history=over))
    assert (page["live"]["is"], page["notes"]) == ("ended", [])
    other = PageBuilder().build(replace(source, silence="It is of another version."))
    assert other["notes"] == ["It is of another version."]


def test_a_device_of_another_study_of_that_name_is_not_its_own() -> None:
    """Two databases may hold studies of one name, with leases of one epoch."""
    other = HOLDER | {"key": "another", "trial": None, "epoch": 7}
    devices = [device_status(holder=HOLDER), device_status(id="cpu:1", holder=other)]
    studies = study_status(**ENTRY), study_status(**{**ENTRY, "key": "another"})
    bars = (Bar("vm/cpu:0", None, 100.0, None, 7),)
    source = replace(
        INPUT,
        broker=broker_status(*studies, devices=devices),
        history=replace(HISTORY, bars=bars),
    )
    page = PageBuilder().build(source)
    assert [device["holder"]["own"] for device in page["devices"]] == [True, False]
    assert page["study"]["others"] == ["digits"]
    assert page["bars"]["7 vm/cpu:0"][3] == 0.0


def test_a_named_study_that_never_ran_is_not_another_one_of_its_name() -> None:
    """That of another database trains: it is listed beside the named one."""
    named = PageInput(name="digits", named=True, broker=BROKER, now=110.0)
    page = PageBuilder().build(named)
    assert (page["live"]["text"], page["trials"]) == ("Not running", {})
    assert page["study"]["others"] == ["digits"]
    assert PageBuilder().build(replace(named, key="other"))["live"]["is"] == "still"
    assert PageBuilder().build(replace(named, key="key"))["live"]["is"] == "live"


def test_what_is_wanted_is_shown_without_a_broker() -> None:
    """As it is written down; of a trial that is over nothing is wanted any more."""
    held = replace(TRIAL, override="held")
    source = PageInput(name="digits", history=replace(HISTORY, trials=(held,)))
    assert PageBuilder().build(source)["trials"]["3"]["override"] == "held"
    over = replace(HISTORY, trials=(replace(held, state="done"),))
    assert PageBuilder().build(replace(source, history=over))["trials"]["3"]["override"] is None


def test_it_says_why_the_ledger_is_not_read() -> None:
    """The reason is shown with what was read before."""
    page = PageBuilder().build(replace(INPUT, problem="The ledger cannot be used."))
    assert page["notes"] == ["The ledger cannot be used."]
    assert page["curves"]


@pytest.mark.parametrize(
    ("seconds", "since"),
    [(1.0, ""), (59.0, ""), (61.0, " since 1 minute"), (200.0, " since 3 minutes")],
)
def test_it_says_since_when_the_database_is_away(seconds: float, since: str) -> None:
    """By the minute: a screen reader reads every note that is new."""
    broker = broker_status(study_status(**ENTRY, outage_seconds=seconds))
    page = PageBuilder().build(replace(INPUT, broker=broker))
    assert page["notes"] == [f"The database does not answer{since}; training goes on."]


class FakeReader:
    """A broker and a ledger, whose reads are counted."""

    silence, maximize, key = "", False, "key"

    def __init__(self) -> None:
        self.broker: BrokerStatus | None = BROKER
        self.kept = HISTORY
        self.reads = 0

    def status(self) -> BrokerStatus | None:
        return self.broker

    def apart(self, broker: BrokerStatus | None) -> BrokerStatus | None:
        return broker

    def history(self, broker: BrokerStatus | None) -> StudyHistory:
        self.reads += 1
        return self.kept

    def disconnect(self) -> None:
        """There is no connection."""


def looking(name: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[PageReader, FakeReader]:
    page, reader = PageReader(name), FakeReader()
    monkeypatch.setattr(page, "_reader", reader)
    monkeypatch.setattr(_source, "ASK_SHARE", math.inf)
    return page, reader


def test_a_database_that_is_away_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it may take half a minute, in which the page would stand still."""
    page, reader = looking("digits", monkeypatch)
    page.look()
    reader.broker = broker_status(study_status(**ENTRY, outage_seconds=1.0))
    shown = page.look()
    assert reader.reads == 1
    assert shown["notes"] == ["The database does not answer; training goes on."]
    assert shown["curves"]
    reader.broker = BROKER
    assert page.look()["notes"] == []
    assert reader.reads == 2


def test_the_study_that_is_shown_stays_while_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of two studies with more running trials changes with the slices."""
    page, reader = looking(None, monkeypatch)
    monkeypatch.setattr(reader, "history", lambda broker: None)

    def shown(**running: int) -> object:
        studies = (
            study_status(key=name, name=name, counts={"running": count})
            for name, count in running.items()
        )
        reader.broker = broker_status(*studies)
        return page.look()["study"]["name"]

    assert shown(a=1, b=2) == "b"
    assert shown(a=2, b=1) == "b"
    reader.broker = None  # it waits for its disk
    assert page.look()["study"]["name"] == "b"
    assert shown(a=2, b=1) == "b"
    assert shown(a=2) == "a"
    assert shown(a=1, b=2) == "a"


def test_a_broker_that_ends_after_its_study_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All was suspended, as at a time-out, and the broker had nothing left to do."""
    page, reader = looking("digits", monkeypatch)
    reader.kept = replace(HISTORY, trials=(replace(TRIAL, state="stored"),))
    assert page.look()["live"]["is"] == "live"
    reader.broker = None
    assert page.look()["live"]["is"] == "away"
    reader.broker = broker_status()
    assert page.look()["live"]["text"] == "Not running"
    reader.broker = None
    after = page.look()
    assert (after["live"]["text"], after["notes"]) == ("Not running", [])


def test_a_broker_that_ends_while_no_page_is_open_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The study was stopped in between; the page that is opened next shows its ledger."""
    page, reader = looking("digits", monkeypatch)
    assert page.look()["live"]["is"] == "live"
    page.disconnect()
    reader.broker = None
    reader.kept = replace(HISTORY, trials=(replace(TRIAL, state="stored"),))
    after = page.look()
    assert (after["live"]["is"], after["notes"]) == ("still", [])


def test_without_a_study_the_broker_is_shown() -> None:
    """States and devices, and no curves."""
    page = PageBuilder().build(PageInput(name="digits", broker=BROKER))
    assert page["trials"]["3"]["value"] == 0.25
    assert page["best"] == {"trial": 3, "value": 0.25}
    assert page["curves"] == {}
    assert page["study"]["named"] is False


def test_the_best_of_a_study_that_maximises_is_its_highest() -> None:
    """The best is chosen by the study's own direction."""
    other = replace(TRIAL, number=4, points=(Point(1, 0.75, 1.0, 103.0),))
    history = replace(HISTORY, trials=(TRIAL, other), maximize=True)
    assert PageBuilder().build(PageInput(name="digits", history=history))["best"]["trial"] == 4
    history = replace(history, maximize=False)
    assert PageBuilder().build(PageInput(name="digits", history=history))["best"]["trial"] == 3


def test_the_best_is_found_among_exact_values_of_trials_that_have_not_failed() -> None:
    """Two may differ past the digits that are shown."""

    def ended(number: int, value: float, state: str = "done") -> TrialHistory:
        return replace(TRIAL, number=number, state=state, points=(Point(1, value, 1.0, 101.0),))

    trials = (ended(0, 123456.4), ended(1, 123456.1), ended(2, 1.0, "failed"))
    page = PageBuilder().build(PageInput(name="digits", history=replace(HISTORY, trials=trials)))
    assert page["best"] == {"trial": 1, "value": 123456.1}


def test_the_best_is_the_end_of_the_best_so_far() -> None:
    """The best value ever reported, not the best last one; a trial that fails loses it."""
    builder = PageBuilder()
    points = tuple(Point(unit, value, unit, 100.0 + unit) for unit, value in ((1, 0.5), (2, 0.2)))
    trial = replace(TRIAL, points=(*points, Point(3, 0.9, 3.0, 103.0)))
    other = replace(TRIAL, number=4, points=(Point(1, 0.4, 1.0, 104.0),))
    history = replace(HISTORY, trials=(trial, other))
    page = builder.build(PageInput(name="digits", history=history))
    assert page["best"] == {"trial": 3, "value": 0.2}
    assert page["path"] == [[1.0, 0.5, 3], [2.0, 0.2, 3]]
    history = replace(history, trials=(replace(trial, state="failed"), other))
    page = builder.build(PageInput(name="digits", history=history))
    assert page["best"] == {"trial": 4, "value": 0.4}
    assert page["path"] == [[4.0, 0.4, 4]]


def test_the_direction_is_known_before_the_first_report() -> None:
    """From Optuna's tables, or the broker; until then it is said to be neither."""
    build = PageBuilder().build
    assert build(PageInput(name="digits"))["study"]["maximize"] is None
    assert build(PageInput(name="digits", maximize=True))["study"]["maximize"] is True
    broker = broker_status(study_status(**{**ENTRY, "maximize": True}))
    assert build(PageInput(name="digits", broker=broker))["study"]["maximize"] is True
    history = replace(HISTORY, maximize=True)
    assert build(PageInput(name="digits", history=history))["study"]["maximize"] is True


def test_a_lease_that_a_dead_broker_left_open_ends_with_the_last_report() -> None:
    """It lasts while its trial trains, or a device is held by its new trial."""
    stored, running = replace(TRIAL, state="stored"), replace(TRIAL, number=4, state="running")
    bars = (
        *(Bar("vm/cpu:0", 3, 100.0, None, 7), Bar("vm/cpu:0", 4, 100.0, None, 9)),
        *(Bar("vm/cpu:0", None, 103.0, None, 8), Bar("vm/cpu:1", None, 103.0, None, 6)),
        Bar("vm/cpu:1", 3, 105.0, None, 5),
    )
    history = replace(HISTORY, trials=(stored, running), bars=bars)
    page = PageBuilder().build(replace(INPUT, history=history))
    ends = {key.partition(" ")[0]: bar[3] for key, bar in page["bars"].items()}
    assert ends == {"7": 2.0, "9": None, "8": None, "6": 3.0, "5": 5.0}


def test_a_page_is_json_whatever_was_reported() -> None:
    """NaN and infinity have no number there."""
    points = (Point(1, math.nan, 1.0, 101.0), Point(2, -math.inf, 2.0, 102.0))
    history = replace(HISTORY, trials=(replace(TRIAL, points=points),))
    page = PageBuilder().build(PageInput(name="digits", history=history))
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    assert page["curves"]["3"]["values"] == [None, None]
    assert rounded(1.23456789) == 1.23457


def test_what_stands_still_is_not_sent_again() -> None:
    """Time that passes changes nothing of a page: the slice's end is a point of the clock."""
    builder = PageBuilder()
    before = builder.build(INPUT)
    device = device_status(holder=HOLDER | {"since_seconds": 3.01, "left_seconds": 0.02})
    seconds = {"device_seconds": 7.0, "held_seconds": 3.0, "spent_seconds": 7.0}
    broker = broker_status(study_status(**ENTRY | seconds), devices=[device])
    after = builder.build(replace(INPUT, broker=broker, now=111.0))
    assert delta(before, after) == {}


def test_of_a_curve_the_new_end_is_sent() -> None:
    """A report is a point, not a curve."""
    builder = PageBuilder()
    before = builder.build(INPUT)
    trial = replace(TRIAL, points=(*TRIAL.points, Point(3, 0.2, 3.0, 103.0)))
    after = builder.build(replace(INPUT, history=replace(HISTORY, trials=(trial,), position=3)))
    changes = delta(before, after)
    assert changes["curves"] == {"3": {"from": 2, "units": [3], "values": [0.2]}}
    assert "bars" not in changes


def test_a_long_curve_is_thinned_out_and_keeps_its_ends() -> None:
    """The drawn curve has a bounded length; a further point changes its tail only."""

    def curve(count: int) -> dict[str, list[Any]]:
        points = tuple(Point(unit, 1 / unit, unit, 100.0 + unit) for unit in range(1, count + 1))
        history = replace(HISTORY, trials=(replace(TRIAL, points=points),))
        found: dict[str, list[Any]] = PageBuilder().build(replace(INPUT, history=history))[
            "curves"
        ]["3"]
        return found

    long, longer = curve(1000), curve(1001)
    assert len(long["units"]) <= MOST_POINTS + 1
    assert (long["units"][0], long["units"][-1]) == (1, 1000)
    assert long["units"][:-1] == longer["units"][: len(long["units"]) - 1]


def test_of_very_many_curves_those_that_live_and_the_best_are_drawn() -> None:
    """Every trial is in the table, though."""
    trials = tuple(
        replace(
            TRIAL,
            number=number,
            state="parked" if number == 900 else "done",
            points=(Point(1, float(number), 1.0, 100.0 + number),),
        )
        for number in range(1000)
    )
    page = PageBuilder().build(PageInput(name="digits", history=replace(HISTORY, trials=trials)))
    assert len(page["trials"]) == 1000
    assert len(page["curves"]) == MOST_CURVES
    assert {"0", "498", "900"} <= page["curves"].keys()
    assert "499" not in page["curves"]
    points = (Point(1, -1.0, 1.0, 101.0), Point(2, 2000.0, 2.0, 102.0))
    trials = (*trials[:-1], replace(trials[-1], points=points))
    page = PageBuilder().build(PageInput(name="digits", history=replace(HISTORY, trials=trials)))
    assert page["best"] == {"trial": 999, "value": -1.0}
    assert (len(page["curves"]), "999" in page["curves"]) == (MOST_CURVES, True)


def test_of_very_many_slices_the_last_ones_are_drawn() -> None:
    """A browser would need seconds for all of a long study."""
    bars = tuple(Bar("h/cpu:0", 0, float(n), n + 1.0, n) for n in range(MOST_BARS + 5))
    page = PageBuilder().build(PageInput(name="digits", history=replace(HISTORY, bars=bars)))
    assert len(page["bars"]) == MOST_BARS
    assert {"5 h/cpu:0", f"{MOST_BARS + 4} h/cpu:0"} <= page["bars"].keys()


def test_devices_have_names_as_short_as_they_differ() -> None:
    """UUIDs are cut where they are one's own."""
    assert short_devices(["GPU-5c2f0a11-1", "GPU-5c2f0a12-1"]) == ["GPU-5c2f0a11", "GPU-5c2f0a12"]
    assert short_devices(["cpu:0", "cpu:10"]) == ["cpu:0", "cpu:10"]


def applied(page: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a page with its changes, as ``store.js`` makes it."""
    page = json.loads(json.dumps(page))
    for name, part in changes.items():
        if name not in ("trials", "bars", "curves"):
            page[name] = part
            continue
        for key, entry in part.items():
            if entry is None:
                page[name].pop(key)
            elif name != "curves":
                page[name][key] = entry
            else:
                count = entry.pop("from")
                old = page[name].get(key, {})
                page[name][key] = {
                    column: [*old.get(column, [])[:count], *values]
                    for column, values in entry.items()
                }
    return page


CURVES = st.dictionaries(
    st.sampled_from("012"),
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 3)), max_size=4).map(
        lambda points: {"units": [u for u, _ in points], "values": [v for _, v in points]}
    ),
)
PAGES = st.fixed_dictionaries(
    {
        "trials": st.dictionaries(st.sampled_from("0123"), st.sampled_from(["parked", "done"])),
        "bars": st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)),
        "curves": CURVES,
        "notes": st.lists(st.sampled_from("xy"), max_size=2),
    }
)


@given(before=PAGES, after=PAGES)
def test_changes_make_the_new_page_of_the_old_one(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Whatever two pages are, and nothing is sent if they are alike."""
    changes = json.loads(json.dumps(delta(before, after)))
    assert (changes == {}) == (before == after)
    assert applied(before, changes) == after


# -- one look for all --------------------------------------------------------------------------


def told(event: bytes) -> tuple[str, Any]:
    head, body = event.decode().strip().split("\n")
    return head.removeprefix("event: "), json.loads(body.removeprefix("data: "))


async def first(events: AsyncIterator[bytes]) -> tuple[str, Any]:
    return told(await asyncio.wait_for(anext(events), 10.0))


class Counter:
    """Looks that are counted, and of which every one finds something new."""

    def __init__(self) -> None:
        self.looks = 0
        self.rests = 0

    def look(self) -> dict[str, Any]:
        self.looks += 1
        return {"looks": self.looks, "name": "digits"}

    def rest(self) -> None:
        self.rests += 1


def test_twenty_pages_cost_one_look() -> None:
    """A late page is sent what is there; a change is sent to all, and only what has changed."""
    counter = Counter()

    async def story() -> None:
        feed = Feed(counter.look, counter.rest, every_seconds=3600.0)
        pages = [feed.listen() for _ in range(20)]
        found = await asyncio.gather(*map(first, pages))
        assert counter.looks == 1
        assert {name for name, _ in found} == {"page"}
        late = feed.listen()
        assert (await first(late))[1]["looks"] == 1
        feed.look_now()
        name, change = await first(pages[0])
        assert (name, change["looks"], "name" in change) == ("change", 2, False)
        feed.close()

    asyncio.run(story())


def test_a_page_hears_something_even_if_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event, for scripts are not given comments: without any a page has lost its server."""
    monkeypatch.setattr(_feed, "BEAT_SECONDS", 0.01)

    async def story() -> None:
        feed = Feed(lambda: {"name": "digits"}, every_seconds=3600.0)
        page, names = feed.listen(), []
        while "page" not in names:
            names.append((await first(page))[0])
        assert await first(page) == ("beat", {})
        feed.close()

    asyncio.run(story())


def test_nobody_looks_for_nobody() -> None:
    """Before the first page and after the last one the broker is left alone."""
    counter = Counter()

    async def story() -> None:
        feed = Feed(counter.look, counter.rest, every_seconds=0.001)
        await asyncio.sleep(0)
        assert counter.looks == 0
        page = feed.listen()
        await first(page)
        await page.aclose()  # type: ignore[attr-defined]
        while not counter.rests:
            await asyncio.sleep(0)
        looks = counter.looks
        again = feed.listen()
        assert (await first(again))[0] == "page"
        assert counter.looks > looks
        feed.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_a_page_that_does_not_read_is_sent_the_whole() -> None:
    """The messages that wait for it do not grow for ever."""
    counter = Counter()

    async def story() -> None:
        feed = Feed(counter.look, counter.rest, every_seconds=0.0)
        slow = feed.listen()
        await first(slow)
        while counter.looks < 3 * UNREAD:
            await asyncio.sleep(0.001)
        names = [(await first(slow))[0] for _ in range(UNREAD)]
        assert names[0] == "page"
        feed.close()

    asyncio.run(asyncio.wait_for(story(), 30.0))


def test_a_change_during_a_look_is_looked_for_at_once() -> None:
    """It may have come too late for that look."""
    counter, begun, go_on = Counter(), threading.Event(), threading.Event()

    def look() -> dict[str, Any]:
        begun.set()
        go_on.wait(20.0)
        return counter.look()

    async def story() -> None:
        feed = Feed(look, every_seconds=3600.0)
        page = feed.listen()
        event = asyncio.create_task(first(page))
        await asyncio.to_thread(begun.wait, 20.0)
        feed.look_now()
        go_on.set()
        assert (await event)[1]["looks"] == 1
        assert (await first(page))[1]["looks"] == 2
        feed.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_the_end_waits_for_no_look() -> None:
    """A disk may hang, or a trial to be finished take a minute: Ctrl-C ends the server at once."""
    begun, go_on = threading.Event(), threading.Event()
    page = PageReader()

    def look() -> dict[str, Any]:
        with page._lock:
            begun.set()
            go_on.wait(60.0)
        return {}

    async def story() -> None:
        event = asyncio.create_task(first(Feed(look).listen()))
        await asyncio.to_thread(begun.wait, 20.0)
        event.cancel()

    before = time.monotonic()
    asyncio.run(story())
    page.close()
    assert time.monotonic() - before < 50.0
    go_on.set()


def test_a_page_that_cannot_be_sent_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """A number that JSON lacks ends no page."""
    looks = iter([{"until": math.inf}, {"until": 1.0}])

    async def story() -> None:
        feed = Feed(lambda: next(looks, {"until": 2.0}), every_seconds=0.001)
        assert (await first(feed.listen()))[1]["until"] == 1.0
        feed.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert "a look failed" in caplog.text


def test_a_look_that_fails_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """Pages stay, and the next look finds what there is."""
    counter = Counter()

    def look() -> dict[str, Any]:
        if counter.looks == 0:
            counter.looks += 1
            raise RuntimeError("of no known kind")
        return counter.look()

    async def story() -> None:
        feed = Feed(look, counter.rest, every_seconds=0.001)
        assert (await first(feed.listen()))[1]["looks"] == 2
        feed.close()

    asyncio.run(story())
    assert "a look failed" in caplog.text
