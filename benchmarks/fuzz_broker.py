"""Attacks on a broker by processes that misuse its socket, and what others notice of them.

    python benchmarks/fuzz_broker.py [--minutes 5] [--seed 0] [--json]

A real broker with four CPU slots is attacked in rounds of half a minute. In each it serves a study
that behaves: a driver asks for its status every 50 ms, a worker trains and reports ten times a
second. Beside them attackers send rubbish, half frames, frames that announce gigabytes, well formed
messages out of place, never read, or never say a word. After a round all hang up, and the broker is
left alone until it has closed what it had open for them: while it is attacked its memory depends on
who does not read a long answer just then. Exit status 1 if it dies, an exception is in its log, a
report is lost, a round leaves a file handle open, or memory after the last third of the rounds is
more than 5 % above that after the first third.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from optuna_hermes.broker import Connection, OpenStudy, StudySpec, connect
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.errors import BrokerError

ATTACKS = Path(__file__).parents[1] / "tests" / "support" / "attacks.py"
KEY = "honest"
ATTACKERS = 2
ROUND_SECONDS = 30.0
QUIET_SECONDS = 45.0
"""A broker that has handles open so long after everybody has hung up does not close them."""
SAMPLE_SECONDS = 0.5
STATUS_SECONDS = 0.05
REPORT_SECONDS = 0.1
LAST_WORDS_SECONDS = 10.0
GROWTH_LIMIT = 1.05


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hermes-fuzz-") as folder:
        os.environ[RUNTIME_DIR_VARIABLE] = folder
        os.chmod(folder, 0o700)
        result = _fuzz(Path(folder), options.minutes * 60, options.seed)
    print(json.dumps(result, indent=1) if options.json else _text(result))
    return int(not result["met"])


def _fuzz(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    log = folder / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "optuna_hermes.broker", "--devices", "cpu:4"]
        broker = subprocess.Popen(command, stderr=output, stdout=output)
    try:
        _connect("viewer").close()
        process, rounds = psutil.Process(broker.pid), []
        handles = process.num_fds()
        for number in range(max(1, round(seconds / ROUND_SECONDS))):
            rounds.append(_round(process, folder / str(number), seed + 1000 * number, handles))
            if broker.poll() is not None or rounds[-1].honest.problem:
                break
        died = broker.poll() is not None
    finally:
        broker.terminate()
        broker.wait()
    exceptions = _exceptions(log.read_text(errors="replace"))
    return _result(rounds, handles, crashes=int(died), exceptions=exceptions)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Measures of the broker while it was attacked, and after everybody had hung up."""

    honest: Honest
    counted: Counter[str]
    highest_bytes: int
    left_bytes: int
    left_handles: int


def _round(broker: psutil.Process, folder: Path, seed: int, handles: int) -> Round:
    folder.mkdir()
    honest, attacks = Honest(folder), Attacks(folder, seed)
    highest, left = 0, (0, 0)
    with contextlib.suppress(psutil.Error):  # it died
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            attacks.keep_up()
            highest = max(highest, broker.memory_info().rss)
            time.sleep(SAMPLE_SECONDS)
    counted = attacks.stop()
    honest.stop()
    with contextlib.suppress(psutil.Error):
        end = time.monotonic() + QUIET_SECONDS
        while broker.num_fds() > handles and time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
        left = broker.memory_info().rss, broker.num_fds()
    return Round(
        honest=honest,
        counted=counted,
        highest_bytes=highest,
        left_bytes=left[0],
        left_handles=left[1],
    )


def _exceptions(log: str) -> list[str]:
    """The last line of every traceback: it is not indented."""
    parts = log.split("Traceback (most recent call last):\n")[1:]
    return [next(line for line in part.splitlines() if line[:1] not in (" ", "")) for part in parts]


