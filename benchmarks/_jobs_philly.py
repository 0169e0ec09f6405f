"""Philly's jobs under `fifo`, `qssf` and oracles.

The jobs of the last quarter are replayed, each virtual cluster on its own nodes of 8 GPUs, and no
job is interrupted (but by `srtf`). What came before is the past: `qssf` has learned from those
jobs that were over when the first of the quarter came, and learns on from those that end.

The trace as it was published with AdaptDL holds a fraction of the load of its original: on all
nodes that are listed (`philly-all-nodes`) hardly a job ever waits. So there are settings in which
every virtual cluster has a share of its nodes, rounded, and never fewer than its largest job takes.
`philly` is the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from optuna_hermes.cluster.job_files import csv_rows, read_jobs
from optuna_hermes.cluster.job_metrics import JobMetrics, measure_jobs
from optuna_hermes.cluster.job_replay import JobRules, simulate_jobs
from optuna_hermes.cluster.jobs import ClusterJob
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.replay import parallel_map

SHARES = {"philly": 1 / 5, "philly-1-of-3": 1 / 3, "philly-2-of-5": 2 / 5, "philly-all-nodes": 1.0}
"""Of the nodes of each virtual cluster."""

POLICIES = ("fifo", "fifo-backfill", "qssf", "qssf-rolling", "qssf-noise", "sjf", "srtf")
LAST = 1 / 4
"""Of the jobs, by submission."""

NOISE_SEEDS = tuple(range(6))
"""Of the errors of `qssf-noise`; its figures are means over them."""
FEWER_NOISE_SEEDS = tuple(range(3))
"""In the other settings."""

TARGETS = {"qssf": (1.5, 2.5), "qssf-noise": (2.3, 7.0)}
"""Factors by which mean completion and mean queueing are to be shorter than under `fifo`."""

# Devices of each of Philly's nodes, as in its authors' replay; the trace does not give them.
DEVICES_OF_A_NODE = 8

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PhillySet:
    """Philly's jobs, without those whose virtual cluster has no nodes."""

    jobs: tuple[ClusterJob, ...]  # the jobs in the order of submission
    nodes: dict[str, int]  # number of nodes of each virtual cluster


def read_philly(folder: Path) -> PhillySet:
    """Read ``jobs.csv.gz`` and ``vc_nodes.csv`` (vc, node num), as published with Helios.

    Raises:
        InvalidInputError: a file is missing or has other columns.
    """
    counts = {}
    for row in csv_rows(folder / "vc_nodes.csv"):
        name, count = row.cells.get("vc"), row.cells.get("node num") or ""
        if not name or not count.isdecimal() or int(count) < 1:
            raise InvalidInputError(
                f"{row.where}: must be a virtual cluster and its number of nodes but got "
                f"{row.cells}."
            )
        counts[name] = int(count)
    found = read_jobs(folder / "jobs.csv.gz").jobs
    return PhillySet(jobs=tuple(job for job in found if job.group in counts), nodes=counts)


def rows(folder: Path) -> Iterator[Row]:
    """A row for each setting and policy."""
    found = read_philly(folder / "philly")
    first = round(len(found.jobs) * (1 - LAST))
    each = [
        (name, policy, seed)
        for name, policy in product(SHARES, POLICIES)
        for seed in _seeds(name, policy)
    ]
    measured = dict(
        zip(each, parallel_map(lambda one: _measured(found, first, *one), each), strict=True)
    )
    for name, policy in product(SHARES, POLICIES):
        seeds = _seeds(name, policy)
        fifo = measured[name, "fifo", 0]
        yield {
            **_row(name, policy, fifo, [measured[name, policy, seed] for seed in seeds]),
            "nodes": sum(nodes(found, SHARES[name]).values()),
            "jobs_before": first,
        }


