"""The processes and database in which ``chaos.py`` causes faults, and the checks after each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sqlalchemy
from _chaos_disk import SmallDisk
from _chaos_memory import SmallMemory
from _chaos_postgres import Postgres
from _chaos_stage import N_TRIALS, POLL_SECONDS, Stage

from optuna_hermes.errors import StorageError

SETTLE_SECONDS = 120.0
UNHEARD_UNITS = 3
"""That each trial which trains shall train while nobody hears of them."""
UNHEARD_SECONDS = 30.0
"""Or so long, which is less than they would wait."""
SLOWER = 10
_LEDGER_SECONDS = 0.5
_REPORTING = 2


class StuckError(Exception):
    """The study does not go on after a fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault, with its begin and end by the wall clock, and the time until all went on."""

    kind: str
    began: float
    ended: float
    settle_seconds: float


@dataclass(kw_only=True)
class Scene:
    """All that faults are done to.

    Args:
        stage: the study and its processes.
        postgres: its database.
        disk: where its checkpoints are.
        memory: little of it, for a trial that is to be killed for it.
        rng: every choice is drawn from it.
        hold_seconds: the least and the most that something is away.
    """

    stage: Stage
    postgres: Postgres
    disk: SmallDisk
    memory: SmallMemory
    rng: np.random.Generator
    hold_seconds: tuple[float, float]
    damaged: list[tuple[int, float]] = field(default_factory=list)
    """Trials whose newest checkpoint was damaged, and when."""
    damaged_files: set[Path] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    killed_in_silence: list[str] = field(default_factory=list)
    most_connections: int = 0
    """That there were to the database after a fault."""
    _hurt: dict[int, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.stage.finished()

    def hurt(self, trial: int) -> None:
        """A trial is about to lose its process by a fault of its own."""
        self._hurt[trial] = self._reports_of(trial)

    def unhurt(self) -> dict[int, int]:
        """Trials by the process that trains them, if they have trained a unit since ``hurt``."""
        holders = self.stage.records.holders().items()
        return {pid: n for pid, n in holders if self._reports_of(n) > self._hurt.get(n, -1)}

    def trained(self) -> set[int]:
        """Trials that have nothing left to train."""
        lines, epochs = self.stage.records.reported(), self.stage.records.setting.epochs
        return {line.trial for line in lines if line.unit == epochs}

    @property
    def is_all_trained(self) -> bool:
        """Nobody reports any more, whether or not it is in the database yet."""
        return len(self.trained()) == N_TRIALS

    def _reports_of(self, trial: int) -> int:
        return sum(line.trial == trial for line in self.stage.records.reported())

    def hold(self, also: Callable[[], None] = lambda: None) -> str:
        """Leave things as they are for a while; says how long."""
        seconds = float(self.rng.uniform(*self.hold_seconds))
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.finished:
            also()
            time.sleep(POLL_SECONDS)
        return f"{seconds:.1f} s"

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Have every trial train more slowly meanwhile."""
        pace = self.stage.records.pace_seconds
        self.stage.records.set_pace(SLOWER * pace)
        try:
            yield
        finally:
            self.stage.records.set_pace(pace)

    def train_on(self) -> int:
        """Leave things as they are until trials have trained some units; how many."""
        records = self.stage.records
        known, end = len(records.reported()), time.monotonic() + UNHEARD_SECONDS
        enough = known + UNHEARD_UNITS * len(records.holders())
        while len(records.reported()) < enough and time.monotonic() < end and records.holders():
            time.sleep(POLL_SECONDS)
        return len(records.reported()) - known

    def settle(self) -> float:
        """Wait until the study goes on as if nothing had happened; returns the seconds it took.

        A broker lives, some trials have reported since, and no trial would lose more than a unit
        if its process were lost now.

        Raises:
            StuckError: that does not come about.
        """
        begin, known = time.monotonic(), len(self.stage.records.reported())
        while not self.finished:
            if self._reports(known) and self._saved():
                break
            if time.monotonic() - begin > SETTLE_SECONDS:
                raise StuckError(
                    f"No progress within {SETTLE_SECONDS:.0f} s.\n{self.stage.last_words()}"
                )
            time.sleep(_LEDGER_SECONDS)
        self.most_connections = max(self.most_connections, self.postgres.n_connections())
        return time.monotonic() - begin

    def stored(self, states: tuple[str, ...] = ("stored",)) -> dict[int, list[Path]]:
        """The last two checkpoints of trials in these states, if both are as they were written."""
        with self.stage.ledger() as (ledger, key):
            found: dict[int, list[Path]] = {
                trial.number: [] for trial in ledger.load_trials(key) if trial.state in states
            }
            for each in ledger.load_checkpoints(key):
                if each.number in found:
                    found[each.number].append(Path(each.checkpoint.path))
        last_two = {number: paths[-2:] for number, paths in found.items() if len(paths) > 1}
        return {n: paths for n, paths in last_two.items() if self.damaged_files.isdisjoint(paths)}

    def _reports(self, known: int) -> bool:
        lines = self.stage.records.reported()
        trained = {line.trial for line in lines[known:]}
        live = N_TRIALS - len(self.trained() - trained)
        return self.stage.broker() is not None and len(trained) >= min(_REPORTING, live)

    def _saved(self) -> bool:
        try:
            return self._is_saved()
        except (StorageError, sqlalchemy.exc.OperationalError):  # no connection is left
            return False

    def _is_saved(self) -> bool:
        units: dict[int, int] = {}
        for line in self.stage.records.reported():
            units[line.trial] = line.unit
        with self.stage.ledger() as (ledger, key):
            saved = {each.number: each.checkpoint.units for each in ledger.load_checkpoints(key)}
        epochs = self.stage.records.setting.epochs
        behind = [unit - saved.get(trial, 0) for trial, unit in units.items() if unit < epochs]
        return max(behind, default=0) <= 1
