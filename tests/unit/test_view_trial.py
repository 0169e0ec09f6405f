"""One trial with its event log, for people."""

from __future__ import annotations

import doctest
import importlib
import io
from typing import Any

import pytest
from rich.console import Console

from optuna_hermes.view import formats, tables

TRIAL: dict[str, Any] = {
    "study": "digits",
    "trial": 3,
    "state": "parked",
    "where": {"host": "box", "tier": "resident", "device": "cpu:0"},
    "params": {"lr": 0.001234567, "kind": "adam"},
    "curve": {
        "units": 3,
        "values": [2.3, 0.4, 0.5],
        "steps": [1, 2, 3],
        "best": {"value": 0.4, "unit": 2},
    },
    "standing": {"rank": 14, "among": 60, "units": 3, "chance": 0.031},
    "units_trained": 4,
    "slices": 3,
    "suspensions": 2,
    "device_seconds": 75.0,
    "watt_hours": 2.5,
    "submitted": 0.0,
    "updated": 9.0,
    "checkpoints": [{"path": "/c/2", "units": 2, "size_bytes": 2_500_000, "at": 1.0}],
    "events": [
        {"at": 1.0, "kind": "admitted", "detail": {"device": "cpu:0", "epoch": 1}},
        {"at": 2.0, "kind": "suspended", "detail": {"tier": "host", "device": "c", "units": 1}},
    ],
}

MOVED = "brought back: in its device's memory, before on disk"


def rendered(document: dict[str, Any]) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(tables.trial_view(document))
    return console.export_text()


def test_examples_hold() -> None:
    """The examples in the docstrings hold."""
    module = importlib.import_module("optuna_hermes.view.tables")
    assert doctest.testmod(module).failed == 0


def test_a_trial_is_told_in_80_columns() -> None:
    """State, values and events of a trial are told, each in a line of its own."""
    text = rendered(TRIAL)
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "Trial 3 of study digits: parked, in its device's memory of box",
        "lr=0.001235, kind=adam",
        "0.5 after 3 units (first 2.3, best 0.4 at unit 2)",
        "█▁▁",
        "14 of 60 after 3 units; 3% to end as the best of all so far",
        "4 units, 1:15 min of a device",
        "2.50 Wh",
        "3 slices, suspended 2 times",
        "1, the newest of unit 2, 2.4 MiB",
        "suspended after unit 1: in host memory",
    ):
        assert words in text


def test_brackets_are_shown_as_they_are() -> None:
    """They are no markup, also where `top` shows a trial, whose console reads markup."""
    params = {"data": "[/data/a]", "act": "[relu]", "go": "[@click=app.quit]x[/]"}
    text = rendered({**TRIAL, "params": params})
    for each in params.values():
        assert each in text


def test_a_trial_that_has_only_begun() -> None:
    """Nothing reported and nothing saved is said, not left out."""
    curve = {"units": 0, "values": [], "steps": [], "best": None}
    where = {"host": None, "tier": None, "device": None}
    text = rendered(
        {**TRIAL, "state": "pending", "where": where, "curve": curve, "checkpoints": []}
        | {"events": [], "params": {}}
    )
    for words in ("pending, it waits for a device", "nothing reported", "checkpoints  none"):
        assert words in text


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_trial_that_is_over_is_nowhere(state: str) -> None:
    """After its end there is no place to name."""
    document = {**TRIAL, "state": state, "where": {"host": "box", "tier": None, "device": None}}
    assert rendered(document).splitlines()[0] == f"Trial 3 of study digits: {state}"


def test_an_encoding_without_bars_has_no_curve() -> None:
    """Escapes in place of the bars tell nothing; all other figures are there."""
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace") as stream:
        Console(width=80, file=stream).print(tables.trial_view(TRIAL))
        stream.flush()
        text = stream.buffer.getvalue().decode()
    assert "\\u" not in text
    assert "curve" not in text
    assert "best 0.4 at unit 2" in text
    assert "curve" in rendered(TRIAL)


def test_a_long_event_log_shows_its_end() -> None:
    """Of very many events the newest are shown, and how many there are before."""
    events = [{"at": float(n), "kind": f"event-{n}", "detail": {}} for n in range(500)]
    text = rendered({**TRIAL, "events": events})
    assert "460 earlier events: --json tells all." in text
    assert "event-460" in text
    assert "event-459" not in text
    assert len(text.splitlines()) < 60


def test_a_long_curve_fits_its_line() -> None:
    """A curve of many units is thinned out; its last point is always there."""
    bars = formats.sparkline([float(n) for n in range(1000)], 50, log=False)
    assert 40 <= len(bars) <= 51
    assert (bars[0], bars[-1]) == ("▁", "█")


@pytest.mark.parametrize(
    ("kind", "detail", "words"),
    [
        ("admitted", {}, "admitted"),
        ("admitted", {"device": "cpu:1", "epoch": 42}, "admitted on cpu:1"),
        ("granted", {"device": "cpu:1", "from": None, "epoch": 2}, "granted cpu:1"),
        ("moved", {"tier": "resident", "from": "disk", "device": "cpu:1"}, MOVED),
        ("evicted", {"tier": "disk", "from": "host"}, "evicted: on disk, before in host memory"),
        ("carried on", {"host": "a", "from": "b"}, "carried on by a, before on b"),
        ("killed", {"pid": 7, "reason": "it hung"}, "process 7 killed: it hung"),
        ("process lost", {}, "process lost"),
        ("of later versions", {"x": 1, "y": None}, "of later versions: x 1, y None"),
    ],
)
def test_events_in_words(kind: str, detail: dict[str, Any], words: str) -> None:
    """Known events read as sentences; unknown and older ones show what they have."""
    assert tables.event_text(kind, detail) == words
