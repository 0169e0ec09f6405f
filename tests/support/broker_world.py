"""A simulated host: a broker's state, its ledgers, and processes that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from msgspec import structs

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import (
    Command,
    Connected,
    DevicesPolled,
    Disconnected,
    Effect,
    Event,
    Kill,
    OutageBegan,
    OutageEnded,
    ProcessExpected,
    Received,
    Send,
    StudyRead,
    Tick,
    Withdraw,
    Write,
    WritesFailed,
)
from optuna_hermes.broker._core._status import finished
from optuna_hermes.broker._server._apply_writes import WriterTerms, write
from optuna_hermes.broker._server._ledgers import study_facts
from optuna_hermes.broker._server._outbox import DatabaseProof, Outbox
from optuna_hermes.broker._server._succession import holders
from optuna_hermes.ledger._records import CheckpointRecord, LeaseRecord, TrialRecord
from optuna_hermes.model import Assignment, Decision, Device, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import free_devices, opened, unopened
from support.broker_clients import CONTEXT, Behaviour, Optuna, Process
from support.memory_ledger import MemoryLedger

Wanted = wire.SetOverrides | wire.Finish | wire.Finished | wire.ChangePolicy

SIZE = 10
"""Memory of a device."""

GRACE_SECONDS = 5.0


class World:
    """Everything around an ``EventHandler``, with the guarantees that a real server gives it.

    Records are committed in order, and messages sent by the broker's own outbox. A database that
    is ``lagging`` commits at ``catch_up``, one that is ``away`` when the outage ends.

    Args:
        gpus: whether its devices are GPUs, whose memory counts.
        devices: number of devices.
        told: memory figures that GPUs report: ``all``, ``total`` or ``nothing``.
        lists: whether GPUs report what each process has, too.
        exclusive: whether one process at most may use a GPU.
        budget: host memory for suspended trials.
        ledgers: number of databases for the studies, 1 or 2.
        policies: the policy of each study.
        wanted: number of trials of each study.
        stretches: whether trials can be trained on several devices.
        sets_up: whether new trials may be set up before there is a device for them.
        random: source of all choices that neither broker nor test makes.
    """

    def __init__(
        self,
        *,
        gpus: bool,
        devices: int,
        told: str,
        budget: int,
        ledgers: int,
        policies: Sequence[str],
        wanted: int,
        random: Random,
        stretches: bool = False,
        sets_up: bool = False,
        lists: bool = False,
        exclusive: bool = False,
    ) -> None:
        self.random = random
        self.told = told
        self.lists = lists
        self.budget = budget
        self.now = 100.0
        self.devices = {
            f"{'GPU' if gpus else 'cpu'}:{index}": Device(
                id=f"{'GPU' if gpus else 'cpu'}:{index}",
                kind="gpu" if gpus else "cpu",
                free=True,
                exclusive=gpus and exclusive,
            )
            for index in range(devices)
        }
        self.strangers = dict.fromkeys(self.devices, 0)
        keys = [f"study-{index}" for index in range(len(policies))]
        databases = [MemoryLedger() for _ in range(ledgers)]
        self.ledgers = {key: databases[index % ledgers] for index, key in enumerate(keys)}
        self.studies = {
            key: Optuna(key=key, wanted=wanted, random=random, stretches=stretches) for key in keys
        }
        self.specs = {
            key: wire.StudySpec(
                key=key, name=key, ledger_url="memory:", policy=policy, sets_up=sets_up
            )
            for key, policy in zip(keys, policies, strict=True)
        }
        self.max_alive = devices + random.randint(1, 3)
        self.processes: dict[int, Process] = {}
        self.epochs: list[int] = [0]
        self._written: set[str] = set()
        self.done: set[tuple[str, int]] = set()
        self.lagging = False
        self.refusals = 0
        self._last_connection = 0
        self.away: set[MemoryLedger] = set()
        self.lost: dict[int, Process] = {}
        self.away_ones: list[Process] = []
        self._dying: list[int] = []
        self.answer: list[Command] = []
        self._brokers = 0
        self._begin()
        self.handler = self._broker(wall_offset=1e9)

    def _begin(self) -> None:
        self._waiting: list[tuple[MemoryLedger, list[Write], set[DatabaseProof]]] = []
        self._committing = False
        self._outbox = Outbox(self._send)

    def _broker(self, wall_offset: float) -> EventHandler:
        self._brokers += 1
        state = BrokerState(
            host="h",
            instance=f"broker-{self._brokers}",
            wall_offset=wall_offset,
            host_budget_bytes=self.budget,
            context_bytes=CONTEXT,
        )
        return EventHandler(state, self._read_devices(), grace_seconds=GRACE_SECONDS)

    # -- the broker ----------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Command]:
        """Feed an event to the broker, and carry out its commands."""
        if _changes_memory(event):
            self._carry_out(self.handler.handle(self._polled(), self.now))
        commands = self.handler.handle(event, self.now)
        self._carry_out(commands)
        return commands

    def catch_up(self) -> None:
        """Commit waiting records to the databases that answer, and release their messages."""
        if self._committing:
            return  # records that follow from a refusal are written after those queued before
        self._committing = True
        while ready := [each for each in self._waiting if each[0] not in self.away]:
            self._waiting.remove(ready[0])
            self._commit(*ready[0])
        self._committing = False

    def lose_ledger(self, key: str) -> None:
        """Begin an outage of a study's database, which other studies may share."""
        ledger = self.ledgers[key]
        self.away.add(ledger)
        beside, held = self._beside(ledger), self._outbox.uncommitted
        unsent, leases = self._outbox.unsent_yields, self.handler.state.leases()
        its = tuple(x.epoch for x in leases if x.study in beside and x.epoch in unsent)
        self._outbox.drop({DatabaseProof(epoch) for epoch in its})
        self.feed(OutageBegan(studies=beside, reason="cut", uncommitted=held, unsent_yields=its))

    def find_ledgers(self) -> None:
        """End all outages."""
        back, self.away = self.away, set()
        self.catch_up()
        for ledger in back:
            self.feed(OutageEnded(studies=self._beside(ledger)))

    def _beside(self, ledger: MemoryLedger) -> tuple[str, ...]:
        return tuple(key for key, its in self.ledgers.items() if its is ledger)

    def drop_broker(self, wall_step: float, share: float) -> None:
        """Kill the broker, with all records not committed and messages not sent, and start another.

        Args:
            wall_step: seconds by which the wall clock is moved before the next one starts.
            share: share of its clients that live on, to reconnect one after another.
        """
        served = holders(self.handler.state)
        clients = list(self.processes.values())
        self._begin()
        self.away.clear()
        self._dying.clear()
        self.processes.clear()
        self.refusals = 0
        self.lost.clear()
        self.handler = self._broker(self.handler.state.wall_offset + wall_step)
        alive = [p for p in clients if p.doing != "leaves" and self.random.random() < share]
        alive = [p for p in alive if p.role in ("worker", "plain")]
        for holder in served:
            its = [p for p in alive if p.pid == holder.pid]
            if its:
                self._last_connection += 1
                self.lost[-self._last_connection] = its[0]
                self.feed(ProcessExpected(connection=-self._last_connection, holder=holder))
        self.away_ones = alive
        for process in alive:
            process.unread.clear()
            process.inbox.clear()
            process.late = None

    def come_back(self) -> None:
        """Reconnect the next client of an earlier broker, which sends its lease state."""
        if not self.away_ones:
            return
        process = self.away_ones.pop(0)
        self._last_connection += 1
        process.connection = self._last_connection
        self.processes[process.connection] = process
        event = Connected(connection=process.connection, pid=process.pid, role=process.role)
        self.feed(event)
        if process.doing in ("trains", "parked"):
            self.say(process, process.resume(self.specs[process.study]))
        elif process.role == "worker" and process.trial is None:
            self.say(process, wire.Ready(study=process.study))
        elif process.trial is not None:
            number = process.trial.number
            spec = self.specs[process.study]
            self.say(process, wire.Register(study=spec, number=number, trial_id=number))

    def poll(self) -> None:
        """Read the devices."""
        self.feed(self._polled())

    def advance(self, seconds: float) -> None:
        """Advance the clock, with a tick at each wake-up that the broker asks for."""
        end = self.now + seconds
        while (due := self.handler.next_wakeup(self.now)) is not None and due <= end:
            self.now = max(self.now, due)
            self.feed(Tick())
            due = self.handler.next_wakeup(self.now)
            assert due is None or due > self.now, "a broker that never sleeps"
        self.now = end

    def jump(self, seconds: float) -> None:
        """Advance the clock at once, as after a suspension of the machine."""
        self.now += seconds
        self.feed(Tick())

    def _carry_out(self, commands: list[Command]) -> None:
        self.answer = commands
        writes = [c for c in commands if not isinstance(c, Effect)]
        asked = {
            DatabaseProof(c.message.epoch): c.database
            for c in commands
            if isinstance(c, Send) and isinstance(c.message, wire.Yield) and c.database is not None
        }
        self._outbox.expect({*_leases(writes), *_paths(writes), *asked})
        for ledger in dict.fromkeys(self.ledgers.values()):
            its = [item for item in writes if self.ledgers[item.study] is ledger]
            to_answer = {proof for proof, key in asked.items() if self.ledgers[key] is ledger}
            if its or to_answer:
                self._waiting.append((ledger, its, to_answer))
        for command in commands:
            if isinstance(command, Kill):
                self._kill(command)
            elif isinstance(command, Withdraw):
                self._outbox.drop({command.epoch})
            elif isinstance(command, Send):
                wire.frame(command.message)
                self._outbox.put(command.connection, command.message)
        if not self.lagging:
            self.catch_up()

    def _commit(self, ledger: MemoryLedger, writes: list[Write], asked: set[DatabaseProof]) -> None:
        """Commit records; refused leases are dropped, the rest is written."""
        refused: list[LeaseRecord] = []
        if self.refusals and _leases(writes):
            self.refusals -= 1
            refused = [item for item in writes if isinstance(item, LeaseRecord)]
            writes = [item for item in writes if not isinstance(item, LeaseRecord)]
        with ledger.batch():
            for item in writes:
                write(ledger, item, WriterTerms())
        for item in writes:
            self._remember(item)
        self._outbox.release({*_leases(writes), *_paths(writes), *asked})
        self._outbox.drop(_leases(refused))
        for key in dict.fromkeys(lease.study for lease in refused):
            epochs = tuple(lease.epoch for lease in refused if lease.study == key)
            self.feed(WritesFailed(study=key, epochs=epochs, reason="the ledger refused"))

    def _remember(self, item: Write) -> None:
        if isinstance(item, LeaseRecord):
            self.epochs.append(item.epoch)
        elif isinstance(item, CheckpointRecord):
            saved = item.checkpoint
            self._written.add(saved.path)
            trials = self.studies[item.study].trials
            if item.number < len(trials) and saved.path in trials[item.number].files:
                trials[item.number].safe = max(trials[item.number].safe, saved.units)
        elif isinstance(item, TrialRecord) and item.state in ("done", "failed"):
            self.done.add((item.study, item.number))

    def committed(self, epoch: int) -> bool:
        """True if a lease is in a ledger."""
        return any(
            lease.epoch == epoch
            for ledger in self.ledgers.values()
            for lease in ledger.load_leases(since=epoch)
        )

    def _send(self, connection: int, message: wire.FromBroker) -> None:
        if isinstance(message, wire.Grant):
            assert self.committed(message.epoch), "a grant before its lease"
        if isinstance(message, wire.CheckpointAck):
            assert message.path in self._written, "an acknowledgement before its checkpoint"
        process = self.processes.get(connection)
        if process is not None:
            process.unread.append(message)

    # -- processes -----------------------------------------------------------------------------

    def connect(self, role: str, study: str) -> Process:
        """Connect a process."""
        self._last_connection += 1
        pid = 1000 + self._last_connection
        process = Process(connection=self._last_connection, pid=pid, role=role, study=study)
        self.processes[process.connection] = process
        self.feed(Connected(connection=process.connection, pid=pid, role=role))
        return process

    def say(self, process: Process, message: wire.FromClient) -> list[Command]:
        """Deliver a message of a process, unless it has died meanwhile."""
        if process.connection not in self.processes:
            return []
        if isinstance(message, wire.OpenStudy | wire.Register | wire.Reattach):
            if self.ledgers[message.study.key] in self.away:
                process.unread.append(wire.Refused(reason="the database is away"))
                return []
            return self.feed(self.read(process, message))
        return self.feed(Received(connection=process.connection, message=message))

    def _tell(self, process: Process, message: wire.FromClient) -> None:
        """Deliver a message of a process about its lease, twice or late if ``mixed`` says so."""
        mixed, process.mixed = process.mixed, None
        if mixed == "late" and process.late is None:
            process.late = message
            return
        late, process.late = process.late, None
        for each in (message, *([message] if mixed == "twice" else []), late):
            if each is not None:
                self.say(process, each)

    def straighten(self, process: Process) -> None:
        """Deliver a late message of a process, and all later ones in order."""
        process.mixed = None
        if process.late is not None:
            late, process.late = process.late, None
            self.say(process, late)

    def read(
        self, process: Process, message: wire.OpenStudy | wire.Register | wire.Reattach
    ) -> StudyRead:
        """The event of a message with its study read from the ledger, after all writes."""
        self.catch_up()
        key = message.study.key
        ledger = self.ledgers[key]
        return StudyRead(
            connection=process.connection,
            message=message,
            **study_facts(key, None, ledger),
        )

    def hang_up(self, process: Process) -> None:
        """End a process and its connection."""
        if self.processes.pop(process.connection, None) is not None:
            self._end_lost(process)
            self._outbox.forget(process.connection)
            self.feed(Disconnected(connections=(process.connection,)))

    def driver(self, key: str) -> wire.OpenStudy:
        """The message by which a driver opens a study."""
        trials = self.studies[key].trials
        known = {trial.number for trial in self.ledgers[key].load_trials(key)}
        return wire.OpenStudy(
            study=self.specs[key],
            limit=self.studies[key].wanted,
            max_alive=self.max_alive,
            ended={t.number: t.end for t in trials if t.end and t.number in known},
            adopted={t.number: t.number for t in trials if t.number not in known},
        )

    def look_again(self) -> None:
        """Let drivers of finished studies adopt trials whose workers died before they sent them."""
        for key, study in self.handler.state.studies.items():
            message = self.driver(key)
            done = study.driver is not None and finished(study, self.handler.state)
            if done and not study.draining and message.adopted:
                again = structs.replace(message, counted=wire.Counted())
                self.say(self.processes[study.driver or 0], again)

    def open_study(self, key: str) -> Process:
        """Connect a driver, which opens a study."""
        process = self.connect("driver", key)
        self.say(process, self.driver(key))
        return process

    def start_worker(self, key: str) -> Process:
        """Connect a worker, which waits for a trial."""
        process = self.connect("worker", key)
        self.say(process, wire.Ready(study=key))
        return process

    def give_up(self) -> None:
        """Let every driver end trials in Optuna that lost too many processes."""
        for key, study in list(self.handler.state.studies.items()):
            for loss in list(failures.losses_shown(study)):
                if loss.given_up and study.driver in self.processes:
                    trial = self.studies[key].trials[loss.trial]
                    trial.end = trial.end or "failed"
                    message = wire.GiveUp(
                        study=key, number=trial.number, reason="crash", state=trial.end
                    )
                    self.say(self.processes[study.driver], message)

    def staff(self) -> None:
        """Start one more worker for every driver that may have one."""
        self.give_up()
        for key, study in list(self.handler.state.studies.items()):
            if study.driver is not None and len(study.workers) < self.max_alive:
                self.start_worker(key)

    def start_plain(self, key: str) -> Process:
        """Connect and register a new trial of plain Optuna."""
        process = self.connect("plain", key)
        process.trial = trial = self.studies[key].create()
        register = wire.Register(study=self.specs[key], number=trial.number, trial_id=trial.number)
        self.say(process, register)
        return process

    def want(self, message: Wanted) -> wire.FromBroker | None:
        """Send a user's command on a viewer's connection, and close it.

        Returns:
            The answer of the broker.
        """
        viewer = self.connect("viewer", message.study)
        self.say(viewer, message)
        answer = viewer.unread[-1]
        self.hang_up(viewer)
        return answer

    def close_trial(self, key: str, number: int, times: int) -> None:
        """Finish a trial as it is, by a viewer that asks up to ``times`` times if it is finished.

        It is finished once no process has it; a viewer that leaves before leaves it on hold.
        """
        viewer = self.connect("viewer", key)
        for _ in range(times):
            self.say(viewer, wire.Finish(study=key, numbers=(number,)))
            answer = viewer.unread[-1]
            if isinstance(answer, wire.Accepted) and not answer.waits:
                trial = self.studies[key].trials[number]
                trial.end = trial.end or "done"  # its process may have ended it in Optuna, and died
                self.say(viewer, wire.Finished(study=key, numbers=(number,)))
                break
            self.bury()
        self.hang_up(viewer)

    def want_nothing(self) -> None:
        """Remove all overrides of trials."""
        for key, study in list(self.handler.state.studies.items()):
            for number in study.overrides:
                self.want(wire.SetOverrides(study=key, numbers=(number,)))

    def act(self, process: Process) -> None:
        """Let a process take one action, if it is still there."""
        if process.connection not in self.processes or not process.honest:
            return
        optuna = self.studies[process.study]
        behaviour = Behaviour(
            process, optuna, self._tell, lambda: min(map(self.free, process.devices)), self.random
        )
        if not behaviour.act():
            self.hang_up(process)

    def bury(self) -> None:
        """Feed the ends of killed processes to the broker."""
        dying, self._dying = self._dying, []
        for connection in dying:
            if connection in self.processes:
                self.hang_up(self.processes[connection])
            elif connection in self.lost:
                self._end_lost(self.lost[connection])

    def _end_lost(self, process: Process) -> None:
        """End a process that has not reconnected, and feed that to the broker."""
        self.away_ones = [each for each in self.away_ones if each is not process]
        for connection in [key for key, each in self.lost.items() if each is process]:
            del self.lost[connection]
            self.feed(Disconnected(connections=(connection,)))

    def is_dying(self, connection: int) -> bool:
        """True if a process was killed, and the broker has not seen its end yet."""
        return connection in self._dying

    def _kill(self, command: Kill) -> None:
        process = self.processes.get(command.connection) or self.lost.get(command.connection)
        if process is None:
            return
        assert process.role == "worker", "a process of the user's is never killed"
        process.honest = False  # it sends nothing more
        self._dying.append(command.connection)

    # -- devices -------------------------------------------------------------------------------

    def free(self, device: str) -> int:
        """Free memory of a device; that of a CPU slot is not limited here."""
        if not device.startswith("GPU"):
            return 1000 * SIZE
        there = (*self.processes.values(), *self.away_ones)
        here = (p.uses + p.context for p in there if device in p.devices)
        return SIZE - self.strangers[device] - sum(here)

    def change(self, device: str, **fields: Any) -> None:
        """Change fields of a device, as polls show it from now on."""
        self.devices[device] = replace(self.devices[device], **fields)

    def _polled(self) -> DevicesPolled:
        return DevicesPolled(devices=self._read_devices())

    def _read_devices(self) -> tuple[Device, ...]:
        return tuple(self._read_device(device) for device in self.devices.values())

    def _read_device(self, device: Device) -> Device:
        if device.kind == "cpu" or self.told == "nothing":
            return device
        free = max(0, self.free(device.id)) if self.told == "all" else None
        here = (p for p in self.processes.values() if p.context and device.id in p.devices)
        listed = tuple((p.pid, p.uses + p.context) for p in here) if self.lists else ()
        return replace(device, memory_bytes=SIZE, memory_free_bytes=free, processes=listed)


