"""A study of 24 trials on 4 CPU slots while processes die, hang and lose their disk and database.

The same study is trained twice: undisturbed, and with faults at random moments. Afterwards every
trial must be complete with the same values, bit for bit; nothing that was reported may be lost, no
more than a unit trained again for a fault, and not a batch where no process that trains was ended;
no device held by two, no trial's process killed because it was silent. Exit status 1 if not.

    python benchmarks/chaos.py --minutes 20 --seed 0 --json
    python benchmarks/chaos.py --minutes 2 --faults 6 --kinds trial-exit,trial-memory
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optuna
from _chaos_disk import SmallDisk
from _chaos_faults import FAULTS, impossible
from _chaos_memory import SmallMemory
from _chaos_postgres import Postgres
from _chaos_records import Setting
from _chaos_scene import Fault, Scene, StuckError
from _chaos_stage import N_SLOTS, N_TRIALS, POLL_SECONDS, Stage
from _chaos_verdict import kept, verdict

FAULTS_PER_MINUTE = 4
LEAST_FAULTS = 8
BUSY = 0.8
"""Share of the time that devices should train."""
BATCHES = 23
"""In a unit."""
PACES = (0.5, 5.0)
"""Limits of the factor on a batch's time: neither study nor faults are to end first."""
POSTPONED = 4
"""Number of times, for each fault, that there may be nothing to do it to."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Amount of work for the minutes that were asked for."""

    minutes: float
    faults: int | None = None

    @property
    def setting(self) -> Setting:
        epochs = min(30, max(6, round(1.5 * self.minutes)))
        return Setting(epochs=epochs, width=64, batch_size=64)

    @property
    def unit_seconds(self) -> float:
        return BUSY * N_SLOTS * 60 * self.minutes / (N_TRIALS * self.setting.epochs)

    @property
    def pace_seconds(self) -> float:
        return self.unit_seconds / BATCHES

    @property
    def n_faults(self) -> int:
        return self.faults or max(LEAST_FAULTS, round(FAULTS_PER_MINUTE * self.minutes))

    @property
    def hold_seconds(self) -> tuple[float, float]:
        return (1.0, 8.0) if self.minutes >= 5 else (0.5, 2.0)


def main() -> int:
    options = _options()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # pgserver asks for a folder that it does not use.
    warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        with contextlib.ExitStack() as stack:
            size = Size(minutes=options.minutes, faults=options.faults)
            result = _run(options, size, folder, stack)
    except StuckError as error:
        print(f"{error}\nIts files are in {folder}.", file=sys.stderr)
        return 1
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ok = kept(result) and not result["ended_by_itself"]
    if ok:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _say(f"A promise was broken; logs and records are in {folder}.")
    print(json.dumps(result) if options.json else _table(result))
    return int(not ok)


