"""Gap of the greedy knapsack of ``smd`` to the exact one, and the time that each of them takes.

    python benchmarks/knapsack_gap.py [--seeds N] [--json]

Runs are drawn: utilities over six orders of magnitude, gains by devices from a power of 0.2 to 1,
up to 40 GB of device memory, up to 8 GB of host memory and up to three CPU workers each (``smd``
itself has no bound of that kind); there are 64 devices, 60 GB of host memory and 32 workers. In
plenty all but the devices is without bound.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import numpy as np

from optuna_hermes.cluster.knapsack import Item, Knapsack

GB = 1e9
RUNS = (5, 10, 20, 30, 60)


def knapsack(rng: np.random.Generator, n_trials: int, *, plenty: bool) -> Knapsack:
    """Trials that are drawn, each on one of eight numbers of devices."""
    items = []
    for trial in range(n_trials):
        value = rng.exponential() * 10 ** rng.uniform(-6, 0)
        power, memory = rng.uniform(0.2, 1.0), rng.uniform(0, 40 * GB)
        rest = (rng.uniform(0, 8 * GB), float(rng.integers(0, 4)))
        items += [
            Item(
                trial=trial,
                devices=count,
                batch_size=None,
                value=value * count**power,
                weights=(float(count), count * memory, *rest),
            )
            for count in (1, 2, 3, 4, 6, 8, 12, 16)
        ]
    most = 64 * 80 * GB * rng.uniform(0.2, 1.0)
    return Knapsack(items, (64.0, *([math.inf] * 3 if plenty else [most, 60 * GB, 32.0])))


def measure(seeds: int) -> list[dict[str, Any]]:
    """One row for each number of trials, with plenty of everything but devices and without."""
    rows = []
    for plenty in (True, False):
        for n_trials in RUNS:
            gaps, exact_seconds, greedy_seconds = [], [], []
            for seed in range(seeds):
                sack = knapsack(np.random.default_rng([seed, n_trials]), n_trials, plenty=plenty)
                began = time.process_time()
                exact = sum(item.value for item in sack.exact())
                between = time.process_time()
                greedy = sum(item.value for item in sack.greedy())
                greedy_seconds.append(time.process_time() - between)
                exact_seconds.append(between - began)
                gaps.append(1.0 - greedy / exact)
            rows.append(
                {
                    "trials": n_trials,
                    "plenty": plenty,
                    "mean_gap": float(np.mean(gaps)),
                    "largest_gap": max(gaps),
                    "exact_seconds": float(np.mean(exact_seconds)),
                    "slowest_exact_seconds": max(exact_seconds),
                    "greedy_seconds": float(np.mean(greedy_seconds)),
                }
            )
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| runs | bound | mean gap | largest | exact | slowest | greedy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bound = "devices" if row["plenty"] else "all four"
        shares = f"{row['mean_gap']:.2%} | {row['largest_gap']:.2%}"
        seconds = ("exact_seconds", "slowest_exact_seconds", "greedy_seconds")
        times = " | ".join(f"{1e3 * row[key]:.1f} ms" for key in seconds)
        lines.append(f"| {row['trials']} | {bound} | {shares} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    options = parser.parse_args()
    rows = measure(options.seeds)
    print(json.dumps(rows, indent=1) if options.json else text(rows))


if __name__ == "__main__":
    main()
