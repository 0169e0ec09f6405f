"""The plots as artifacts of optuna-dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.visualization._plotly import (
    plot_best_over_device_time,
    plot_curves,
    plot_schedule,
)

if TYPE_CHECKING:
    import optuna


def save_to_dashboard(
    study: optuna.Study, against: Sequence[str] = ("fifo", "round-robin")
) -> list[str]:
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
    try:
        from optuna_dashboard import save_plotly_graph_object
    except ImportError as error:
        raise InvalidInputError(
            "Plots in the dashboard need optuna-dashboard, which is not installed: run "
            '`pip install "optuna-hermes[dashboard]"`.'
        ) from error
    figures = {
        "hermes-schedule": plot_schedule(study),
        "hermes-curves": plot_curves(study),
        "hermes-best": plot_best_over_device_time(study, against),
    }
    return [
        save_plotly_graph_object(study, figure, graph_object_id=name)
        for name, figure in figures.items()
    ]
