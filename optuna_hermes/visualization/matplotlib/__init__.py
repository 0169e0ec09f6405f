"""The plots of ``optuna_hermes.visualization``, drawn by matplotlib."""

from __future__ import annotations

from optuna_hermes.visualization.matplotlib._plots import (
    plot_best_over_device_time,
    plot_curves,
    plot_schedule,
)

__all__ = ["plot_best_over_device_time", "plot_curves", "plot_schedule"]
