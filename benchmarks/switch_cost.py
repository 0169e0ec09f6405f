"""Cost of giving a device from one trial to another, by tier and size of state.

Three parts, all measured in one call: a plain copy of as many bytes; one trial that parks and
resumes in a process of its own accord; and a study of two trials that take turns on one device
under ``optimize()``, from the end of one's last batch to the beginning of the other's first. Beside
the last, if ``ray`` is installed, Ray Tune does the same. Exit status 1 if a target is missed.

    python benchmarks/switch_cost.py --sizes 1,100 --tiers resident,host --json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# One thread each, as Ray gives to a trial of one CPU; before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import psutil
import torch
from _switch_hermes import measure_hermes
from _switch_report import text
from _switch_runs import read_switches
from _switch_tiers import DEVICE, copy_bandwidth, makers, measure_tier

from optuna_hermes.model import TierName

TIERS: tuple[TierName, ...] = ("resident", "host", "disk")
TARGET_MB = 100
TARGETS = {"resident": 0.025, "host": 0.36, "disk": 1.0}
"""Seconds from batch to batch, at ``TARGET_MB`` of state on CPU slots."""
RESNET_MS = (50, 35)
"""At most, for ResNet-50 with AdamW on PCIe 4, and on what copies faster than ``PCIE_5``."""
PCIE_5 = 30e9
WARM_UP = 4
"""Switches not counted: each trial begins, and comes back for the first time."""
SEED = 0


def main() -> int:
    options = _options()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="switch-cost-") as name:
        folder = Path(name).absolute()
        result: dict[str, Any] = {
            "setting": _setting(options),
            "park_and_resume": _park_and_resume(options, folder),
            "switches": [*_hermes(options, folder), *_ray(options, folder)],
        }
    result["ratios"] = _ratios(result["switches"])
    result["targets"] = _targets(result)
    print(json.dumps(result, indent=1) if options.json else text(result))
    return int(not all(target["met"] for target in result["targets"]))


# -- what is measured --------------------------------------------------------------------------


def _park_and_resume(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, make in makers(options.sizes).items():
        copy: dict[str, float] = {}
        for tier in options.tiers:
            _say(f"{name}: park and resume, {tier}")
            row = measure_tier(make, tier, folder, options.repetitions)
            copy = copy or copy_bandwidth(row["state_bytes"], options.repetitions)
            rows.append({"state": name, "tier": tier, **row, "copy": copy})
    return rows


def _hermes(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for size in options.sizes:
        for tier in options.tiers:
            _say(f"{size:g} MB: two trials take turns, {tier}")
            with tempfile.TemporaryDirectory(dir=folder) as place:
                batches = measure_hermes(
                    tier,
                    int(1e6 * size),
                    Path(place),
                    switches=WARM_UP + options.switches,
                )
                rows.append(_switches(batches, size, f"hermes, {tier}"))
    return rows


def _ray(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    if options.no_ray:
        return []
    if importlib.util.find_spec("ray") is None:
        _say("ray is not installed: no figures of Ray Tune")
        return []
    rows = []
    steps = str((WARM_UP + options.switches) // 2 + 1)
    script = str(Path(__file__).with_name("_switch_ray.py"))
    for size in options.sizes:
        for mode in ("reuse_actors", "default"):
            _say(f"{size:g} MB: two trials take turns, Ray Tune, {mode}")
            with tempfile.TemporaryDirectory(dir=folder) as place:
                batches = Path(place) / "batches"
                arguments = [str(batches), str(int(1e6 * size)), steps, mode, place]
                with (Path(place) / "log").open("w+b") as log:
                    command = [sys.executable, script, *arguments]
                    done = subprocess.run(command, stdout=log, stderr=log, check=False)
                if done.returncode:
                    raise SystemExit((Path(place) / "log").read_text())
                rows.append(_switches(batches, size, f"ray, {mode}"))
    return rows


def _switches(batches: Path, size: float, by: str) -> dict[str, Any]:
    seen = read_switches(batches, skip=WARM_UP)
    return {
        "size_mb": size,
        "by": by,
        "switches": len(seen.to_batch),
        "processes": seen.processes,
        "median_seconds": statistics.median(seen.to_batch),
        "longest_seconds": max(seen.to_batch),
        "with_first_step_seconds": statistics.median(seen.to_step),
        "step_seconds": seen.step,
    }


# -- what it means -----------------------------------------------------------------------------


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of Ray's time to each tier's: below 1 we lose."""
    return [
        {
            "size_mb": ours["size_mb"],
            "by": ours["by"],
            "rival": rival["by"],
            "ratio": rival["median_seconds"] / ours["median_seconds"],
        }
        for ours in rows
        for rival in rows
        if ours["by"].startswith("hermes")
        and rival["by"].startswith("ray")
        and rival["size_mb"] == ours["size_mb"]
    ]


