"""Plots of a study: what they draw, by plotly and by matplotlib."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import optuna
import pytest

from optuna_hermes import _optuna, visualization
from optuna_hermes.cli import run as run_cli
from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.ledger import open_ledger
from optuna_hermes.view.history import Bar, StudyHistory
from optuna_hermes.visualization import _data as plot_data
from optuna_hermes.visualization import matplotlib as by_matplotlib
from optuna_hermes.visualization._study import StudyData, _most_at_once
from support.records import checkpoint, lease, report, trial_record
from support.statuses import broker_status, device_status, study_status

mpl.use("agg")

BEGIN = 1_700_000_000.0
NAMES = ("plot_schedule", "plot_curves", "plot_best_over_device_time")
PLOTS = [getattr(home, name) for home in (visualization, by_matplotlib) for name in NAMES]
VALUES = {0: (0.9, 0.8), 1: (0.5, 0.2), 2: (0.7, float("nan")), 3: (0.1,)}
ENDS = {0: 0.8, 1: 0.2}


@pytest.fixture(autouse=True)
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Optuna's log can be heard, ledgers are the test's own, and no figure stays open."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pyplot = importlib.import_module("matplotlib.pyplot")
    optuna.logging.enable_propagation()
    yield
    optuna.logging.disable_propagation()
    pyplot.close("all")


@pytest.fixture(params=["minimize"])
def study(request: pytest.FixtureRequest) -> optuna.Study:
    """Two trials that are done, one that is stored and one that failed, on two devices."""
    study = optuna.create_study(study_name="s", direction=request.param)
    key, sign = _optuna.study_key(study), _optuna.sign(study)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        for number, values in VALUES.items():
            study.ask()
            state: Any = ("done", "done", "stored", "failed")[number]
            ledger.save_trial(
                trial_record(number, study=key, state=state, device_seconds=len(values))
            )
            for unit, value in enumerate(values, 1):
                at = BEGIN + 10 * unit + number
                ledger.add_report(report(unit, sign * value, number=number, study=key, at=at))
            times = {"started": BEGIN + number, "ended": BEGIN + number + len(values)}
            device = f"a/cpu:{9 + number % 2}"
            ledger.commit_lease(
                lease(number + 1, number=number, study=key, devices=(device,), **times)
            )
        ledger.save_checkpoint(checkpoint("/2", number=2, study=key))
    for number, value in ENDS.items():
        study.tell(number, value)
    study.tell(3, state=optuna.trial.TrialState.FAIL)
    return study


def names(figure: Any) -> list[str]:
    return [trace.name for trace in figure.data]


def test_examples_hold() -> None:
    """The examples in the docstrings hold."""
    assert doctest.testmod(plot_data).failed == 0


def test_the_schedule_has_a_row_for_each_device(study: optuna.Study) -> None:
    """Each slice is a bar of its device, as long as it lasted, with the number of its trial."""
    (bars,) = visualization.plot_schedule(study).data
    assert list(bars.y) == ["cpu:9", "cpu:9", "cpu:10", "cpu:10"]
    assert list(bars.text) == ["0", "2", "1", "3"]
    assert list(bars.x) == [2000, 2000, 2000, 1000]
    axes = by_matplotlib.plot_schedule(study)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu:9", "cpu:10"]
    assert [len(row.get_paths()) for row in axes.collections] == [2, 2]
    assert [text.get_text() for text in axes.texts] == ["0", "2", "1", "3"]
    assert axes.collections[0].get_linewidth() == [0.5]


def test_a_schedule_of_days_has_dates(study: optuna.Study) -> None:
    """Where a slice begins is told by its time alone if that is enough."""
    (bars,) = visualization.plot_schedule(study).data
    assert "from %{base|%H:%M:%S} on %{y}" in bars.hovertemplate
    later = BEGIN + 2 * 86400
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        key = _optuna.study_key(study)
        ledger.commit_lease(lease(9, number=2, study=key, started=later, ended=later + 1))
    (bars,) = visualization.plot_schedule(study).data
    assert "from %{base|%Y-%m-%d %H:%M:%S} on %{y}" in bars.hovertemplate


def test_the_schedule_of_many_slices_is_bars_and_no_lines() -> None:
    """White lines of half a point would cover bars of a pixel; a row is drawn at once."""
    bars = tuple(Bar("a/cpu:0", n % 7, float(n), n + 1.0, n + 1) for n in range(400))
    data = StudyData(history=StudyHistory(key="k", trials=(), bars=bars), now=500.0)
    axes = by_matplotlib._draw_schedule(by_matplotlib._figure(1).axes[0], data)
    (row,) = axes.collections
    assert (len(row.get_paths()), list(row.get_linewidth())) == (400, [0.0])
    assert (len(axes.patches), len(axes.texts)) == (0, 0)


def test_curves_stand_by_what_has_become_of_them(study: optuna.Study) -> None:
    """Suspended ones are dimmed and lie below, values that are no numbers are left out, and a trial
    that failed is not the best."""
    suspended, failed, done, best = visualization.plot_curves(study).data
    assert [suspended.name, failed.name, done.name, best.name] == [
        "suspended (1)",
        "failed (1)",
        "done (2)",
        "best last value: trial 1",
    ]
    assert suspended.opacity < failed.opacity < done.opacity
    assert (list(suspended.x), list(suspended.y)) == ([1], [0.7])
    assert list(done.y) == [0.9, 0.8, None, 0.5, 0.2]
    assert suspended.mode == "lines+markers"
    axes = by_matplotlib.plot_curves(study)
    assert [list(line.get_ydata()) for line in axes.lines] == [
        [0.7],
        [0.1],
        [0.9, 0.8],
        [0.5, 0.2],
        [0.5, 0.2],
    ]


def test_curves_can_stand_over_device_time(study: optuna.Study) -> None:
    """Each trial's own, in the unit in which it is read best; there is no third axis."""
    figure = visualization.plot_curves(study, axis="device_seconds", target_name="Loss")
    assert figure.layout.xaxis.title.text == "Device Time of the Trial (s)"
    assert figure.layout.yaxis.title.text == "Loss"
    with pytest.raises(ValueError, match='"unit" or "device_seconds" but got \'time\''):
        visualization.plot_curves(study, axis="time")


