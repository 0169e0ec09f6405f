"""Rules of the broker: an event in, commands out. No clock, no I/O.

``handle`` changes the ``BrokerState`` and returns commands. Times are seconds of one monotonic
clock; what goes into the ledger is turned into wall clock seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core import _events as events
from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core import _outage as outage
from optuna_hermes.broker._core import _progress as progress
from optuna_hermes.broker._core import _retries as retries
from optuna_hermes.broker._core._admission import (
    admit_study,
    admit_trial,
    listed,
    misplaced,
    refusal,
    take_charge,
)
from optuna_hermes.broker._core._broker_state import (
    BrokerState,
    Client,
    Lease,
    Slot,
)
from optuna_hermes.broker._core._device_changes import DeviceChanges
from optuna_hermes.broker._core._drain import Drains
from optuna_hermes.broker._core._lease_ends import LeaseEnds
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._scheduler import Scheduler
from optuna_hermes.broker._core._status import broker_status
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._study_watches import tell, watch, watchers
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._core._watchdog import (
    GRACE_SECONDS,
    Watchdog,
    leave_out,
    record_heartbeat,
)
from optuna_hermes.ledger._records import HostRecord
from optuna_hermes.model import Device

if TYPE_CHECKING:
    from optuna_hermes.broker._core._curve_shape import CurveShape
    from optuna_hermes.broker._core._overrides import Overrides
    from optuna_hermes.broker._core._power import Power
    from optuna_hermes.broker._core._recovery import Recovery
    from optuna_hermes.broker._core._shared_studies import Sharing
    from optuna_hermes.curves import CurveCache

_OfTraining = wire.Beat | wire.Report | wire.FirstBatch | wire.Begin
"""Messages of a trial that trains: most messages by far."""
_CHANGES_NO_PLAN = (wire.Beat, wire.Report)
"""Messages after which nothing is due earlier, unless a report leads to a decision."""

STALL_SECONDS = 4.0
"""Time without any event from which on the broker was stopped, or starved.

