"""Nodes powered down behind a recorded demand: `energy` on traces of clusters, beside bounds.

    python benchmarks/_energy_rows.py --traces DIR [--json] [--out benchmarks/results]

DIR has `philly/nodes_per_minute.csv.gz` and `helios/Earth_*_cluster_sequence_*.csv.gz`. A node of
Earth has 8 GPUs; jobs of 8 and more take whole nodes, smaller ones share, as many as fit. Nodes
that waiting jobs need are wanted too, as far as there are so many. A job is delayed if it comes in
a minute in which fewer nodes are up than are wanted. Where a trace counts jobs (Earth), jobs come
when their number rises; where it counts nodes only (Philly), one comes with each node by which the
active ones rise. Power goes to `energy:fifo` as it does to `energy` over any policy that lets no
node lie idle: with recorded demand, who runs on the nodes makes no difference.
`energy-seasonal` forecasts without LightGBM, as the live policy does; `clairvoyant-buffer` knows
the future and keeps the same buffer.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from _energy_nodes import NodeSeries, clairvoyant_nodes, never_powered_down, replay_nodes
from _energy_trees import seasonal_peak

from optuna_hermes.errors import HermesError, InvalidInputError

GPUS_OF_A_NODE = 8
DELAYED_TARGET = 0.02
GAIN_TARGET = 0.13


def read_series(folder: Path) -> dict[str, NodeSeries]:
    """The traces of nodes in a folder, by name.

    Raises:
        InvalidInputError: there are none.
    """
    found = {}
    philly = folder / "philly" / "nodes_per_minute.csv.gz"
    if philly.is_file():
        found["philly-nodes"] = _of_nodes(_rows(philly))
    for path in sorted((folder / "helios").glob("Earth_*_cluster_sequence_*.csv.gz")):
        found[f"earth-{path.name.split('_')[1]}"] = _of_gpus(_rows(path))
    if not found:
        raise InvalidInputError(
            f"--traces must name a folder with philly/ or helios/ but got {str(folder)!r}."
        )
    return found


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each trace and policy, as `jobs.py` prints them, with what only this one has."""
    for name, series in read_series(folder).items():
        always, use = never_powered_down(series), replay_nodes(series)
        seasonal = replay_nodes(series, forecast=seasonal_peak)
        shares = {
            "fifo": (always.utilisation, 0.0, 0),
            "energy:fifo": (use.utilisation, use.delayed_fraction, use.wakeups),
            "energy-seasonal:fifo": (
                seasonal.utilisation,
                seasonal.delayed_fraction,
                seasonal.wakeups,
            ),
            "clairvoyant": (clairvoyant_nodes(series), 0.0, None),
            "clairvoyant-buffer": (clairvoyant_nodes(series, with_buffer=True), 0.0, None),
        }
        for policy, (utilisation, delayed, wakeups) in shares.items():
            yield {
                "trace": name,
                "policy": policy,
                "mean_completion_seconds": None,
                "mean_queueing_seconds": None,
                "p99_completion_seconds": None,
                "utilisation": utilisation,
                "utility": None,
                "delayed_fraction": delayed,
                "gain": utilisation / always.utilisation,
                "jobs": sum(series.arrivals),
                "wakeups": wakeups,
            }


def text(found: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, with what of the targets is met."""
    lines = [
        "| trace | policy | utilisation | against `fifo` | jobs delayed | nodes woken |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        wakeups = "-" if row["wakeups"] is None else row["wakeups"]
        points = 100 * row["utilisation"] * (1 - 1 / row["gain"])
        lines.append(
            f"| {row['trace']} | `{row['policy']}` | {100 * row['utilisation']:.1f} % | "
            f"{100 * row['gain'] - 100:+.1f} % ({points:+.1f} points) | "
            f"{100 * row['delayed_fraction']:.2f} % of {row['jobs']} | {wakeups} |"
        )
    return "\n".join([*lines, "", *_verdicts(found), ""])


def _verdicts(found: list[dict[str, Any]]) -> Iterator[str]:
    gains = {(row["trace"], row["policy"]): row["gain"] - 1 for row in found}
    for row in found:
        if row["policy"] != "energy:fifo":
            continue
        gain = row["gain"] - 1
        bound, buffered = (gains[row["trace"], f"clairvoyant{each}"] for each in ("", "-buffer"))
        met = gain >= GAIN_TARGET and row["delayed_fraction"] <= DELAYED_TARGET
        beyond = "out of reach" if bound < GAIN_TARGET else "not met"
        yield (
            f"- {row['trace']}: +{100 * GAIN_TARGET:.0f} % with at most {100 * DELAYED_TARGET:.0f} "
            f"% delayed is {'met' if met else beyond}. It gains {_share(gain, bound)} of what a "
            f"clairvoyant controller gains, {_share(gain, buffered)} if that keeps the same buffer."
        )


def _share(gain: float, bound: float) -> str:
    return f"{100 * gain / bound:.0f} %" if bound > 0 else "all"


def _rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def _of_nodes(table: list[dict[str, str]]) -> NodeSeries:
    total = [int(row["total"]) for row in table]
    active = [min(int(row["active"]), nodes) for row, nodes in zip(table, total, strict=True)]
    return NodeSeries(active=active, demand=active, total=total, arrivals=_rises(active))


def _of_gpus(table: list[dict[str, str]]) -> NodeSeries:
    total = [
        (int(row["running_gpu_num"]) + int(row["idle_gpu_num"])) // GPUS_OF_A_NODE for row in table
    ]
    pairs = list(zip(table, total, strict=True))
    return NodeSeries(
        active=[min(nodes, _nodes(row, "running")) for row, nodes in pairs],
        demand=[min(nodes, _nodes(row, "running", "pending")) for row, nodes in pairs],
        total=total,
        arrivals=_rises([int(row["total_gpujob_num"]) for row in table]),
    )


def _nodes(row: dict[str, str], *states: str) -> int:
    whole = sum(int(row[f"{state}_gpu_num_noless_8"]) for state in states)
    shared = sum(int(row[f"{state}_gpu_num_less_8"]) for state in states)
    return -(-whole // GPUS_OF_A_NODE) - (-shared // GPUS_OF_A_NODE)


def _rises(counts: list[int]) -> list[int]:
    return [0, *(max(0, b - a) for a, b in pairwise(counts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write energy.md there")
    options = parser.parse_args()
    if options.out:  # before all that takes long
        options.out.mkdir(parents=True, exist_ok=True)
    try:
        found = list(rows(options.traces))
    except HermesError as error:
        print(error, file=sys.stderr)
        return 2
    written = text(found)
    if options.out:
        (options.out / "energy.md").write_text(f"# Nodes powered down: `energy`\n\n{written}")
    print(json.dumps(found, indent=1) if options.json else written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
