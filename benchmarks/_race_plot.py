"""Regret over time of the contestants of ``race.py``, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _race_compare import KINDS, OURS

FLOOR = 0.005
"""Regret is drawn by its logarithm, and no lower than this."""


def plot(comparison: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each kind of value and origin of time; a line and its interval each.

    Args:
        comparison: as ``_race_compare.compare`` gives it.
        path: of the picture, with its format as its ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "race"})
    from matplotlib import pyplot

    grids, rows = comparison["grids"], comparison["rows"]
    figure, panels = pyplot.subplots(
        len(KINDS), len(grids), sharey=True, squeeze=False, figsize=(5 * len(grids) + 2, 7)
    )
    colors = [f"C{index}" for index in range(10)]
    for axes_row, kind in zip(panels, KINDS, strict=True):
        for axes, (origin, grid) in zip(axes_row, grids.items(), strict=True):
            for index, (name, row) in enumerate(rows.items()):
                curve = {
                    key: [max(value, FLOOR) for value in values]
                    for key, values in row["curves"][f"{kind}, {origin}"].items()
                }
                color, width = colors[index % len(colors)], 2.2 if name == OURS else 1.1
                axes.plot(grid, curve["mean"], color=color, linewidth=width, label=name)
                axes.fill_between(
                    grid, curve["low"], curve["high"], color=color, alpha=0.08, linewidth=0
                )
            axes.set_yscale("log")
            axes.set_title("all values" if kind == "any" else "finished trials")
            axes.set_xlabel(f"seconds {origin}" + (" of the command" * (origin.endswith("start"))))
            axes.grid(linewidth=0.3)
    for axes_row in panels:
        axes_row[0].set_ylabel("regret")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="center right", frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
