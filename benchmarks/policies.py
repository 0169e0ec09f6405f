"""All policies and their rivals on recorded learning curves: who finds the best trial soonest?

    python benchmarks/policies.py --curves FOLDER --out benchmarks/results
    python benchmarks/policies.py --curves FOLDER --case noise-30 --out benchmarks/results
    python benchmarks/policies.py --curves FOLDER --studies --out benchmarks/results
    python benchmarks/policies.py --studies --sets ::3 --devices 4 --budget 40 --opening 0 --seeds 5
    python benchmarks/policies.py --quick

Every policy gets the same trials of each set, drawn with seed 0, 1, ..., on 1, 4 and 16 devices,
with a switch that costs 0.5 %, 5 % and 25 % of a unit. Those for whole clusters have benchmarks of
their own. The settings of ``MAIN`` get ``--seeds`` draws, the others ``--seeds-elsewhere``: on 32
sets all of it then takes two cores less than half an hour. ``--case`` changes the trainings in one
way, on 1 and 4 devices: to nearly equal ones, where there is little to win, or to ones whose
reported values have errors. ``--studies`` has samplers propose the trials of a study that ends when
``--budget`` full trainings are spent, on 1, 2 and 4 devices, where opening a trial costs 0.05, 0.3
and 1 unit: its best value then, its best finished trial, and how soon they came. It prints Markdown
tables, or JSON; with ``--out`` it writes ``policies.md`` and, where matplotlib is installed,
``policies.svg`` (``policies-CASE.*``, ``policies-studies.md``). With ``--check`` the exit status is
1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

# One thread in each process; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from _policies_cases import CASES, NEARLY_EQUAL, kept
from _policies_plot import can_plot, plot
from _policies_report import count, figures, studies_text, text
from _policies_run import Setting, simulate_to_best
from _policies_studies import (
    CONTESTANTS,
    OPENINGS,
    SURROGATE,
    TPE,
    simulate_endings,
)

from optuna_hermes import cluster
from optuna_hermes.errors import HermesError
from optuna_hermes.policies import POLICIES, check_simulated_policy
from optuna_hermes.replay import SimulationRules, read_curve_set
from optuna_hermes.replay._proposals import PRUNERS, make_sampler
from optuna_hermes.replay._studies import PLAIN, StudyRules
from optuna_hermes.simulator import RIVALS, CurveSet

DEVICES = (1, 4, 16)
COSTS = (0.005, 0.05, 0.25)
MAIN = ((1, 0.005), (4, 0.005))
"""Devices and cost of the settings that get all seeds."""
ALWAYS = ("hermes", "fifo")
"""Policies that every table compares with."""

TARGETS = {
    (1, "fifo"): 7.7,
    (1, "asha"): 1.8,
    (1, "freeze-thaw"): 1.35,
    (1, "slaq"): 6.5,
    (1, "round-robin"): 15.0,
    (4, "fifo"): 5.6,
    (4, "freeze-thaw"): 1.25,
}
"""By devices and rival: how many times as long it needs to the best trial as ``hermes``, at least,
with a switch of 0.5 %."""
FAMILY_TARGET = 7.0
"""Of every family against ``fifo``, on one device."""
CASE_TARGETS = {NEARLY_EQUAL: 1.0, "noise-30": 2.8}
"""Against ``fifo``."""


def main() -> int:
    options = _options()
    try:
        result = _measure_studies(options) if options.studies else _measure(options)
    except HermesError as error:
        print(error, file=sys.stderr)
        return 2
    written = studies_text(result) if options.studies else text(result)
    if options.out:
        _write(options, result, written)
    print(json.dumps(result, indent=1) if options.json else written)
    missed = not all(target["met"] for target in result["targets"])
    return int(options.check and missed)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    for name in options.policy:
        check_simulated_policy(name, RIVALS)
    sets = _sets(options)
    policies = tuple(dict.fromkeys((*ALWAYS, *options.policy)))
    settings = [_setting(options, *pair) for pair in product(options.devices, options.cost)]
    settings.sort(key=lambda setting: (setting.rules.switch_cost, setting.rules.n_devices))
    found = simulate_to_best(
        sets, policies, settings, processes=options.processes, on_job=_Progress().say
    )
    blocks: list[dict[str, Any]] = [
        {
            "devices": setting.rules.n_devices,
            "cost": setting.rules.switch_cost,
            "seeds": setting.n_seeds,
            "rows": figures(results),
        }
        for setting, results in zip(settings, found, strict=True)
    ]
    return {
        "setting": {
            "sets": f"{len(sets)}",
            **({"case": CASES[options.case]} if options.case else {}),
            "trials": options.trials,
            "seeds": ", ".join(f"0 to {n - 1}" for n in sorted({b["seeds"] for b in blocks})),
            **_run_on(begun),
        },
        "families": {each.name: each.family for each in sets},
        "blocks": blocks,
        # On fewer trials or another draw there is less to win than the targets say.
        "targets": [] if options.quick else list(_targets(blocks, options.case)),
    }


def _measure_studies(options: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    contestants = options.policy and dict.fromkeys(map(_contestant, options.policy))
    contestants = tuple(contestants or CONTESTANTS)
    for policy, sampler in contestants:
        check_simulated_policy(policy, PRUNERS, "With a sampler a policy")
        make_sampler(sampler, 0)
    sets = _sets(options)
    settings = [
        StudyRules(n_devices=n, budget=budget, opening_cost=cost)
        for cost, budget, n in product(options.opening, options.budget, options.devices)
    ]
    blocks = simulate_endings(
        sets,
        contestants,
        settings,
        n_seeds=options.seeds,
        processes=options.processes,
        on_job=_Progress().say,
    )
    setting = {
        "sets": f"{len(sets)}",
        "seeds": f"0 to {options.seeds - 1}",
        **_run_on(begun),
    }
    return {"setting": setting, "blocks": blocks, "targets": []}


def _contestant(name: str) -> tuple[str, str]:
    """A policy and its sampler: where none is named, the one that it has by default."""
    policy, _, sampler = name.partition("/")
    return policy, sampler or (TPE if policy in PLAIN else SURROGATE)


def _run_on(begun: float) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }


def _sets(options: argparse.Namespace) -> list[CurveSet]:
    paths = sorted(Path(options.curves).glob("*.npz"))
    if not paths:
        raise HermesError(f"--curves must name a folder with .npz files but got {options.curves}.")
    if options.quick:
        paths = [paths[0], paths[-1]] if len(paths) > 1 else paths
    paths = paths[options.sets]
    if not paths:
        raise HermesError(f"--sets leaves none of the files in {options.curves}.")
    sets = [read_curve_set(path) for path in paths]
    return [kept(options.case, each) for each in sets]


def _setting(options: argparse.Namespace, n_devices: int, cost: float) -> Setting:
    is_main = (n_devices, cost) in MAIN
    return Setting(
        rules=SimulationRules(n_devices=n_devices, n_trials=options.trials, switch_cost=cost),
        n_seeds=options.seeds if is_main else min(options.seeds, options.seeds_elsewhere),
        case=options.case,
    )


def _targets(blocks: Sequence[dict[str, Any]], case: str) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block["cost"] != COSTS[0]:
            continue
        n_devices, rows = block["devices"], {row["policy"]: row for row in block["rows"]}
        where = count(n_devices, "device")
        if case:
            if case in CASE_TARGETS:
                measured = rows["fifo"]["ours"]["best"]
                yield _target(f"{where}, {case}, against fifo", measured, CASE_TARGETS[case])
            continue
        for (devices, rival), target in TARGETS.items():
            if devices == n_devices and rival in rows:
                yield _target(f"{where}, against {rival}", rows[rival]["ours"]["best"], target)
        for family, ratio in rows["hermes"]["families"].items() if n_devices == 1 else ():
            yield _target(f"{where}, {family}, against fifo", ratio, FAMILY_TARGET)


def _target(name: str, measured: float, target: float) -> dict[str, Any]:
    return {"name": f"{name} >= {target:g}", "measured": measured, "met": measured >= target}


def _write(options: argparse.Namespace, result: dict[str, Any], written: str) -> None:
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    if options.studies:
        (folder / "policies-studies.md").write_text(written)
        return
    name = f"policies-{options.case}" if options.case else "policies"
    if can_plot():
        plot(result["blocks"][0], result["families"], folder / f"{name}.svg")
        title, rest = written.split("\n", 1)
        written = f"{title}\n\n![Time to the best trial against FIFO]({name}.svg)\n{rest}"
    else:
        print("matplotlib is not installed: no plot", file=sys.stderr)
    (folder / f"{name}.md").write_text(written)


class _Progress:
    """A line a twentieth of the work, on stderr."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def say(self, done: int, total: int) -> None:
        """So many jobs of all are done."""
        if done * 20 // total > (done - 1) * 20 // total:
            seconds = time.monotonic() - self._begun
            print(f"{done} of {total} jobs, {seconds:.0f} s", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shipped = Path(__file__).parents[1] / "examples" / "curves"
    default = os.environ.get("OPTUNA_HERMES_CURVES", str(shipped))
    parser.add_argument("--curves", default=default, help="a folder of .npz files")
    parser.add_argument("--sets", type=_slice, default=slice(None), help="of them, as ::3")
    parser.add_argument("--policy", type=_names, help="a,b,..., of --studies a/SAMPLER,...")
    parser.add_argument("--devices", type=_integers, help="n,m,...")
    parser.add_argument("--cost", type=_numbers, help="of a switch, in units")
    parser.add_argument("--trials", type=_positive, help="of each set; else 100")
    parser.add_argument("--seeds", type=_positive, help="0 to this number - 1")
    parser.add_argument("--seeds-elsewhere", type=_positive, help="else 1")
    parser.add_argument("--processes", type=_positive, help="default: one for each core")
    parser.add_argument("--case", choices=list(CASES), default="", help="how trainings differ")
    parser.add_argument("--studies", action="store_true", help="with a sampler and a budget")
    parser.add_argument("--budget", type=_numbers, help="of --studies, in trainings: a,b,...")
    parser.add_argument("--opening", type=_numbers, help="of --studies, what it costs, in units")
    parser.add_argument("--quick", action="store_true", help="two sets, one seed, one device")
    parser.add_argument("--out", help="a folder for policies.md and policies.svg")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="status 1 if a target is missed")
    options = parser.parse_args()
    rule = "goes without --studies" if options.studies else "needs --studies"
    for name in _NOT_OF_STUDIES if options.studies else _OF_STUDIES:
        if getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} {rule}")
    if options.studies and options.case not in ("", NEARLY_EQUAL):
        parser.error(f"--studies has no case but {NEARLY_EQUAL}")
    options.trials, options.seeds_elsewhere = options.trials or 100, options.seeds_elsewhere or 1
    options.budget, options.opening = options.budget or (20.0,), options.opening or OPENINGS
    main_devices, main_costs = ((1, 4), COSTS[:1]) if options.case else (DEVICES, COSTS)
    options.cost = options.cost or main_costs
    options.devices = options.devices or ((1, 2, 4) if options.studies else main_devices)
    # Those of clusters look for no best trial, and take a minute for what others do in a second.
    of_clusters = f"{cluster.__name__}."
    of_hosts = (
        name for name, each in POLICIES.items() if not each.__module__.startswith(of_clusters)
    )
    if not options.studies:
        options.policy = options.policy or (*of_hosts, *RIVALS)
    options.seeds = options.seeds or (1 if options.studies else 10)
    if options.quick:
        options.devices, options.cost, options.seeds = (1,), COSTS[:1], 1
        options.trials = min(options.trials, 30)
        options.budget = tuple(min(each, 4.0) for each in options.budget)
    return options


_OF_STUDIES = ("budget", "opening")
_NOT_OF_STUDIES = ("cost", "trials", "seeds_elsewhere", "check")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _slice(text: str) -> slice:
    if not re.fullmatch(r"(-?\d*):(-?\d*)(:[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"must be a slice as 1::3 but got {text}")
    return slice(*(int(part) if part else None for part in text.split(":")))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 but got {number}")
    return number


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_positive(each) for each in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