class Stretching(Policy):
    """A policy that assigns the free devices at random, with the same draws for the same snapshot.

    Slices end with whole seconds, so that several devices are free at once.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Assign to waiting trials random numbers of devices within their limits."""
        units = sum(trial.curve.units for trial in snapshot.trials)
        random = Random(f"{snapshot.seed} {snapshot.now} {units}")
        free = [device.id for device in free_devices(snapshot)]
        waiting: list[TrialView | None] = [*opened(snapshot), *unopened(snapshot)]
        random.shuffle(waiting)
        given: list[Assignment] = []
        for trial in waiting:
            least, most = (1, 1) if trial is None else trial.device_range
            its = [
                id_ for id_ in free if trial is None or not trial.bound_to or id_ in trial.bound_to
            ]
            if len(its) < least:
                continue
            most = min(most, len(its))
            devices = its[: random.choice([most, most, random.randint(least, most)])]
            free = [id_ for id_ in free if id_ not in devices]
            given.append(
                Assignment(
                    trial=None if trial is None else trial.number,
                    devices=tuple(devices),
                    slice_seconds=1.0 + -snapshot.now % 1.0,
                )
            )
        return Decision(assignments=tuple(given))


def _leases(writes: Sequence[Write]) -> list[int]:
    return [item.epoch for item in writes if isinstance(item, LeaseRecord)]


def _paths(writes: Sequence[Write]) -> list[str]:
    return [item.checkpoint.path for item in writes if isinstance(item, CheckpointRecord)]


def _changes_memory(event: Event) -> bool:
    """True for events before which the server polls the devices."""
    if isinstance(event, Received):
        return isinstance(event.message, wire.TierChanged | wire.Ended | wire.Released)
    return isinstance(event, Disconnected | Tick)
