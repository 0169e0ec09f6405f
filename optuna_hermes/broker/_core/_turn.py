"""Turn: one event being handled, its time, and the commands that answer it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.broker._core._broker_state import BrokerState, Lease
from optuna_hermes.broker._core._events import Claim, Command, EndLease, Kill, Send
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._protocol import FromBroker
from optuna_hermes.ledger._records import EventRecord, LeaseRecord, TrialRecord


@dataclass(kw_only=True)
class Turn:
    """Handling of one event at a time of the broker's clock; ``commands`` are its answer so far."""

    state: BrokerState
    now: float
    commands: list[Command] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """Wall clock seconds, as they go into the ledger."""
        return self.now + self.state.wall_offset

    def add(self, command: Command) -> None:
        self.commands.append(command)

    def send(self, connection: int, message: FromBroker, *, database: str | None = None) -> None:
        self.add(Send(connection=connection, message=message, database=database))

    def kill(self, connection: int, pid: int, reason: str) -> None:
        self.add(Kill(connection=connection, pid=pid, reason=reason))

    def kill_worker(self, connection: int | None, reason: str) -> bool:
        """SIGKILL a process if it is a worker, and return that: users' own are left alone."""
        client = self.state.client_of(connection)
        if client is None or client.role != "worker":
            return False
        self.kill(connection or 0, client.pid, reason)
        return True

    def log(self, study: str, number: int | None, kind: str, detail: dict[str, Any]) -> None:
        """Add an event of a study, or of one of its trials, to the event log."""
        self.add(EventRecord(study=study, number=number, kind=kind, at=self.wall, detail=detail))

    def end_lease(self, lease: Lease | LeaseRecord) -> None:
        """Close a lease in the ledger."""
        self.add(EndLease(study=lease.study, epoch=lease.epoch, ended=self.wall))

    # -- rows of trials ------------------------------------------------------------------------

    def save(self, trial: LiveTrial) -> None:
        """Write a trial as it is now, unless it is another host's.

        A trial that is in no process's memory has no owner: any host may carry it on.
        """
        study = self.state.studies[trial.study]
        if study.is_elsewhere(trial):
            return
        self.claim(trial)
        if study.broker is not None:
            trial.owner = study.broker if trial.in_process else None
        # As it was written first, though the clock may have been set since.
        submitted = trial.submitted + self.state.wall_offset
        if trial.row is not None:
            submitted = trial.row.submitted
        trial.row = TrialRecord(
            study=trial.study,
            number=trial.number,
            trial_id=trial.trial_id,
            state=trial.state,
            tier=trial.tier,
            host=self.state.host,
            units=trial.units,
            slices=trial.slices,
            suspensions=trial.suspensions,
            device_seconds=trial.device_seconds,
            energy_joules=trial.energy_joules,
            losses=trial.losses,
            submitted=submitted,
            updated=self.wall,
            owner=trial.owner,
        )
        self.add(trial.row)

    def claim(self, trial: LiveTrial) -> TrialRecord | None:
        """Claim a trial without an owner before it is written; return its row if that had to be."""
        study = self.state.studies[trial.study]
        if study.broker is None or study.owns(trial) or trial.row is None:
            return None
        self.add(Claim(study=trial.study, number=trial.number, slices=trial.row.slices))
        trial.owner = study.broker
        return trial.row

    def give_back(self, trial: LiveTrial) -> None:
        """Free an earlier broker's trial of this host if no process has it any more."""
        if self.state.studies[trial.study].owns(trial) and trial.live and not trial.in_process:
            self.save(trial)
