"""Time to the best trial against FIFO, per family, as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _policies_report import OURS, count

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(block: Mapping[str, Any], family_of: Mapping[str, str], path: Path) -> None:
    """Draw one setting: a panel a family, a line a policy, a small dot a set.

    Args:
        block: the setting and its rows.
        family_of: the family of each set.
        path: of the picture, with its format as its ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "policies"})
    from matplotlib import pyplot

    rows: Sequence[Mapping[str, Any]] = block["rows"][::-1]
    families = list(rows[0]["families"])
    width = 2.2 + 2.6 * len(families)
    figure, panels = pyplot.subplots(
        1,
        len(families),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(width, 0.32 * len(rows) + 1.4),
    )
    for family, axes in zip(families, panels[0], strict=True):
        for height, row in enumerate(rows):
            ours = row["policy"] == OURS
            sets = [ratio for name, ratio in row["sets"].items() if family_of[name] == family]
            axes.plot(sets, [height] * len(sets), ".", color="0.7", markersize=4)
            color = "tab:red" if ours else "tab:blue"
            axes.plot(row["families"][family], height, "D", color=color, markersize=6)
        axes.axvline(1.0, color="0.4", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_title(family)
        axes.set_xlabel("times as fast as FIFO")
        axes.grid(axis="x", linewidth=0.3)
    panels[0][0].set_yticks(range(len(rows)), [row["policy"] for row in rows])
    setting = f"{count(block['devices'], 'device')}, a switch costs {100 * block['cost']:g} %"
    figure.suptitle(f"Time to the best trial: {setting} of a unit")
    ratios = [ratio for row in rows for ratio in row["sets"].values()]
    panels[0][0].set_xlim(min(ratios) / 1.2, max(ratios) * 1.2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
