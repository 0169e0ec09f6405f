"""One run's side of its lease, and the sessions of this process by trial."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._client import Connection
from optuna_hermes.errors import BrokerError, Suspended, SuspendError
from optuna_hermes.model import RunState, TierName
from optuna_hermes.suspend._base import Held, State, StoredState
from optuna_hermes.suspend._disk import read_ahead

if TYPE_CHECKING:
    from optuna_hermes.suspend._parking import Parking

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""How often a run that waits looks whether its process is to end."""
_TERMINATED = 128 + 15


class RunSession:
    """A connection that holds, or waits for, the lease of one run (``suspend.Session``).

    A thread reads the socket, so that training pays one attribute read a batch.

    Args:
        connection: open, with nothing read from it yet.
        checkpoint_dir: where this run's checkpoints go, None if it cannot leave its process.
        noted: told ``parked``, ``running`` or ``stored`` when that has become true, off the
            device's time where it can be.
        rejoin: makes a new connection that asks for a lease, for a run whose process stays when
            the broker goes.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        checkpoint_dir: Path | None = None,
        noted: Callable[[RunState], None] = lambda state: None,
        rejoin: Callable[[], Connection] | None = None,
    ) -> None:
        self.must_yield = False
        self.asked: TierName = "resident"
        self.managed = False
        self.checkpoint_dir = checkpoint_dir
        self.checkpoints: tuple[StoredState, ...] = ()
        self.devices: tuple[str, ...] = ()
        self.alone = True
        self.noted = noted
        self.describe: Callable[[], wire.Params] = dict
        """Tells the trial's hyper-parameters, as far as they are known by then."""
        self._described = False
        self._rejoin = rejoin
        self._connection = connection
        self._epoch = 0
        self._trained = False
        self._saved: dict[str, StoredState] = {}
        self._last_beat = 0.0
        self._had_seconds = 0.0
        self._granted_at: float | None = None
        self._lost = False
        self._parked_in: Parking | None = None
        self._inbox: queue.SimpleQueue[wire.FromBroker | None] = queue.SimpleQueue()
        self._reader = self._start_reader()

    @property
    def device_seconds(self) -> float:
        """Device time the run has had, this slice included."""
        current = 0.0 if self._granted_at is None else time.monotonic() - self._granted_at
        return self._had_seconds + current

    # -- before training -----------------------------------------------------------------------

    def wait_for_grant(self) -> wire.Grant | None:
        """Wait for the next lease; None when there is nothing left to do.

        Raises:
            BrokerError: the broker is gone, or refuses.
        """
        while True:
            message = self._inbox.get()
            if message is None:
                raise BrokerError("The broker is gone.")
            if isinstance(message, wire.Refused):
                raise BrokerError(message.reason)
            if isinstance(message, wire.Dismiss):
                return None
            if isinstance(message, wire.Grant):
                self._take(message)
                return message
            if isinstance(message, wire.Prepare):
                states = tuple(_unwired(saved) for saved in message.checkpoints)
                read_ahead(states, f"trial {message.number}")

    def begin(self, number: int, trial_id: int) -> None:
        """Say which trial a lease for a new one went to."""
        self._send(wire.Begin(epoch=self._epoch, number=number, trial_id=trial_id))

    # -- while training: suspend.Session --------------------------------------------------------

    def training(self, *, stores: bool) -> None:
        """See ``suspend.Session``. From here on the loop itself looks after yielding."""
        self.managed = True
        self.started(stores=stores)

    def started(self, *, stores: bool) -> None:
        """The first batch since the grant begins."""
        if not self._trained:
            self._trained = True
            params = self.describe()
            self._described = bool(params)
            self._send(wire.Training(epoch=self._epoch, stores=stores, params=params))

    def report(self, *, unit: int, step: int, value: float, units_left: int | None = None) -> None:
        """See ``suspend.Session``."""
        params = {} if self._described else self.describe()
        self._described = True
        self._send(
            wire.Report(
                epoch=self._epoch,
                unit=unit,
                step=step,
                value=value,
                units_left=units_left,
                params=params,
            )
        )

    def beat(self, batches: int, memory_bytes: int | None = None) -> None:
        """See ``suspend.Session``."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            self._send(wire.Beat(epoch=self._epoch, batches=batches, memory_bytes=memory_bytes))

    def saved(self, state: StoredState) -> None:
        """See ``suspend.Session``."""
        self._saved[str(state.path)] = state
        self._send(wire.Saved(epoch=self._epoch, checkpoint=_wired(state)))

    def park(self, state: State | None) -> None:
        """See ``suspend.Session``; with None nothing is known but that the run can wait.

        Raises:
            Suspended: the run is on disk.
            CheckpointError: it should go there and cannot.
            BrokerError: the broker is gone and the run cannot be stored.
        """
        begin = time.monotonic()
        self.must_yield = False
        self._put(state, "disk" if self._lost else self.asked, begin)
        self.noted("parked")
        try:
            self._wait(state)
        except BaseException:
            if state is not None:
                self._parking().leave()
            raise
        self.noted("running")

    # -- after training ------------------------------------------------------------------------

    def end(self, state: wire.Ending, error: str | None = None) -> None:
        """The trial is told: the lease is over."""
        self._send(wire.Ended(epoch=self._epoch, state=state, error=error))

    def release(self, reason: str, *, outgrown: bool = False) -> None:
        """Give the lease back: this process cannot serve the run, which stays as it was.

        Args:
            reason: what people are told.
            outgrown: the device's memory did not suffice beside what others hold there.
        """
        self._send(wire.Released(epoch=self._epoch, reason=reason, outgrown=outgrown))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self._reader.join()

    # -- waiting -------------------------------------------------------------------------------

    def _put(self, state: State | None, tier: TierName, begin: float) -> None:
        """Suspend the run into a tier, or move it there; from disk there is no way back."""
        if state is None:
            held, tier = None, "resident"
        else:
            parking = self._parking()
            # What Python knows of a GPU's tensors is the run's own only if the process is.
            sole = sessions.worker is self
            held = parking.put(state, "disk" if tier == "host" and not sole else tier)
            tier = parking.tier or "resident"
        self._stop_clock()
        self._say_parked(state, tier, held, time.monotonic() - begin)
        if held is not None and held.stored is not None:
            self.noted("stored")
            raise Suspended(f"The run is stored in {held.stored.path}.")

    def _say_parked(
        self, state: State | None, tier: TierName, held: Held | None, spent: float
    ) -> None:
        stored = None if held is None else held.stored
        self._send(
            wire.Parked(
                epoch=self._epoch,
                tier=tier,
                suspend_seconds=spent,
                checkpoint=None if stored is None else _wired(stored),
                held_bytes=None if held is None else held.device_bytes,
                host_bytes=0 if held is None else held.host_bytes,
                stores=state is not None and self._parking().stores(state),
                moves=state is not None and state.moves and sessions.worker is self,
            )
        )

    def _wait(self, state: State | None) -> None:
        while True:
            message = self._next(state)
            if isinstance(message, wire.Evict):
                self._put(state, message.tier, time.monotonic())
                continue
            if isinstance(message, wire.Recall):
                with contextlib.suppress(SuspendError):
                    self._parking().back()
                self._put(state, self._parking().tier or "resident", time.monotonic())
                continue
            if message is None:  # the broker is gone
                self._put(state, "disk", time.monotonic())
                self._ask_again()
            elif isinstance(message, wire.Grant):
                self._take(message)
            if self._back(state):
                return

    def _next(self, state: State | None) -> wire.FromBroker | None:
        while True:
            try:
                return self._inbox.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if state is not None and state.ended():
                    self._put(state, "disk", time.monotonic())
                    raise SystemExit(_TERMINATED) from None

    def _back(self, state: State | None) -> bool:
        """Bring the run back to its device; False if it has no room there, and waits on."""
        if state is None:
            self.started(stores=False)
            return True
        try:
            self._parking().back()
        except SuspendError:
            self._put(state, "disk", time.monotonic())
            return False
        return True

    def _parking(self) -> Parking:
        if self._parked_in is None:
            from optuna_hermes.suspend._parking import Parking  # it needs torch

            self._parked_in = Parking(self.checkpoint_dir, lambda: self.checkpoints)
        return self._parked_in

    def _ask_again(self) -> None:
        """Wait for a lease of the next broker."""
        if self._rejoin is None:
            raise BrokerError("The broker is gone.")
        self._connection.close()
        self._reader.join()
        self._connection = self._rejoin()
        self._inbox = queue.SimpleQueue()
        self._lost = self.must_yield = False
        self._reader = self._start_reader()
        self.wait_for_grant()

    # -- inside --------------------------------------------------------------------------------

    def _start_reader(self) -> threading.Thread:
        reader = threading.Thread(target=self._read, name="hermes-session", daemon=True)
        reader.start()
        return reader

    def _stop_clock(self) -> None:
        self._had_seconds, self._granted_at = self.device_seconds, None

    def _take(self, grant: wire.Grant) -> None:
        self._epoch = grant.epoch
        self.devices, self.alone = grant.devices, grant.alone
        self._had_seconds, self._granted_at = grant.device_seconds, time.monotonic()
        self._trained = False
        if not self.managed:  # the loop read them when it started
            self.checkpoints = tuple(_unwired(c) for c in grant.checkpoints)

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.receive()
            except BrokerError:
                self._lost = True
                self.must_yield = True
                self._inbox.put(None)
                return
            if isinstance(message, wire.Yield):
                self.asked = message.tier
                self.must_yield = True
            elif isinstance(message, wire.Kept):
                state = self._saved.pop(message.path)
                self.checkpoints = (state, *self.checkpoints[:1])
            else:
                self._inbox.put(message)

    def _send(self, message: wire.FromClient) -> None:
        # Training does not stop because the broker is gone: the reader has seen it too, and the
        # run parks at its next clean point.
        with contextlib.suppress(BrokerError):
            self._connection.send(message)


def _wired(state: StoredState) -> wire.SavedCheckpoint:
    return wire.SavedCheckpoint(
        path=str(state.path),
        units=state.units,
        size_bytes=state.size_bytes,
        sha256=state.sha256,
    )


def _unwired(saved: wire.SavedCheckpoint) -> StoredState:
    return StoredState(
        path=Path(saved.path),
        units=saved.units,
        size_bytes=saved.size_bytes,
        sha256=saved.sha256,
    )


class Sessions:
    """The sessions of this process, by study name and trial number.

    ``worker`` is the session of a process that serves one run at a time for ``optimize``.
    """

    def __init__(self) -> None:
        self.worker: RunSession | None = None
        self._by_trial: dict[tuple[str, int], RunSession] = {}

    def add(self, study: str, number: int, session: RunSession) -> None:
        """Remember whose session this is."""
        self._by_trial[study, number] = session

    def get(self, study: str, number: int) -> RunSession | None:
        """The session of a trial, None if it has none in this process."""
        return self._by_trial.get((study, number))

    def pop(self, study: str, number: int) -> RunSession | None:
        """Forget a trial's session."""
        return self._by_trial.pop((study, number), None)


sessions = Sessions()


def session_of(trial: Any) -> RunSession | None:
    """The session of an ``optuna.Trial``, None if its study does not run under a broker."""
    study = getattr(trial, "study", None)
    return None if study is None else sessions.get(study.study_name, trial.number)
