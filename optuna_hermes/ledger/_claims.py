"""Ownership of trials: rules of claims, and the errors of writes that break them; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from optuna_hermes.errors import NotOwnerError, StaleEpochError, StudyFullError
from optuna_hermes.ledger._records import HostRecord, LeaseRecord, TrialRecord

_UNFINISHED = ("pending", "running", "parked", "stored")
_WAITING = ("pending", "stored")


def claimable(
    trial: TrialRecord,
    hosts: Iterable[HostRecord],
    *,
    host: str,
    instance: str,
    dead_after_seconds: float,
) -> bool:
    """True if a broker may claim a trial; see the rules of ``Ledger``.

    Args:
        trial: the trial.
        hosts: all brokers that the ledger knows.
        host: the host of the broker that claims.
        instance: the broker that claims.
        dead_after_seconds: age of a holder's heartbeat from which it is gone.
    """
    live = [known for known in hosts if known.age_seconds < dead_after_seconds]
    if trial.state not in _UNFINISHED:
        return False
    if trial.owner is not None:
        return trial.owner == instance or all(known.instance != trial.owner for known in live)
    if trial.state in _WAITING or trial.host in (None, host):
        return True
    # Without an owner it is held by its host, whose broker trained it on its own.
    return all(known.name != trial.host for known in live)


def claimed(trial: TrialRecord, *, host: str, instance: str, stored: bool) -> TrialRecord:
    """The record of a trial after a claim; its former holder is gone.

    Args:
        trial: the trial as it was.
        host: the host of the broker that claimed it.
        instance: that broker.
        stored: whether it has a checkpoint.
    """
    if trial.owner == instance:
        return trial
    return replace(
        trial,
        state="stored" if stored else "pending",
        tier="disk" if stored else None,
        host=host,
        owner=instance,
    )


def not_owner(study: str, number: int, owner: str | None, by: str | None) -> NotOwnerError:
    """The error of a broker that writes another broker's trial."""
    return NotOwnerError(
        f"Run {number} of study {study} belongs to {_broker(owner)}, so {_broker(by)} may not "
        "write it: another broker may have taken it over. End its process if there is one, and "
        "claim it before it is run again.",
        number,
    )


def study_full(lease: LeaseRecord, limit: int, known: int) -> StudyFullError:
    """The error of a lease for a trial beyond the study's limit."""
    return StudyFullError(
        f"Study {lease.study} shall have at most {limit} trials, and has {known} with those that "
        "other leases are for. Open no further trial, unless one of these leases ends without."
    )


def stale_epoch(epoch: int, last: int) -> StaleEpochError:
    """The error of a lease whose epoch is not above all others."""
    return StaleEpochError(
        f"A lease's epoch must be above every earlier one, which is {last}, but got {epoch}. "
        "Another broker was faster: read last_epoch() again and decide anew."
    )


def _broker(instance: str | None) -> str:
    return "no broker" if instance is None else f"broker {instance}"
