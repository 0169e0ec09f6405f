"""Plots of a study, beside those of ``optuna.visualization``: plotly here, matplotlib below.

They need plotly, ``pip install "optuna-hermes[plot]"``.
"""

from __future__ import annotations

from optuna_hermes.visualization._plotly import (
    plot_best_over_device_time,
    plot_curves,
    plot_schedule,
    save_to_dashboard,
)

__all__ = ["plot_best_over_device_time", "plot_curves", "plot_schedule", "save_to_dashboard"]