Its devices are polled every 2 s, and it waits 1 s at most for each answer of their driver.
"""


class EventHandler:
    """Changes a broker's state by events, and answers them with commands.

    Args:
        state: of a broker that has no devices yet.
        grace_seconds: see ``GRACE_SECONDS``.
        powers: whether there are commands that power devices up and down.
    """

    def __init__(
        self,
        state: BrokerState,
        devices: Sequence[Device],
        *,
        grace_seconds: float = GRACE_SECONDS,
        powers: bool = False,
    ) -> None:
        self.state = state
        state.slots = {device.id: Slot(device=device) for device in devices}
        self._power: Power | None = None
        if powers:
            from optuna_hermes.broker._core._power import Power  # few hosts have such commands

            self._power = Power(self.state)
        self._policy_runner = PolicyRunner(self.state, self._power)
        self._memory = MemoryManager(self.state, self._policy_runner.wanted_last)
        self._scheduler = Scheduler(self.state, self._policy_runner, self._memory)
        self._ends = LeaseEnds(self.state, self._memory)
        self._drains = Drains(self.state, self._memory, self._ends, self._scheduler)
        self._devices = DeviceChanges(self.state, self._memory, self._scheduler)
        self._watchdog = Watchdog(self.state, grace_seconds)
        self._wakeup: float | None = None
        self._wakeup_known = True
        self._handled_at = 0.0

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Handle an event and return the commands, in order."""
        turn = Turn(state=self.state, now=now)
        # First: with GPUs, messages come before the tick that is due.
        self._leave_out_stall(now)
        # Most messages do not change the next wake-up: it is not searched again for each.
        self._wakeup_known = self._wakeup_known and (
            isinstance(event, events.Received) and isinstance(event.message, _CHANGES_NO_PLAN)
        )
        self._dispatch(turn, event)
        self._follow_up(turn)
        return turn.commands

    def _dispatch(self, turn: Turn, event: events.Event) -> None:
        if isinstance(event, (events.Received, events.StudyRead)) and self._is_misplaced(
            turn, event
        ):
            pass
        elif isinstance(event, events.Received):
            self._receive(turn, event.connection, event.message)
        elif isinstance(event, events.StudyRead):
            self._study_read(turn, event)
        elif isinstance(event, events.Connected):
            self._connected(event)
        elif isinstance(event, events.ProcessExpected):
            self._recovery.expect(event, turn.now)
        elif isinstance(event, events.Disconnected):
            self._disconnected(turn, event)
        elif isinstance(event, events.DevicesPolled):
            self._devices.reported(turn, event.xids)
            self._devices.polled(turn, event.devices)
            self._scheduler.schedule(turn)
        elif isinstance(event, events.WritesFailed):
            self._ends.writes_refused(turn, event)
            self._drain_again(turn)
        elif isinstance(event, events.Refreshed):
            self._sharing.refreshed(turn, event)
            self._overrides.refreshed(turn, event)
            self._scheduler.schedule(turn)
        elif isinstance(event, events.ClaimConflict):
            self._sharing.claim_conflict(turn, event)
            self._drain_again(turn)
            self._scheduler.schedule(turn)
        elif isinstance(event, events.OutageBegan):
            outage.begin(turn, event)
            self._drain_again(turn)
        elif isinstance(event, events.OutageEnded):
            outage.end(turn, event)
            self._scheduler.schedule(turn)
        elif isinstance(event, events.PowerSwitched) and self._power is not None:
            self._power.switched(turn, event)
        elif isinstance(event, events.Observed):
            self._watchdog.observed(event, turn.now)
        elif isinstance(event, events.Tick):
            self._tick(turn)

    def _drain_again(self, turn: Turn) -> None:
        """Let what has waited in vain for a database, with its lease or its yield, leave anew."""
        for study in self.state.studies.values():
            if study.draining:
                self._drains.begin(turn, study)

    def _tick(self, turn: Turn) -> None:
        outage.give_up(turn)
        retries.end_waits(turn)
        self._watchdog.end(turn)
        if self.state.recovering:
            self._recovery.end(turn)
        self._scheduler.extend(turn)  # first: a longer slice may be due to look ahead in
        self._scheduler.look_ahead(turn)
        self._scheduler.schedule(turn)

    def _follow_up(self, turn: Turn) -> None:
        """Do what may be due after any event."""
        for study in self.state.studies.values():
            retries.end_study(self.state, study)
            if study.problem and not study.draining:
                self._drains.begin(turn, study)
            if study.draining:
                self._drains.go_on(turn, study)
        if any(study.overrides for study in self.state.studies.values()):
            self._overrides.enforce(turn)
        if self._power is not None:
            self._power.switch(turn)

    def next_wakeup(self, now: float) -> float | None:
        """Time at which a ``Tick`` is due; None if only a message can change anything."""
        if not self._wakeup_known:
            self._wakeup, self._wakeup_known = self._next_wakeup(now), True
        return self._wakeup

    def _next_wakeup(self, now: float) -> float | None:
        times = [*self._watchdog.wakeups(), *outage.wakeups(self.state)]
        times += retries.wakeups(self.state)
        if self.state.recovering:
            times += self._recovery.wakeups()
        for slot in self.state.slots.values():
            if slot.lease is None and slot.reservation and slot.settles_at > now:
                times.append(slot.settles_at)
        for lease in self.state.leases():
            if not lease.yielding and lease.deadline > now and not lease.uncommitted:
                times.append(min(lease.deadline, self._scheduler.look_ahead_at(lease)))
        return min(filter(math.isfinite, times), default=None)

    def _leave_out_stall(self, now: float) -> None:
        """Leave the time for which the broker was stopped out of all silences and waits."""
        since, self._handled_at = self._handled_at, now
        missed = self._wakeup is not None and now > self._wakeup
        if missed and now - since > STALL_SECONDS:
            leave_out(self.state, since, now)
            if self.state.recovering:
                self._recovery.wait_longer(now - since)

    def silent(self, now: float) -> dict[int, int]:
        """Processes of workers that are silent, by their connections."""
        found = {
            each: self.state.clients.get(each) for each in self._watchdog.silent_connections(now)
        }
        return {key: each.pid for key, each in found.items() if each and each.role == "worker"}

    @property
    def idle(self) -> bool:
        """True if nothing would be lost if the broker ended now."""
        if self.state.needed or self.state.recovering:
            return False
        return not any(s.power in ("going", "coming") for s in self.state.slots.values())

    @property
    def has_watchers(self) -> bool:
        """True if any driver is to be told of the next change of its study."""
        return any(watchers(self.state))

    def changes(self, now: float) -> list[events.Command]:
        """Messages to drivers whose studies have changed since they were told last."""
        turn = Turn(state=self.state, now=now)
        tell(turn, self._memory.problem)
        return turn.commands

    def presence(self, now: float) -> HostRecord:
        """Presence of this broker, for those of other hosts."""
        return self._sharing.presence(now)

    @cached_property
    def _recovery(self) -> Recovery:
        # Few brokers follow one that died, and have anything recovering.
        from optuna_hermes.broker._core._recovery import Recovery

        return Recovery(self.state)

    @cached_property
    def _sharing(self) -> Sharing:
        # Few studies are shared by several hosts.
        from optuna_hermes.broker._core._shared_studies import Sharing

        return Sharing(self.state, self._policy_runner, self._memory, self._ends)

    @cached_property
    def _overrides(self) -> Overrides:
        # Few studies have trials that a person holds, boosts or finishes.
        from optuna_hermes.broker._core._overrides import Overrides

        return Overrides(self.state, self._memory, self._scheduler)

    @cached_property
    def _shapes(self) -> CurveCache[CurveShape]:
        # Few clients ask for shapes, and the cache imports NumPy.
        from optuna_hermes.broker._core._curve_shape import shape_of
        from optuna_hermes.curves import CurveCache

        return CurveCache(shape_of)

    def status(self, now: float, *, trials: bool = True, curves: bool = False) -> wire.BrokerStatus:
        shapes = self._shapes if curves else None
        return broker_status(self.state, now, memory=self._memory, trials=trials, shapes=shapes)

    # -- messages ------------------------------------------------------------------------------

    def _is_misplaced(self, turn: Turn, event: events.Received | events.StudyRead) -> bool:
        """True if a message is ignored: its client is gone, or may not send it now."""
        client = self.state.clients.get(event.connection)
        if client is None:
            return True
        reason = misplaced(client, event.message)
        if reason is not None:
            # One that was sent away asks again, and may have to be told why again.
            turn.send(event.connection, wire.Refused(reason=client.dismissed or reason))
        return reason is not None

    def _receive(self, turn: Turn, connection: int, message: wire.FromClient) -> None:
        if isinstance(message, _OfTraining) and message.epoch:
            self._about_lease(turn, connection, message)
        elif isinstance(message, wire.Ready):
            self._ready(turn, connection, message)
        elif isinstance(message, wire.Begin):  # of a trial without a lease
            from optuna_hermes.broker._core import _set_up as set_up  # as in the scheduler

            set_up.created(turn, connection, message)
            self._scheduler.schedule(turn)
        elif isinstance(message, wire.KeepWorkers):
            self.state.studies[message.study].max_alive = message.max_alive
            self._scheduler.schedule(turn)
        elif isinstance(message, wire.Drain):
            self._drains.begin(turn, self.state.studies[message.study])
        elif isinstance(message, wire.GiveUp):
            self._give_up(turn, message)
        elif isinstance(message, wire.Describe):
            described = self.state.clients[connection].described
            described.setdefault(message.study, {}).update(message.params)
        elif isinstance(message, wire.UserCommand):
            self._overrides.carry_out(turn, connection, message)
        elif isinstance(message, wire.GetStatus):
            told = self.status(turn.now, trials=message.trials, curves=message.curves)
            turn.send(connection, wire.Status(status=told))
        elif isinstance(message, wire.WatchStudy):
            watch(turn, connection, message, self._memory.problem)
        elif isinstance(message, wire.TierChanged):
            self._ends.parked(turn, connection, message)
            self._scheduler.schedule(turn)
        elif isinstance(message, wire.Saved):
            self._saved(turn, connection, message)
        elif isinstance(message, (wire.Ended, wire.Released)):  # late or not
            # Answered also if the lease is over: its process waits for this before it leaves.
            turn.send(connection, wire.LeaseEndAck(epoch=message.epoch))
            if isinstance(message, wire.Ended):
                self._ended(turn, connection, message)
            else:
                self._about_lease(turn, connection, message)

    def _about_lease(
        self, turn: Turn, connection: int, message: _OfTraining | wire.Released
    ) -> None:
        lease = self.state.lease(message.epoch)
        if lease is None or lease.connection != connection:
            return  # a lease that is over: the message is late
        trial = self.state.trial_of(lease)
        late = isinstance(message, wire.FirstBatch) and message.late
        record_heartbeat(lease, trial, turn.now, trained=late)
        if isinstance(message, wire.Begin):
            progress.begin(turn, lease, message)
        elif trial is None:
            return
        elif isinstance(message, wire.FirstBatch):
            progress.training(self.state, lease, trial, message, turn.now)
        elif isinstance(message, wire.Report):
            progress.report(turn, lease, trial, message)
            if self._scheduler.reported(turn, lease):
                self._wakeup_known = False
            turn.send(connection, wire.ReportAck(epoch=lease.epoch))
        elif isinstance(message, wire.Beat):
            trial.needs(message.memory_bytes)
            if message.sizes is not None:
                progress.sizes_reported(turn, trial, message.sizes)
        elif isinstance(message, wire.Released):
            self._released(turn, lease, trial, message)

    def _ready(self, turn: Turn, connection: int, message: wire.Ready) -> None:
        if self.state.recovering:
            self._recovery.release_ungranted(turn, self.state.clients[connection].pid)
        study = self.state.studies.get(message.study)
        self.state.clients[connection].study = message.study
        if study is None:  # its driver comes back too, perhaps later than its workers
            self.state.early.setdefault(message.study, []).append(connection)
            return
        if study.draining:
            turn.send(connection, wire.Dismiss())
            return
        study.workers.add(connection)
        study.idle_workers.append(connection)
        self._scheduler.schedule(turn)

    def _saved(self, turn: Turn, connection: int, message: wire.Saved) -> None:
        """Handle a safe checkpoint; its trial may have been parked while it was written."""
        trial = self._ends.trial_of(connection, message.epoch)
        if trial is None:
            return
        lease = self.state.lease(message.epoch)
        if lease is not None:
            record_heartbeat(lease, trial, turn.now)
            blocked = message.blocked_seconds * len(lease.devices)
            self.state.studies[trial.study].add_overhead("saving", blocked)
        progress.keep(turn, trial, message.checkpoint)
        turn.save(trial)
        turn.send(connection, wire.CheckpointAck(path=message.checkpoint.path))

    def _ended(self, turn: Turn, connection: int, message: wire.Ended) -> None:
        """End a trial, which may be parked: it could not be moved, or was interrupted."""
        if message.epoch:
            trial = self._ends.trial_of(connection, message.epoch)
        else:  # it had no lease when its process said so; its grant may be on its way
            own = (each for each in self.state.trials() if each.connection == connection)
            trial = next((each for each in own if each.live), None)
        if trial is None:
            return
        lease = next((x for x in self.state.leases() if self.state.trial_of(x) is trial), None)
        if lease is not None:
            self._ends.end(turn, lease)
        self._memory.expect_exit(trial, turn.now)
        trial.end(message.state)
        turn.save(trial)
        _event_log.ended(turn, trial, message)
        if message.state == "failed":
            failures.failed(self.state, trial, message.error or "", turn.now)
        self.state.cancel_reservations(self.state.studies[trial.study], only_impossible=True)
        self._scheduler.schedule(turn)

    def _give_up(self, turn: Turn, message: wire.GiveUp) -> None:
        trial = failures.give_up(turn, message)
        if trial is not None:
            if trial.state == "failed":
                failures.failed(self.state, trial, message.reason, turn.now)
            self.state.cancel_reservations(self.state.studies[trial.study], only_impossible=True)
            self._scheduler.schedule(turn)

    def _released(self, turn: Turn, lease: Lease, trial: LiveTrial, message: wire.Released) -> None:
        slots = self.state.slots_of(lease)
        self._ends.end(turn, lease)
        self._ends.take_back(turn, trial)
        if message.outgrown:
            self._ends.out_of_memory(turn, slots, trial, "outgrew its memory on")
        else:
            study, number, reason = self.state.studies[trial.study], trial.number, message.reason
            turn.log(trial.study, number, "released", {"reason": reason})
            if message.unreachable:
                retries.failed_read(study, number, reason, turn.now)
            elif trial.checkpoints and not lease.training:
                retries.failed_return(study, number, reason, turn.now, final=message.final)
            else:
                study.problem = reason
        self._scheduler.schedule(turn)

    # -- studies -------------------------------------------------------------------------------

    def _study_read(self, turn: Turn, event: events.StudyRead) -> None:
        study = admit_study(turn, event)
        connection, message = event.connection, event.message
        if isinstance(message, wire.Reattach):
            self._reattach(turn, study, connection, message)
            return
        refused = refusal(self.state, study, event)
        if refused is not None:
            turn.send(connection, refused)
            self._forget_unused(study)
            return
        if isinstance(message, wire.Register):
            is_new = message.number not in study.trials
            pid, key = self.state.clients[connection].pid, study.spec.key
            if self.state.recovering:
                self._recovery.release_ungranted(turn, pid, study=key, number=message.number)
            trial = admit_trial(study, message.number, message.trial_id, turn.now)
            trial.register(connection, turn.now)
            if self.state.clients[connection].role == "worker":
                study.workers.add(connection)
            if is_new:
                _event_log.admitted(turn, trial)
            turn.save(trial)
        else:
            known = set(study.trials)
            changed = take_charge(self.state, study, connection, message, turn.now)
            described = self.state.clients[connection].described.pop(study.spec.key, {})
            for number, params in described.items():
                if number in study.trials:
                    study.trials[number].params = params
            study.listed = listed(study, message, described)
            for trial in changed:
                if trial.number not in known:
                    _event_log.admitted(turn, trial)
                turn.save(trial)
        self.state.clients[connection].study = study.spec.key
        for ready in self.state.early.pop(study.spec.key, []):
            self._ready(turn, ready, wire.Ready(study=study.spec.key))
        self._scheduler.schedule(turn)

    def _reattach(self, turn: Turn, study: Study, connection: int, message: wire.Reattach) -> None:
        from optuna_hermes.broker._core._reattach import reattach  # as for `_recovery`

        client = self.state.clients[connection]
        reason = reattach(self._recovery, self._ends, turn, study, connection, message)
        if reason is None:
            client.study = study.spec.key
            if client.role == "worker":
                study.workers.add(connection)
            if study.draining:
                self._drains.begin(turn, study)
        else:
            refused = wire.Refused(reason=f"{reason} Ask for another lease, or end.")
            turn.send(connection, refused)
            turn.kill_worker(connection, reason)
            self._forget_unused(study)
        self._scheduler.schedule(turn)

    def _forget_unused(self, study: Study) -> None:
        if not study.has_processes:
            del self.state.studies[study.spec.key]

    # -- ends ----------------------------------------------------------------------------------

    def _connected(self, event: events.Connected) -> None:
        client = Client(pid=event.pid, role=event.role, started=event.started)
        self.state.clients[event.connection] = client
        if self.state.recovering and client.role in ("worker", "plain"):
            self._recovery.met(client.pid)

    def _disconnected(self, turn: Turn, event: events.Disconnected) -> None:
        # A list, not a generator: devices are decided about once all of them are gone.
        if any([self._gone(turn, each) for each in event.connections]):
            self._scheduler.schedule(turn)

    def _gone(self, turn: Turn, connection: int) -> bool:
        """Remove a client; True if devices may have to be decided about."""
        if connection in self.state.recovering:
            self._recovery.gone(turn, connection)
            return True
        client = self.state.clients.get(connection)
        if client is not None:
            self._lose_trials(turn, connection)
            del self.state.clients[connection]
            if self.state.recovering:
                self._recovery.lost(turn, client.pid)
            if client.finishes:
                self._overrides.gone(turn, client)
        for key, waiting in list(self.state.early.items()):
            if connection in waiting:
                waiting.remove(connection)
            if not waiting:
                del self.state.early[key]
        study = self.state.studies.get(client.study or "") if client else None
        if study is None:
            return False
        assert client is not None, "a study is served to a client"
        was_plain = study.is_plain
        study.workers.discard(connection)
        if client.creation_names:  # it may have created a trial
            study.lost_creations.append(client.creation_names)
        if connection in study.idle_workers:
            study.idle_workers.remove(connection)
        if study.driver == connection:
            study.driver = None
            failures.forget_losses(turn, study)
        if study.is_plain and not was_plain:
            study.cancel_drain()
        self.state.cancel_reservations(study, only_impossible=True)
        self._forget_unused(study)
        return True

    def _lose_trials(self, turn: Turn, connection: int) -> None:
        for lease in self.state.leases():
            if lease.connection == connection:
                self._ends.holder_gone(turn, lease)
        for trial in self.state.trials():
            if trial.connection == connection:
                self._ends.process_gone(turn, trial, connection)
