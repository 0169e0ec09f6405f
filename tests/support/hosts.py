"""Simulated hosts that share a study: a broker each, with workers, without processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Kill, Send
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import Checkpoint
from support.broker import FakeBroker
from support.memory_ledger import MemoryLedger

KEY = "s"
UNITS = 4
"""Number of units of each trial."""

WORKERS = 3


@dataclass(kw_only=True)
class Optuna:
    """Stand-in for Optuna's tables: the epoch that opened each trial, and the ended trials."""

    opened: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def open(self, grant: wire.Grant) -> int:
        """Create a trial, or take over one that was opened under a lost lease."""
        for lost in grant.lost:
            if lost in self.opened:
                number = self.opened.index(lost)
                self.opened[number] = f"{grant.epoch}"
                return number
        self.opened.append(f"{grant.epoch}")
        return len(self.opened) - 1


@dataclass(kw_only=True)
class Worker:
    """A process that waits, or has a trial, which trains or is parked in its memory."""

    number: int | None = None
    epoch: int = 0
    units: int = 0
    trains: bool = False


class Host:
    """A broker, a driver and some workers.

    Args:
        name: name of the host and its broker.
        ledger: the ledger that all hosts share.
        optuna: Optuna's tables, which all hosts share.
        n_trials: number of trials of the study.
        devices: number of its devices.
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
        """Start a broker of this host's name, a driver and its workers."""
        self.broker = FakeBroker(devices=self._devices, ledger=self._ledger, host=self.name)
        self.broker.now = now
        self._read = 0
        self.lives = True
        self.workers = {}
        leases = self._ledger.load_leases(KEY, live=True)
        theirs = {f"{x.epoch}" for x in leases if x.owner not in (None, self.name)}
        known = {trial.number: trial for trial in self._ledger.load_trials(KEY)}
        unknown = {n: by for n, by in enumerate(self._optuna.opened) if n not in known}
        self.broker.driver(
            policy="round-robin",
            limit=self._n_trials,
            max_alive=WORKERS,
            adopted={n: n for n, by in unknown.items() if by not in theirs},
            foreign=tuple(n for n, by in unknown.items() if by in theirs),
            ended={n: "done" for n in self._optuna.ended & known.keys() if _is_live(known[n])},
        )
        self._hire()

    def die(self) -> None:
        """End all of its processes without notice."""
        self.lives = False
        self.workers = {}

    def pass_time(self, now: float) -> None:
        """Advance its clock to ``now``, the same for all hosts."""
        self.broker.advance(now - self.broker.now)
        self._listen()

    def refresh(self) -> None:
        """Read the changes of other hosts from the ledger."""
        self.broker.refresh()
        self._listen()

    def train(self) -> list[tuple[int, int]]:
        """Train a unit of each trial that has a device; return the trials with these units."""
        trained = []
        for connection, worker in list(self.workers.items()):
            if worker.trains and worker.number is not None and connection in self.workers:
                trained.append((worker.number, worker.units + 1))
                self._train(connection, worker)
                self._listen()
        return trained

    def holders(self) -> Counter[int]:
        """The number of its processes that have each trial in memory."""
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
        """Carry out the broker's new commands."""
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
        elif isinstance(message, wire.Yield | wire.Move) and message.epoch == worker.epoch:
            self._leave_device(connection, worker, message)

    def _leave_device(
        self, connection: int, worker: Worker, message: wire.Yield | wire.Move
    ) -> None:
        if worker.trains == isinstance(message, wire.Yield):  # otherwise the message is out of date
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
            self.broker.say(connection, wire.FirstBatch(epoch=grant.epoch, can_store=True))

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
            checkpoint = Checkpoint(path=path, units=worker.units, size_bytes=1, sha256="0")
        message = wire.TierChanged(
            epoch=worker.epoch,
            tier="disk" if tier == "disk" else "resident",
            suspend_seconds=0.1,
            can_store=True,
            checkpoint=checkpoint,
        )
        self.broker.say(connection, message)
        if tier == "disk" and connection in self.workers:
            self._leave(connection)


def _is_live(trial: TrialRecord) -> bool:
    return trial.state not in ("done", "failed")