def nodes(found: PhillySet, share: float) -> dict[str, int]:
    """The nodes of each virtual cluster in one setting."""
    widest: dict[str, int] = {}
    for job in found.jobs:
        widest[str(job.group)] = max(widest.get(str(job.group), 1), job.devices)
    return {
        group: max(round(count * share), -(-widest.get(group, 1) // DEVICES_OF_A_NODE))
        for group, count in found.nodes.items()
    }


def text(found: list[Row]) -> str:
    """A Markdown table for each setting, and which targets are met."""
    parts = []
    for name in SHARES:
        some = [row for row in found if row["trace"] == name]
        parts += [f"### {name}", "", _setting(name, some[0]), "", *_HEAD]
        parts += [_line(row) for row in some] + [""]
    for policy, target in TARGETS.items():
        said = "; ".join(each for each in missed(found) if each.startswith(f"{policy}:"))
        wanted = "{} and {} times shorter".format(*target)
        parts.append(f"- `{policy}` on `philly`, {wanted}: {said or 'met'}.")
    return "\n".join([*parts, ""])


_HEAD = (
    "| policy | mean completion | median | p99 | mean queueing | against `fifo` | utilisation | "
    "delayed |",
    "|---|---|---|---|---|---|---|---|",
)


def _setting(name: str, first: Row) -> str:
    share = "All nodes" if SHARES[name] == 1 else f"{SHARES[name]:.0%} of the nodes"
    return (
        f"{share} of each virtual cluster: {first['nodes']} nodes of {DEVICES_OF_A_NODE} GPUs. "
        f"{first['jobs']:.0f} jobs, after {first['jobs_before']} that were learned from."
    )


def _line(row: Row) -> str:
    seconds = [
        f"{row[key]:,.0f} s"
        for key in (
            "mean_completion_seconds",
            "median_completion_seconds",
            "p99_completion_seconds",
            "mean_queueing_seconds",
        )
    ]
    ratio = f"{row['completion_ratio']:.2f}x, queueing {row['queueing_ratio']:.2f}x"
    if row["seeds"] > 1:
        spans = [
            f"{min(row[key]):.2f} to {max(row[key]):.2f}"
            for key in ("completion_ratios", "queueing_ratios")
        ]
        ratio += f" ({row['seeds']} seeds: {spans[0]}, {spans[1]})"
    shares = [f"{100 * row[key]:.1f} %" for key in ("utilisation", "delayed_fraction")]
    return f"| `{row['policy']}` | {' | '.join([*seconds, ratio, *shares])} |"


def missed(found: list[Row]) -> list[str]:
    """Targets that a replay of `philly` has not reached."""
    return [
        f"{row['policy']}: {row[key]:.2f} times, not {target}"
        for row in found
        if row["trace"] == "philly" and row["policy"] in TARGETS
        for key, target in zip(
            ("completion_ratio", "queueing_ratio"), TARGETS[row["policy"]], strict=True
        )
        if row[key] < target
    ]


def _seeds(name: str, policy: str) -> tuple[int, ...]:
    if policy != "qssf-noise":
        return (0,)
    return NOISE_SEEDS if name == "philly" else FEWER_NOISE_SEEDS


def _measured(found: PhillySet, first: int, name: str, policy: str, seed: int) -> JobMetrics:
    groups: dict[str | None, list[int]] = {
        group: [DEVICES_OF_A_NODE] * count for group, count in nodes(found, SHARES[name]).items()
    }
    trace = simulate_jobs(
        found.jobs[first:],
        policy,
        JobRules(groups=groups),
        seed=seed,
        past=found.jobs[:first],
    )
    return measure_jobs(trace)


def _row(name: str, policy: str, fifo: JobMetrics, of_seeds: list[JobMetrics]) -> Row:
    """Means over the seeds, and how they compare with `fifo`, seed by seed at worst and best."""
    metrics = [asdict(each) for each in of_seeds]
    means = {key: fmean(each[key] for each in metrics) for key in metrics[0]}
    completion = [_ratio(fifo.mean_completion_seconds, m.mean_completion_seconds) for m in of_seeds]
    queueing = [_ratio(fifo.mean_queueing_seconds, m.mean_queueing_seconds) for m in of_seeds]
    return {
        "trace": name,
        "policy": policy,
        **means,
        "utility": None,
        "completion_ratio": _ratio(fifo.mean_completion_seconds, means["mean_completion_seconds"]),
        "queueing_ratio": _ratio(fifo.mean_queueing_seconds, means["mean_queueing_seconds"]),
        "completion_ratios": completion,
        "queueing_ratios": queueing,
        "seeds": len(of_seeds),
    }


def _ratio(fifo: float, other: float) -> float:
    return fifo / other if other else float("inf")