@pytest.mark.parametrize(
    ("curves", "maximize", "bounds"),
    [
        ([[2.0, 0.5]] * 9 + [[2.0, 1e20]], False, (0.5, 2.0)),
        ([[0.1, 0.9]] * 9 + [[0.1, -1e308]], True, (0.1, 0.9)),
        # A quarter of the trials, and no more.
        ([[2.0, 0.5]] * 3 + [[1e20, 1e20]], False, (0.5, 2.0)),
        ([[2.0, 0.5]] * 2 + [[1e20, 1e20]], False, (0.5, 1e20)),
        # A peak that each trial has.
        ([[1e6, *[2.0, -0.5] * 10]] * 9, False, (-0.5, 2.0)),
        # Bad trials do not diverge.
        ([[2.3, 0.1]] * 9 + [[2.3, 9.0]], False, (0.1, 9.0)),
        ([[0.95]] * 9 + [[0.1]], True, (0.1, 0.95)),
        ([[0.0]] * 9 + [[0.5]], False, (0.0, 0.5)),
        # Nothing is left out at the good end, unless no axis could be that long.
        ([[2.0, 0.5]] * 9 + [[-1e20]], False, (-1e20, 2.0)),
        ([[-1e308], [1e308]], False, (-1e300, 1e300)),
    ],
)
def test_the_scale_of_curves_is_that_of_trials_that_do_not_diverge(
    curves: list[list[float]], maximize: bool, bounds: tuple[float, float]
) -> None:
    """Few trials must not flatten all others; one that is merely bad is shown."""
    assert plot_data.usual_bounds(curves, maximize) == bounds


def test_a_trial_that_diverges_leaves_the_scale(study: optuna.Study) -> None:
    """The title names it; the picture of all three plots is drawn without a warning."""
    key = _optuna.study_key(study)

    def drawn(value: float, number: int) -> tuple[str, Any]:
        with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
            ledger.add_report(report(2, value, number=number, study=key, at=BEGIN + 20 + number))
        figure = by_matplotlib.figure_of_all(study, ["fifo"])
        figure.draw_without_rendering()
        layout = visualization.plot_curves(study).layout
        assert figure.axes[1].get_title() == layout.title.text
        assert figure.axes[1].get_ylim() == layout.yaxis.range
        return layout.title.text, layout.yaxis.range

    title, ends = drawn(1e308, 3)
    assert title == "Curves (trial 3 leaves the scale)"
    assert ends == pytest.approx((0.06, 0.94))
    # One at the good end flattens all others, and the best value so far is no longer seen.
    title, ends = drawn(-1e308, 2)
    assert title == "Curves (trials 2, 3 leave the scale)"
    assert ends == pytest.approx((-1.1e300, 1.1e300))


