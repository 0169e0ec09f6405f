"""Soak test of a broker: one that serves for long is to stay as small as it was.

    python benchmarks/soak.py [--minutes 30] [--json]

One broker serves a stream of short studies, one every two seconds, each in a database of its own: a
driver opens it, workers train its trials, report, save, and are parked, evicted and brought back;
some of them vanish in the middle of a slice, and some drivers with all their workers. What is
measured is the broker before each study, when nobody is connected: its open handles and its memory.
Ledgers stay open for ten seconds, so that is some five of them. Exit status 1 if the median of the
last third is more than 2 % above that of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from _broker import broker

from optuna_hermes.broker import Connection, OpenStudy, StudySpec, connect
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.errors import BrokerError
from optuna_hermes.model import Checkpoint

LIMIT = 0.02
WORKERS = 6
TRIALS = 8
UNITS = 6
STUDY_SECONDS = 60.0
STUDY_EVERY_SECONDS = 2.0
"""A quiet machine has no more ledgers open at a time than a busy one."""
PAUSE_SECONDS = 0.01
"""Between two units of a worker: the soak shall leave the machine to others."""


def main() -> int:
    options = _options()
    with (
        tempfile.TemporaryDirectory(prefix="hermes-soak-") as folder,
        broker(Path(folder), "cpu:2") as process,
    ):
        result = _soak(process, Path(folder), 60 * options.minutes)
    print(json.dumps(result, indent=1) if options.json else _text(result))
    return int(not result["met"])


def _soak(process: psutil.Process, folder: Path, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    seen: list[tuple[int, int]] = []
    trials = 0
    while time.monotonic() < end:
        due = time.monotonic() + STUDY_EVERY_SECONDS
        seen.append((process.num_fds(), process.memory_info().rss))
        trials += Study(folder, len(seen)).run()
        time.sleep(max(0.0, due - time.monotonic()))
    handles = _thirds([each[0] for each in seen])
    memory = _thirds([each[1] for each in seen])
    return {
        "minutes": seconds / 60,
        "studies": len(seen),
        "trials": trials,
        "handles": handles,
        "memory_bytes": memory,
        "met": trials > 0 and max(handles["growth"], memory["growth"]) <= LIMIT,
    }


def _thirds(values: list[int]) -> dict[str, Any]:
    third = max(1, len(values) // 3)
    medians = [statistics.median(values[i : i + third]) for i in (0, third, len(values) - third)]
    return {"first": medians[0], "last": medians[2], "growth": medians[2] / medians[0] - 1}


class Study:
    """A short study: a driver and its workers, each a thread with a socket of its own."""

    def __init__(self, folder: Path, number: int) -> None:
        self._random = random.Random(number)
        self._key = f"study-{number}"
        self._url = f"sqlite:///{folder}/ledger-{number}.db"
        self._next = 0
        self._ended = 0
        self._lock = threading.Lock()
        self._over = False
        self._open: set[Connection] = set()

    def run(self) -> int:
        """Serve it to its end, or until its driver vanishes; returns how many trials ended."""
        driver = connect("driver")
        spec = StudySpec(key=self._key, name=self._key, ledger_url=self._url, slice_seconds=0.05)
        message = OpenStudy(study=spec, limit=TRIALS, max_alive=WORKERS)
        params = {number: {"lr": 0.1} for number in range(TRIALS)}
        driver.send(wire.Describe(study=self._key, params=params))
        driver.send(message)
        _studies(driver)  # it is open when this is answered
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        vanishes = self._random.random() < 0.2
        deadline = time.monotonic() + (0.5 if vanishes else STUDY_SECONDS)
        while time.monotonic() < deadline:
            (entry,) = [s for s in _studies(driver) if s.key == self._key] or [None]
            if entry is None or entry.finished:
                break
            for loss in entry.lost:
                if loss.given_up:
                    driver.send(self._give_up(loss))
            time.sleep(0.1)
        else:
            if not vanishes:
                raise SystemExit(
                    f"{self._key} is not finished after {STUDY_SECONDS:.0f} s: {entry}"
                )
        if vanishes:
            driver.close()
            self._take_workers_along()
        else:
            driver.send(wire.Drain(study=self._key))
        for worker in workers:
            worker.join(STUDY_SECONDS)
        driver.close()
        return self._ended

    def _give_up(self, loss: wire.TrialLoss) -> wire.GiveUp:
        """What a driver says of a trial whose workers keep vanishing without a new unit."""
        return wire.GiveUp(study=self._key, number=loss.trial, reason="vanished")

    def _work(self) -> None:
        """A worker, and another in its place when it is gone, while there is work."""
        while True:
            with self._lock:
                if self._over:
                    return
                connection = connect("worker")
                self._open.add(connection)
            try:
                connection.send(wire.Ready(study=self._key))
                if not Worker(connection, self).serve():
                    return
            except BrokerError:
                return
            finally:
                with self._lock:
                    self._open.remove(connection)
                connection.close()

    def _take_workers_along(self) -> None:
        """Workers end with the process that started them."""
        with self._lock:
            self._over = True
            for connection in self._open:
                connection.close()

    def new_trial(self) -> int:
        """The number of a new trial."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def end_trial(self) -> None:
        """A trial more is done."""
        with self._lock:
            self._ended += 1

    def chance(self, share: float) -> bool:
        """Draw at random: True in this share of cases."""
        with self._lock:
            return self._random.random() < share


