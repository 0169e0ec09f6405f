"""Session: a trial's side of its lease."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._client._connection import Connection
from optuna_hermes.broker._client._lease_state import LeaseState
from optuna_hermes.broker._client._reconnecting import (
    BROKER_SEARCH_SECONDS,
    ReconnectingConnection,
    pending_endings,
)
from optuna_hermes.broker._client._sessions import sessions
from optuna_hermes.errors import BrokerError, Suspended, SuspendError, TrialTakenError
from optuna_hermes.model import (
    MOST_SECONDS,
    MOST_SIZES,
    BatchSizes,
    Checkpoint,
    TierName,
    TrialStatus,
)
from optuna_hermes.suspend._base import CleanPoint, Footprint
from optuna_hermes.suspend._tiers._disk import read_ahead

if TYPE_CHECKING:
    from optuna_hermes.suspend._tiers._tier_mover import TierMover

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.25
"""Interval at which a waiting trial checks whether its process is to end."""
_LONG_SECONDS = 5.0
"""Time after which a waiting trial looks once a second."""
_DECIDED_SECONDS = 0.05
"""Time for which a trial that has reported waits for what follows.

Longer than a decision takes: it does not train into a unit that it is about to leave.
"""
_ACK_SECONDS = 5.0
"""Time for which a process that leaves waits until the ledger knows where its trial is."""
_MOST_CHARACTERS = 10_000
"""Longest text of an error: one that held a whole data set would be more than a frame takes."""
_TERMINATED = 128 + 15
_NO_BROKER = (
    f"No broker was there for {BROKER_SEARCH_SECONDS:.0f} s: look into broker.log, and go on."
)


class _Phase(Enum):
    """Phase of a trial, which may have been created without a lease."""

    SETTING_UP = "on its way to its first batch: it must yield there, and waits for its first lease"
    GRANTED_EARLY = "that lease came on the way: it may have read that it must yield, and need not"
    TAKES_TURNS = "it trains under a lease or waits for one; most trials begin here"


class TrialSession:
    """Connection that holds, or waits for, the lease of one trial (``suspend.Session``).

    A thread reads the socket, so that training pays one attribute read a batch. When the broker
    dies the trial goes on: the thread finds the next broker and tells it what the trial has.

    Args:
        connection: open, with nothing read from it yet.
        ask: asks for the first lease.
        reconnect: connects to the next broker; raises ``HermesError`` while there is none.
    """

    def __init__(
        self,
        connection: Connection,
        study: wire.StudySpec,
        ask: wire.Ready | wire.Register,
        *,
        reconnect: Callable[[], Connection],
    ) -> None:
        self.must_yield = False
        self.requested_tier: TierName = "resident"
        self.managed = False
        self.trains = False
        """True if the trial has begun to train under its latest lease."""
        self.left = False
        """True once ``Suspended`` was raised: the trial is no longer this process's."""
        self.checkpoint_dir: Path | None = None
        """The folder of this trial's checkpoints; None if it cannot leave its process."""
        self.checkpoint_url: str | None = None
        self.place_of: Callable[[int], tuple[Path, str | None]] | None = None
        """Returns the folder of a trial by its number, and its URL; None without a store."""
        self.batch_size: int | None = None
        self.reported_unit = 0
        """The unit that was reported last."""
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.devices: tuple[str, ...] = ()
        self.alone = True
        self.on_state: Callable[[TrialStatus], None] = lambda state: None
        """Called with ``parked``, ``running`` or ``stored`` when that is true.

        Off the device's time where it can be.
        """
        self.on_first_batch: Callable[[], None] = lambda: None
        """Called right before it reports the first batch of a lease."""
        self.on_wait: Callable[[float], None] = lambda seconds: None
        """Called again and again with the seconds of waiting; an exception in it ends the wait."""
        self.describe: Callable[[], wire.Params] = dict
        """Returns the trial's hyper-parameters, as far as they are known by then."""
        self._study = study
        self._ask = ask
        self._described = False
        self._last_beat = 0.0
        self._had_seconds = 0.0
        self._granted_at: float | None = None
        self._phase = _Phase.TAKES_TURNS
        self._told_to_set_up = False
        """True if the present broker has said so."""
        self._refused: str | None = None
        """The reason not to go on here; None unless the lease is another process's by now."""
        self._end_acknowledged = False
        self._decided = threading.Event()
        self._decided.set()
        self._tier_mover: TierMover | None = None
        self._inbox: queue.SimpleQueue[wire.FromBroker | None] = queue.SimpleQueue()
        self._lease = LeaseState.none(study)
        self._connection = ReconnectingConnection(
            connection,
            reconnect=reconnect,
            introduce=self._introduce,
            on_message=self._on_message,
            on_loss=self._forget_requests,
        )
        self._connection.send(ask)
        self._connection.start()

    @property
    def device_seconds(self) -> float:
        """Device time the trial has had, this slice included."""
        if self._granted_at is None:
            return self._had_seconds
        held = time.monotonic() - self._granted_at
        return self._had_seconds + held * len(self._lease.reattach.devices)

    @property
    def holds(self) -> bool:
        """True while it has a lease."""
        return self._granted_at is not None

    # -- before training -----------------------------------------------------------------------

    def wait_for_grant(self) -> wire.Grant | wire.SetUp | None:
        """Wait for the next lease, or for a trial to set up; None when there is nothing left to do.

        Raises:
            TrialTakenError: another thread or process has the trial.
            BrokerError: the broker is gone, or refuses.
        """
        begin = time.monotonic()
        while True:
            message = self._next(None, begin)
            if message is None:
                raise BrokerError(self._refused or _NO_BROKER)
            if isinstance(message, wire.Refused):
                kind = TrialTakenError if message.again else BrokerError
                raise kind(message.reason)
            if isinstance(message, wire.Dismiss):
                return None
            if isinstance(message, wire.Grant):
                self._take(message)
                return message
            if isinstance(message, wire.SetUp):
                # The trial waits at its first batch as if it were asked to yield there.
                self._phase, self.must_yield = _Phase.SETTING_UP, True
                self._told_to_set_up = True
                self.alone = False  # others train meanwhile
                return message
            if isinstance(message, wire.Prepare):
                place = () if self.place_of is None else self.place_of(message.number)
                read_ahead(message.checkpoints, f"trial {message.number}", *place)

    def begin(self, number: int, trial_id: int) -> None:
        """Tell the broker which trial a new lease went to, or was created to be set up."""
        with self._connection.lock:
            if self._lease.reattach.number not in (None, number):
                # A broker that does not know of this trial has taken it for a worker that waits.
                raise BrokerError(f"Trial {number} was created, but the lease is for another one.")
            self._lease.change(number=number, trial_id=trial_id)
            epoch = self._lease.epoch
            begin = wire.Begin(epoch=epoch, number=number, trial_id=trial_id)
            if not epoch:
                self._ask = wire.Register(study=self._study, number=number, trial_id=trial_id)
            # A broker that came meanwhile knows of no trial that is set up here.
            self._connection.send(begin if epoch or self._told_to_set_up else self._ask)

    def wait_for_device(self) -> None:
        """Wait for the trial's first lease, if it has none yet; to be called where it has begun.

        Raises:
            Suspended: it is not to begin now, or has left this process.
            BrokerError: no broker can be found.
        """
        self._check_left()
        with self._connection.lock:
            if self._phase is not _Phase.SETTING_UP:
                return
            self._phase, self.must_yield = _Phase.TAKES_TURNS, False
        with self._stopped_alarm():
            self._wait(None)

    def find_journal(self) -> None:
        """Take up the journal of an earlier process of the trial, if it has newer checkpoints."""
        assert self.checkpoint_dir is not None
        left = _journal.find(self.checkpoint_dir)
        known = max((each.units for each in self.checkpoints), default=0)
        newest = [each for each in left.newest_first if each.units > known]
        if not newest:
            self._confirmed()
            return
        # Never 0, even if the clock went back: an age is what marks a report as late.
        age = max(0.001, time.time() - left.at)
        for report in left.reports:
            if report.unit > known:
                self._say_again(report, report.age_seconds + age)
        # Should the newest be damaged, the one before it is as good as its process left it.
        self.checkpoints = (*newest[:2], *self.checkpoints[:1])
        self.saved(newest[0])

    def _say_again(self, report: wire.Report, age: float) -> None:
        # A clock that began in 1970 and was set later makes it older than a message can say.
        age = min(age, MOST_SECONDS)
        with self._connection.lock:
            epoch, at = self._lease.epoch, time.monotonic() - age
            message = msgspec.structs.replace(report, epoch=epoch, age_seconds=age)
            self._lease.reports.append((at, message))
            self._connection.send(message)

    # -- while training: suspend.Session --------------------------------------------------------

    def training(self, *, can_store: bool, late: bool = False) -> None:
        """See ``suspend.Session``. From here on the loop itself looks after yielding."""
        self.managed = True
        if late:  # one that is set up has had no clean point at which to wait
            self.wait_for_device()
        self.started(can_store=can_store, late=late)

    def started(self, *, can_store: bool, late: bool = False) -> None:
        """Report the first batch since the grant; ``late`` if it has trained before."""
        if not self.trains and self._lease.epoch:
            self.trains = True
            self.on_first_batch()
            params = self.describe()
            self._described = bool(params)
            with self._connection.lock:
                lease = self._lease
                lease.change(
                    training=True, can_store=can_store, params=params or lease.reattach.params
                )
                epoch = lease.epoch
                self._connection.send(
                    wire.FirstBatch(epoch=epoch, can_store=can_store, late=late, params=params)
                )

    def report_sizes(self, sizes: BatchSizes) -> None:
        """See ``suspend.Session``."""
        # Those measured last: a message takes no more.
        told = replace(sizes, seconds=dict([*sizes.seconds.items()][-MOST_SIZES:]))
        with self._connection.lock:
            self._lease.change(sizes=told)
            self._connection.send(wire.Beat(epoch=self._lease.epoch, sizes=told))

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """See ``suspend.Session``."""
        self.wait_for_device()
        # Parameters do not change: they are sent once.
        params = {} if self._described else self.describe()
        self._described, self.reported_unit = True, unit
        with self._connection.lock:
            lease = self._lease
            message = wire.Report(
                epoch=lease.epoch,
                unit=unit,
                step=step,
                value=value,
                units_left=units_left,
                params=params,
            )
            lease.change(units_left=units_left, params=params or lease.reattach.params)
            lease.reports.append((time.monotonic(), message))
            if units_left != 0:
                self._decided.clear()
            self._connection.send(message)

    def wait_for_decision(self) -> None:
        """See ``suspend.Session``."""
        if not self.must_yield:
            self._decided.wait(_DECIDED_SECONDS)
        self._decided.set()  # once for each report

    def beat(self, memory_bytes: int | None = None) -> None:
        """See ``suspend.Session``."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            with self._connection.lock:
                if memory_bytes is not None:
                    self._lease.change(need_bytes=memory_bytes)
                epoch = self._lease.epoch
                self._connection.send(wire.Beat(epoch=epoch, memory_bytes=memory_bytes))

    def saved(self, checkpoint: Checkpoint, *, blocked_seconds: float = 0.0) -> None:
        """See ``suspend.Session``."""
        with self._connection.lock:
            self._lease.checkpoints[checkpoint.path] = checkpoint
            self._keep_unconfirmed()  # this process and the broker may die before it is written
            self._connection.send(
                wire.Saved(
                    epoch=self._lease.epoch,
                    checkpoint=checkpoint,
                    blocked_seconds=blocked_seconds,
                )
            )

    def park(self, state: CleanPoint | None) -> None:
        """See ``suspend.Session``; without a state the trial can only wait in its process.

        Raises:
            Suspended: the trial is on disk, is another host's, or has left this process before.
            CheckpointError: it should go there and cannot.
            BrokerError: no broker can be found and the trial cannot be stored, or it is another
                process's by now.
        """
        self._check_left()
        if self._refused is not None:
            raise BrokerError(self._refused)
        begin = time.monotonic()
        with self._connection.lock:
            phase, self._phase = self._phase, _Phase.TAKES_TURNS
            if phase is _Phase.GRANTED_EARLY and not self.must_yield:
                return
            self.must_yield = False
        with self._stopped_alarm():
            if phase is not _Phase.SETTING_UP:  # else it has nothing to give back
                # Without a broker only a checkpoint outlives this process.
                tier = "disk" if self._connection.gone else self.requested_tier
                self._suspend(state, tier, begin)
                if state is not None:
                    state.waits()
                self.on_state("parked")
            try:
                self._wait(state)
            except BaseException:
                if self._tier_mover is not None:
                    self._tier_mover.leave()
                raise
        if state is None:
            self.started(can_store=False)
        if phase is not _Phase.SETTING_UP:
            self.on_state("running")

    # -- after training ------------------------------------------------------------------------

    def end(self, state: wire.Ending, error: str | None = None) -> None:
        """Report the end of the trial, perhaps before its first lease (epoch 0)."""
        with self._connection.lock:
            if self._phase is _Phase.SETTING_UP:
                self._phase = _Phase.TAKES_TURNS
            text = None if error is None else error[:_MOST_CHARACTERS]
            self._lease.end = wire.Ended(epoch=self._lease.epoch, state=state, error=text)
            self._connection.send(self._lease.end)

    def release(
        self, reason: str, *, outgrown: bool = False, unreachable: bool = False, final: bool = False
    ) -> None:
        """Give the lease back: this process cannot serve the trial, which stays as it was.

        Args:
            reason: for people.
            outgrown: the device's memory did not suffice beside what others hold there.
            unreachable: its checkpoint cannot be read on this host now.
            final: another try on this host would end the same way.
        """
        self.wait_for_device()
        with self._connection.lock:
            self._lease.end = wire.Released(
                epoch=self._lease.epoch,
                reason=reason[:_MOST_CHARACTERS],
                outgrown=outgrown,
                unreachable=unreachable,
                final=final,
            )
            self._connection.send(self._lease.end)

    def close(self) -> None:
        """Close the connection, once a broker has acknowledged the state of the trial."""
        self._connection.settle(lambda: not self._unconfirmed(), _ACK_SECONDS)
        self._connection.close()
        if self._lease.end is not None and self._unconfirmed():
            pending_endings.keep(self._introduce)

    def hang_up(self) -> None:
        """Close the connection and leave the trial as it is, acknowledged or not."""
        self._connection.close()
        self.must_yield = False

    # -- waiting -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stopped_alarm(self) -> Iterator[None]:
        """Stop the ``signal.alarm`` of a process that has this trial alone.

        Scripts limit by it how long a trial may train.
        """
        if sessions.worker is not self:
            yield
            return
        left, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
        yield  # a trial that leaves this process needs no alarm any more
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)

    def _suspend(self, state: CleanPoint | None, tier: TierName, begin: float) -> None:
        """Suspend the trial into a tier, or move it there; from disk there is no way back."""
        if state is None:
            held, tier = None, "resident"
        else:
            parking = self._mover()
            # What Python knows of a GPU's tensors is the trial's own only if the process is.
            sole = sessions.worker is self
            held = parking.put(state, "disk" if tier == "host" and not sole else tier)
            tier = parking.tier or "resident"
        self._had_seconds, self._granted_at = self.device_seconds, None
        self._say_parked(state, tier, held, time.monotonic() - begin)
        if held is not None and held.stored is not None:
            self.on_state("stored")
            self._leave(f"The trial is stored in {held.stored.path}.")

    def _leave(self, reason: str) -> NoReturn:
        # A loop whose objective catches it comes here again at its next batch.
        self.left = self.must_yield = True
        raise Suspended(reason)

    def _check_left(self) -> None:
        if self.left:
            self._leave("The trial has left this process before.")

    def _say_parked(
        self, state: CleanPoint | None, tier: TierName, held: Footprint | None, spent: float
    ) -> None:
        stored = None if held is None else held.stored
        can_store = state is not None and self._mover().can_store(state)
        with self._connection.lock:
            lease = self._lease
            if not lease.epoch:
                return  # it has no lease to give back
            several = len(lease.reattach.devices) > 1
            parked = wire.TierChanged(
                epoch=lease.epoch,
                tier=tier,
                suspend_seconds=spent,
                checkpoint=stored,
                # What its ranks hold this process does not know.
                held_bytes=None if held is None or several else held.device_bytes,
                host_bytes=0 if held is None else held.host_bytes,
                can_store=can_store,
                can_offload=state is not None and state.can_offload and sessions.worker is self,
            )
            lease.change(requested_tier=None, parked=parked)
            if stored is not None:
                lease.checkpoints[stored.path] = stored
                self._keep_unconfirmed()
            self._connection.send(parked)

    def _keep_unconfirmed(self) -> None:
        if self.checkpoint_dir is not None:
            lease = self._reattach()
            parts = {"reports": lease.reports, "checkpoints": lease.checkpoints}
            _journal.change(self.checkpoint_dir, at=time.time(), **parts)

    def _confirmed(self) -> None:
        """Take out of the journal what the ledger has: all that the session has put into it."""
        if self.checkpoint_dir is not None:
            _journal.change(self.checkpoint_dir, reports=(), checkpoints=())

    def _wait(self, state: CleanPoint | None) -> None:
        begin = time.monotonic()
        while True:
            message = self._next(state, begin)
            if isinstance(message, wire.Move):
                began = time.monotonic()
                try:
                    self._suspend(state, message.tier, began)
                except SuspendError:
                    if message.tier != "resident":
                        raise
                    self._suspend(state, "host", began)
            elif message is None:  # no broker can be found
                self._suspend(state, "disk", time.monotonic())
                raise BrokerError(self._refused or _NO_BROKER)
            elif isinstance(message, wire.Refused):
                if message.taken:
                    self._leave(message.reason)  # not by an error, for which Optuna would end it
                raise BrokerError(message.reason)
            elif isinstance(message, wire.Dismiss):
                self._leave("The trial has not begun.")
            elif isinstance(message, wire.Grant) and self._is_present(message):
                self._take(message)
                if self._resume(state):
                    return

    def _is_present(self, grant: wire.Grant) -> bool:
        """True if a grant is of the current lease, under which the trial has not parked yet."""
        return grant.epoch == self._lease.epoch and self._lease.reattach.parked is None

    def _next(self, state: CleanPoint | None, begin: float) -> wire.FromBroker | None:
        while True:
            try:
                # A host may have many trials that wait for long: they look less often.
                pause = _POLL_SECONDS if time.monotonic() < begin + _LONG_SECONDS else 1.0
                return self._inbox.get(timeout=pause)
            except queue.Empty:
                self.on_wait(time.monotonic() - begin)
                if state is not None and state.ended():
                    self._suspend(state, "disk", time.monotonic())
                    raise SystemExit(_TERMINATED) from None

    def _resume(self, state: CleanPoint | None) -> bool:
        """Bring the trial back to its device; False if it has no room there, and waits on."""
        if state is None or self._tier_mover is None:  # it has not been moved
            return True
        try:
            self._tier_mover.back()
        except SuspendError:
            self._suspend(state, "disk", time.monotonic())
            return False
        return True

    def _mover(self) -> TierMover:
        if self._tier_mover is None:
            from optuna_hermes.suspend._tiers._tier_mover import TierMover  # it needs torch

            self._tier_mover = TierMover(
                self.checkpoint_dir, lambda: self.checkpoints, self.checkpoint_url
            )
        return self._tier_mover

    # -- on the connection's thread ------------------------------------------------------------

    def _introduce(self) -> Iterable[wire.FromClient]:
        lease = self._lease
        if self._phase is _Phase.SETTING_UP and lease.reattach.number is None:
            return []  # it does not wait for a trial, and has none yet: see ``begin``
        first = self._reattach() if lease.epoch else self._ask
        return [first] if lease.end is None else [first, lease.end]

    def _reattach(self) -> wire.Reattach:
        return self._lease.message(time.monotonic(), self.device_seconds)

    def _forget_requests(self) -> None:
        """Drop requests of a dead broker that are not begun; keep grants: the ledger has them."""
        with self._connection.lock:
            self._told_to_set_up = False
            kept: list[wire.FromBroker | None] = []
            with contextlib.suppress(queue.Empty):
                while True:
                    message = self._inbox.get_nowait()
                    if isinstance(message, wire.Move):
                        self._lease.change(requested_tier=None)
                    elif isinstance(message, wire.Grant):
                        kept.append(message)
            for message in kept:
                self._inbox.put(message)

    def _on_message(self, message: wire.FromBroker | None) -> None:
        with self._connection.lock:
            if message is None:
                self._stop()
            elif isinstance(message, wire.Yield):
                self._lease.change(requested_tier=message.tier)
                self.requested_tier, self.must_yield = message.tier, True
            elif isinstance(message, wire.Resize):
                # A size for an earlier lease is too late: the grant has said which one holds.
                if message.epoch == self._lease.epoch:
                    self.batch_size = message.batch_size
            elif isinstance(message, wire.LeaseEndAck):
                self._end_acknowledged = True
            elif isinstance(message, wire.ReportAck):
                self._decided.set()
            elif isinstance(message, wire.CheckpointAck):
                self._on_checkpoint_ack(message)
            elif isinstance(message, wire.Refused) and self._lease.epoch:
                self._let_go(message)
            elif isinstance(message, wire.Refused) and self._lease.end is not None:
                self._end_acknowledged = True  # the trial is known to be over
            elif isinstance(message, wire.Grant):
                self._on_grant(message)
            elif isinstance(message, wire.Move):
                self._lease.change(requested_tier=message.tier)
                self._inbox.put(message)
            else:
                self._inbox.put(message)

    def _on_grant(self, grant: wire.Grant) -> None:
        now = time.monotonic()
        # After the trial had to give up a lease, and before it had another one.
        unheard = [(at, report) for at, report in self._lease.reports if report.epoch == 0]
        self._lease.granted(grant, now)
        for at, report in unheard:
            self._say_again(report, now - at)
        self._had_seconds, self._granted_at = grant.device_seconds, now
        self.trains = False
        if grant.batch_size is not None:
            self.batch_size = grant.batch_size
        if self._phase is _Phase.SETTING_UP:  # it need not wait at its first batch
            self._phase, self.must_yield = _Phase.GRANTED_EARLY, False
            self._take(grant)
        else:
            self._inbox.put(grant)

    def _on_checkpoint_ack(self, message: wire.CheckpointAck) -> None:
        saved = self._lease.checkpoints.pop(message.path, None)
        if saved is None:
            return
        if not self._lease.checkpoints:
            self._confirmed()
        if saved not in self.checkpoints:
            # Two are kept, as the broker does: the older one is for a damaged newer one.
            self.checkpoints = (saved, *self.checkpoints[:1])

    def _let_go(self, refused: wire.Refused) -> None:
        """Give up a lease that is another's by now.

        A worker ends. A plain trial asks again, or leaves if it is another host's.
        """
        if isinstance(self._ask, wire.Register):
            self._lease = LeaseState.none(self._study)
            self.must_yield = True
            if refused.taken:
                self._inbox.put(refused)
            else:
                self._connection.send(self._ask)
        else:
            self._refused = refused.reason
            self._stop()

    def _stop(self) -> None:
        self.must_yield = True
        self._inbox.put(None)

    # -- inside --------------------------------------------------------------------------------

    def _take(self, grant: wire.Grant) -> None:
        self.devices, self.alone = grant.devices, grant.alone
        if not self.managed:  # the loop read them when it started
            self.checkpoints = grant.checkpoints

    def _unconfirmed(self) -> bool:
        """True if the trial is over or on disk, and the ledger may not know it."""
        lease = self._lease
        if lease.end is not None:
            return not self._end_acknowledged
        parked = lease.reattach.parked
        return parked is not None and parked.tier == "disk" and bool(lease.checkpoints)