def test_first_values_that_diverge_leave_the_scale_of_the_best_so_far(study: optuna.Study) -> None:
    """As they leave that of the curves: all that follows would be a flat line."""
    by_plotly = visualization.plot_best_over_device_time(study, []).layout
    assert (by_plotly.title.text, by_plotly.yaxis.range) == ("Best Value over Device Time", None)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        key, number = _optuna.study_key(study), study.ask().number
        ledger.save_trial(trial_record(number, study=key, state="done", device_seconds=2.0))
        for unit, value in enumerate((1e9, 0.75), 1):
            ledger.add_report(report(unit, value, number=number, study=key, at=BEGIN + unit))
        study.tell(number, 0.75)
    figure = visualization.plot_best_over_device_time(study, [])
    assert list(figure.data[0].y) == [1e9, 0.75, 0.5, 0.2, 0.2]
    title = "Best Value over Device Time (first values leave the scale)"
    assert figure.layout.title.text == title
    assert figure.layout.yaxis.range == pytest.approx((0.1725, 0.7775))
    axes = by_matplotlib.plot_best_over_device_time(study, [])
    assert (axes.get_title(), axes.get_ylim()) == (title, figure.layout.yaxis.range)


def test_the_best_so_far_stands_beside_its_replays(study: optuna.Study) -> None:
    """All lines end at the device time of all; what a policy had is replayed, failed ones not."""
    figure = visualization.plot_best_over_device_time(study, ["fifo", "oracle"], n_devices=1)
    own, fifo, oracle = figure.data
    assert names(figure) == ["this study", "fifo", "oracle"]
    # Reports come in rounds: 0.9, 0.5 and 0.7 after 1, 2 and 3 s, then 0.8 and 0.2.
    assert (list(own.x), list(own.y)) == ([1.0, 2.0, 5.0, 6.0], [0.9, 0.5, 0.2, 0.2])
    # One trial after the other: 0.9, 0.8, then after a switch 0.5 and 0.2.
    assert list(fifo.y) == [0.9, 0.8, 0.5, 0.2, 0.2]
    assert list(fifo.x)[:3] == pytest.approx([1.0, 2.0, 3.0], abs=0.02)
    assert list(oracle.y) == [0.5, 0.2, 0.2]
    axes = by_matplotlib.plot_best_over_device_time(study, ["fifo"], n_devices=1)
    assert [line.get_label() for line in axes.lines] == ["this study", "fifo"]
    assert list(axes.lines[1].get_ydata()) == list(fifo.y)


def test_a_replay_has_as_many_devices_as_were_leased_at_one_time() -> None:
    """A host of a cluster may have another name in each job."""
    bars = [
        Bar("job-1/cpu:0", 0, 0.0, 10.0, 1),
        Bar("job-1/cpu:1", 1, 0.0, 10.0, 2),
        Bar("job-2/cpu:0", 0, 10.0, 20.0, 3),
        Bar("job-2/cpu:1", 1, 12.0, None, 4),
    ]
    assert [_most_at_once(bars), _most_at_once(bars[:1]), _most_at_once([])] == [2, 1, 0]


def test_an_infinite_report_is_no_best_of_a_replay(study: optuna.Study) -> None:
    """As it is none of this study: else the line of the policy would end there."""
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        infinite = report(2, float("-inf"), number=2, study=_optuna.study_key(study), at=BEGIN + 30)
        ledger.add_report(infinite)
    _, fifo = visualization.plot_best_over_device_time(study, ["fifo"], n_devices=1).data
    assert list(fifo.y) == [0.9, 0.8, 0.5, 0.2, 0.2]


