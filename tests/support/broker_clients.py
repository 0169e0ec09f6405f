"""Simulated clients of a broker: processes that train, wait, move and die as real ones do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import BatchSizes, Checkpoint, TierName

UNITS = 4
"""Units that a trial trains; three times as many if it can be trained on several devices."""

CONTEXT = 1
"""Memory that a process takes of a device beside what its trial needs, from its first batch on."""

Mixed = Literal["twice", "late"]
"""Faults of delivery: a message arrives twice, or after the next one."""


@dataclass(kw_only=True)
class Trial:
    """The state of a trial in Optuna and on disk.

    Args:
        study: the study's key.
        number: as in Optuna.
        need: device memory that it needs.
        can_store: whether it can be suspended to disk.
        can_offload: whether it can be moved to host memory.
        most_devices: the most devices it can be trained on at once.
        units: units that its living process has trained.
        files: units of each existing checkpoint file, by path in order of writing.
        saves: number of checkpoints ever written.
        safe: units of the newest checkpoint that is committed to the ledger.
        kept: acknowledged paths, newest first.
        opened: the name of the opening by which it was created, or found again.
        end: its final state in Optuna, None while it is unfinished.
        spoilt: whether a process has lied about it, so that its checkpoints are not checked.
    """

    study: str
    number: int
    need: int
    can_store: bool
    can_offload: bool
    most_devices: int = 1
    units: int = 0
    files: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    safe: int = 0
    kept: list[str] = field(default_factory=list)
    opened: str | None = None
    end: wire.Ending | None = None
    spoilt: bool = False

    @property
    def length(self) -> int:
        """Number of units that it trains."""
        return UNITS if self.most_devices == 1 else 3 * UNITS

    def save(self) -> Checkpoint:
        """Write a checkpoint of its present units."""
        self.saves += 1
        path = f"/{self.study}/{self.number}/{self.saves}-{self.units}"
        self.files[path] = self.units
        return Checkpoint(path=path, units=self.units, size_bytes=1, sha256="0")

    def keep(self, path: str) -> None:
        """Acknowledge a checkpoint: delete all files before the one acknowledged before it."""
        self.kept = [path, *self.kept[:1]]
        files = list(self.files)
        oldest = min(files.index(each) for each in self.kept if each in files)
        for old in files[:oldest]:
            del self.files[old]


@dataclass(kw_only=True)
class Optuna:
    """The trials of a study, as many as ``wanted`` in the end.

    ``stretches`` says whether some of them can be trained on several devices.
    """

    key: str
    wanted: int
    random: Random
    stretches: bool = False
    trials: list[Trial] = field(default_factory=list)

    def create(self) -> Trial:
        """Create a trial with random properties."""
        trial = Trial(
            study=self.key,
            number=len(self.trials),
            need=self.random.choice([1, 4, 6, 8]),
            can_store=self.random.random() < 0.8,
            can_offload=self.random.random() < 0.8,
            most_devices=self.random.choice([1, 2, 3, 3]) if self.stretches else 1,
        )
        self.trials.append(trial)
        return trial

    def open(self, name: str, lost: Collection[str]) -> Trial:
        """An unfinished trial that one of the lost openings has left, otherwise a new one."""
        left = (trial for trial in self.trials if trial.opened in lost and trial.end is None)
        trial = next(left, None) or self.create()
        trial.opened = name
        return trial

    @property
    def finished(self) -> bool:
        """True if every trial has ended, and all ``wanted`` ones were created."""
        return len(self.trials) >= self.wanted and all(trial.end for trial in self.trials)


@dataclass(kw_only=True)
class Process:
    """A process with a connection, which reads its inbox when it acts.

    ``honest`` is False once it has sent a message that no real client sends, or was killed: it does
    not act from then on, and is not checked.
    """

    connection: int
    pid: int
    role: str
    study: str
    honest: bool = True
    trial: Trial | None = None
    devices: tuple[str, ...] = ()
    uses: int = 0
    context: int = 0
    epoch: int = 0
    alone: bool = False
    doing: str = "waits"  # "waits", "trains", "parked" or "leaves"
    tier: TierName = "resident"
    requested_tier: TierName | None = None
    unread: list[wire.FromBroker] = field(default_factory=list)
    inbox: list[wire.FromBroker] = field(default_factory=list)
    report: wire.Report | None = None
    parked: wire.TierChanged | None = None
    saved: list[Checkpoint] = field(default_factory=list)
    mixed: Mixed | None = None
    late: wire.FromClient | None = None

    def resume(self, spec: wire.StudySpec) -> wire.Reattach:
        """Its lease state, sent to a new broker after the death of an earlier one."""
        assert self.trial is not None
        stops = self.doing == "parked"
        return wire.Reattach(
            study=spec,
            epoch=self.epoch,
            devices=self.devices,
            number=self.trial.number,
            trial_id=self.trial.number,
            training=self.doing == "trains",
            requested_tier=None if stops else self.requested_tier,
            can_store=self.trial.can_store and self.role == "worker",
            need_bytes=self.trial.need,
            reports=() if self.report is None else (self.report,),
            checkpoints=tuple(self.saved),
            parked=self.parked if stops else None,
            sizes=self.sizes(),
        )

    def sizes(self) -> BatchSizes | None:
        """Its batch sizes and devices; None if neither can change."""
        if self.trial is None or self.trial.most_devices == 1:
            return None
        seconds = {8: 1 / max(1, len(self.devices))}
        most = self.trial.most_devices
        return BatchSizes(now=8, least=8, most=8, seconds=seconds, most_devices=most)


class Behaviour:
    """The next action of an honest process.

    Args:
        process: the process.
        optuna: the trials of its study.
        say: function that sends a message to the broker.
        free: function that returns the fewest free bytes on any of its devices.
        random: source of its choices.
    """

    def __init__(
        self,
        process: Process,
        optuna: Optuna,
        say: Callable[[Process, wire.FromClient], object],
        free: Callable[[], int],
        random: Random,
    ) -> None:
        self._process = process
        self._optuna = optuna
        self._tell = say
        self._free = free
        self._random = random

    def act(self) -> bool:
        """Take one action; return False when the process has ended."""
        process = self._process
        self._hear()
        if process.doing == "leaves":
            return False
        if process.doing == "trains":
            self._train()
        elif process.inbox:
            return self._obey(process.inbox.pop(0))
        return True

    def _hear(self) -> None:
        process = self._process
        while process.unread:
            message = process.unread.pop(0)
            if isinstance(message, wire.Yield):
                process.requested_tier = message.tier
            elif isinstance(message, wire.CheckpointAck):
                assert process.trial is not None
                process.trial.keep(message.path)
                process.saved = [each for each in process.saved if each.path != message.path]
            elif isinstance(message, wire.Grant | wire.SetUp | wire.Move):
                first = {type(each) for each in process.inbox}
                # A lease may come while its trial is being created, or its process leaves.
                crossed = first in ({wire.SetUp}, {wire.Refused})
                crosses = isinstance(message, wire.Grant) and crossed
                assert not first or crosses, "nobody is asked twice at once"
                process.inbox.append(message)
            elif isinstance(message, wire.Dismiss | wire.Refused):
                process.inbox.append(message)

    def _obey(self, message: wire.FromBroker) -> bool:
        if isinstance(message, wire.Move):
            self._put(message.tier)
        elif isinstance(message, wire.Grant):
            self._take(message)
        elif isinstance(message, wire.SetUp):
            return self._set_up(message)
        return not isinstance(message, wire.Dismiss | wire.Refused)

    def _set_up(self, message: wire.SetUp) -> bool:
        """Create a trial that waits for its first lease; False if it dies before it says so."""
        process = self._process
        assert process.trial is None, "a process has one trial"
        process.trial = trial = self._optuna.open(message.name, message.lost)
        trial.units = 0
        if self._random.random() < 0.1:
            return False
        self._say(wire.Begin(epoch=0, number=trial.number, trial_id=trial.number))
        if self._random.random() < 0.1:
            trial.end, process.doing = "failed", "leaves"
            self._say(wire.Ended(epoch=0, state="failed", error="in its set-up"))
        return True

    def _take(self, grant: wire.Grant) -> None:
        process = self._process
        if process.doing == "parked":
            assert len(grant.devices) == len(process.devices), "ranks do not come and go"
            moved = set(grant.devices) != set(process.devices)
            assert not (moved and grant.devices[0].startswith("GPU")), "a process keeps its GPUs"
        process.epoch, process.devices, process.alone = grant.epoch, grant.devices, grant.alone
        if process.trial is None:
            self._open(grant)
        trial = process.trial
        assert trial is not None
        assert len(grant.devices) <= trial.most_devices or trial.spoilt, "too many devices"
        if process.doing == "leaves":
            return
        if trial.end is not None:  # ended in Optuna by a process that died before it sent that
            process.doing = "leaves"
            self._say(wire.Ended(epoch=process.epoch, state=trial.end))
        elif process.doing == "parked" and process.tier == "host" and not self._fits():
            self._put("disk")
        else:
            process.doing = "trains"
            self._say(wire.FirstBatch(epoch=process.epoch, can_store=self._stores))
            sizes = process.sizes()
            if sizes is not None:
                self._say(wire.Beat(epoch=process.epoch, sizes=sizes))

    def _open(self, grant: wire.Grant) -> None:
        """Find the trial of a grant, and go back to its newest checkpoint."""
        process, optuna = self._process, self._optuna
        new = grant.number is None
        if grant.number is None:
            trial = optuna.open(str(grant.epoch), grant.lost)
        else:
            trial = optuna.trials[grant.number]
        process.trial = trial
        if new and self._random.random() < 0.1:
            process.doing = "leaves"  # it dies before it has sent the trial that it has created
            return
        if process.role == "worker":
            begin = wire.Begin(epoch=process.epoch, number=trial.number, trial_id=trial.number)
            self._say(begin)
        if not process.honest:
            return  # it was killed: another one has this trial
        assert new == (grant.trial_id is None)
        trial.units = 0
        if grant.checkpoints:
            newest = grant.checkpoints[0]
            assert trial.spoilt or newest.path in trial.files, "a checkpoint that is not there"
            trial.units = newest.units
        assert trial.spoilt or trial.units >= trial.safe, "a checkpoint was forgotten"

    @property
    def _stores(self) -> bool:
        """True if it can go to disk; trials of plain Optuna cannot."""
        assert self._process.trial is not None
        return self._process.trial.can_store and self._process.role == "worker"

    def _fits(self) -> bool:
        assert self._process.trial is not None
        here = self._free() + self._process.uses + self._process.context
        return here >= self._process.trial.need + CONTEXT

    def _train(self) -> None:
        process, trial, epoch = self._process, self._process.trial, self._process.epoch
        assert trial is not None
        if not self._fits():
            process.doing = "leaves"
            if process.alone:
                trial.end = "failed"
                self._say(wire.Ended(epoch=epoch, state="failed", error="memory"))
            else:
                self._say(wire.Released(epoch=epoch, reason="memory", outgrown=True))
            return
        process.uses, process.context = trial.need, CONTEXT
        trial.units += 1
        self._say(wire.Beat(epoch=epoch, memory_bytes=trial.need))
        value = self._random.choice([1 / trial.units, float("nan"), float("inf")])
        process.report = wire.Report(epoch=epoch, unit=trial.units, step=trial.units, value=value)
        self._say(process.report)
        if trial.units >= trial.length:
            trial.end, process.doing = "done", "leaves"
            if self._random.random() < 0.8:  # or it dies once it has ended it in Optuna
                self._say(wire.Ended(epoch=epoch, state="done"))
        elif process.requested_tier is not None:
            self._put(process.requested_tier)
        elif self._stores and self._random.random() < 0.3:
            process.saved.append(trial.save())
            self._say(wire.Saved(epoch=epoch, checkpoint=process.saved[-1]))

    def _put(self, tier: TierName) -> None:
        """Suspend to a tier, or to another where that is not possible."""
        process, trial = self._process, self._process.trial
        assert trial is not None
        assert tier != "host" or len(process.devices) == 1, "ranks stay, or go to disk"
        moves = trial.can_offload and process.role == "worker"
        if self._random.random() < 0.1:
            tier = self._random.choice([tier, "resident", "disk"])
        if (tier == "host" and not moves) or (tier == "disk" and not self._stores):
            tier = "host" if process.doing == "parked" and process.tier == "host" else "resident"
        if tier == "resident" and process.uses < trial.need and not self._fits():
            tier = "host" if moves else "resident"
        process.doing, process.tier, process.requested_tier = "parked", tier, None
        process.uses = 0 if tier == "host" else trial.need  # until the process is gone
        if tier == "disk":
            process.doing = "leaves"
        process.parked = wire.TierChanged(
            epoch=process.epoch,
            tier=tier,
            suspend_seconds=0.1,
            checkpoint=trial.save() if tier == "disk" else None,
            held_bytes=0 if tier == "disk" else process.uses,
            host_bytes=trial.need if tier == "host" else 0,
            can_store=self._stores,
            can_offload=moves,
        )
        self._say(process.parked)

    def _say(self, message: wire.FromClient) -> None:
        self._tell(self._process, message)
