"""Prefetch: bringing the next trial nearer while another still trains. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Prepare


class Prefetch:
    """Asks the policies of a ``BrokerState``, once in a slice, for their decision at its end.

    What is found is a guess: nothing is reserved, and the policy is asked again when it counts.
    """

    def __init__(
        self, state: BrokerState, policy_runner: PolicyRunner, memory: MemoryManager
    ) -> None:
        self._state = state
        self._policy_runner = policy_runner
        self._memory = memory

    def due(self, lease: Lease) -> float | None:
        """Time to look ahead: as long before the slice's end as bringing a trial back takes."""
        if lease.looked or lease.yielding or lease.number is None:
            return None
        study = self._state.studies[lease.study]
        if study.away_since is not None:
            return None
        # The tier of the next trial is not known yet: the slower way back counts.
        cost = max(study.cost("host"), study.cost("disk"))
        lead = min(cost, (lease.deadline - lease.slice_started) / 2)
        if lead <= 0 or not any(trial.tier in ("host", "disk") for trial in study.trials.values()):
            return None
        return lease.deadline - lead

    def look(self, turn: Turn) -> None:
        """Look ahead where it is time to."""
        if self._state.recovering:
            return
        for lease in self._state.leases():
            due = self.due(lease)
            if due is not None and due <= turn.now < lease.deadline:
                lease.looked = True
                slots = self._state.slots_of(lease)
                self._look(turn, self._state.studies[lease.study], slots)

    def _look(self, turn: Turn, study: Study, slots: Sequence[Slot]) -> None:
        decision = self._policy_runner.decide(study, slots, turn.now)
        number = next((a.trial for a in decision.assignments), None)
        trial = None if number is None else study.trials[number]
        if trial is None or trial.asked is not None:
            return
        if trial.tier == "disk" and trial.connection is None:
            self._prepare(turn, study, trial)
        elif trial.tier == "host" and self._memory.fits_beside(slots[0], trial):
            self._memory.recall(turn, trial)

    def _prepare(self, turn: Turn, study: Study, trial: LiveTrial) -> None:
        """Let a worker that waits read a checkpoint; it gets that trial if it is free then."""
        connection = worker_for(self._state, study, trial)
        if connection is None or self._state.clients[connection].prepared == trial.number:
            return
        self._state.clients[connection].prepared = trial.number
        message = Prepare(number=trial.number, checkpoints=tuple(reversed(trial.checkpoints)))
        turn.send(connection, message)


def worker_for(state: BrokerState, study: Study, trial: LiveTrial | None) -> int | None:
    """Best worker that waits: one that has prepared for this trial, else one for none."""

    def distance(connection: int) -> int:
        prepared = state.clients[connection].prepared
        if prepared is None:
            return 1
        return 0 if trial is not None and prepared == trial.number else 2

    return min(study.idle, key=distance, default=None)
