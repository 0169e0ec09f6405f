"""Watchdog: limits of a worker's silence, by the activity of its processes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core._broker_state import BrokerState, Client, Lease
from optuna_hermes.broker._core._events import Kill, Observed
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._turn import Turn

GRACE_SECONDS = 300.0
"""Time after which a worker that is silent and idle hangs, unless its study says otherwise."""

LEAST_GRACE_SECONDS = 30.0
"""Time for one that is stopped, and in the way of others: it cannot be at work."""

USUAL_SILENCES = 10
"""Factor on a trial's longest silence until now, for which it may be idle if that is longer."""

BUSY_SHARE = 10
"""Factor on that time for a worker that works, after its first unit; before it, no limit."""

LOOK_SECONDS = 5.0
"""Silence after which a worker is observed."""


def record_heartbeat(
    lease: Lease, trial: LiveTrial | None, now: float, *, trained: bool = False
) -> None:
    """Note a sign of life: the silence before it is normal, if the trial was training.

    It had ``trained`` if it says only now that it trains, with its first unit.
    """
    silence = now - lease.last_progress
    # Beats come once a second at most: less says nothing of the rhythm.
    if trial is not None and (lease.training or trained) and silence >= 1.0:
        trial.silence = max(trial.silence or 0.0, silence)
    lease.last_progress = now


def leave_out(state: BrokerState, since: float, now: float, study: str | None = None) -> None:
    """Leave the time since then out of the silences of workers, of all studies or of one.

    The broker was stopped, or the study's database away, for which its workers may have waited.
    """

    def later(at: float) -> float:
        return min(now, at + now - since)

    for lease in state.leases():
        if study in (None, lease.study):
            lease.last_progress = later(lease.last_progress)
    for trial in state.trials():
        if study in (None, trial.study):
            trial.requested_at = later(trial.requested_at)
    for client in state.clients.values():
        if study in (None, client.study):
            client.silent_from = later(client.silent_from)
            client.worked_at = later(client.worked_at)
            if client.stopped_since is not None:
                client.stopped_since = later(client.stopped_since)