def _targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    if DEVICE == "cpu":
        return [_target(row) for row in result["switches"] if _has_target(row)]
    host = [row for row in result["park_and_resume"] if row["tier"] == "host"]
    return [target for row in host for target in _gpu_targets(row)]


def _has_target(row: dict[str, Any]) -> bool:
    return row["size_mb"] == TARGET_MB and row["by"].startswith("hermes")


def _target(row: dict[str, Any]) -> dict[str, Any]:
    limit, measured = TARGETS[row["by"].removeprefix("hermes, ")], row["median_seconds"]
    name = f"{row['by']}: at most {1e3 * limit:g} ms from batch to batch at {TARGET_MB} MB"
    return {"name": name, "measured": 1e3 * measured, "met": measured <= limit}


def _gpu_targets(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if row["state"] == "ResNet-50":
        both = 1e3 * (row["park_seconds"] + row["resume_seconds"])
        limit = RESNET_MS[row["copy"]["out"] > PCIE_5]
        name = f"ResNet-50 to host memory and back: at most {limit} ms"
        yield {"name": name, "measured": both, "met": both <= limit}
    elif row["state_bytes"] > 0.99e9:
        for way, copy in (("park", "out"), ("resume", "in")):
            share = row["moved_bytes"] / row[f"{way}_seconds"] / row["copy"][copy]
            name = f"host, {row['state']}: {way} at 0.8 or more of a pinned copy"
            yield {"name": name, "measured": share, "met": share >= 0.8}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_sizes, default="1,10,100,500,1000,2000", help="in MB")
    parser.add_argument("--tiers", type=_tiers, default=",".join(TIERS))
    parser.add_argument("--repetitions", type=int, default=10, help="of parking one trial")
    parser.add_argument("--switches", type=int, default=20, help="between two trials")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray Tune out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _sizes(text: str) -> list[float]:
    """Sizes that fit: two trials with their gradients, and a copy of each in host memory."""
    room = psutil.virtual_memory().available / 1e6 / 6
    try:
        sizes = [float(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"sizes are numbers of MB but got {text!r}") from error
    for size in sizes:
        if size > room:
            _say(f"{size:g} MB is left out: more than {room:.0f} MB does not fit into memory twice")
    return [size for size in sizes if size <= room]


def _tiers(text: str) -> list[TierName]:
    tiers = [tier for tier in TIERS if tier in text.split(",")]
    if set(tiers) != set(text.split(",")):
        raise argparse.ArgumentTypeError(f"tiers are {', '.join(TIERS)} but got {text!r}")
    return tiers


def _setting(options: argparse.Namespace) -> dict[str, Any]:
    names = ("optuna-hermes", "torch", "lightning", "optuna", "ray")
    found = {name: version(name) for name in names if _installed(name)}
    return {
        "command": " ".join(["python", "benchmarks/switch_cost.py", *sys.argv[1:]]),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": found,
        "seed": SEED,
        "repetitions": options.repetitions,
        "switches": options.switches,
    }


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
