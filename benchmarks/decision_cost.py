"""Cost of one decision of a policy, by the number of live trials.

    python benchmarks/decision_cost.py [--policy hermes,asha] [--trials 100,1000] [--json]

Random power-law curves with noise, of four populations: in ``level`` every trial has 100 reports,
in ``spread`` from 1 to 100, ``budget`` is ``spread`` in a study with one, and ``ends`` is
``spread`` beside 300 finished trials, which ``qssf`` needs, and one more every fifth decision. One
device is free: the trial that had it has just reported one more unit, as before every decision of a
broker. Times are medians of processor milliseconds, with the slope of a line through their
logarithms as the exponent of growth: 1 is linear; n log n gives 1.15 from 100 to 10,000. ``the
first`` is the first decision about the largest number of trials: some policies remember what they
computed about a curve. Exit status 1 if ``hermes`` needs more than 10 ms for 10,000 trials.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

# One thread, as in a broker beside the trainings; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from optuna_hermes.model import Budget, Curve, Device, Snapshot, TrialView
from optuna_hermes.policies import POLICIES, Policy, make_policy

TRIALS = (100, 1_000, 3_000, 10_000)
POPULATIONS = ("level", "spread", "budget", "ends")
N_FINISHED = 300  # of ``ends``, at first
ENDS_EVERY = 5
N_POINTS = 100
N_UNITS = 150
"""Units of a trial in all."""
LIMIT_MS = 10.0
LIMIT_TRIALS = 10_000
CELL_SECONDS = 20.0
"""No further repetition after this long: some policies need seconds for one decision."""
SEED = 0


def main() -> int:
    options = _options()
    rows = [_row(options, name, pop) for name in options.policy for pop in options.population]
    result = {
        "setting": {
            "points": N_POINTS,
            "repetitions": options.repetitions,
            "seed": SEED,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "rows": rows,
        "limit": {"policy": "hermes", "trials": LIMIT_TRIALS, "ms": LIMIT_MS, "met": _met(rows)},
    }
    print(json.dumps(result, indent=1) if options.json else _text(result, options.trials))
    return int(_met(rows) is False)


# -- populations -------------------------------------------------------------------------------


def curves(n_trials: int, n_points: int, seed: int) -> list[list[float]]:
    """Losses that fall as a power of the unit to a floor of their own, with noise; some diverge."""
    rng = np.random.default_rng(seed)
    units = np.arange(1, n_points + 1)
    floor = rng.lognormal(-1.0, 0.5, (n_trials, 1))
    height = rng.lognormal(0.0, 0.5, (n_trials, 1))
    power = rng.uniform(0.1, 1.5, (n_trials, 1))
    noise = rng.normal(0.0, 0.02, (n_trials, n_points)) * height
    values = floor + height * units**-power + noise
    diverged = rng.random(n_trials) < 0.02
    values[diverged] = np.where(units > rng.integers(1, n_points), np.nan, values[diverged])
    found: list[list[float]] = values.tolist()
    return found


def population(kind: str, n_trials: int) -> tuple[list[TrialView], list[list[float]]]:
    """Trials that all wait, and all that they will ever report."""
    rng = np.random.default_rng(SEED)
    values = curves(n_trials, N_UNITS, SEED)
    ages = [N_POINTS] * n_trials if kind == "level" else rng.integers(1, N_POINTS + 1, n_trials)
    seconds = rng.uniform(0.5, 2.0, n_trials).tolist()
    params = rng.uniform(0.0, 1.0, (n_trials, 4)).tolist()
    trials = [
        TrialView(
            number=i,
            state="parked",
            curve=_curve(values[i], int(ages[i]), seconds[i]),
            attained_seconds=int(ages[i]) * seconds[i],
            waiting_since=float(i),
            tier="host",
            device="cpu:0",
            switch_cost_seconds=0.005 * seconds[i],
            units_left=N_UNITS - int(ages[i]),
            params=dict(zip("abcd", params[i], strict=True)),
        )
        for i in range(n_trials)
    ]
    return trials, values


def _finished(number: int) -> TrialView:
    rng = np.random.default_rng([SEED, number])
    (values,) = curves(1, N_UNITS, number)
    seconds, params = float(rng.uniform(0.5, 2.0)), rng.uniform(0.0, 1.0, 4).tolist()
    return TrialView(
        number=number,
        state="done",
        curve=_curve(values, N_UNITS, seconds),
        attained_seconds=N_UNITS * seconds,
        params=dict(zip("abcd", params, strict=True)),
    )


def _curve(values: list[float], age: int, seconds: float) -> Curve:
    return Curve(
        steps=tuple(range(1, age + 1)),
        values=tuple(values[:age]),
        device_seconds=tuple(unit * seconds for unit in range(1, age + 1)),
    )


# -- measuring ---------------------------------------------------------------------------------


def decisions(policy: Policy, kind: str, n_trials: int) -> Iterator[float]:
    """Seconds of one decision after another; in between the trial that was chosen reports."""
    trials, values = population(kind, n_trials)
    devices = (Device(id="cpu:0", free=True),)
    # So long that each trial can end, and none is due.
    left = Budget(seconds=1e6) if kind == "budget" else Budget()
    ended = [_finished(n_trials + i) for i in range(N_FINISHED if kind == "ends" else 0)]
    now, last, memory = float(n_trials), 0, None
    for decided in itertools.count():
        trials[last] = _reported(trials[last], values[last], now)
        snapshot = Snapshot(
            now=now,
            devices=devices,
            trials=tuple(trials),
            finished=tuple(ended),
            left=left,
            memory=memory,
        )
        start = time.process_time()
        decision = policy.decide(snapshot)
        yield time.process_time() - start
        trials[last] = replace(trials[last], switch_cost_seconds=0.01)
        (assignment,) = decision.assignments
        assert assignment.trial is not None
        now, last, memory = now + 1.0, assignment.trial, decision.memory
        if ended and decided % ENDS_EVERY == ENDS_EVERY - 1:
            ended.append(_finished(n_trials + len(ended)))


def _reported(trial: TrialView, values: list[float], now: float) -> TrialView:
    """The trial after one more unit; nobody ends here."""
    age = min(trial.curve.units + 1, N_UNITS - 1)
    return replace(
        trial,
        curve=_curve(values, age, 1.0),
        attained_seconds=trial.attained_seconds + 1.0,
        waiting_since=now,
        tier="resident",
        switch_cost_seconds=0.0,
        units_left=N_UNITS - age,
    )


def _row(options: argparse.Namespace, name: str, kind: str) -> dict[str, Any]:
    cells = {}
    for n_trials in options.trials:
        if not options.json:
            print(f"{name}, {kind}, {n_trials} trials ...", file=sys.stderr)
        cells[n_trials] = _cell(make_policy(name), kind, n_trials, options.repetitions)
    return {
        "policy": name,
        "population": kind,
        "first_ms": {n: round(1e3 * times[0], 4) for n, times in cells.items()},
        "median_ms": {n: round(1e3 * statistics.median(t), 4) for n, t in cells.items()},
        "exponent": _exponent({n: statistics.median(times) for n, times in cells.items()}),
    }


def _cell(policy: Policy, kind: str, n_trials: int, repetitions: int) -> list[float]:
    times: list[float] = []
    for seconds in decisions(policy, kind, n_trials):
        times.append(seconds)
        if len(times) >= repetitions or sum(times) > CELL_SECONDS:
            break
    return times


def _exponent(seconds: dict[int, float]) -> float | None:
    if len(seconds) < 2:
        return None
    slope = np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0]
    return round(float(slope), 2)


def _met(rows: list[dict[str, Any]]) -> bool | None:
    """True if ``hermes`` kept its limit; None if that was not measured."""
    found = [row["median_ms"].get(LIMIT_TRIALS) for row in rows if row["policy"] == "hermes"]
    return all(ms <= LIMIT_MS for ms in found) if found and None not in found else None


# -- text --------------------------------------------------------------------------------------


def _text(result: dict[str, Any], trials: tuple[int, ...]) -> str:
    most = trials[-1]
    heads = ["policy", "population", *(f"{n:,} trials" for n in trials), "exponent", "the first"]
    rows = [
        [
            row["policy"],
            row["population"],
            *(f"{row['median_ms'][n]:.3f}" for n in trials),
            "" if row["exponent"] is None else f"{row['exponent']:.2f}",
            f"{row['first_ms'][most]:.3f}",
        ]
        for row in result["rows"]
    ]
    lines = [heads, ["---"] * len(heads), *rows]
    setting = ", ".join(f"{name} {value}" for name, value in result["setting"].items())
    met = {True: "met", False: "MISSED", None: "not measured"}[result["limit"]["met"]]
    return "\n".join(
        [
            f"Median milliseconds of a decision ({setting}).",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            f"- hermes, {LIMIT_TRIALS:,} trials, at most {LIMIT_MS:g} ms: {met}",
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", type=_names, default=tuple(POLICIES), help="a,b,...")
    parser.add_argument(
        "--trials", type=_numbers, default=TRIALS, help="how many live trials: n,m,..."
    )
    parser.add_argument("--population", type=_names, default=POPULATIONS, help="level,spread,...")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for kind in options.population:
        if kind not in POPULATIONS:
            parser.error(f"a population must be one of {', '.join(POPULATIONS)} but got {kind!r}")
    if options.repetitions < 1 or min(options.trials) < 1:
        parser.error("--repetitions and --trials must be at least 1")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(each) for each in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
