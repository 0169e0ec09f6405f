"""The study of ``chaos.py`` and its processes: found, watched, started again, and all ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
from _chaos_orders import Orders
from _chaos_records import FOLDER_VARIABLE, Records, Setting

from optuna_hermes._optuna import ledger_url, study_key
from optuna_hermes.broker._election import RUNTIME_DIR_VARIABLE
from optuna_hermes.ledger import Ledger, open_ledger

N_SLOTS = 4
N_TRIALS = 24
STUDY = "chaos"
END_SECONDS = 20.0
POLL_SECONDS = 0.1
OBJECTIVE = Path(__file__).with_name("_chaos_objective.py")


class Stage:
    """One study; on leaving, every process that was started for it is gone.

    Args:
        folder: its own, missing.
        storage: Optuna's storage URL.
        checkpoints: where suspended trials go.
        setting: what each trial trains.
        seed: trials and their parameters follow from it.
        policy: as ``--policy``.
        slice_seconds: as ``--slice-seconds``.
        pace_seconds: see ``Records``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        storage: str,
        checkpoints: Path,
        setting: Setting,
        seed: int,
        policy: str = "fifo",
        slice_seconds: float = 1.0,
        pace_seconds: float = 0.0,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.storage = storage
        self.runtime = folder / "run"
        self.records = Records(folder / "records")
        self.records.prepare(setting, pace_seconds=pace_seconds)
        self.orders = Orders(self.records.folder)
        self.orders.prepare()
        self.statuses: list[int] = []
        """Exit statuses of the calls of ``optimize`` that nobody killed."""
        self.driver: subprocess.Popen[bytes] | None = None
        self._over = False
        self._command = [
            *(sys.executable, "-m", "optuna_hermes", "optimize", f"{OBJECTIVE}:objective"),
            *("--storage", storage, "--study-name", STUDY, "--n-trials", str(N_TRIALS)),
            *("--devices", f"cpu:{N_SLOTS}", "--policy", policy, "--seed", str(seed)),
            *("--slice-seconds", str(slice_seconds), "--checkpoint-dir", str(checkpoints)),
            "--json",
        ]
        study = optuna.create_study(study_name=STUDY, storage=storage)
        rng = np.random.default_rng(seed)
        for lr, dropout in zip(
            rng.uniform(-4, -1, N_TRIALS), rng.uniform(0, 0.6, N_TRIALS), strict=True
        ):
            study.enqueue_trial({"lr": 10.0**lr, "dropout": dropout})  # whatever the order
        self._key, self._ledger_url = study_key(study), ledger_url(study)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exception: object) -> None:
        deadline = time.monotonic() + END_SECONDS
        while (alive := self.processes()) and time.monotonic() < deadline:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.driver is not None:
                self.driver.poll()
            time.sleep(POLL_SECONDS)

    # -- the call of ``optimize`` ---------------------------------------------------------------

    def start(self) -> None:
        """Call ``optimize``, in a process group of its own, as a terminal does."""
        with (self.folder / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env={
                    **os.environ,
                    RUNTIME_DIR_VARIABLE: str(self.runtime),
                    FOLDER_VARIABLE: str(self.folder / "records"),
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finished(self) -> bool:
        """True if the call has ended well; one that ended by itself otherwise is made again."""
        assert self.driver is not None
        status = None if self._over else self.driver.poll()
        if status is not None:
            self.statuses.append(status)
            self._over = status == 0
            if not self._over:
                self.start()
        return self._over

    def kill_driver(self, *, group: bool) -> None:
        """SIGKILL to the call, or to its whole process group."""
        assert self.driver is not None
        (os.killpg if group else os.kill)(self.driver.pid, signal.SIGKILL)
        self.driver.wait()

    def wait_for_driver(self, within_seconds: float) -> int:
        """Wait for the end of a call that was told to end; its exit status."""
        assert self.driver is not None
        return self.driver.wait(within_seconds)

    # -- its processes -------------------------------------------------------------------------

    @property
    def driver_pid(self) -> int:
        assert self.driver is not None
        return self.driver.pid

    def broker(self) -> psutil.Process | None:
        """The broker that lives, None if there is none."""
        try:
            pid = json.loads((self.runtime / "broker.json").read_text())["pid"]
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            return None

    def workers(self) -> list[psutil.Process]:
        """Worker processes, whether they train or wait."""
        with contextlib.suppress(psutil.NoSuchProcess):
            nurseries = psutil.Process(self.driver_pid).children()
            return [worker for nursery in nurseries for worker in nursery.children()]
        return []

    def processes(self) -> list[psutil.Process]:
        """All that was started for this study and still runs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = process.environ().get(RUNTIME_DIR_VARIABLE) == str(self.runtime)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # -- what came of it -----------------------------------------------------------------------

    def study(self) -> optuna.Study:
        return optuna.load_study(study_name=STUDY, storage=self.storage)

    @contextlib.contextmanager
    def ledger(self) -> Iterator[tuple[Ledger, str]]:
        """The study's ledger, and its key there."""
        ledger = open_ledger(self._ledger_url)
        try:
            yield ledger, self._key
        finally:
            ledger.close()

    def last_words(self, lines: int = 15) -> str:
        """The ends of the logs, for people."""
        parts = []
        for path in (self.folder / "driver.log", self.runtime / "broker.log"):
            with contextlib.suppress(OSError):
                words = path.read_text(errors="replace").splitlines()[-lines:]
                parts.append("\n".join([f"--- {path}", *words]))
        return "\n".join(parts)


def values_of(trials: Sequence[optuna.trial.FrozenTrial]) -> dict[int, dict[str, Any]]:
    """Return parameters, reports and value of each trial, by number, with every bit."""
    return {
        trial.number: {
            "params": {name: float(value).hex() for name, value in trial.params.items()},
            "values": {unit: v.hex() for unit, v in sorted(trial.intermediate_values.items())},
            "value": None if trial.value is None else trial.value.hex(),
        }
        for trial in trials
    }
