"""Time, processor time and memory of many short trials, with Hermes and with plain Optuna.

Run it with ``python benchmarks/many_trials.py [--trials 2000] [--units 3] [--unit-seconds 0.05]
[--torch] [--live 500] [--json]``. A unit sleeps until its time is over, so that what is measured
beside it is what Optuna and Hermes take. With ``--torch`` it trains a small network before. Plain
Optuna has two processes and Hermes two CPU slots, over SQLite, with the same sampler. Processor
time is told by the kind of process; that of workers includes those that have ended.

``--live 500`` opens 500 trials of long training in turn, for ``--timeout`` seconds, and measures
processes and memory in place of the time: the trials that are RUNNING at the end are live.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import psutil
from _broker import broker

SLOTS = 2
LOOK_SECONDS = 0.2

OBJECTIVE = """
import os, sys, time
from optuna_hermes import suspendable

UNITS, SECONDS = {units}, {unit_seconds}
TORCH = {torch}
if TORCH:
    import torch

def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

def unit(begin, model, optimizer):
    if TORCH:
        x, y = torch.randn(64, 64), torch.randint(10, (64,))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    time.sleep(max(0.0, begin + SECONDS - time.monotonic()))

def parts(trial):
    lr, x = trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.suggest_float("x", -1, 1)
    model = network() if TORCH else None
    return x, model, torch.optim.AdamW(model.parameters(), lr=lr) if TORCH else None

def objective(trial):
    x, model, optimizer = parts(trial)
    kept = dict(model=model, optimizer=optimizer) if TORCH else {{}}
    run = suspendable(trial, **kept)
    for number in run.epochs(UNITS):
        for _ in run.batches(range(1)):
            unit(time.monotonic(), model, optimizer)
        run.report(x * x + 1 / (number + 1))
    return run.value

def plain(trial):
    x, model, optimizer = parts(trial)
    for number in range(UNITS):
        unit(time.monotonic(), model, optimizer)
        trial.report(x * x + 1 / (number + 1), number)
        trial.should_prune()
    return x * x + 1 / UNITS

if __name__ == "__main__":
    import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.{sampler}()
    study = optuna.load_study(study_name="s", storage=sys.argv[1], sampler=sampler)
    if TORCH:
        torch.set_num_threads(1)
    study.optimize(plain, n_trials=int(sys.argv[2]))
"""


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--units", type=int, default=3)
    parser.add_argument("--unit-seconds", type=float, default=0.05)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--sampler", default="TPESampler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="many-"))
    try:
        if options.live:
            result = {"hermes": live(folder, options)}
        else:
            result = {"optuna": plain(folder, options), "hermes": hermes(folder, options)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps({"options": vars(options), **result}))
    else:
        show(result)
    return 0


def script(folder: Path, options: argparse.Namespace, name: str) -> tuple[Path, str]:
    """The objective's file, and the URL of a new study."""
    file = folder / "train.py"
    asked = {key: vars(options)[key] for key in ("units", "unit_seconds", "torch", "sampler")}
    file.write_text(OBJECTIVE.format(**asked))
    url = f"sqlite:///{folder / name}.db"
    optuna.create_study(study_name="s", storage=url)
    return file, url


