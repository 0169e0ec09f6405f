"""Broker process: sockets, clocks, devices and ledgers around the pure ``EventHandler``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from optuna_hermes._cgroups import available_bytes
from optuna_hermes._parent import kill
from optuna_hermes.broker import _holders
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _events as events
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._event_log import POWER, ROUTINE, is_of_grant
from optuna_hermes.broker._core._memory_manager import SETTLE_SECONDS
from optuna_hermes.broker._devices._source import DeviceSource
from optuna_hermes.broker._devices._visible import VISIBLE_VARIABLE
from optuna_hermes.broker._server._apply_writes import WriterTerms
from optuna_hermes.broker._server._ledger_reader import LedgerReader
from optuna_hermes.broker._server._ledgers import LedgerOutcome, Ledgers
from optuna_hermes.broker._server._logs import log_event
from optuna_hermes.broker._server._malloc import give_back_free_pages
from optuna_hermes.broker._server._outbox import DatabaseProof, Outbox, proofs_of
from optuna_hermes.broker._server._policy_modules import try_policy
from optuna_hermes.broker._server._processes import soon
from optuna_hermes.broker._server._socket_server import HELLO_SECONDS, SocketServer
from optuna_hermes.broker._server._succession import (
    Succession,
    instance_in,
    save_instance,
    unpowered_path,
)
from optuna_hermes.broker._server._writer import Written
from optuna_hermes.errors import HermesError, InvalidInputError, LedgerError
from optuna_hermes.ledger import load as load_ledger
from optuna_hermes.ledger._records import EventRecord
from optuna_hermes.policies import make_policy

if TYPE_CHECKING:
    from optuna_hermes.broker._election import RuntimeLock
    from optuna_hermes.broker._power_commands import PowerCommands
    from optuna_hermes.broker._server._activity import Activities
    from optuna_hermes.broker._server._metrics import Meter
    from optuna_hermes.broker._server._power_switches import PowerSwitches
    from optuna_hermes.broker._server._readings import Readings

POLL_SECONDS = 2.0
HOST_SHARE = 0.4
"""Share of the host memory that is free, or trials' own, for what they move off their devices."""
FLUSH_SECONDS = 0.25
OBSERVE_SECONDS = 1.0
"""Interval at which silent workers are observed."""
TRIM_SECONDS = 10.0
"""Interval at which free memory is given back to the system, and the host's is measured."""
TOUCH_SECONDS = 3600.0
"""Interval at which the runtime directory's files are touched, for cleaners take old ones."""
CLOCK_SECONDS = 1.0
"""Difference from which on the wall clock was not read late, but moved."""
TELL_SECONDS = 0.1
"""Least time between two messages to drivers about changes of their studies."""
TELL_SHARE = 0.05
"""Largest share of the time that is spent on these messages: a study may be huge."""
END_SECONDS = 5.0
"""Time for the last records when the broker ends."""
AT_ONCE = 8
"""Messages of one connection after which the others have their turn."""
OF_JOBS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that all processes of a job may be sent."""
_LOST = "bring the database back before `optimize` is run again; live trials send theirs again"
_UNSEEN = (
    "This process is in another container than the broker, which cannot see it: set "
    "shareProcessNamespace, or give it an OPTUNA_HERMES_RUNTIME_DIR of its own."
)

_CHANGES_MEMORY = (wire.TierChanged, wire.Ended, wire.Released)
"""Messages whose outcome depends on the memory that is free at that moment."""

log = logging.getLogger("optuna_hermes.broker")


class Server:
    """Serves one host's devices until no client has needed it for a while.

    Args:
        directory: the runtime directory, whose lock this process holds.
        devices: the specification it was started with.
        idle_seconds: end after this long without a client; None never ends.
        metrics: where figures for Prometheus are served, as ``ADDRESS:PORT``; None for nowhere.
        power: the commands that power devices down and up, None if there are none.
        background: it was started by a client, and a signal to it is one to its clients too.
        lock: that lock, to keep the directory's files where somebody removes them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        devices: str,
        source: DeviceSource,
        host: str,
        idle_seconds: float | None,
        metrics: str | None = None,
        power: PowerCommands | None = None,
        background: bool = False,
        lock: RuntimeLock | None = None,
    ) -> None:
        self._background = background
        self._lock = lock
        self._power = () if power is None else power.texts
        self._directory = directory
        self._metrics = metrics
        self._meter: Meter | None = None
        self._devices = devices
        self._source = source
        first = source.poll()
        self._readings: Readings | None = None
        if any(device.kind == "gpu" for device in first.devices):
            # Only the reading of a driver can take long.
            from optuna_hermes.broker._server._readings import Readings

            self._readings = Readings(source, first)
        self._host = host
        self._idle_seconds = idle_seconds
        self._ledgers: Ledgers
        self._reader: LedgerReader
        self._instance = instance_in(directory, host)
        state = BrokerState(
            host=host,
            instance=self._instance,
            n_set_ups=time.time_ns() // 1000,  # more than any broker before this one has had
            # A pause between the two clocks makes the difference too small: the largest is right.
            wall_offset=max(time.time() - time.monotonic() for _ in range(10)),
        )
        self._handler = EventHandler(state, first.devices, powers=power is not None)
        self._measure_host_memory()
        self._sockets = SocketServer(state, self._converse, self._left)
        self._outbox = Outbox(self._sockets.send)
        self._switches: PowerSwitches | None = None
        if power is not None or unpowered_path(directory).exists():
            # Only with a policy that powers devices down, or after a broker that had one.
            from optuna_hermes.broker._server._power_switches import PowerSwitches, left_unpowered

            state.expect_off(left_unpowered(directory, power))
            if power is not None:
                self._switches = PowerSwitches(directory, state, power, self._switched)
        self._chores: set[asyncio.Task[None]] = set()
        self._has_peers = False
        self._succession = Succession(directory, state, self._apply)
        self._hung_up: dict[int, float] = {}
        self._leaving: list[int] = []
        self._last_busy = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._tell_due = 0.0
        self._ticking: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Listen, say that this process is ``ready``, and return when it is time to end.

        Raises:
            InvalidInputError: figures cannot be served, and a person has started this broker.
        """
        with contextlib.ExitStack() as figures:
            if self._metrics is not None:
                from optuna_hermes.broker._server._metrics import serving  # few ask for them

                try:
                    self._meter = figures.enter_context(serving(self._metrics, self._shown))
                except InvalidInputError as error:
                    # Clients take the place from a variable, as do others on this host.
                    if not self._background:
                        raise
                    log.warning("no figures are served: %s", error)
            await self._serve(ready)

    def _shown(self) -> tuple[wire.BrokerStatus, tuple[str, ...]]:
        status = self._handler.status(time.monotonic(), trials=False)
        return status, tuple(role for _, role in self._handler.state.processes)

    async def _serve(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        observe = None if self._meter is None else self._meter.ledger_writes.observe
        terms = WriterTerms(host=self._host, instance=self._instance)
        self._ledgers = Ledgers(
            self._on_outcome, partial(soon, loop), observe_seconds=observe, terms=terms
        )
        self._reader = LedgerReader(self._handler, self._ledgers)
        self._heed_signals(loop)
        self._succession.expect()
        await self._sockets.open(self._directory)
        if self._lock is not None:
            self._begin(self._keep_files(self._lock))
        for chore in (self._poll(), self._flush(), self._trim(), self._observe()):
            self._begin(chore)
        log.info("listening, devices %s", self._devices)
        ready()
        self._begin(_load())
        await self._stop.wait()
        self._succession.remember()
        for task in self._chores:
            task.cancel()
        await self._sockets.close()  # the ends of clients are to be written too
        if self._readings is not None:
            self._readings.close()
        # Else the next broker of this name goes on with the trials: no other host may take them.
        if self._handler.idle:
            self._ledgers.forget_this_broker()
        lost = self._ledgers.close(END_SECONDS)
        if lost:
            log.error("%d records did not reach the ledger: %s", lost, _LOST)
        log.info("ended")

    def _heed_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """End on a signal; in the background only once no client is left.

        systemd and SLURM send their signals to all processes of a job: those that suspend their
        trials then need their broker, and so do those of other jobs.
        """
        ends = {signal.SIGINT, signal.SIGTERM}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and not self._background:
            ends.add(signal.SIGHUP)  # its terminal is closed, and it was not started by nohup
        end = self._end_soon if self._background else self._stop.set
        for number in OF_JOBS:
            loop.add_signal_handler(number, end if number in ends else _nothing)

    def _end_soon(self) -> None:
        log.info("told to end: that will be when no client is left")
        self._idle_seconds = 0.0

    # -- connections ---------------------------------------------------------------------------

    async def _converse(self, connection: int, pid: int) -> None:
        hello = await self._sockets.read(connection)
        if not isinstance(hello, wire.Hello) or hello.version != wire.VERSION:
            way_out = f"when its studies have ended, `kill {os.getpid()}`."
            reason = f"This broker is of another version: {way_out}"
            self._sockets.send(connection, wire.Refused(reason=reason))
            return
        if pid == 0 and hello.role != "viewer":  # it could not be killed, nor be told from others
            self._sockets.send(connection, wire.Refused(reason=_UNSEEN))
            return
        started = _holders.started(pid)
        self._apply(
            events.Connected(connection=connection, pid=pid, role=hello.role, started=started)
        )
        self._sockets.send(connection, self._welcome())
        for count in itertools.count(1):
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)  # what has arrived already is read without a pause
            message = await self._sockets.read(connection)
            if isinstance(message, wire.Quit):
                self._quit(connection)
            elif isinstance(message, (wire.OpenStudy, wire.Register, wire.Reattach)):
                await self._read_study(connection, message)
            else:
                await self._receive(connection, message)

    async def _receive(self, connection: int, message: wire.FromClient) -> None:
        if isinstance(message, wire.ChangePolicy):
            try:
                try_policy(message.policy, message.folders)
            except HermesError as error:
                self._sockets.send(connection, wire.Refused(reason=str(error)))
                return
        if isinstance(message, _CHANGES_MEMORY):
            await self._read_gpus()
        self._apply(events.Received(connection=connection, message=message))

    async def _left(self, connection: int, pid: int) -> None:
        """Report all clients that leave at this moment together: they may have been one process."""
        self._outbox.forget(connection)
        # When this broker ends, clients that have a device go on with the next one.
        if connection not in self._handler.state.clients or self._stop.is_set():
            return
        self._hung_up[pid] = time.monotonic()
        self._leaving.append(connection)
        if len(self._leaving) > 1:
            return  # the first call reports all
        try:
            await self._read_gpus()
            await asyncio.sleep(0)
        finally:
            leaving, self._leaving = self._leaving, []
            self._apply(events.Disconnected(connections=tuple(leaving)))

    def _welcome(self) -> wire.Welcome:
        return wire.Welcome(
            pid=os.getpid(),
            instance=self._instance,
            devices=self._devices,
            device_ids=tuple(self._handler.state.slots),
            power=self._power,
            background=self._background,
            visible=os.environ.get(VISIBLE_VARIABLE),
        )

    def _quit(self, connection: int) -> None:
        clients = self._handler.state.clients.items()
        others = len({c.pid for each, c in clients if each != connection and c.role != "viewer"})
        if others:
            reason = f"The broker still serves {others} other process(es)."
            self._sockets.send(connection, wire.Refused(reason=reason))
        else:
            self._stop.set()

    async def _read_study(
        self, connection: int, message: wire.OpenStudy | wire.Register | wire.Reattach
    ) -> None:
        """Admit a study; further messages of its client wait until it is read."""
        spec = message.study
        try:
            known = await self._reader.read(message, self._handler.state.clients[connection].pid)
        except HermesError as error:
            reason = str(error)
            # Its client may reach the server by a password of its own environment.
            if isinstance(error, LedgerError) and not spec.ledger_url.startswith("sqlite"):
                reason = f"The broker, which has an environment of its own, says: {reason}"
            self._sockets.send(connection, wire.Refused(reason=reason))
            return
        if known.get("shared") and not self._has_peers:
            # Few studies are shared by several hosts.
            from optuna_hermes.broker._server._peer_sync import PeerSync

            self._has_peers = True
            self._begin(PeerSync(self._handler, self._ledgers, self._apply).refresh())
        if not self._reader.is_served(spec.key):
            self._ledgers.set_ledger(spec.key, spec.ledger_url)
        self._apply(events.StudyRead(connection=connection, message=message, **known))

    # -- carrying out --------------------------------------------------------------------------

    def _apply(self, event: events.Event) -> None:
        now = time.monotonic()
        commands = self._handler.handle(event, now)
        if self._meter is not None:
            self._meter.handled(event, time.monotonic() - now)
        if commands:
            told = (each for each in commands if isinstance(each, EventRecord))
            # Another host may be faster to be granted what is granted here: see ``_on_outcome``.
            self._log_events(each for each in told if not is_of_grant(each))
            self._carry_out(commands)
        if not self._handler.idle:
            self._last_busy = now
        self._set_timer(now)
        if self._telling is None and self._handler.has_watchers:
            due = max(now, self._tell_due)
            self._telling = asyncio.get_running_loop().call_at(due, self._tell)

    def _tell(self) -> None:
        self._telling, begin = None, time.monotonic()
        self._carry_out(self._handler.changes(begin))
        now = time.monotonic()
        self._tell_due = now + max(TELL_SECONDS, (now - begin) / TELL_SHARE)

    def _log_events(self, records: Iterable[EventRecord]) -> None:
        for each in records:
            if each.kind not in ROUTINE | POWER:
                study = self._handler.state.studies.get(each.study)
                log_event(each, each.study if study is None else study.spec.name)

    def _carry_out(self, commands: Sequence[events.Command]) -> None:
        ended = {c.epoch for c in commands if isinstance(c, events.EndLease)}
        if ended:  # most messages end no lease
            self._succession.lease_ends(ended)
        # Before a grant is sent: the next broker must know of its holder, and then of its trial.
        if any(map(_changes_holders, commands)):
            self._succession.remember()
        writes = [c for c in commands if not isinstance(c, events.Effect)]
        self._ledgers.write(writes)
        self._outbox.expect(proofs_of(writes))
        for command in commands:
            if isinstance(command, events.Send):
                if command.database is not None and isinstance(command.message, wire.Yield):
                    proof = DatabaseProof(command.message.epoch)
                    self._outbox.expect({proof})
                    answered = partial(self._outbox.release, {proof})
                    self._ledgers.when_writable(command.database, answered)
                self._outbox.put(command.connection, command.message)
            elif isinstance(command, events.Withdraw):
                self._outbox.drop({command.epoch})
            elif isinstance(command, events.SwitchPower):
                assert self._switches is not None
                self._switches.switch(command)
            elif isinstance(command, events.Kill):
                log.warning("SIGKILL to process %d: %s", command.pid, command.reason)
                kill(command.pid)

    def _on_outcome(self, news: LedgerOutcome) -> None:
        if isinstance(news, Written):
            self._log_events(filter(is_of_grant, news.items))
            proofs = proofs_of(news.items)
            self._succession.written(proofs)
            self._outbox.release(proofs)
        elif isinstance(news, (events.ClaimConflict, events.WritesFailed)):
            if isinstance(news, events.WritesFailed):
                log.error("the ledger refused: %s", news.reason)
            self._outbox.drop({*news.epochs, *news.paths})
            self._apply(news)
        elif isinstance(news, events.OutageBegan):
            log.warning("a database is away, what is to be written waits: %s", news.reason)
            unsent, leases = self._outbox.unsent_yields, self._handler.state.leases()
            its = tuple(x.epoch for x in leases if x.study in news.studies and x.epoch in unsent)
            self._outbox.drop({DatabaseProof(epoch) for epoch in its})
            self._apply(replace(news, uncommitted=self._outbox.uncommitted, unsent_yields=its))
        else:
            log.info("the database is back")
            self._apply(news)

    def _set_timer(self, now: float) -> None:
        due = self._handler.next_wakeup(now)
        if self._timer is not None:
            if self._timer.when() == due:
                return  # most messages change nothing about it
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # With GPUs their memory is read first, on a thread; one tick is under way at a time.
        if self._readings is None:
            self._apply(events.Tick())
        elif self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _switched(self, event: events.PowerSwitched) -> None:
        self._apply(event)
        if event.up:  # it can be granted once it was seen
            self._begin(self._see())

    async def _see(self) -> None:
        if self._readings is None:
            devices = self._source.poll(self._own_pids()).devices
            reading = events.DevicesPolled(devices=devices)
        else:
            reading = await self._readings.read(self._own_pids())
        self._apply(reading)

    async def _tick(self) -> None:
        await self._read_gpus()
        self._apply(events.Tick())

    # -- chores --------------------------------------------------------------------------------

    def _begin(self, chore: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(chore)
        task.add_done_callback(self._chore_ended)
        self._chores.add(task)

    def _chore_ended(self, chore: asyncio.Task[None]) -> None:
        """End the broker if a background task fails: it would serve on and write nothing."""
        self._chores.discard(chore)
        error = None if chore.cancelled() else chore.exception()
        if error is not None:
            log.critical("the broker ends, another one can be started: %r", error, exc_info=error)
            self._stop.set()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval())
            self._follow_clock()
            await self._see()
            if self._ledgers.pending:
                self._last_busy = time.monotonic()
            if self._idle_seconds is not None and self._handler.idle:
                # The process that started this one may be slow to connect.
                least = 0.0 if self._sockets.used else HELLO_SECONDS
                if time.monotonic() - self._last_busy > max(self._idle_seconds, least):
                    self._stop.set()

    async def _keep_files(self, lock: RuntimeLock) -> None:
        """Keep the runtime directory: a logout, or a cleaner of old files, may remove it."""
        touch_at, missed = time.monotonic() + TOUCH_SECONDS, False
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._sockets.is_open(self._directory) and lock.has_files:
                if time.monotonic() >= touch_at:
                    touch_at += TOUCH_SECONDS
                    _touch(self._directory)
                continue
            if self._handler.idle and self._idle_seconds is not None:
                self._stop.set()  # whoever needs a broker starts another one
                return
            try:
                lock.restore()
                await self._sockets.open(self._directory)
                save_instance(self._directory, self._host, self._instance)
            except (OSError, HermesError) as error:
                if not missed:
                    log.error("%s was removed, so no new worker comes: %s", self._directory, error)
                missed = True
                continue
            missed = False
            self._succession.remember(again=True)
            if self._switches is not None:
                self._switches.save()
            log.warning("%s was removed, and is there again", self._directory)

    async def _read_gpus(self) -> None:
        """Read the GPUs, so that the next decision is made with the memory that is free now."""
        if self._readings is not None:
            await self._see()

    def _own_pids(self) -> set[int]:
        state = self._handler.state
        pids = {client.pid for client in state.clients.values()}
        pids.update(each.holder.pid for each in state.recovering.values())
        # A process that has hung up is no stranger while it ends.
        lately = time.monotonic() - SETTLE_SECONDS
        self._hung_up = {pid: at for pid, at in self._hung_up.items() if at > lately}
        pids.update(self._hung_up)
        return pids

    def _interval(self) -> float:
        """Time until the devices are read again: shorter only where the broker may soon end."""
        if self._idle_seconds is None or not self._handler.idle:
            return POLL_SECONDS
        return min(POLL_SECONDS, max(0.05, self._idle_seconds / 4))

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self._ledgers.flush()
            self._ledgers.close_idle({*self._handler.state.studies, *self._reader.reading})
            self._sockets.hang_up_on_the_slow()

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            silent = self._handler.silent(time.monotonic())
            if not silent:
                continue
            # On a thread: a host may have thousands of processes.
            try:
                activities = await asyncio.to_thread(self._activities.measure, silent)
            except (OSError, RuntimeError) as error:  # no file, or no thread, is left for now
                log.warning("silent workers cannot be observed: %s", error)
                continue
            if activities:
                self._apply(events.Observed(activities=activities))

    @cached_property
    def _activities(self) -> Activities:
        # Most workers are never silent for long.
        from optuna_hermes.broker._server._activity import Activities

        return Activities()

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(TRIM_SECONDS)
            give_back_free_pages()
            try:
                self._measure_host_memory()
            except OSError as error:  # no file is left for now
                log.warning("the host's memory cannot be measured: %s", error)

    def _measure_host_memory(self) -> None:
        """Measure what trials may take of the host's memory: other programs come and go."""
        state = self._handler.state
        taken = sum(trial.host_bytes for trial in state.trials())
        state.host_budget_bytes = int(HOST_SHARE * (available_bytes() + taken))

    def _follow_clock(self) -> None:
        """Take the wall clock as it is: it was set, or the machine slept."""
        offset, state = time.time() - time.monotonic(), self._handler.state
        if abs(offset - state.wall_offset) > CLOCK_SECONDS:
            state.wall_offset = offset


def _changes_holders(command: events.Command) -> bool:
    """True if a process is granted a lease, or has found the trial of the one that it has."""
    grants = isinstance(command, events.Send) and isinstance(command.message, wire.Grant)
    return grants or isinstance(command, events.NameLease)


async def _load() -> None:
    """Import what the first study will take, on a thread: SQLAlchemy and NumPy take long."""
    await asyncio.to_thread(load_ledger)
    await asyncio.to_thread(make_policy, "hermes")
    if gc.get_freeze_count():  # as what was imported before: see ``run_broker``
        gc.freeze()


def _touch(directory: Path) -> None:
    """Set the time of the runtime directory's files: cleaners remove old ones."""
    with contextlib.suppress(OSError):  # they are being removed
        for path in (directory, *directory.iterdir()):
            os.utime(path, follow_symlinks=False)


def _nothing() -> None:
    """Ignore a signal."""