class Watchdog:
    """Watches silent workers.

    One that works is waited for: by its CPU time, that of its children, and its device's use. It
    hangs only if it has been silent for much longer than ever before.
    """

    def __init__(self, state: BrokerState, grace_seconds: float = GRACE_SECONDS) -> None:
        self._state = state
        self._grace_seconds = grace_seconds

    def silent_connections(self, now: float) -> Iterator[int]:
        """Connections of silent workers, whose processes are to be observed."""
        for lease in self._state.leases():
            after = min(LOOK_SECONDS, self._hang_seconds(lease.study) / 4)
            if not lease.uncommitted and now - lease.last_progress >= after:
                yield lease.connection
        for trial in self._asked():
            if trial.connection is not None:
                yield trial.connection
        for connection, client in self._without_lease().items():
            if client.leaving or now - client.silent_from >= LOOK_SECONDS:
                yield connection

    def observed(self, event: Observed, now: float) -> None:
        for connection, activity in event.activities.items():
            client = self._state.clients.get(connection)
            if client is None:
                continue
            if activity == "works" or self._uses_device(connection):
                client.worked_at, client.idle_since, client.stopped_since = now, None, None
            else:
                stopped = activity == "stopped"
                if client.stopped_since is not None and not stopped:
                    client.worked_at = now  # it goes on: its time begins anew
                client.idle_since = now if client.idle_since is None else client.idle_since
                since = now if client.stopped_since is None else client.stopped_since
                client.stopped_since = since if stopped else None

    def wakeups(self) -> Iterator[float]:
        yield from map(self._due, self._state.leases())
        for trial in self._asked():
            yield self._idle_from(trial.connection, trial.requested_at) + self._hang_seconds(
                trial.study
            )
        for connection, client in self._without_lease().items():
            since = self._idle_from(connection, client.silent_from)
            yield since + self._hang_seconds(client.study)

    def end(self, turn: Turn) -> None:
        """Kill workers that hang; each kill opens another period.

        The process of a plain trial is its user's: it is waited for where it has a device, and
        not asked again where it is parked.
        """
        for lease in self._state.leases():
            if turn.now >= self._due(lease):
                lease.last_progress = turn.now
                self._kill(turn, lease.connection, self._state.trial_of(lease))
        for trial in self._asked():
            since = self._idle_from(trial.connection, trial.requested_at)
            if turn.now >= since + self._hang_seconds(trial.study):
                trial.requested_at = turn.now
                if not self._kill(turn, trial.connection or 0, trial):
                    trial.requested_tier, trial.can_store, trial.can_offload = None, False, False
        for connection, client in self._without_lease().items():
            since = self._idle_from(connection, client.silent_from)
            if turn.now >= since + self._hang_seconds(client.study):
                client.silent_from = turn.now
                self._kill(turn, connection, None)

    def _uses_device(self, connection: int) -> bool:
        leases = (lease for lease in self._state.leases() if lease.connection == connection)
        return any(slot.device.used for lease in leases for slot in self._state.slots_of(lease))

    def _asked(self) -> list[LiveTrial]:
        """Parked trials that have not answered yet."""
        return [
            trial
            for trial in self._state.trials()
            if trial.requested_tier and trial.state == "parked"
        ]

    def _without_lease(self) -> dict[int, Client]:
        """Workers that announced that they leave and are still there, or that create a trial."""
        return {
            key: each
            for key, each in self._state.clients.items()
            if each.role == "worker"
            and (each.leaving or (each.creation_names and not self._is_away(each)))
        }

    def _is_away(self, client: Client) -> bool:
        """True while the database that a worker's trial is in does not answer."""
        study = self._state.studies.get(client.study or "")
        return study is not None and study.outage_since is not None

    def _hang_seconds(self, key: str | None) -> float:
        study = self._state.studies.get(key or "")
        seconds = None if study is None else study.spec.hang_seconds
        return self._grace_seconds if seconds is None else seconds

    def _idle_from(self, connection: int | None, silent_from: float) -> float:
        """Time from which on a silent worker may have been idle."""
        client = self._state.client_of(connection)
        return silent_from if client is None else max(silent_from, client.worked_at)

    def _due(self, lease: Lease) -> float:
        """Time at which a lease's holder has been silent for too long; infinite if it may go on."""
        client = self._state.clients.get(lease.connection)
        if lease.uncommitted or client is None:
            return math.inf
        trial = self._state.trial_of(lease)
        usual = (trial.silence if trial else None) or 0.0
        patience = max(self._hang_seconds(lease.study), USUAL_SILENCES * usual)
        idle = self._idle_from(lease.connection, lease.last_progress) + patience
        if not lease.yielding:
            # No trial waits for its device: it is killed only if it was seen to be idle.
            may_hang = client.role == "worker" and client.idle_since is not None
            # It may wait for the database itself, to which it tells a value or the trial's end.
            return idle if may_hang and not self._is_away(client) else math.inf
        due = [idle]
        stopped = client.stopped_since
        # After an outage, in which it was heard and then stopped, both times are that one's end.
        if stopped is not None and stopped >= lease.last_progress:
            due.append(stopped + min(LEAST_GRACE_SECONDS, patience))
        if trial is not None and trial.furthest and lease.training:
            # It computes, perhaps for ever: others wait for its device.
            due.append(lease.last_progress + BUSY_SHARE * patience)
        return min(due)

    def _kill(self, turn: Turn, connection: int, trial: LiveTrial | None) -> bool:
        client = self._state.clients.get(connection)
        if client is None or client.role != "worker":
            return False
        client.hung = True
        kill = Kill(connection=connection, pid=client.pid)
        turn.add(kill)
        _event_log.killed(turn, trial, kill.pid, kill.reason)
        return True