def plain(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plain Optuna, with a process for each slot."""
    file, url = script(folder, options, "plain")
    each = [sys.executable, str(file), url, str(options.trials // SLOTS)]
    begin, before = time.monotonic(), os.times()
    processes = [subprocess.Popen(each, env=environment()) for _ in range(SLOTS)]
    for process in processes:
        assert process.wait() == 0
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return figures(url, time.monotonic() - begin, {"processes": cpu}, 0, 0)


def hermes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Hermes with a broker that is there already."""
    file, url = script(folder, options, "hermes")
    driver = folder / "drive.py"
    terms = LIVE.format(timeout=options.timeout) if options.live else ""
    asked = {"sampler": options.sampler, "url": url, "trials": options.trials, "terms": terms}
    driver.write_text(HERMES.format(**asked))
    with broker(folder, f"cpu:{SLOTS}") as server:
        watch = Watch(server)
        begin = time.monotonic()
        with subprocess.Popen([sys.executable, str(driver)], cwd=file.parent) as process:
            watch.driver = psutil.Process(process.pid)
            with watch.watching():
                process.wait()
        elapsed = time.monotonic() - begin
    return figures(url, elapsed, watch.cpu_seconds(), watch.most_processes, watch.most_bytes)


HERMES = """
import sys
sys.path.insert(0, ".")
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize

if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    base = optuna.samplers.{sampler}()
    study = optuna.load_study(
        study_name="s", storage="{url}", sampler=HermesSampler(base), pruner=HermesPruner()
    )
    optimize(
        study, "train.py:objective", {trials}, devices="cpu:2", show_progress=False, {terms}
    )
"""

LIVE = 'policy="round-robin", slice_seconds=0.1, timeout={timeout}'


def environment() -> dict[str, str]:
    """The environment of plain Optuna's processes: the threads that Hermes gives to a slot."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // SLOTS))} | os.environ


class Watch:
    """Processor time and memory of a driver, its fork servers and workers, and a broker."""

    def __init__(self, server: psutil.Process) -> None:
        self.driver: psutil.Process | None = None
        self.most_processes = self.most_bytes = 0
        self._server = server
        self._last: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look now and then while the block runs."""
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def cpu_seconds(self) -> dict[str, float]:
        """Seconds by kind of process."""
        total: Counter[str] = Counter()
        for kind, seconds in self._last.values():
            total[kind] += seconds
        return dict(total)

    def _work(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        assert self.driver is not None
        self._note(self._server, "broker")
        self._note(self.driver, "driver")
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            below = self.driver.children(recursive=True)
        parents = {each.pid: parent_of(each) for each in below}
        servers = {*parents.values(), *(p for p, q in parents.items() if q == self.driver.pid)}
        total = 0
        for each in below:
            self._note(each, "fork server" if each.pid in servers else "workers")
            with contextlib.suppress(psutil.Error, OSError):
                total += each.memory_full_info().pss
        self.most_processes = max(self.most_processes, len(below))
        self.most_bytes = max(self.most_bytes, total)

    def _note(self, process: psutil.Process, kind: str) -> None:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            if kind == "workers":
                return  # counted by the fork server once they have ended
            self._last[process.pid] = kind, times.user + times.system
            if kind == "fork server":
                ended = times.children_user + times.children_system
                self._last[-process.pid] = "workers", ended


def parent_of(process: psutil.Process) -> int:
    """The parent of a process, 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return 0


def live(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Hermes with a fixed list of trials that all begin before one of them ends."""
    options.trials, options.sampler, options.units = options.live, "RandomSampler", 10_000
    return hermes(folder, options)


def figures(
    url: str, seconds: float, cpu: dict[str, float], processes: int, size: int
) -> dict[str, Any]:
    """The figures of one contestant."""
    trials = optuna.load_study(study_name="s", storage=url).get_trials(deepcopy=False)
    units = sum(len(trial.intermediate_values) for trial in trials)
    return {
        "seconds": seconds,
        "trials": len(trials),
        "states": dict(Counter(trial.state.name for trial in trials)),
        "units": units,
        "cpu_seconds": cpu,
        "cpu_seconds_per_unit": sum(cpu.values()) / units,
        "most_processes": processes,
        "most_bytes": size,
    }


def show(result: dict[str, dict[str, Any]]) -> None:
    """Print a table."""
    base = result.get("optuna", {}).get("seconds")
    for name, each in result.items():
        times = f"{each['seconds'] / base:.2f} times" if base else ""
        print(f"{name:<8} {each['seconds']:8.1f} s {times}, {each['trials']} trials", end="")
        print(f" {each['states']}, {each['units']} units", end="")
        print(f", {1000 * each['cpu_seconds_per_unit']:.0f} ms of processor time a unit")
        for kind, seconds in each["cpu_seconds"].items():
            per_unit, per_trial = seconds / each["units"], seconds / each["trials"]
            print(f"    {kind:<12}{seconds:8.1f} s {1000 * per_unit:8.1f} ms a unit", end="")
            print(f" {1000 * per_trial:8.1f} ms a trial")
        if each["most_processes"]:
            print(
                f"    at most {each['most_processes']} processes, {each['most_bytes'] / 1e9:.2f} GB"
            )


if __name__ == "__main__":
    sys.exit(main())
