"""Outage of the database of a study's ledger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import OutageBegan, OutageEnded
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._core._watchdog import leave_out
from optuna_hermes.model import OUTAGE_SECONDS


def begin(turn: Turn, event: OutageBegan) -> None:
    """Cancel reservations and unsent yields where nothing can be granted."""
    for study in _known(turn, event.studies):
        if study.outage_since is None:
            study.outage_since, study.outage_reason = turn.now, event.reason
        turn.state.cancel_reservations(study)
    for lease in turn.state.leases():
        if lease.study in event.studies and lease.epoch in event.uncommitted:
            lease.uncommitted = True
        if lease.epoch in event.unsent_yields:
            lease.yielding = None
            trial = turn.state.trial_of(lease)
            if trial is not None:
                trial.requested_tier = None
            for slot in turn.state.slots_of(lease):  # another study's may be waiting for it
                if slot.reservation is not None:
                    turn.state.unreserve(slot.reservation)


def end(turn: Turn, event: OutageEnded) -> None:
    """End an outage: uncommitted leases begin now, and no worker was silent meanwhile."""
    for study in _known(turn, event.studies):
        if study.outage_since is not None:
            leave_out(turn.state, study.outage_since, turn.now, study.spec.key)
        study.outage_since = None
    for lease in turn.state.leases():
        if lease.study in event.studies and lease.uncommitted:
            lease.uncommitted = False
            # The trial learns of its lease only now: its slice is as long as it was to be.
            lease.deadline += turn.now - lease.slice_started
            lease.started = lease.slice_started = lease.last_progress = turn.now


def wakeups(state: BrokerState) -> Iterator[float]:
    """Times at which an outage has lasted too long."""
    for study in state.studies.values():
        if study.outage_since is not None and not (study.draining or study.is_plain):
            yield study.outage_since + OUTAGE_SECONDS


def give_up(turn: Turn) -> None:
    """Give up studies whose database has been away for too long.

    Trials of plain Optuna could not be suspended to disk: they wait until it is back.
    """
    for study in turn.state.studies.values():
        since = study.outage_since
        if since is None or study.problem or study.is_plain:
            continue
        if turn.now >= since + OUTAGE_SECONDS:
            study.problem = (
                f"The database did not answer for {OUTAGE_SECONDS:.0f} s, so every trial was "
                f"suspended to disk: bring it back, then run the same command again. "
                f"{study.outage_reason}"
            )


def _known(turn: Turn, keys: tuple[str, ...]) -> list[Study]:
    return [turn.state.studies[key] for key in keys if key in turn.state.studies]
