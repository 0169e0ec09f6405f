"""How much is lost where many hosts share a study, each with a policy of its own: simulated.

    python benchmarks/hosts_simulated.py [--hosts 1,2,4,8,16,64,256] [--per-host 40] [--seeds 5]
        [--unit-seconds 30] [--json]

Each host has one device, and brings so many trials, which are drawn from recorded trainings with
their lengths and values; every unit takes as long. The same trials on as many devices of one host
are the measure. Asking: a host asks for trials that are parked on others and that its policy would
rather train (as brokers do); without, a host only takes what is stored and nobody's. Looks, reads
and claims are those of one host in a second: a look is one statement, a read five, a claim is part
of the transaction that grants a lease.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from optuna_hermes.policies import make_policy
from optuna_hermes.replay import read_curve_set
from optuna_hermes.simulator import FixedList, Recording, Sharing, SwitchCosts, TrialSimulator

CURVES = Path(__file__).parents[1] / "examples" / "curves" / "sklearn-digits-cnn.npz"
COSTS = SwitchCosts(resident_seconds=0.05, host_seconds=0.2, disk_seconds=1.0)
CLAIM_SECONDS, STORE_SECONDS = 0.05, 0.5


def main() -> int:
    options = _options()
    recorded = read_curve_set(options.curves).recordings
    rows = [_row(options, recorded, hosts) for hosts in options.hosts]
    if options.json:
        print(json.dumps({"curves": options.curves.name, "rows": rows}, indent=1))
    else:
        print(_table(options, rows))
    return 0


def _row(options: argparse.Namespace, recorded: Any, hosts: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"one": [], "asks": [], "waits": []}
    for seed in options.seeds:
        trials = _drawn(recorded, hosts * options.per_host, options.unit_seconds, seed)
        found["one"].append(_run(trials, hosts, None))
        for name, asks in (("asks", True), ("waits", False)):
            sharing = Sharing(claim_seconds=CLAIM_SECONDS, store_seconds=STORE_SECONDS, asks=asks)
            found[name].append(_run(trials, hosts, sharing))
        print(f"{hosts} hosts, seed {seed}: done", file=sys.stderr, flush=True)

    def ratio(name: str, figure: str) -> float:
        pairs = zip(found[name], found["one"], strict=True)
        return statistics.geometric_mean(mine[figure] / one[figure] for mine, one in pairs)

    def mean(figure: str) -> float:
        return statistics.fmean(each[figure] for each in found["asks"])

    return {
        "hosts": hosts,
        "trials": hosts * options.per_host,
        "seeds": len(options.seeds),
        "best_asks": ratio("asks", "best"),
        "best_waits": ratio("waits", "best"),
        "five_asks": ratio("asks", "five"),
        "five_waits": ratio("waits", "five"),
        **{name: mean(name) for name in ("looks", "reads", "claims", "lost")},
        "computing_seconds": sum(each["computing"] for kind in found.values() for each in kind),
    }


def _drawn(recorded: Any, count: int, unit_seconds: float, seed: int) -> list[Recording]:
    """Trials drawn with replacement, each value moved a little so that no two are equal."""
    generator = random.Random(seed)
    trials = []
    for _ in range(count):
        each = generator.choice(recorded)
        moved = generator.gauss(0.0, 0.01)
        values = tuple(value * (1.0 + moved) for value in each.values)
        trials.append(Recording(values=values, seconds=(unit_seconds,) * len(values)))
    return trials


def _run(trials: list[Recording], hosts: int, sharing: Sharing | None) -> dict[str, float]:
    """Times until the best trial, and half of the ten best ones, have finished."""
    begin = time.perf_counter()
    simulator = TrialSimulator(
        make_policy("hermes"),
        FixedList(trials),
        n_devices=hosts,
        n_hosts=hosts,
        sharing=sharing,
        costs=COSTS,
    )
    order = sorted(range(len(trials)), key=lambda number: trials[number].final)
    until, finished, ends = 0.0, dict[int, float](), list[float]()
    while order[0] not in finished or len(ends) < 5:
        until += 100.0
        finished = simulator.run(until).finished
        ends = sorted(finished[number] for number in order[:10] if number in finished)
    traffic, seconds = simulator.traffic, until * hosts
    return {
        "best": finished[order[0]],
        "five": ends[4],
        "looks": traffic.looks / seconds,
        "reads": traffic.reads / seconds,
        "claims": traffic.claims / seconds,
        "lost": traffic.lost / seconds,
        "computing": time.perf_counter() - begin,
    }


def _table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{options.curves.stem}, {options.per_host} trials for each host of one device, units of "
        f"{options.unit_seconds:g} s, seeds {', '.join(map(str, options.seeds))}; costs in s: "
        f"{COSTS.resident_seconds} from a device, {COSTS.disk_seconds} from disk, {CLAIM_SECONDS} "
        f"for a claim, {STORE_SECONDS} to store.",
        "",
        "Times as long as one host with as many devices, geometric means over the seeds; and a "
        "host's questions to the database, each second.",
        "",
        "| hosts | trials | best: asking | best: not asking | five of ten best: asking "
        "| five of ten best: not asking | looks | reads | claims | lost claims |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            *(f"{row[name]}" for name in ("hosts", "trials")),
            *(f"{row[n]:.3f}" for n in ("best_asks", "best_waits", "five_asks", "five_waits")),
            *(f"{row[name]:.3f}" for name in ("looks", "reads", "claims", "lost")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=numbers, default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--per-host", type=int, default=40)
    parser.add_argument("--seeds", type=lambda text: list(range(int(text))), default=range(5))
    parser.add_argument("--unit-seconds", type=float, default=30.0)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