class Attacks:
    """Processes that attack; one that is killed for what it said is replaced by another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._running: list[subprocess.Popen[bytes]] = []
        self._output = (folder / "attacks").open("ab")
        self.killed = 0
        self.keep_up()

    def keep_up(self) -> None:
        """See to it that there are enough."""
        gone = [each for each in self._running if each.poll() is not None]
        self.killed += len(gone)
        self._running = [each for each in self._running if each not in gone]
        while len(self._running) < ATTACKERS:
            self._seed += 1
            self._running.append(self._start(self._seed))

    def stop(self) -> Counter[str]:
        """End them, and count what they did."""
        for each in self._running:
            each.kill()
            each.wait()
        self._output.close()
        done: Counter[str] = Counter(attackers_killed=self.killed)
        for line in (self._folder / "attacks").read_text().splitlines():
            try:
                done.update(json.loads(line))
            except ValueError:
                continue  # it was killed while it wrote
        return done

    def _start(self, seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ATTACKS), "--seconds", "1e6"]
        command += ["--socket", str(self._folder.parent / "broker.sock")]
        command += ["--folder", str(self._folder), "--seed", str(seed)]
        return subprocess.Popen(command, stdout=self._output)


class Honest:
    """A study that behaves: what its driver and its worker see."""

    def __init__(self, folder: Path) -> None:
        self._stop = threading.Event()
        self._trained = threading.Event()
        self.latencies: list[float] = []
        self.units = 0
        self.seen = 0
        self.problem = ""
        self._driver = _connect("driver")
        spec = StudySpec(key=KEY, name=KEY, ledger_url=f"sqlite:///{folder / 'honest.db'}")
        self._driver.send(OpenStudy(study=spec, limit=1, max_alive=1))
        self._driver.ask_status()
        self._worker = _connect("worker")
        self._worker.send(wire.Ready(study=KEY))
        self._threads = [threading.Thread(target=each) for each in (self._train, self._ask)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Hang up, once the broker has heard everything."""
        self._trained.set()
        end = time.monotonic() + LAST_WORDS_SECONDS
        while self.seen < self.units and not self.problem and time.monotonic() < end:
            time.sleep(STATUS_SECONDS)
        self._stop.set()
        self._worker.close()
        for thread in self._threads:
            thread.join()
        self._driver.close()

    def _train(self) -> None:
        """Report again and again; whenever a slice ends, park and wait for the next."""
        begun = False
        try:
            while not self._trained.is_set():
                grant = self._worker.receive()
                if not isinstance(grant, wire.Grant):
                    continue
                if not begun:
                    self._worker.send(wire.Begin(epoch=grant.epoch, number=0, trial_id=0))
                    begun = True
                self._worker.send(wire.FirstBatch(epoch=grant.epoch, can_store=False))
                self._slice(grant.epoch)
        except BrokerError as error:
            if not self._trained.is_set():
                self.problem = f"worker: {error}"

    def _slice(self, epoch: int) -> None:
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not self._trained.wait(REPORT_SECONDS):
            unit = self.units + 1
            self._worker.send(wire.Report(epoch=epoch, unit=unit, step=unit, value=1 / unit))
            self.units = unit
        self._worker.send(wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0))

    def _ask(self) -> None:
        try:
            while not self._stop.wait(STATUS_SECONDS):
                begin = time.perf_counter()
                status = self._driver.ask_status()
                self.latencies.append(time.perf_counter() - begin)
                mine = next(study for study in status.studies if study.key == KEY)
                self.seen = sum(trial.units for trial in mine.trials)
                self.problem = self.problem or mine.problem or ""
        except BrokerError as error:
            self.problem = f"driver: {error}"


def _connect(role: str) -> Connection:
    end = time.monotonic() + 60.0
    while True:
        try:
            return connect(role)
        except BrokerError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _result(
    rounds: list[Round], handles: int, *, crashes: int, exceptions: list[str]
) -> dict[str, Any]:
    third = max(1, len(rounds) // 3)
    left = [each.left_bytes / 1e6 for each in rounds]
    memory = [statistics.median(part) for part in (left[:third], left[-third:])]
    latencies = sorted(1000 * each for part in rounds for each in part.honest.latencies)
    sent = sum(each.honest.units for each in rounds)
    seen = sum(each.honest.seen for each in rounds)
    problem = rounds[-1].honest.problem
    grew = memory[1] > GROWTH_LIMIT * memory[0] or any(r.left_handles > handles for r in rounds)
    counted = sum((each.counted for each in rounds), Counter[str]())
    return {
        "rounds": len(rounds),
        "frames": counted["frames"],
        "megabytes": round(counted["bytes"] / 1e6, 1),
        "connections": counted["connections"],
        "closed_by_broker": counted["closed"],
        "attackers_killed": counted["attackers_killed"],
        "crashes": crashes,
        "exceptions": dict(Counter(exceptions)),
        "memory_mb_first_last_third": [round(each, 1) for each in memory],
        "memory_mb_after_rounds": [round(each, 1) for each in left],
        "memory_mb_highest": round(max(each.highest_bytes for each in rounds) / 1e6, 1),
        "handles_before": handles,
        "handles_after_rounds": [each.left_handles for each in rounds],
        "status_ms_median": round(statistics.median(latencies), 2),
        "status_ms_p99": round(latencies[int(0.99 * len(latencies))], 2),
        "status_asked": len(latencies),
        "reports_sent": sent,
        "reports_seen": seen,
        "problem": problem,
        "met": not (crashes or exceptions or grew or problem or sent > seen),
    }


def _text(result: dict[str, Any]) -> str:
    return "\n".join(f"{name:<28} {value}" for name, value in result.items())


if __name__ == "__main__":
    sys.exit(main())
