"""The plots, drawn by plotly, and their way into optuna-dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optuna_hermes._extras import needed
from optuna_hermes.visualization import _data as plot_data
from optuna_hermes.visualization._study import best_info_of, read_study

if TYPE_CHECKING:
    import optuna
    import plotly.graph_objects as go


def plot_schedule(study: optuna.Study) -> go.Figure:
    """Plot the leases of each device over time.

    Args:
        study: a study that was run with this package.

    Returns:
        A ``plotly.graph_objects.Figure``: a row for each device, a bar for each slice.

    Example:
        ```python
        from optuna_hermes.visualization import plot_schedule

        plot_schedule(study).show()
        ```
    """
    go = _plotly()
    data = read_study(study)
    boxes = plot_data.schedule_info(data.history, data.now, data.held)
    figure = go.Figure(layout=_layout("Schedule", "Time", "Device"))
    if not boxes:
        return figure
    seconds = max(box.end for box in boxes) - min(box.begin for box in boxes)
    form = "%H:%M:%S" if seconds <= 86400 else "%Y-%m-%d %H:%M:%S"
    figure.add_bar(
        orientation="h",
        y=[box.device for box in boxes],
        # Plotly has no zones: it shows times as they are written.
        base=[datetime.fromtimestamp(b.begin).isoformat(" ", "milliseconds") for b in boxes],
        x=[round(1000 * (box.end - box.begin)) for box in boxes],
        marker={
            "color": [box.colour for box in boxes],
            "line": {"color": "white", "width": 0.5 if len(boxes) <= plot_data.LABELLED else 0},
        },
        text=[box.label for box in boxes] if len(boxes) <= plot_data.LABELLED else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[box.hover for box in boxes],
        hovertemplate=f"%{{hovertext}}<br>from %{{base|{form}}} on %{{y}}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(type="date")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure.update_layout(barmode="overlay", bargap=0.15, uniformtext=_ONE_SIZE)


def plot_curves(
    study: optuna.Study,
    *,
    axis: plot_data.Axis = "unit",
    target_name: str = "Intermediate Value",
) -> go.Figure:
    """Plot the reported values of all trials, coloured by their state.

    Suspended trials are dimmed, and the one whose last value is the best is highlighted. A trial
    that diverges leaves the scale, rather than flatten all others, and the title names it.

    Args:
        study: a study that was run with this package.
        axis: ``"unit"`` (the interval of reports, for example an epoch) or ``"device_seconds"``,
            the device time of the trial until then.
        target_name: the name on the axis of the values.

    Returns:
        A ``plotly.graph_objects.Figure``.

    Raises:
        ValueError: there is no such axis.
    """
    go = _plotly()
    info = plot_data.curves_info(read_study(study).history, axis)
    figure = go.Figure(layout=_layout(info.title, info.x_label, target_name))
    if info.bounds is not None:
        figure.update_yaxes(range=info.bounds)
    for look, lines in info.groups:
        figure.add_scatter(
            name=f"{look.label} ({len(lines)})",
            **_joined(lines),
            mode=_mode(lines),
            line={"color": look.colour, "width": 1.2},
            marker={"color": look.colour, "size": 4},
            opacity=look.opacity,
            hovertemplate="trial %{customdata}: %{y:.4g} at %{x:.4g}<extra></extra>",
        )
    if info.best is not None:
        figure.add_scatter(
            name=f"best last value: trial {info.best.name}",
            **_joined([info.best]),
            mode=_mode([info.best]),
            line={"color": plot_data.BEST_COLOUR, "width": 2.5},
            hovertemplate="trial %{customdata}: %{y:.4g} at %{x:.4g}<extra></extra>",
        )
    return figure.update_layout(showlegend=info.best is not None, legend=_ABOVE)


def plot_best_over_device_time(
    study: optuna.Study,
    against: Sequence[str] = ("fifo",),
    *,
    n_devices: int | None = None,
    target_name: str = "Best Intermediate Value",
) -> go.Figure:
    """Plot the best value so far against the device time of all trials together.

    Other policies are drawn beside it: a simulator replays the values in the ledger under them,
    each trial as far as it was trained, in the order of their numbers. First values that diverge
    leave the scale, as the title then says.

    Args:
        study: a study that was run with this package.
        against: names of policies; see ``optuna-hermes simulate``.
        n_devices: of the simulator; None for as many as the study had.
        target_name: the name on the axis of the values.

    Returns:
        A ``plotly.graph_objects.Figure``.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    go = _plotly()
    info = best_info_of(study, against, n_devices)
    figure = go.Figure(layout=_layout(info.title, info.x_label, target_name))
    if info.bounds is not None:
        figure.update_yaxes(range=info.bounds)
    for index, line in enumerate(info.lines):
        figure.add_scatter(
            name=line.name,
            x=line.xs,
            y=line.ys,
            mode="lines",
            line={
                "shape": "hv",
                "color": plot_data.COLOURS[index % len(plot_data.COLOURS)],
                "width": 1.5 if index else 3,
                "dash": "dash" if index else "solid",
            },
            hovertemplate="%{y:.4g} after %{x:.4g}",
        )
    return figure.update_layout(showlegend=bool(info.lines), legend=_ABOVE)


def save_to_dashboard(study: optuna.Study, against: Sequence[str] = ("fifo",)) -> list[str]:
    """Show the three plots on the study's page of optuna-dashboard, in place of earlier ones.

    Args:
        study: a study that was run with this package.
        against: see ``plot_best_over_device_time``.

    Returns:
        The plots' ids in the dashboard.

    Raises:
        InvalidInputError: plotly or optuna-dashboard is not installed.

    Example:
        ```python
        from optuna_hermes.visualization import save_to_dashboard

        save_to_dashboard(study)  # then: optuna-dashboard sqlite:///study.db
        ```
    """
    with needed("Plots in the dashboard need optuna-dashboard", extra="dashboard"):
        from optuna_dashboard import save_plotly_graph_object
    figures = {
        "hermes-schedule": plot_schedule(study),
        "hermes-curves": plot_curves(study),
        "hermes-best": plot_best_over_device_time(study, against),
    }
    return [
        save_plotly_graph_object(study, figure, graph_object_id=name)
        for name, figure in figures.items()
    ]


# Beside the figure the legend would take the place of the longest curves.
_ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}
_ONE_SIZE = {"minsize": 8, "mode": "hide"}


def _plotly() -> Any:
    other = ", or use optuna_hermes.visualization.matplotlib"
    with needed("Plots need plotly", extra="plot", other=other):
        import plotly.graph_objects as go
    return go


def _layout(title: str, x_label: str, y_label: str) -> dict[str, Any]:
    return {"title": title, "xaxis": {"title": x_label}, "yaxis": {"title": y_label}}


def _mode(lines: Iterable[plot_data.InfoLine]) -> str:
    # A line of one point would be invisible without a marker.
    return "lines+markers" if any(len(line.xs) == 1 for line in lines) else "lines"


def _joined(lines: Sequence[plot_data.InfoLine]) -> dict[str, Any]:
    """Many curves as one trace with gaps."""
    # Hundreds of traces would make a figure of megabytes that is slow to draw.
    joined: dict[str, list[Any]] = {"x": [], "y": [], "customdata": []}
    for line in lines:
        gap = [None] if joined["x"] else []
        joined["x"] += [*gap, *(round(x, 3) for x in line.xs)]
        joined["y"] += [*gap, *(float(f"{y:.6g}") for y in line.ys)]
        joined["customdata"] += [*gap, *[int(line.name)] * len(line.xs)]
    return joined
