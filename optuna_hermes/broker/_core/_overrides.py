"""Overrides of single trials, and changes of a study's policy. Pure.

An override is only noted when it arrives. However a trial on hold has come to a device, or is about
to, it is asked to leave it at the end of every event: see ``enforce``.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _retries as retries
from optuna_hermes.broker._core._broker_state import BrokerState, Client, Lease
from optuna_hermes.broker._core._events import Refreshed, SaveMemory, SaveOverride
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._scheduler import Scheduler
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.model import Override
from optuna_hermes.policies import make_policy


class Overrides:
    """Keeps and enforces the overrides of trials."""

    def __init__(self, state: BrokerState, memory: MemoryManager, scheduler: Scheduler) -> None:
        self._state = state
        self._memory = memory
        self._scheduler = scheduler

    def carry_out(self, turn: Turn, connection: int, message: wire.UserCommand) -> None:
        """Carry out a request, or refuse it with the reason."""
        answer = self._answer(turn, connection, message)
        # Who waits for trials to stop asks again and again, mostly in vain.
        if turn.commands or not isinstance(message, wire.Finish):
            self.enforce(turn)
            self._scheduler.schedule(turn)
        turn.send(connection, answer)

    def enforce(self, turn: Turn) -> None:
        """Cancel reservations and revoke leases of trials on hold."""
        for reservation in self._state.reservations():
            if self._is_held(reservation.study, reservation.number):
                self._state.unreserve(reservation)
        for lease in self._state.leases():
            if lease.yielding or not self._is_held(lease.study, lease.number):
                continue
            study = self._state.studies[lease.study]
            if study.outage_since is None:  # else its devices could not be granted
                lease.deadline = min(lease.deadline, turn.now)
                self._leave(turn, study, lease)

    def refreshed(self, turn: Turn, event: Refreshed) -> None:
        """Take in overrides that were set on other hosts."""
        study = self._state.studies.get(event.study)
        if study is None or not event.overrides:
            return
        study.overrides = _changed(study, event.overrides)
        for trial in study.trials.values():
            if study.override_of(trial) == "finishing":
                self._stop(turn, study, trial)
        self.enforce(turn)

    def gone(self, turn: Turn, client: Client) -> None:
        """Hold trials that a client was finishing when it left: Optuna does not know of it."""
        for key, number in client.finishes:
            study = self._state.studies.get(key)
            trial = None if study is None else study.trials.get(number)
            others = (each.finishes for each in self._state.clients.values())
            if study is None or trial is None or any((key, number) in each for each in others):
                continue
            if study.override_of(trial) == "finishing":
                self._override(turn, study, trial, "held")

    # -- inside --------------------------------------------------------------------------------

    def _answer(
        self, turn: Turn, connection: int, message: wire.UserCommand
    ) -> wire.Accepted | wire.Refused:
        study = self._state.studies.get(message.study)
        if study is None:
            return wire.Refused(reason=_NOT_SERVED)
        client = self._state.clients[connection]
        reason = self._refusal(study, client, message)
        if reason is not None:
            return wire.Refused(reason=reason)
        if isinstance(message, wire.ChangePolicy):
            self._change_policy(turn, study, message)
            return wire.Accepted()
        trials = [study.trials[number] for number in message.numbers]
        for trial in trials:
            self._do(turn, connection, study, trial, message)
        finishes = isinstance(message, wire.Finish)
        return wire.Accepted(waits=finishes and any(_waits(study, trial) for trial in trials))

    def _do(
        self, turn: Turn, connection: int, study: Study, trial: LiveTrial, message: wire.UserCommand
    ) -> None:
        if isinstance(message, wire.SetOverrides):
            if message.override != "held":
                retries.try_again(study, trial.number)
            self._override(turn, study, trial, message.override)
        elif isinstance(message, wire.Finish):
            self._state.clients[connection].finishes.add((trial.study, trial.number))
            self._override(turn, study, trial, "finishing")
            self._stop(turn, study, trial)
        else:
            trial.end("done")
            turn.save(trial)
            turn.log(trial.study, trial.number, "finished", {"units": trial.curve.units})

    def _refusal(self, study: Study, asker: Client, message: wire.UserCommand) -> str | None:
        numbers = () if isinstance(message, wire.ChangePolicy) else message.numbers
        # What the asker has begun goes on, or is taken back: else the trials would stay on hold.
        begun = numbers and asker.finishes.issuperset((message.study, each) for each in numbers)
        if study.outage_since is not None and not begun:
            return f"The database of study {study.spec.name!r} is away: try again when it is back."
        reasons = (self._refusal_of(study, asker, each, message) for each in numbers)
        return next((reason for reason in reasons if reason is not None), None)

    def _refusal_of(
        self, study: Study, asker: Client, number: int, message: wire.UserCommand
    ) -> str | None:
        trial = study.trials.get(number)
        if trial is None:
            return (
                f"Study {study.spec.name!r} has no trial {number} that ever had a device: see "
                "`optuna-hermes status`."
            )
        if not trial.live:
            return f"Trial {number} has ended ({trial.state}): leave it out."
        finishing = study.override_of(trial) == "finishing"
        # Who has ordered it may take it back.
        others = finishing and (trial.study, number) not in asker.finishes
        if isinstance(message, wire.SetOverrides) and others:
            return f"Trial {number} is about to be finished: say `finish` again, if it is not."
        if isinstance(message, wire.Finished) and not finishing:
            return f"Trial {number} was not ordered to finish: say `finish`."
        if isinstance(message, wire.Finished) and _waits(study, trial):
            return f"Trial {number} has not stopped yet: say `finish` again."
        client = self._state.client_of(trial.connection)
        if isinstance(message, wire.Finish) and client is not None and client.role == "plain":
            return (
                f"Trial {number} is trained by process {client.pid}, which is not this package's "
                "to stop: end that one first, or let it be with `hold`."
            )
        return None

    def _override(
        self, turn: Turn, study: Study, trial: LiveTrial, override: Override | None
    ) -> None:
        before = study.override_of(trial)
        if override == before:
            return
        study.overrides = _changed(study, {trial.number: override})
        turn.add(SaveOverride(study=trial.study, number=trial.number, override=override))
        turn.log(trial.study, trial.number, override or f"no longer {before}", {})

    def _is_held(self, key: str, number: int | None) -> bool:
        study = self._state.studies[key]
        return number is not None and study.is_held(study.trials[number])

    def _leave(self, turn: Turn, study: Study, lease: Lease) -> None:
        trial = self._state.trial_of(lease)
        ends = trial is not None and study.override_of(trial) == "finishing" and trial.can_store
        self._scheduler.ask_to_yield(turn, lease, to_disk=ends)

    def _stop(self, turn: Turn, study: Study, trial: LiveTrial) -> None:
        """Let a parked trial that is to be finished leave its process, over disk if it can.

        Its last values reach Optuna on the way. The process of one that cannot be
        stored is killed, if it is a worker.
        """
        if (
            trial.state not in ("parked", "pending")
            or trial.connection is None
            or trial.requested_tier
        ):
            return
        if trial.can_store and trial.state == "parked":
            self._memory.move(turn, trial, "disk")
        else:
            turn.kill_worker(trial.connection, f"trial {trial.number} is finished as it is")

    def _change_policy(self, turn: Turn, study: Study, message: wire.ChangePolicy) -> None:
        before = study.spec.policy
        study.spec = structs.replace(study.spec, policy=message.policy, folders=message.folders)
        study.policy, study.powered_down = make_policy(message.policy), frozenset()
        if message.policy == before:
            return
        study.memory = None  # another one could not use it
        turn.add(SaveMemory(study=study.spec.key, memory=study.saved_memory))
        turn.log(study.spec.key, None, "policy", {"from": before, "to": message.policy})


_NOT_SERVED = "No study of this key is served by this broker: run it with `optuna-hermes optimize`."


def _waits(study: Study, trial: LiveTrial) -> bool:
    """True if any process may still have a trial."""
    return trial.connection is not None or trial.recovering or study.is_elsewhere(trial)


def _changed(study: Study, changes: Mapping[int, Override | None]) -> dict[int, Override]:
    overrides = {**study.overrides, **changes}
    return {number: each for number, each in overrides.items() if each is not None}