def _run(
    options: argparse.Namespace, size: Size, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
    begin = time.monotonic()
    given: dict[str, Any] = {"setting": size.setting, "seed": options.seed}
    calm = Stage(
        folder / "calm", storage=f"sqlite:///{folder}/calm.db", checkpoints=folder / "calm-disk",
        **given,
    )  # fmt: skip
    stack.enter_context(calm)
    _say(f"undisturbed: {N_TRIALS} trials of {size.setting.epochs} units on {N_SLOTS} slots")
    calm.start()
    _finish(calm, 120 + 60 * size.minutes)
    postgres = stack.enter_context(Postgres(folder / "postgres"))
    disk = stack.enter_context(SmallDisk(folder / "disk"))
    stage = Stage(
        folder / "storm", storage=postgres.url, checkpoints=disk.folder,
        policy="round-robin", slice_seconds=0.7 * size.unit_seconds,
        pace_seconds=size.pace_seconds, **given,
    )  # fmt: skip
    stack.enter_context(stage)
    rng = np.random.default_rng(options.seed)
    scene = Scene(
        stage=stage, postgres=postgres, disk=disk, memory=stack.enter_context(SmallMemory()),
        rng=rng, hold_seconds=size.hold_seconds,
    )  # fmt: skip
    left_out = impossible(scene)
    for kind in set(options.kinds).intersection(left_out):
        _say(f"{kind} is left out: {left_out[kind]}")
    kinds = [kind for kind in options.kinds if kind not in left_out]
    _storm(scene, kinds, size)
    faults = scene.faults
    return {
        "faults": len(faults),
        **verdict(stage, calm, scene.damaged, faults),
        "by_kind": dict(sorted(Counter(fault.kind for fault in faults).items())),
        "left_out": sorted(set(FAULTS) - set(kinds)),
        "killed_in_silence": scene.killed_in_silence,
        "ended_by_itself": stage.statuses[:-1],
        "most_connections": scene.most_connections,
        "longest_recovery_seconds": round(max((f.settle_seconds for f in faults), default=0.0), 1),
        "seconds": round(time.monotonic() - begin, 1),
        "seed": options.seed,
    }


def _storm(scene: Scene, kinds: list[str], size: Size) -> None:
    """Train the study with faults."""
    stage, rng = scene.stage, scene.rng
    plan = [str(kind) for _ in range(size.n_faults) for kind in rng.permutation(kinds)]
    del plan[size.n_faults :]
    _say(f"disturbed: {len(plan)} faults in about {size.minutes:g} min")
    stage.start()
    begin = time.monotonic()
    scene.settle()
    postponed = 0
    while plan and not scene.finished and postponed < POSTPONED * size.n_faults:
        left = max(0.0, begin + 60 * size.minutes - time.monotonic())
        _wait(scene, rng.uniform(0, left / len(plan)))
        at, began, kind = time.monotonic() - begin, time.time(), plan.pop(0)
        what = FAULTS[kind](scene)
        if what is None:
            postponed += 1
            plan.insert(min(1, len(plan)), kind)
            time.sleep(POLL_SECONDS)
            continue
        ended, seconds = time.time(), scene.settle()
        done = Fault(kind=kind, began=began, ended=ended, settle_seconds=seconds)
        scene.faults.append(done)
        n = len(scene.faults)
        _say(f"[{n}/{size.n_faults}] {at:5.0f} s  {kind}: {what}; {seconds:.1f} s to go on")
        _keep_pace(stage, size, len(plan))
    stage.records.set_pace(0.0)
    _finish(stage, 120 + 60 * size.minutes)


def _keep_pace(stage: Stage, size: Size, faults_left: int) -> None:
    """Train as fast as there are faults left for what there is to train."""
    trained = {(line.trial, line.unit) for line in stage.records.reported()}
    left = 1 - len(trained) / (N_TRIALS * size.setting.epochs)
    ratio = faults_left / size.n_faults / max(left, 0.01)
    stage.records.set_pace(size.pace_seconds * min(max(PACES[0], ratio), PACES[1]))


def _wait(scene: Scene, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not scene.finished:
        time.sleep(POLL_SECONDS)


def _finish(stage: Stage, within_seconds: float) -> None:
    end = time.monotonic() + within_seconds
    while not stage.finished():
        if time.monotonic() > end:
            raise StuckError(f"Not within {within_seconds:.0f} s: its end.\n{stage.last_words()}")
        time.sleep(POLL_SECONDS)


# -- what is said ------------------------------------------------------------------------------


def _table(result: dict[str, Any]) -> str:
    by_kind = ", ".join(f"{count} {kind}" for kind, count in result["by_kind"].items())
    rows = {
        "faults": f"{result['faults']} ({by_kind})",
        "left out": ", ".join(result["left_out"]) or "nothing",
        "trials complete": f"{result['completed']} of {result['trials']}",
        "values lost": f"{result['values_lost']} of {result['values_reported']}",
        "units trained again": f"{result['units_repeated']} in all, at most "
        f"{result['units_repeated_max']} for a fault",
        "batches trained again": f"{len(result['batches_repeated'])} times for nothing",
        "silent, and killed for it": len(result["killed_in_silence"]),
        "two holders of a device": result["double_holders"],
        "values equal to the undisturbed": "yes" if result["values_equal"] else "NO",
        "calls that ended by themselves": len(result["ended_by_itself"]),
        "most connections": result["most_connections"],
        "longest time to go on": f"{result['longest_recovery_seconds']} s",
        "seconds": result["seconds"],
    }
    return "\n".join(f"{name:>32}  {value}" for name, value in rows.items())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults go on")
    parser.add_argument("--seed", type=int, default=0, help="trials and faults follow from it")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(FAULTS), help="of faults"
    )
    parser.add_argument(
        "--faults", type=int, help=f"how many; {FAULTS_PER_MINUTE} a minute if not given"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0 but got {options.minutes:g}.")
    if options.faults is not None and options.faults < 1:
        parser.error(f"--faults must be at least 1 but got {options.faults}.")
    unknown = sorted(set(options.kinds) - set(FAULTS))
    if unknown:
        parser.error(f"--kinds are among {', '.join(FAULTS)} but got {', '.join(unknown)}.")
    return options


if __name__ == "__main__":
    sys.exit(main())
