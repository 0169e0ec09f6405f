"""Draw what a study's devices did, from its ledger: the picture of how it works.

    python docs/draw_run.py sqlite:///study.db digits docs/run.svg

Needs matplotlib.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from optuna_hermes import _optuna
from optuna_hermes.ledger import LeaseRecord, open_ledger
from optuna_hermes.model import Curve

plt.rcParams.update({"svg.hashsalt": "hermes", "font.size": 9, "svg.fonttype": "path"})

LABEL = {"ha": "center", "va": "center", "fontsize": 7, "color": "white", "weight": "bold"}


def main(storage: str, name: str, target: str) -> None:
    """Two panels with one colour a trial: leases on each device, and the curves."""
    study = _optuna.load_study(storage, name)
    key = _optuna.study_key(study)
    ledger = open_ledger(_optuna.ledger_url(study))
    leases, curves = ledger.load_leases(key), ledger.load_curves(key)
    ledger.close()
    figure, (schedule, progress) = plt.subplots(
        2, 1, figsize=(9, 4.8), height_ratios=[1, 1.6], layout="constrained"
    )
    colours = {n: plt.get_cmap("turbo")(i / max(1, len(curves) - 1)) for i, n in enumerate(curves)}
    draw_schedule(schedule, leases, colours)
    draw_curves(progress, curves, colours)
    figure.savefig(target, metadata={"Date": None})


def draw_schedule(axes: Axes, leases: list[LeaseRecord], colours: dict[int, object]) -> None:
    """Draw the holders of each device over time."""
    begin = min(lease.started for lease in leases)
    devices = sorted({lease.devices[0] for lease in leases})
    for lease in leases:
        if lease.number is None or lease.ended is None:
            continue
        start, length = lease.started - begin, lease.ended - lease.started
        row = devices.index(lease.devices[0])
        colour = colours.get(lease.number, "grey")
        axes.barh(row, length, left=start, height=0.85, color=colour, edgecolor="white", lw=0.4)
        axes.text(start + length / 2, row, str(lease.number), **LABEL)
    axes.set_yticks(range(len(devices)), [device.split("/")[-1] for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("Slices of each device, with the trial's number", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(axes: Axes, curves: dict[int, Curve], colours: dict[int, object]) -> None:
    """Draw the values of the trials by device time of their own."""
    for number, curve in curves.items():
        axes.plot(curve.device_seconds, curve.values, color=colours[number], lw=1.2)
    axes.set_yscale("log")
    axes.set_xlabel("device-seconds of the trial")
    axes.set_ylabel("validation loss")
    axes.set_title("Every trial is trained to its end; the best ones first", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(*sys.argv[1:])
