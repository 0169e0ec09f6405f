"""Output for people as text: lines, tables."""

from __future__ import annotations

import doctest
import importlib
import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console, RenderableType

from optuna_hermes.broker._protocol import BrokerStatus, StudyStatus
from optuna_hermes.view import formats, notebook, progress, tables
from optuna_hermes.view.picture import picture_of
from support.statuses import broker_status, device_status, study_status

RUN: dict[str, Any] = {
    "override": None,
    "value": 0.25,
    "slope": -0.125,
    "curve": [0.5, 0.25],
    "units": 2,
    "device_seconds": 3.5,
    "tier": None,
    "slices": 4,
    "suspensions": 3,
    "watt_hours": None,
}

FIELDS: dict[str, Any] = {
    "key": "k",
    "name": "digits",
    "driver_pid": 4711,
    "unstarted": 3,
    "counts": {"running": 2, "parked": 3, "stored": 1, "done": 4},
    "device_seconds": 12.34,
    "overhead_seconds": {
        "idle": 0.0,
        "opening": 0.06,
        "resuming": 0.02,
        "saving": 0.0,
        "suspending": 0.02,
    },
    "switches": 9,
    "best": {"trial": 7, "value": 0.08125},
    "trials": [
        {"trial": 1, "state": "running", **RUN},
        {"trial": 2, "state": "parked", **RUN},
        {"trial": 3, "state": "parked", **RUN},
        {"trial": 4, "state": "parked", **RUN},
        {"trial": 9, "state": "stored", **RUN},
    ],
}


def digits(**changes: Any) -> StudyStatus:
    return study_status(**FIELDS | changes)


def holder(trial: int | None, state: str = "running") -> dict[str, Any]:
    study = {"key": "k", "study": "digits"}
    return {**study, "trial": trial, "state": state, "since_seconds": 1.5}


STUDY = digits()
DEVICES = [
    device_status(id="cpu:0", holder=holder(1)),
    device_status(id="cpu:1"),
    device_status(id="cpu:2", healthy=False),
]
BROKER = broker_status(STUDY, devices=DEVICES)


