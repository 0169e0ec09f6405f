"""This project, Optuna's pruners and Ray Tune on real trainings: who finds the best trial soonest?

    python benchmarks/race.py --ray-python VENV/bin/python
    python benchmarks/race.py --tasks digits --contestants optuna,hermes --seeds 1 --seconds 60
    python benchmarks/race.py --report --json

A contest is one contestant on one task with one seed: a command that has ``--seconds`` from its
start, on ``--devices`` CPU slots. A batch computes, then waits as if the device were slower: a unit
takes ``--unit-seconds``, most of which the processor is free, so that several contests can run
beside each other (``--beside``), their starts apart. All contestants begin with the same ten
configurations, sample with Optuna's TPE of equal settings (BOHB and ``hermes`` with models of their
own), and get the same curve for the same configuration. Times and values are written down by the
trainings, never by a scheduler.

Each contest leaves a file in ``OUT/race``; what is there is not run again, so the same command goes
on after Ctrl-C. The report is ``OUT/race.md`` and, where matplotlib is installed, ``OUT/race.svg``.
Ray Tune runs in another Python (``--ray-python``) that has ``ray[tune]``, hpbandster, ConfigSpace,
and the same versions as this one of what the trainings use; without one its rows are left out.
Exit status 1 if a contestant failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from _policies_plot import can_plot
from _race_compare import compare
from _race_measure import Record, differing, figures
from _race_plot import plot
from _race_predict import simulated_units
from _race_report import text
from _race_run import (
    CONTESTANTS,
    RAY,
    ContestError,
    Runner,
    StoppedError,
    read_records,
    record_path,
    save_record,
)
from _race_tasks import N_CHOSEN_ON, TASKS, UNITS, Contest

SHARED = ("torch", "lightning", "lightgbm", "scikit-learn", "numpy", "optuna")
"""Packages that curves and proposals follow from."""
RAY_NEEDS = ("ray", "hpbandster", "ConfigSpace")
_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


class RaceError(Exception):
    """Bad input: exit status 2."""


def main() -> int:
    options = _options()
    try:
        status = 0 if options.report else _race(options)
        result = _result(options)
    except RaceError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"Stopped; every process has ended. What was finished is in {_folder(options)}: the "
            "same command goes on, and --report shows what there is.",
            file=sys.stderr,
        )
        return 130
    _write(options, result)
    print(json.dumps(result) if options.json else text(result))
    return status


# -- the contests ------------------------------------------------------------------------------


def _race(options: argparse.Namespace) -> int:
    contests = _contests(options)
    if options.ray_python:
        _check_ray(options.ray_python)
    elif left_out := [name for name in options.contestants if name in RAY]:
        _say(f"{', '.join(left_out)} are left out: --ray-python names no Python that has Ray.")
        contests = [contest for contest in contests if contest.contestant not in RAY]
    folder = _folder(options)
    _read(options, contests)  # of the same setting, or nothing is run
    left = [contest for contest in contests if not record_path(folder, contest).exists()]
    minutes = math.ceil(len(left) / options.beside) * options.seconds / 60
    _say(f"{len(left)} of {len(contests)} contests are left: about {minutes:.0f} min")
    failed = _run(left, Runner(options.ray_python, folder), options.beside, folder)
    if failed:
        _say(f"Failed: {', '.join(failed)}. The same command tries them again.")
    return int(bool(failed))


def _run(contests: Sequence[Contest], runner: Runner, beside: int, folder: Path) -> list[str]:
    """Run them; the names of those that failed."""
    failed, done = [], 0
    with ThreadPoolExecutor(beside) as threads:
        futures: dict[Future[Record], Contest] = {
            threads.submit(runner.run, contest): contest for contest in contests
        }
        running = set(futures)
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    contest = futures[future]
                    done += 1
                    try:
                        record = future.result()
                    except ContestError as error:
                        failed.append(contest.name)
                        _say(str(error))
                        continue
                    save_record(folder, contest, record)
                    _say(f"[{done}/{len(contests)}] {contest.name}: {_short(record)}")
        except StoppedError:
            raise KeyboardInterrupt from None
        finally:
            runner.stop()
            threads.shutdown(cancel_futures=True)
    return failed


def _short(record: Record) -> str:
    seen = figures(record, UNITS)
    best = "no value" if seen["best"] is None else f"best {seen['best']:.4g}"
    return f"{seen['units']} units, {best}, {seen['cpu_seconds']:.0f} s of CPU"


def _contests(options: argparse.Namespace) -> list[Contest]:
    return [
        Contest(
            task=task, seed=seed, contestant=name, devices=options.devices,
            seconds=options.seconds, unit_seconds=options.unit_seconds, folder="",
        )
        for seed, task, name in product(
            range(options.first_seed, options.first_seed + options.seeds),
            options.tasks, options.contestants,
        )
    ]  # fmt: skip


def _check_ray(python: str) -> None:
    asked = [*SHARED, *RAY_NEEDS]
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS, *asked], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise RaceError(f"--ray-python must be a Python but got {python}: {error}.") from error
    found = json.loads(done.stdout)
    if missing := [name for name in asked if found[name] is None]:
        raise RaceError(f"--ray-python must have {', '.join(missing)} but got {python}.")
    own = {"python": platform.python_version(), **{name: version(name) for name in SHARED}}
    for name, mine in own.items():
        if found[name] != mine:
            raise RaceError(
                f"--ray-python must have {name} {mine} as this Python, or curves differ, but "
                f"{python} has {found[name]}."
            )


# -- the report --------------------------------------------------------------------------------


def _read(options: argparse.Namespace, contests: Sequence[Contest]) -> list[Record]:
    folder, records = _folder(options), []
    for contest, record in read_records(folder, contests):
        for name in ("devices", "seconds", "unit_seconds"):
            given, kept = getattr(contest, name), record.setting[name]
            if given != kept:
                raise RaceError(
                    f"--{name.replace('_', '-')} must be {kept:g} as in {folder} but got "
                    f"{given:g}: give another --out to race anew."
                )
        records.append(record)
    return records


def _result(options: argparse.Namespace) -> dict[str, Any]:
    records = _read(options, _contests(options))
    if not records:
        raise RaceError(
            f"--out must have records of these contests but {_folder(options)} has none."
        )
    cells: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        setting = record.setting
        cells.setdefault((setting["task"], setting["seed"]), {})[setting["contestant"]] = record
    seen = {record.setting["contestant"] for record in records}
    names = [name for name in options.contestants if name in seen]
    return {
        "setting": _setting(options, records, names),
        "contests": [
            {
                **asdict(record)["setting"],
                "figures": {
                    **figures(record, UNITS),
                    "simulated": simulated_units(record, UNITS),
                },
            }
            for record in records
        ],
        "exactness": differing(records),
        "comparison": compare(cells, names, UNITS),
    }


def _setting(
    options: argparse.Namespace, records: Sequence[Record], names: Iterable[str]
) -> dict[str, Any]:
    absent = [name for name in CONTESTANTS if name not in names]
    return {
        "command": " ".join(["python", "benchmarks/race.py", *sys.argv[1:]]),
        "tasks": ", ".join(dict.fromkeys(record.setting["task"] for record in records)),
        "seeds": ", ".join(map(str, sorted({record.setting["seed"] for record in records}))),
        "contestants left out": ", ".join(absent) or "none",
        "seconds": f"{options.seconds:g} from the start of each command",
        "unit": f"{options.unit_seconds:g} s, {UNITS} in a trial",
        "devices": f"{options.devices} CPU slots each",
        "cores": f"{os.cpu_count()}, {_processor()}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "versions": ", ".join(f"{name} {version(name)}" for name in SHARED)
        + f", Python {platform.python_version()}",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    written = text(result)
    if can_plot():
        plot(result["comparison"], options.out / "race.svg")
        title, rest = written.split("\n", 1)
        written = f"{title}\n\n![Regret over time](race.svg)\n{rest}"
    else:
        _say("matplotlib is not installed: no plot")
    (options.out / "race.md").write_text(written)


def _folder(options: argparse.Namespace) -> Path:
    folder: Path = options.out / "race"
    return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the options -------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks",
        type=_among(TASKS),
        default=tuple(TASKS)[:N_CHOSEN_ON],
        help=f"a,b,... among {', '.join(TASKS)}; by default the first {N_CHOSEN_ON}, on which "
        "policy and sampler were chosen",
    )
    parser.add_argument(
        "--contestants", type=_among(CONTESTANTS), default=tuple(CONTESTANTS), help="a,b,..."
    )
    parser.add_argument("--seeds", type=_whole, default=5, help="how many")
    parser.add_argument("--first-seed", type=_seed, default=0, help="the least, for more of them")
    parser.add_argument("--seconds", type=_positive, default=340.0, help="budget of a contest")
    parser.add_argument("--unit-seconds", type=_positive, default=1.0, help="that a unit takes")
    parser.add_argument("--devices", type=_whole, default=2, help="CPU slots of each contestant")
    parser.add_argument("--beside", type=_whole, default=1, help="contests at once")
    # Absolute, for contests run elsewhere; not resolved, for a link says which environment it is.
    parser.add_argument("--ray-python", type=os.path.abspath, help="the Python that has Ray Tune")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--report", action="store_true", help="run nothing, report what there is")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _among(known: Iterable[str]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"must be among {', '.join(known)} but got {', '.join(unknown)}"
            )
        return given

    return names


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, but got {text}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0, but got {text}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0 but got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