def test_a_policy_of_a_private_file_is_in_the_legend(
    study: optuna.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although matplotlib leaves out what begins with an underscore."""
    (tmp_path / "_mine.py").write_text("from optuna_hermes.policies import Fifo as Mine\n")
    monkeypatch.chdir(tmp_path)
    axes = by_matplotlib.plot_best_over_device_time(study, ["_mine.py:Mine"], n_devices=1)
    legend = axes.get_legend()
    assert legend
    shown = [text.get_text().strip() for text in legend.get_texts()]
    assert shown == ["this study", "_mine.py:Mine"]


@pytest.mark.parametrize("study", ["maximize"], indirect=True)
def test_higher_is_better_where_values_are_maximised(study: optuna.Study) -> None:
    """The best is the highest, and replays are turned back too."""
    *_, best = visualization.plot_curves(study).data
    assert best.name == "best last value: trial 0"
    own, fifo = visualization.plot_best_over_device_time(study, ["fifo"]).data
    assert (own.y[-1], fifo.y[-1]) == (0.9, 0.9)


def test_a_trial_that_trains_is_drawn_until_now(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that lasts ends with the plot; one that nobody holds, with the last report."""
    key = _optuna.study_key(study)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        ledger.save_trial(trial_record(2, study=key, state="running"))
        ledger.commit_lease(lease(9, number=2, study=key, started=BEGIN + 5))
    data = visualization._study.read_study(study)
    nobody = plot_data.schedule_info(data.history, BEGIN + 100)
    assert [box.end for box in nobody if box.begin == BEGIN + 5] == [BEGIN + 22]
    status = broker_status(study_status(key=key))
    monkeypatch.setattr(visualization._study, "ask_broker", lambda: (status, ""))
    data = visualization._study.read_study(study)
    held = plot_data.schedule_info(data.history, BEGIN + 100)
    assert [box.end for box in held if box.begin == BEGIN + 5] == [BEGIN + 100]


def test_a_new_trial_that_trains_is_drawn_until_now(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no number yet: the broker knows that its lease lasts, and which leases were lost."""
    key = _optuna.study_key(study)
    with closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        for epoch in (8, 9):
            ledger.commit_lease(lease(epoch, number=None, study=key, started=BEGIN + epoch))
    device = device_status(holder={"key": key, "epoch": 9})
    status = broker_status(study_status(key=key), devices=[device])
    monkeypatch.setattr(visualization._study, "ask_broker", lambda: (status, ""))
    monkeypatch.setattr(visualization._study, "time", SimpleNamespace(time=lambda: BEGIN + 100))
    (bars,) = visualization.plot_schedule(study).data
    shown = zip(bars.x, bars.hovertext, strict=True)
    assert [each for each in shown if "new" in each[1]] == [(91_000, "new trial, 1:31 min")]
    rows = by_matplotlib.plot_schedule(study).collections
    assert sum(len(row.get_paths()) for row in rows) == 5


def test_hosts_are_named_where_there_are_several() -> None:
    """Devices of one host need not say whose they are; two that look alike keep all they have."""
    assert plot_data.device_names(["a/cpu:0", "b/cpu:0"]) == {
        "a/cpu:0": "a/cpu:0",
        "b/cpu:0": "b/cpu:0",
    }
    bars = tuple(Bar(f"a/{name}", 0, 0.0, 1.0, 1) for name in ("x²", "x10", "x9"))
    boxes = plot_data.schedule_info(StudyHistory(key="k", trials=(), bars=bars, position=0), 1.0)
    assert [box.device for box in boxes] == ["x²", "x9", "x10"]  # not each digit is of a number
    alike = ["a/GPU-5c1ae4b2-1", "a/GPU-5c1ae4b2-2"]
    assert [*plot_data.device_names(alike).values()] == ["GPU-5c1ae4b2-1", "GPU-5c1ae4b2-2"]


def drawn_things(plot: Any) -> int:
    return len(plot.data) if hasattr(plot, "data") else len(plot.lines) + len(plot.collections)


@pytest.mark.parametrize("plot", PLOTS)
def test_a_study_without_a_ledger_gives_an_empty_plot(
    plot: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It says why in the log, as Optuna's plots do, and makes no ledger."""
    study = optuna.create_study(study_name="plain")
    assert drawn_things(plot(study)) == 0
    assert "Study 'plain' has no ledger to plot" in caplog.text
    assert _optuna.known_key(study) is None


@pytest.mark.parametrize("plot", PLOTS)
def test_a_study_without_values_gives_an_empty_plot(
    plot: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A study that has not begun is none to complain of, but to say so."""
    study = optuna.create_study(study_name="new")
    _optuna.study_key(study)
    assert drawn_things(plot(study)) == 0
    assert "No trial of study 'new' has reported a value yet." in caplog.text


@pytest.mark.parametrize("plot", PLOTS)
def test_only_a_study_can_be_plotted(plot: Callable[..., Any]) -> None:
    """A name is not enough, and the error says what is."""
    with pytest.raises(TypeError, match=r"of an optuna.Study but got 'digits'"):
        plot("digits")


def test_policies_are_checked_first(study: optuna.Study) -> None:
    """A name that nobody has, and one text in place of a list."""
    with pytest.raises(UnknownPolicyError, match="nobody"):
        visualization.plot_best_over_device_time(study, ["nobody"])
    with pytest.raises(TypeError, match=r'must be a list of policies but got \'fifo\': \["fifo"\]'):
        visualization.plot_best_over_device_time(study, "fifo")


@pytest.mark.parametrize(
    ("module", "plot"),
    [
        ("plotly.graph_objects", visualization.plot_curves),
        ("matplotlib.pyplot", by_matplotlib.plot_curves),
        ("optuna_dashboard", visualization.save_to_dashboard),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_remedy(
    module: str, plot: Callable[..., Any], study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says what to type."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInputError, match=r"pip install 'optuna-hermes\[\w+\]'"):
        plot(study)


def test_the_dashboard_gets_all_three(study: optuna.Study) -> None:
    """Each under a name of its own, so that the next ones take their place."""
    plots = pytest.importorskip("optuna_dashboard._custom_plot_data")
    ids = visualization.save_to_dashboard(study)
    assert visualization.save_to_dashboard(study) == ids
    found = plots.get_plotly_graph_objects(study._storage.get_study_system_attrs(study._study_id))
    assert sorted(found) == sorted(ids) == ["hermes-best", "hermes-curves", "hermes-schedule"]
    assert '"this study"' in found["hermes-best"]


@pytest.fixture
def stored(
    study: optuna.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[optuna.Study]:
    """A study that the command line finds, without a database."""
    verbosity = optuna.logging.get_verbosity()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_optuna, "load_study", lambda storage, name: study)
    yield study
    optuna.logging.set_verbosity(verbosity)


def plot(*words: str) -> int:
    return run_cli(["plot", "--storage", "journal", "--study-name", "s", *words])


@pytest.mark.usefixtures("stored")
def test_a_page_needs_no_network(tmp_path: Path) -> None:
    """All three plots are in one file, with the library that draws them."""
    assert plot("--out", "plots.html", "--against", "fifo") == 0
    page = (tmp_path / "plots.html").read_text()
    library = importlib.import_module("plotly.offline").get_plotlyjs()
    own = page.replace(library, "")  # which names functions and addresses of its own
    assert page.count(library) == 1
    assert own.count("Plotly.newPlot(") == 3
    assert 'src="http' not in own


@pytest.mark.usefixtures("stored")
def test_a_picture_has_all_three(tmp_path: Path) -> None:
    """One below the other, drawn by matplotlib, which needs no browser."""
    assert plot("--out", "plots.png") == 0
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    (number,) = importlib.import_module("matplotlib.pyplot").get_fignums()
    axes = importlib.import_module("matplotlib.pyplot").figure(number).axes
    assert [each.get_title() for each in axes] == [
        "Best Value over Device Time",
        "Curves",
        "Schedule",
    ]


@pytest.mark.usefixtures("stored")
def test_a_picture_needs_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever $MPLBACKEND names, for plots over ``ssh -X``: here there is no display."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(mpl.rcParams, "backend", "TkAgg")
    # As before the first figure of a process.
    monkeypatch.setattr("matplotlib.pyplot._backend_mod", None)
    assert plot("--out", "plots.png") == 0


def test_the_command_fills_the_dashboard(
    stored: optuna.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the policies that were asked for."""
    assert plot("--dashboard", "--against", "las") == 0
    attributes = stored._storage.get_study_system_attrs(stored._study_id)
    assert '"name":"las"' in "".join(map(str, attributes.values()))
    assert "on the page of study 's'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--out plots.html or --dashboard"),
        (("--out", "plots.gif"), "must end in .html, .png, .svg, .pdf but got 'plots.gif'"),
        (("--out", "away/plots.png"), "No folder 'away'"),
        (("--out", f"{'x' * 300}/plots.png"), "No folder 'xxx"),
        (("--out", "plots.png", "--against", "nobody"), "nobody"),
    ],
)
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_plotted_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and status 2."""
    assert plot(*words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