def rendered(what: RenderableType, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(what)
    return console.export_text()


# -- words and imports -------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["formats", "tables"])
def test_examples_hold(module: str) -> None:
    """The examples in the docstrings are true."""
    result = doctest.testmod(importlib.import_module(f"optuna_hermes.view.{module}"))
    assert result.attempted
    assert not result.failed


def test_importing_the_views_is_cheap() -> None:
    """Nothing heavy is imported before something is drawn."""
    code = (
        "import json, sys; "
        "from optuna_hermes.view import formats, history, notebook, progress, tables; "
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert not {"rich", "torch", "optuna", "numpy"} & set(json.loads(done.stdout))


# -- progress ----------------------------------------------------------------------------------


def test_the_study_line_tells_all_that_matters() -> None:
    """Ended, live, parked, stored, the best value and device-seconds are in one line."""
    assert progress.study_line(STUDY, 13) == (
        "digits: 4 of 13 ended, 6 live, 3 parked, 1 stored, best 0.08125 (trial 7), "
        "12.3 device-seconds"
    )


def test_the_study_line_without_a_total_or_a_best_value() -> None:
    """An unbounded study that has not reported yet has a line too; failures are named."""
    counts = FIELDS["counts"] | {"failed": 2}
    line = progress.study_line(digits(best=None, counts=counts), None)
    assert line.startswith("digits: 6 ended, 6 live, 3 parked, 1 stored, 2 failed, 12.3")


def test_the_total_is_what_the_study_comes_to() -> None:
    """Trials of plain Optuna, which the broker counts nowhere, are not waited for.

    One that is just being opened is neither counted nor left, and does not change the total.
    """
    total = progress.Total()
    begun = digits(unstarted=10, counts={})
    opening = digits(unstarted=8, counts={"running": 1})
    over = digits(unstarted=0, counts={"done": 8, "failed": 2})
    assert [total.of(each) for each in (begun, opening, over)] == [10, 10, 10]
    assert progress.study_line(over, total.of(over)).startswith("digits: 10 of 10 ended, ")
    assert progress.Total().of(digits(unstarted=None)) is None


def test_each_device_has_a_line() -> None:
    """A device shows its trial and for how long, or that it is free, or that it is broken."""
    strange = device_status(id="GPU-1", problem="process 12 computes on it")
    devices = [*DEVICES, device_status(id="cpu:3", holder=holder(None, "yielding")), strange]
    assert progress.device_lines(devices) == [
        ("cpu:0", "trial 1", "1.5 s"),
        ("cpu:1", "free", ""),
        ("cpu:2", "not healthy", ""),
        ("cpu:3", "a new trial, being suspended", "1.5 s"),
        ("GPU-1", "process 12 computes on it", ""),
    ]


def test_plain_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    """A line comes when something is new, and not before the last one is seconds old or it ends."""
    now = 100.0
    lines = progress.Lines(clock=lambda: now)
    changed = digits(best={"trial": 8, "value": 0.05})
    last = digits(best={"trial": 9, "value": 0.04})
    lines.update(DEVICES, STUDY)
    lines.update(DEVICES, changed)  # too early
    now += progress.LINE_SECONDS
    lines.update(DEVICES, STUDY)  # nothing new
    lines.update(DEVICES, changed)
    lines.update(DEVICES, last)  # too early, but the last
    lines.close()
    lines.close()
    out, err = capsys.readouterr()
    legend, *shown = err.splitlines()
    assert legend.startswith("live: ")
    assert [line.split("best ")[1][:6] for line in shown] == ["0.0812", "0.05 (", "0.04 ("]
    assert out == ""


def test_progress_fits_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal it is plain lines; when nothing shall be shown it is silent."""
    shown = progress.make_progress(True)
    assert isinstance(shown._shown, progress.Lines)
    silent = progress.make_progress(False)
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        nowhere = progress.make_progress(True)
        for each in (silent, nowhere):
            each.update(DEVICES, STUDY)
            each.note("psst")
            each.close()
    assert capsys.readouterr() == ("", "")


def test_warnings_are_logged_where_no_progress_is_shown(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers that a script has added get them; the rest is INFO."""
    caplog.set_level(logging.INFO)
    silent = progress.make_progress(False)
    silent.note("psst")
    silent.warn("ouch")
    name = "optuna_hermes.optimize"
    assert caplog.record_tuples == [(name, logging.INFO, "psst"), (name, logging.WARNING, "ouch")]
    progress.make_progress(True).warn("ouch")
    assert capsys.readouterr().err == "ouch\n"


@pytest.mark.parametrize("term", ["dumb", "Unknown"])
def test_a_terminal_without_a_screen_has_plain_lines(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live view would not be drawn there, and nothing said until the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    shown = progress.make_progress(True)
    assert isinstance(shown._shown, progress.Lines)
    monkeypatch.setenv("TERM", "xterm")
    assert progress.is_screen(sys.stderr)


class Tee:
    """A stream in the place of standard error that can be written to, and no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_a_script_may_replace_or_close_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the study, or while it runs: it goes on, and says what it can."""
    tee = Tee()
    monkeypatch.setattr(sys, "stderr", tee)
    shown = progress.make_progress(True)
    shown.note("psst")
    assert tee.text == "psst\n"
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    closed.close()
    for each in (shown, progress.make_progress(True)):
        each.update(DEVICES, STUDY)
        each.note("psst")
        each.warn("ouch")
        each.close()


def test_a_study_goes_on_when_nobody_can_be_shown_anything() -> None:
    """Ctrl-C ends ``tee`` too, and a terminal can be closed: what is written then is dropped."""
    ours, theirs = os.pipe()
    os.close(ours)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(theirs, "w", buffering=1) as closed:
        patch.setattr(sys, "stderr", closed)
        lines = progress.make_progress(True)
        for _ in range(3):
            lines.note("psst")
            lines.update(DEVICES, STUDY)
        lines.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())


def test_the_screen_shows_devices_and_study() -> None:
    """The live view has a line for each device and one for the study."""
    text = rendered(progress.live_view(DEVICES, STUDY, 13))
    assert [line.split()[0] for line in text.splitlines()] == ["digits:", "cpu:0", "cpu:1", "cpu:2"]


def test_a_screen_can_be_closed_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing twice, or before anything was shown, is no error."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    screen = progress.make_progress(True)
    screen.close()
    screen.update(DEVICES, STUDY)
    screen.note("a [bold]line[/bold]")
    screen.close()
    screen.close()


# -- tables ------------------------------------------------------------------------------------


def test_status_names_holders_and_suspended_trials() -> None:
    """Devices, their holders, and the parked and stored trials of each study are there."""
    text = rendered(tables.status_view(BROKER, None))
    for words in ("cpu:0", "digits 1", "not healthy", "2-4", "parked", "stored", "0.08125"):
        assert words in text


def test_status_says_why_a_device_is_idle() -> None:
    """A device that nobody may have says why in its own words."""
    problem = "process 7 of alice computes on it"
    taken = broker_status(devices=[device_status(problem=problem)])
    text = rendered(tables.status_view(taken, None))
    assert problem in text.replace("\n", " ")


def resident(trial: int, **fields: Any) -> dict[str, Any]:
    known = {"key": "k", "study": "digits", "trial": trial, "pid": 70 + trial}
    known |= {"held_bytes": 3 << 30, "process_bytes": 400 << 20, "measured": True}
    return known | {"tier": "resident"} | fields


def on_gpu(*residents: dict[str, Any]) -> BrokerStatus:
    memory = {"memory_bytes": 24 << 30, "memory_free_bytes": 10 << 30}
    device = device_status(id="GPU-a", kind="gpu", residents=list(residents), **memory)
    return broker_status(digits(), devices=[device])


def test_status_says_who_holds_what_of_a_gpu() -> None:
    """Each trial with its process: what is measured, what is estimated, and what nobody knows."""
    broker = on_gpu(
        resident(1, tier=None, measured=False, process_bytes=600 << 20),
        resident(2),
        resident(3, tier="host", held_bytes=None),
    )
    lines = rendered(tables.status_view(broker, None)).splitlines()
    begin = next(i for i, line in enumerate(lines) if "Memory of GPU-a" in line)
    found = [line.replace("│", " ").split() for line in lines[begin + 1 :]]
    for words in (
        "digits 1 running 71 3.0 GiB about 600.0 MiB",
        "digits 2 parked, resident 72 3.0 GiB 400.0 MiB",
        "digits 3 parked, host 73 ? 400.0 MiB",
    ):
        assert words.split() in found


def test_a_picture_has_what_each_trial_takes_of_its_devices() -> None:
    """With its process, and of all devices that it is on; unknown is left out."""
    picture = picture_of(on_gpu(resident(2), resident(3, held_bytes=None)), "s", 0.0)
    assert picture.memory == {2: (3 << 30) + (400 << 20)}
    two = device_status(id="GPU-b", kind="gpu", residents=[resident(2, process_bytes=None)])
    one = on_gpu(resident(2), resident(4, key="another")).devices[0]
    broker = broker_status(digits(), devices=[two])
    broker = structs.replace(broker, devices=(one, *broker.devices))
    assert picture_of(broker, "s", 0.0).memory == {2: (6 << 30) + (400 << 20)}


def ledger_trial(number: int, state: str = "stored") -> dict[str, Any]:
    run = {"trial": number, "state": state, "value": None, "units": 3, "slices": 2}
    return run | {"suspensions": 1, "device_seconds": 75.0, "watt_hours": None}


def test_status_of_very_many_trials_is_a_summary() -> None:
    """10,000 trials are counted by state: neither lines nor numbers for each of them."""
    runs = [ledger_trial(n, "stored" if n % 2 else "done") for n in range(10_000)]
    study = {"name": "big", "trials": runs, "counts": {"stored": 5000, "done": 5000}}
    study |= {"best": {"trial": 7, "value": 0.5}, "device_seconds": 7200.0, "watt_hours": 1234.5}
    counts = FIELDS["counts"] | {"stored": 5000, "done": 5000}
    broker = broker_status(digits(trials=runs, counts=counts), devices=DEVICES)
    text = rendered(tables.status_view(broker, study))
    assert len(text.splitlines()) < 40
    assert text.count("5000 trials") == 4
    for words in ("0.5 (trial 7)", "2:00 h", "1.23 kWh", "status TRIAL"):
        assert words in text


def test_trials_that_fit_nowhere_are_named() -> None:
    """Whoever wonders why a trial waits reads what it waits for."""
    text = rendered(tables.status_view(BROKER, None))
    assert "no room" not in text
    text = rendered(tables.status_view(broker_status(digits(no_room=[2, 3, 9])), None))
    words = "2, 3, 9: no device has the memory until another trial has left it"
    assert words in text


@pytest.mark.parametrize(
    ("problem", "words"),
    [(None, "training goes on"), ("It was away for 300 s.", "every trial is to be on disk")],
)
def test_a_database_that_is_away_is_shown(problem: str | None, words: str) -> None:
    """The message says too if training still goes on without it."""
    broker = broker_status(digits(outage_seconds=75.0, problem=problem))
    text = rendered(tables.status_view(broker, None))
    assert f"does not answer since 1:15 min: {words}" in text
    assert problem is None or problem in text
    full = digits(outage_seconds=75.0, outage_reason="database or disk is full", problem=problem)
    text = rendered(tables.status_view(broker_status(full), None))
    assert "cannot be written, as its disk is full since 1:15 min" in text


def test_status_without_a_broker_still_shows_a_ledger() -> None:
    """A study that has ended is shown from its ledger."""
    run = ledger_trial(5)
    study = {"name": "old", "trials": [run], "watt_hours": None}
    text = rendered(tables.status_view(None, study))
    assert "No broker runs on this host" in text
    assert "1:15 min" in text
    hosts = [{"host": "b", "load": 1.0, "devices": 2}]
    text = rendered(tables.status_view(None, {**study, "hosts": hosts}))
    assert "No broker runs on this host.\n" in text
    assert "Host b: 2 of 2 devices busy" in text
    text = rendered(tables.status_view(None, study, silent=True))
    assert "The broker does not answer: trials may train." in text
    assert "nothing trains" not in text
    text = rendered(tables.status_view(None, {**study, "elsewhere": True}))
    assert "a broker of another runtime directory" in text
    assert "nothing trains" not in text


def test_status_shows_the_trials_of_a_namesake() -> None:
    """Another database may hold a study of that name: its trials are not those of the ledger."""
    study = {"name": "digits", "trials": [ledger_trial(5)], "watt_hours": None}
    assert "slope" not in rendered(tables.status_view(BROKER, {**study, "key": "k"}))
    assert "slope" in rendered(tables.status_view(BROKER, {**study, "key": "another"}))


def test_an_encoding_without_bars_has_no_curves() -> None:
    """Escapes in place of the bars would be no curve, and move the columns after it."""
    assert "curve" in rendered(tables.status_view(BROKER, None))
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace") as stream:
        Console(width=100, file=stream).print(tables.status_view(BROKER, None))
        stream.flush()
        text = stream.buffer.getvalue().decode()
    assert "slope" in text
    assert "curve" not in text


def result(*trials: tuple[str, int]) -> dict[str, Any]:
    return {
        "study": "digits",
        "policy": "hermes",
        "devices": ["cpu:0", "cpu:1"],
        "elapsed_seconds": 30.0,
        "device_seconds": 55.0,
        "spent_seconds": 5.0,
        "watt_hours": None,
        "switches": 1,
        "overhead_fraction": 0.0123,
        "overhead_seconds": {
            "idle": 0.0,
            "opening": 0.5,
            "resuming": 0.25,
            "saving": 0.0,
            "suspending": 0.0,
        },
        "best": {"number": 3, "value": 0.5, "params": {"lr": 0.00123456, "kind": "[red]"}},
        "trials": [{"state": state, "suspensions": n, "slices": n + 1} for state, n in trials],
    }


def test_the_summary_tells_best_counts_and_costs() -> None:
    """Best trial with parameters, states, suspensions and time outside of batches are there."""
    text = rendered(tables.summary_view(result(("COMPLETE", 2), ("STORED", 1), ("COMPLETE", 0))))
    for words in (
        "0.5 (trial 3)",
        "lr=0.001235, kind=[red]",
        "2 complete, 1 stored",
        "2 of 3 trials, 3 times; 1 still are",
        "5.0 s on cpu:0, cpu:1, in 30.0 s; 55.0 s in all calls",
        "1.2 % of device time (opening 0.5 s, resuming 0.2 s)",
    ):
        assert words in text
    assert "in all calls" not in rendered(tables.summary_view({**result(), "spent_seconds": 55.0}))


def test_the_summary_of_a_study_without_a_finished_trial() -> None:
    """There is a summary although nothing is best."""
    text = rendered(tables.summary_view({**result(), "best": None}))
    assert "no trial is complete" in text
    text = rendered(tables.summary_view({**result(("COMPLETE", 0)), "best": None}))
    assert "no trial is feasible" in text
    text = rendered(tables.summary_view({**result(), "devices": []}))  # over before it had any
    assert "5.0 s, in 30.0 s" in text


@pytest.mark.parametrize(
    ("trials", "ending"),
    [
        ([("COMPLETE", 0)], "none"),
        ([("COMPLETE", 1)], "1 of 1 trial, 1 time; each was resumed and finished"),
        ([("PRUNED", 1)], "1 of 1 trial, 1 time; each was resumed"),
        ([("PARKED", 1), ("COMPLETE", 1)], "2 of 2 trials, 2 times; 1 still are"),
    ],
)
def test_what_became_of_suspended_trials(trials: list[tuple[str, int]], ending: str) -> None:
    """The words match what became of them."""
    assert tables.suspensions(result(*trials)["trials"]) == ending


@pytest.mark.parametrize(
    ("other", "ending"), [("COMPLETE", "each was finished"), ("PRUNED", "none still is")]
)
def test_a_trial_that_a_person_has_finished_was_not_resumed(other: str, ending: str) -> None:
    """It had a slice for each suspension, and none after the last."""
    finished = {"state": "COMPLETE", "slices": 1, "suspensions": 1}
    trials = [finished, {"state": other, "slices": 2, "suspensions": 1}]
    assert tables.suspensions(trials) == f"2 of 2 trials, 2 times; {ending}"


@pytest.mark.parametrize(
    ("watt_hours", "text"),
    [
        (0.0, "0.00 Wh"),
        (0.00004, "0.00 Wh"),
        (99.96, "100 Wh"),
        (512.3, "512 Wh"),
        (999.6, "1.00 kWh"),
        (123_456.0, "123 kWh"),
        (2.5e6, "2.50 MWh"),
        (2.5e11, "250 GWh"),
    ],
)
def test_energy_has_three_digits(watt_hours: float, text: str) -> None:
    """No point dangles, and no exponent is there."""
    assert formats.energy(watt_hours) == text


def test_a_figure_is_in_the_unit_that_it_has_once_it_is_rounded() -> None:
    """Neither 60.0 s nor 1000.0 KiB."""
    assert [formats.duration(each) for each in (59.94, 59.97)] == ["59.9 s", "1:00 min"]
    sizes = [formats.size(each) for each in (999.6, 999.9 * 1024, 999.99 * 1024)]
    assert sizes == ["1.0 KiB", "999.9 KiB", "1.0 MiB"]


def test_energy_is_shown_where_it_is_known() -> None:
    """Watt-hours have a line and a column of their own; nobody sees figures that nobody has."""
    runs = [ledger_trial(0) | {"watt_hours": 0.25}, ledger_trial(1)]
    study = {"key": "s", "name": "s", "trials": runs, "counts": {"stored": 2}, "best": None}
    study |= {"device_seconds": 150.0, "watt_hours": 0.25}
    text = rendered(tables.status_view(broker_status(digits(watt_hours=3.5)), study))
    for words in ("energy", "3.50 Wh", "0.250 Wh"):
        assert words in text
    study |= {"watt_hours": None}
    assert "energy" not in rendered(tables.status_view(BROKER, study))


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (30, "trial state value"),
        (40, "trial state value units"),
        (50, "trial state value units slices"),
        (100, "trial state value units slices suspensions device time"),
    ],
)
def test_a_narrow_table_breaks_no_word(width: int, columns: str) -> None:
    """Columns are left out whole, as in ``top``: a number without its end is another one."""
    trial = ledger_trial(5) | {"value": 0.023239, "state": "done", "override": "boosted"}
    study = {"name": "s", "trials": [trial], "watt_hours": None}
    text = rendered(tables.status_view(None, study), width)
    lines = text[text.index("as its ledger has it") :].splitlines()[1:]
    assert max(map(len, lines)) <= width
    assert lines[1].replace("┃", " ").split() == columns.split()
    words = " ".join(lines[-4:]).replace("│", " ").split()
    assert {"0.02324", "done,", "boosted"} <= set(words)


