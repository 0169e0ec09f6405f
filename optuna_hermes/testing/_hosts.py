"""Hosts that share a study: a broker each, with workers that do what they are told. No process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Kill, Send
from optuna_hermes.ledger._base import RunRecord
from optuna_hermes.ledger._memory import MemoryLedger
from optuna_hermes.testing._broker import FakeBroker

KEY = "s"
UNITS = 4
"""After so many units a run has ended."""

WORKERS = 3


@dataclass(kw_only=True)
class Optuna:
    """What Optuna's tables would say: by which opening each trial was made, and which ended."""

    opened: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def open(self, grant: wire.Grant) -> int:
        """A new trial, or the one that somebody who died may have left."""
        for lost in map(str, grant.lost):
            if lost in self.opened:
                number = self.opened.index(lost)
                self.opened[number] = f"{grant.epoch}"
                return number
        self.opened.append(f"{grant.epoch}")
        return len(self.opened) - 1


@dataclass(kw_only=True)
class Worker:
    """A process: it waits, or has a run, which trains or is parked in its memory."""

    number: int | None = None
    epoch: int = 0
    units: int = 0
    trains: bool = False


class Host:
    """A broker, a driver and some workers.

    Args:
        name: the host's, and its broker's.
        ledger: which all hosts share.
        optuna: likewise.
        n_trials: how many trials there shall be.
        devices: how many it has.
    """

    def __init__(
        self, name: str, ledger: MemoryLedger, optuna: Optuna, *, n_trials: int, devices: int
    ) -> None:
        self.name = name
        self._ledger = ledger
        self._optuna = optuna
        self._n_trials = n_trials
        self._devices = devices
        self.workers: dict[int, Worker] = {}
        self.lives = False

    def start(self, now: float) -> None:
        """A broker of this host's name, a driver and its workers begin."""
        self.broker = FakeBroker(devices=self._devices, ledger=self._ledger, host=self.name)
        self.broker.now = now
        self.broker.terms.limits[KEY] = self._n_trials
        self._read = 0
        self.lives = True
        self.workers = {}
        leases = self._ledger.load_leases(KEY, live=True)
        theirs = {f"{x.epoch}" for x in leases if x.owner not in (None, self.name)}
        known = {run.number: run for run in self._ledger.load_runs(KEY)}
        opened = self._optuna.opened
        self.broker.driver(
            policy="round-robin",
            unstarted=max(0, self._n_trials - len(opened)),
            limit=self._n_trials,
            trials=len(opened),
            max_alive=WORKERS,
            adopted={n: n for n, by in enumerate(opened) if n not in known and by not in theirs},
            ended={n: "done" for n in self._optuna.ended & known.keys() if _is_live(known[n])},
        )
        self._hire()

    def die(self) -> None:
        """All of its processes are gone."""
        self.lives = False
        self.workers = {}

    def pass_time(self, now: float) -> None:
        """Its clock, which it shares with the others, goes on."""
        self.broker.advance(now - self.broker.now)
        self._listen()

    def refresh(self) -> None:
        """It looks what the others have done."""
        self.broker.refresh()
        self._listen()

    def train(self) -> list[tuple[int, int]]:
        """Each of its runs that has a device trains a unit: the trials with these units."""
        trained = []
        for connection, worker in list(self.workers.items()):
            if worker.trains and worker.number is not None and connection in self.workers:
                trained.append((worker.number, worker.units + 1))
                self._train(connection, worker)
                self._listen()
        return trained

    def holders(self) -> Counter[int]:
        """Trials by how many of its processes have them in memory."""
        numbers = (worker.number for worker in self.workers.values())
        return Counter(number for number in numbers if number is not None)

    # -- workers -------------------------------------------------------------------------------

    def _hire(self) -> None:
        while len(self.workers) < WORKERS:
            connection = self.broker.connect("worker")
            self.workers[connection] = Worker()
            self.broker.say(connection, wire.Ready(study=KEY))
            self._listen()

    def _leave(self, connection: int) -> None:
        del self.workers[connection]
        self.broker.hang_up(connection)
        self._listen()
        self._hire()

    def _listen(self) -> None:
        """Do what the broker has said."""
        while self._read < len(self.broker.log):
            command = self.broker.log[self._read]
            self._read += 1
            if isinstance(command, Kill) and command.connection in self.workers:
                self._leave(command.connection)
            elif isinstance(command, Send) and command.connection in self.workers:
                self._obey(command.connection, command.message)

    def _obey(self, connection: int, message: wire.FromBroker) -> None:
        worker = self.workers[connection]
        if isinstance(message, wire.Grant):
            self._begin(connection, worker, message)
        elif isinstance(message, wire.Yield | wire.Evict) and message.epoch == worker.epoch:
            self._leave_device(connection, worker, message)

    def _leave_device(
        self, connection: int, worker: Worker, message: wire.Yield | wire.Evict
    ) -> None:
        if worker.trains == isinstance(message, wire.Yield):  # else they have crossed
            self._park(connection, worker, message.tier)

    def _begin(self, connection: int, worker: Worker, grant: wire.Grant) -> None:
        if grant.number is None:
            worker.number, worker.units = self._optuna.open(grant), 0
        elif worker.number is None:
            worker.number = grant.number
            worker.units = max((each.units for each in grant.checkpoints), default=0)
        worker.epoch, worker.trains = grant.epoch, True
        begin = wire.Begin(epoch=grant.epoch, number=worker.number, trial_id=worker.number)
        self.broker.say(connection, begin)
        if connection in self.workers:
            self.broker.say(connection, wire.Training(epoch=grant.epoch, stores=True))

    def _train(self, connection: int, worker: Worker) -> None:
        worker.units += 1
        unit = worker.units
        said = wire.Report(epoch=worker.epoch, unit=unit, step=unit, value=1.0 / unit)
        self.broker.say(connection, said)
        if unit == UNITS:
            self._optuna.ended.add(worker.number or 0)
            self.broker.say(connection, wire.Ended(epoch=worker.epoch, state="done"))
            self._leave(connection)

    def _park(self, connection: int, worker: Worker, tier: str) -> None:
        checkpoint = None
        worker.trains = False
        if tier == "disk":
            path = f"/c/{worker.number}/{worker.units}-{worker.epoch}-{self.name}"
            checkpoint = wire.SavedCheckpoint(
                path=path, units=worker.units, size_bytes=1, sha256="0"
            )
        message = wire.Parked(
            epoch=worker.epoch,
            tier="disk" if tier == "disk" else "resident",
            suspend_seconds=0.1,
            stores=True,
            checkpoint=checkpoint,
        )
        self.broker.say(connection, message)
        if tier == "disk" and connection in self.workers:
            self._leave(connection)


def _is_live(run: RunRecord) -> bool:
    return run.state not in ("done", "failed")
