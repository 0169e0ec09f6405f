"""The plots of ``optuna_hermes.visualization``, drawn by matplotlib: same names, same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optuna_hermes._extras import needed
from optuna_hermes.visualization import _data as plot_data
from optuna_hermes.visualization._study import StudyData, best_info_of, read_study

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_best_over_device_time", "plot_curves", "plot_schedule"]

# Of the whole time: the number of a trial does not fit into a shorter bar.
_LABELLED_SHARE = 0.02

# Of the bars of a device; the distance to those of the next one is 1.
_HEIGHT = 0.85


def plot_schedule(study: optuna.Study) -> Axes:
    """Plot as ``optuna_hermes.visualization.plot_schedule``, with matplotlib."""
    return _draw_schedule(_figure(1).axes[0], read_study(study))


def _draw_schedule(ax: Axes, data: StudyData) -> Axes:
    boxes = plot_data.schedule_info(data.history, data.now, data.held)
    _name(ax, "Schedule", "Time", "Device")
    if not boxes:
        return ax
    rows = {device: row for row, device in enumerate(dict.fromkeys(box.device for box in boxes))}
    begins = [_days(box.begin) for box in boxes]
    # Not the difference of local times, which go back an hour once a year.
    spans = [
        (begin, (box.end - box.begin) / 86400) for begin, box in zip(begins, boxes, strict=True)
    ]
    # One collection for each device: an object for each bar would take minutes for a large study.
    for device, row in rows.items():
        own = [index for index, box in enumerate(boxes) if box.device == device]
        ax.broken_barh(
            [spans[index] for index in own],
            (row - _HEIGHT / 2, _HEIGHT),
            facecolors=[boxes[index].colour for index in own],
            edgecolors="white",
            # Bars of a pixel would be all line.
            linewidth=0.5 if len(boxes) <= plot_data.LABELLED else 0.0,
        )
    least = _LABELLED_SHARE * (max(map(sum, spans)) - min(begins))
    for box, (begin, width) in zip(boxes, spans, strict=True):
        if width > least:
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white"}
            ax.text(begin + width / 2, rows[box.device], box.label, **style, fontsize=8)
    ax.set_yticks(list(rows.values()), labels=list(rows))
    ax.invert_yaxis()
    ax.xaxis_date()
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="x", rotation=30)
    return ax


def plot_curves(
    study: optuna.Study,
    *,
    axis: plot_data.Axis = "unit",
    target_name: str = "Intermediate Value",
) -> Axes:
    """Plot as ``optuna_hermes.visualization.plot_curves``, with matplotlib."""
    return _draw_curves(
        _figure(1).axes[0], plot_data.curves_info(read_study(study).history, axis), target_name
    )


def _draw_curves(ax: Axes, info: plot_data.CurvesInfo, target_name: str) -> Axes:
    _name(ax, info.title, info.x_label, target_name)
    if info.bounds is not None:
        ax.set_ylim(*info.bounds)
    for look, lines in info.groups:
        style: dict[str, Any] = {"color": look.colour, "alpha": look.opacity, "linewidth": 1.2}
        for index, line in enumerate(lines):
            # Labels that begin with an underscore are left out of the legend: one per group.
            label = "_" if index else f"{look.label} ({len(lines)})"
            ax.plot(line.xs, line.ys, **style, **_dot(line), label=label)
    if info.best is not None:
        style = {"color": plot_data.BEST_COLOUR, "linewidth": 2.5, **_dot(info.best)}
        label = f"best last value: trial {info.best.name}"
        ax.plot(info.best.xs, info.best.ys, **style, label=label)
        _legend(ax)
    if info.counts:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def plot_best_over_device_time(
    study: optuna.Study,
    against: Sequence[str] = ("fifo",),
    *,
    n_devices: int | None = None,
    target_name: str = "Best Intermediate Value",
) -> Axes:
    """Plot as ``optuna_hermes.visualization.plot_best_over_device_time``, with matplotlib."""
    return _draw_best(_figure(1).axes[0], best_info_of(study, against, n_devices), target_name)


def _draw_best(ax: Axes, info: plot_data.BestInfo, target_name: str) -> Axes:
    _name(ax, info.title, info.x_label, target_name)
    if info.bounds is not None:
        ax.set_ylim(*info.bounds)
    for index, line in enumerate(info.lines):
        ax.step(
            line.xs,
            line.ys,
            where="post",
            # Legends leave out what begins with an underscore, as the file of a policy may.
            label=f" {line.name}" if line.name.startswith("_") else line.name,
            color=plot_data.COLOURS[index % len(plot_data.COLOURS)],
            linewidth=1.5 if index else 3,
            linestyle="--" if index else "-",
        )
    if info.lines:
        _legend(ax)
    return ax


def figure_of_all(study: optuna.Study, against: Sequence[str]) -> Figure:
    """The three plots below each other, for a file: without a window, whatever backend is set."""
    best, data = best_info_of(study, against, None), read_study(study)
    figure = _figure(3, backend="agg")
    upper, middle, lower = figure.axes
    _draw_best(upper, best, "Best Intermediate Value")
    _draw_curves(middle, plot_data.curves_info(data.history, "unit"), "Intermediate Value")
    _draw_schedule(lower, data)
    return figure


def _figure(rows: int, *, backend: str | None = None) -> Figure:
    with needed("Plots need matplotlib", extra="plot"):
        import matplotlib.pyplot as plt
    if backend is not None:
        plt.switch_backend(backend)
    # The style of Optuna's own plots, beside which these stand.
    plt.style.use("ggplot")
    size = None if rows == 1 else (9.0, 4.5 * rows)
    return plt.subplots(rows, figsize=size, layout="constrained")[0]


def _name(ax: Axes, title: str, x_label: str, y_label: str) -> None:
    ax.set_title(title)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)


def _legend(ax: Axes) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _days(seconds: float) -> float:
    # A local time, since axes have no zones.
    from matplotlib.dates import date2num

    return float(date2num(datetime.fromtimestamp(seconds)))  # type: ignore[no-untyped-call]


def _dot(line: plot_data.InfoLine) -> dict[str, Any]:
    # A line of one point would be invisible without a marker.
    return {"marker": "o", "markersize": 3} if len(line.xs) == 1 else {}