# -- in a notebook -----------------------------------------------------------------------------


def test_a_cell_has_one_output() -> None:
    """It is replaced, not too often, and at the end tells of no device any more."""
    drawn: list[dict[str, str]] = []
    times = iter([0.0, 0.1, 0.6, 0.7])

    def draw(texts: dict[str, str]) -> Any:
        drawn.append(texts)
        return drawn.append

    cell = notebook.Cell(draw, lambda: next(times))
    for _ in range(4):
        cell.update(DEVICES, STUDY)
    cell.close()
    assert ["cpu:0 trial 1" in each["text/plain"] for each in drawn] == [True, True, False]
    assert "4 of 13 ended" in drawn[-1]["text/plain"]
    assert '<progress value="4" max="13"' in drawn[-1]["text/html"]


def test_a_cell_shows_the_last_notes() -> None:
    """As text: what a study is called runs nothing in a browser."""
    drawn: list[dict[str, str]] = []
    cell = notebook.Cell(lambda texts: drawn.append(texts) or drawn.append)
    for number in range(9):
        cell.note(f"note <{number}>")
    assert "note <3>" not in drawn[-1]["text/plain"]
    assert "note &lt;8&gt;" in drawn[-1]["text/html"]
    assert "<8>" not in drawn[-1]["text/html"]


def test_no_notebook_here() -> None:
    """A script gets its lines, also where IPython is installed."""
    assert not notebook.in_notebook()