class Worker:
    """A worker process's words, without its process."""

    def __init__(self, connection: Connection, study: Study) -> None:
        self._connection = connection
        self._study = study
        self._inbox: list[wire.FromBroker] = []
        self._heard = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def serve(self) -> bool:
        """Serve one trial; returns whether another worker may take this one's place."""
        grant = self._wait(wire.Grant)
        if grant is None:
            return False
        number = self._study.new_trial() if grant.number is None else grant.number
        unit = max((each.units for each in grant.checkpoints), default=0)
        self._say(wire.Begin(epoch=grant.epoch, number=number, trial_id=number))
        self._say(wire.FirstBatch(epoch=grant.epoch, can_store=True, params={"lr": 0.1}))
        while unit < UNITS:
            unit += 1
            time.sleep(PAUSE_SECONDS)
            self._say(wire.Report(epoch=grant.epoch, unit=unit, step=unit, value=1 / unit + number))
            if self._study.chance(0.03):
                return True  # without a word
            asked = self._asked(wire.Yield)
            if asked is not None:
                self._park(grant.epoch, number, unit, asked.tier)
                if asked.tier == "disk":
                    return True
                grant = self._resume(grant.epoch, number, unit)
                if grant is None:
                    return True
        self._say(wire.Ended(epoch=grant.epoch, state="done"))
        self._study.end_trial()
        return True

    def _resume(self, epoch: int, number: int, unit: int) -> wire.Grant | None:
        """Wait, parked, for the next grant; None if the trial went to disk."""
        while True:
            message = self._wait(wire.Grant, wire.Move)
            if isinstance(message, wire.Grant):
                self._say(wire.FirstBatch(epoch=message.epoch, can_store=True))
                return message
            if message is None:
                return None
            self._park(epoch, number, unit, message.tier)
            if message.tier == "disk":
                return None

    def _park(self, epoch: int, number: int, unit: int, tier: Any) -> None:
        checkpoint = None
        if tier == "disk":
            path = f"/nowhere/{self._study._key}/{number}/{unit}"
            checkpoint = Checkpoint(path=path, units=unit, size_bytes=1, sha256="0" * 64)
        self._say(
            wire.TierChanged(
                epoch=epoch,
                tier=tier,
                suspend_seconds=0.001,
                checkpoint=checkpoint,
                held_bytes=0,
                can_store=True,
                can_offload=True,
            )
        )

    def _say(self, message: wire.FromClient) -> None:
        self._connection.send(message)

    def _read(self) -> None:
        with contextlib.suppress(BrokerError):
            while True:
                message = self._connection.receive()
                with self._heard:
                    self._inbox.append(message)
                    self._heard.notify()
        with self._heard:
            self._inbox.append(wire.Dismiss())
            self._heard.notify()

    def _asked(self, kind: type) -> Any:
        with self._heard:
            found = next((m for m in self._inbox if isinstance(m, kind)), None)
            if found is not None:
                self._inbox.remove(found)
            return found

    def _wait(self, *kinds: type) -> Any:
        """The next message of these kinds; None when this worker is not needed any more."""
        with self._heard:
            while True:
                for message in self._inbox:
                    if isinstance(message, (*kinds, wire.Dismiss)):
                        self._inbox.remove(message)
                        return None if isinstance(message, wire.Dismiss) else message
                if not self._heard.wait(STUDY_SECONDS):
                    return None


def _studies(driver: Connection) -> tuple[wire.StudyStatus, ...]:
    return driver.ask_status(trials=False).studies


def _text(result: dict[str, Any]) -> str:
    handles, memory = result["handles"], result["memory_bytes"]
    return (
        f"{result['minutes']:.0f} min, {result['studies']} studies, {result['trials']} trials: "
        f"handles {handles['first']:.0f} -> {handles['last']:.0f} ({handles['growth']:+.1%}), "
        f"memory {memory['first'] / 1e6:.1f} -> {memory['last'] / 1e6:.1f} MB "
        f"({memory['growth']:+.1%}); {'flat' if result['met'] else 'it GROWS'}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whether a broker stays as small as it was.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
