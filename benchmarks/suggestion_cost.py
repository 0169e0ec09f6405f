"""Cost of one suggestion of this project's default sampler, beside Optuna's samplers.

    python benchmarks/suggestion_cost.py [--trials 100,1000] [--params 12] [--json]

A study in memory has so many complete trials, with 1 to 27 reports each; all parameters are
numbers. Times are processor milliseconds of ``study.ask`` on one thread: the median and the longest
of those after the first, which imports. Each suggested trial is told a value, so the next
suggestion knows one more. Exit status 1 if the default sampler's median for 1,000 trials of 12
parameters is more than 100 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from typing import Any

# One thread, as in a worker beside the trainings; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution

from optuna_hermes import HermesSampler

SAMPLERS = {
    "hermes": lambda: HermesSampler(seed=SEED),
    "TPESampler": lambda: optuna.samplers.TPESampler(seed=SEED),
    "GPSampler": lambda: optuna.samplers.GPSampler(seed=SEED),
}
AGES = (1, 2, 4, 8, 16, 27)
"""Reports of a trial."""
LIMIT_MS = 100.0
LIMIT_TRIALS, LIMIT_PARAMS = 1_000, 12
SEED = 0


def main() -> int:
    options = _options()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [_row(options, name, n) for n in options.trials for name in options.sampler]
    result = {
        "setting": {
            "params": options.params,
            "suggestions": options.suggestions,
            "seed": SEED,
            "python": platform.python_version(),
            "optuna": optuna.__version__,
            "machine": platform.machine(),
        },
        "rows": rows,
        "limit": {"ms": LIMIT_MS, "met": _met(rows, options.params)},
    }
    print(json.dumps(result, indent=1) if options.json else _text(result))
    return int(result["limit"]["met"] is False)


def _row(options: argparse.Namespace, name: str, n_trials: int) -> dict[str, Any]:
    if not options.json:
        print(f"{name}, {n_trials} trials ...", file=sys.stderr)
    space: dict[str, BaseDistribution] = {
        f"p{index}": FloatDistribution(0, 1) for index in range(options.params)
    }
    study = optuna.create_study(sampler=SAMPLERS[name]())
    study.add_trials(_trials(space, n_trials))
    times = []
    for _ in range(1 + options.suggestions):
        begin = time.process_time()
        trial = study.ask(space)
        times.append(time.process_time() - begin)
        study.tell(trial, 1.0)
    return {
        "sampler": name,
        "trials": n_trials,
        "median_ms": round(1e3 * statistics.median(times[1:]), 1),
        "longest_ms": round(1e3 * max(times[1:]), 1),
    }


def _trials(space: dict[str, BaseDistribution], n: int) -> list[optuna.trial.FrozenTrial]:
    """Trials that come nearer to a value of their parameters' own, the longer they train."""
    rng = random.Random(SEED)
    trials = []
    for _ in range(n):
        params = {name: rng.random() for name in space}
        end = sum((value - 0.3) ** 2 for value in params.values())
        age = rng.choice(AGES)
        trials.append(
            optuna.trial.create_trial(
                params=params,
                distributions=space,
                value=end + 1 / age,
                intermediate_values={unit: end + 1 / (unit + 1) for unit in range(age)},
            )
        )
    return trials


def _met(rows: list[dict[str, Any]], n_params: int) -> bool | None:
    """True if the default sampler kept the limit; None if that was not measured."""
    found = [
        row["median_ms"]
        for row in rows
        if row["sampler"] == "hermes" and row["trials"] == LIMIT_TRIALS
    ]
    return all(ms <= LIMIT_MS for ms in found) if found and n_params == LIMIT_PARAMS else None


def _text(result: dict[str, Any]) -> str:
    lines = [
        "| sampler | trials | median ms | longest ms |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {row['sampler']} | {row['trials']:,} | {row['median_ms']} | {row['longest_ms']} |"
            for row in result["rows"]
        ),
    ]
    setting = ", ".join(f"{name} {value}" for name, value in result["setting"].items())
    met = {True: "met", False: "MISSED", None: "not measured"}[result["limit"]["met"]]
    limit = f"{LIMIT_TRIALS:,} trials of {LIMIT_PARAMS} parameters, at most {LIMIT_MS:g} ms"
    return "\n".join(
        [f"Milliseconds of a suggestion ({setting}).", "", *lines, "", f"- hermes, {limit}: {met}"]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sampler", type=_names, default=tuple(SAMPLERS), help="a,b,...")
    parser.add_argument("--trials", type=_numbers, default=(100, 1_000), help="n,m,...")
    parser.add_argument("--params", type=int, default=LIMIT_PARAMS)
    parser.add_argument("--suggestions", type=int, default=30, help="of each sampler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.sampler:
        if name not in SAMPLERS:
            parser.error(f"a sampler must be one of {', '.join(SAMPLERS)} but got {name!r}")
    if min(options.params, options.suggestions, *options.trials) < 1:
        parser.error("--params, --suggestions and --trials must be at least 1")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
