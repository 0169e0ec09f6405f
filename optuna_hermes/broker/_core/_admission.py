"""Admission of studies and trials, and refusals of messages that are out of place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import get_args

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import BrokerState, Client
from optuna_hermes.broker._core._events import EndLease, Refreshed, SaveOverride, StudyRead
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Failures, Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import Params
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.model import Checkpoint, Curve, TrialView
from optuna_hermes.policies import make_policy

KEPT_CHECKPOINTS = 2
"""Newest checkpoints of a trial that are kept; the older is for when the newest cannot be read."""

_OF_OWN_STUDY = (wire.KeepWorkers, wire.Drain, wire.GiveUp, wire.WatchStudy)
_SAID_BY: dict[type, tuple[str, ...]] = {
    wire.Ready: ("worker",),
    # A worker comes back to a new broker with a trial that has not begun.
    wire.Register: ("plain", "worker"),
    wire.Reattach: ("worker", "plain"),
    **dict.fromkeys((wire.OpenStudy, wire.Describe, *_OF_OWN_STUDY), ("driver",)),
    **dict.fromkeys(get_args(wire.UserCommand), ("viewer",)),
}


def misplaced(client: Client, message: wire.FromClient) -> str | None:
    """Reason why a client may not send this message, or not now; None if it may."""
    name, roles = type(message).__name__, _SAID_BY.get(type(message))
    if roles is None:
        return None
    if client.role not in roles:
        return f"{name} is said by a {roles[0]}, not by a {client.role}: connect as one."
    if isinstance(message, _OF_OWN_STUDY):
        own = client.study == message.study
        return None if own else f"A driver says {name} of its own study only: open it first."
    again = isinstance(message, wire.OpenStudy) and client.study == message.study.key
    if client.study is not None and not isinstance(message, wire.Describe) and not again:
        return f"A connection says {name} once, but this one serves a study already: open another."
    return None


def refusal(state: BrokerState, study: Study, event: StudyRead) -> wire.Refused | None:
    """Refusal of a client's request for a study that is read; None if there is no reason."""
    message = event.message
    if isinstance(message, wire.OpenStudy):
        pid = None if study.driver == event.connection else state.pid_of(study.driver)
        if pid is None:
            return None
        reason = (
            f"Study {study.spec.name!r} is already being optimized by process {pid} on this host: "
            "wait for it, or end it with Ctrl-C."
        )
        return wire.Refused(reason=reason, driver_pid=pid)
    if not isinstance(message, wire.Register):
        return None
    trial = study.trials.get(message.number)
    taken = trial is not None and trial.live and study.is_elsewhere(trial)
    if study.is_plain and study.problem:
        return wire.Refused(reason=study.problem, taken=taken)
    if trial is None:
        return None
    finishing = study.override_of(trial) == "finishing"
    if taken:
        why = f"is trained on another host ({trial.host}): end it there first."
    elif finishing:
        why = "is about to be finished: create another one."
    elif not trial.live:
        why = f"has ended ({trial.state}): create another one."
    elif trial.connection is not None:
        pid = state.pid_of(trial.connection)
        why = f"is trained by process {pid} already: end that one first."
    else:
        return None
    again = not (taken or finishing)
    return wire.Refused(reason=f"Trial {trial.number} {why}", taken=taken, again=again)


def admit_study(turn: Turn, event: StudyRead) -> Study:
    """Study of a message, read from its ledger unless a living process holds part of it."""
    turn.state.epoch = max(turn.state.epoch, event.last_epoch)
    spec = event.message.study
    study = turn.state.studies.get(spec.key)
    if study is None or not study.has_processes:
        study = Study(spec=spec, policy=make_policy(spec.policy))
        study.kept_memory = event.memory
        study.restore_memory(event.memory)
        study.broker = turn.state.instance if event.shared else None
        _take_overrides(turn, study, event)
        turn.state.studies[spec.key] = study
        for trial in known_trials(turn.state, event, turn.now):
            study.add(trial)
        _keep_unclaimed_leases(turn, study, event)
        _count_lost_leases(study, event)
        _settle_owners(turn, study, event)
    return study


def _take_overrides(turn: Turn, study: Study, event: StudyRead) -> None:
    """Take the overrides from the ledger; ``finishing`` is a hold until it is requested again."""
    study.overrides = dict(event.overrides)
    for number, override in event.overrides.items():
        if override == "finishing":
            study.overrides[number] = "held"
            turn.add(SaveOverride(study=study.spec.key, number=number, override="held"))


def _settle_owners(turn: Turn, study: Study, event: StudyRead) -> None:
    """Settle the owner of each trial; stored ones of this host's earlier broker are free."""
    hosts = {host.instance for host in event.hosts}
    records = {record.number: record for record in event.trials}
    spoken_of = getattr(event.message, "number", None)
    for number, trial in study.trials.items():
        if study.is_elsewhere(trial) and trial.owner in hosts:
            # A trial without a process counts as stored; with its own broker it may well train.
            trial.show_as(records[number].state)
        elif study.is_elsewhere(trial):
            trial.owner = None
        elif number != spoken_of:
            turn.give_back(trial)
    study.opening_elsewhere = count_opening_elsewhere(study, event.leases, hosts)


def count_opening_elsewhere(
    study: Study, leases: Iterable[LeaseRecord], hosts: Collection[str]
) -> int:
    """Number of leases of other hosts' brokers that open a trial which is not in the ledger yet."""
    new = (lease.owner for lease in leases if lease.number is None)
    return sum(1 for owner in new if owner in hosts and owner != study.broker)


def _keep_unclaimed_leases(turn: Turn, study: Study, event: StudyRead) -> None:
    """Keep the leases of this broker whose processes may come back, and end the others.

    One without an owner is of an earlier broker of this host. In a file, which one broker at a time
    trains, it is so whatever the host was called: a container has another name after each start.
    """
    holders = [each.holder for each in turn.state.recovering.values()]
    recovering = {holder.epoch for holder in holders}
    if isinstance(event.message, wire.Reattach):
        recovering.add(event.message.epoch)
    for lease in event.leases:
        ours = lease.owner == study.broker or (
            lease.owner is None and lease.host == turn.state.host
        )
        if ours and lease.epoch in recovering:
            study.unclaimed_leases[lease.epoch] = lease
        elif ours:  # at a time that nobody knows
            turn.add(EndLease(study=lease.study, epoch=lease.epoch, ended=None))
    for holder in holders:
        if holder.study == study.spec.key and holder.number in study.trials:
            study.trials[holder.number].recovering = True


def _count_lost_leases(study: Study, event: StudyRead) -> None:
    """Count the device time of leases whose processes will not come back to say it."""
    comes_back = event.message.number if isinstance(event.message, wire.Reattach) else None
    for number, trial in study.trials.items():
        if not trial.recovering and number != comes_back:
            trial.count_reported()


def admit_trial(study: Study, number: int, trial_id: int, now: float) -> LiveTrial:
    """Return a trial of the study, added if it is new."""
    if number not in study.trials:
        study.add(
            LiveTrial(
                study=study.spec.key,
                number=number,
                trial_id=trial_id,
                state="pending",
                submitted=now,
                waiting_since=now,
            )
        )
    return study.trials[number]


def take_charge(
    state: BrokerState, study: Study, connection: int, message: wire.OpenStudy, now: float
) -> list[LiveTrial]:
    """Give the study to a driver, and take from it what Optuna knows better than the ledger.

    Returns:
        Trials to save: those that ended in Optuna, were never registered, or lose their losses.
    """
    changed_policy = message.study.policy != study.spec.policy
    study.spec, study.policy = message.study, make_policy(message.study.policy)
    if changed_policy:  # since the workers began that came back to a new broker before
        study.restore_memory(study.kept_memory)
    study.kept_memory = None
    study.driver, study.max_alive = connection, message.max_alive
    study.limit, study.fixed = message.limit, message.fixed
    study.foreign = set(message.foreign) - study.trials.keys()
    study.cancel_drain()
    study.device_seconds = message.device_seconds
    study.ends_at = None if message.seconds_left is None else now + message.seconds_left
    study.retry_at, study.failed_reads, study.failed_returns = {}, 0, {}
    study.failed_in_a_row, study.opens_again_at = [], 0.0
    # A driver that comes back to a new broker brings its counters along.
    if message.counted is None:
        study.switches, study.overhead_seconds, study.spent_seconds = 0, {}, 0.0
        study.failures = Failures()
    else:
        study.switches += message.counted.switches
        for kind, seconds in message.counted.overhead_seconds.items():
            if seconds:  # else trials have trained, as it seems
                study.add_overhead(kind, seconds)
        study.spent_seconds += message.counted.spent_seconds
    changed = _with_new_chances(study) if message.counted is None else []
    for number, ending in message.ended.items():
        trial = study.trials.get(number)
        if trial is not None and trial.live and trial.connection is None:
            trial.end(ending)
            changed.append(trial)
    recovering = {(each.holder.study, each.holder.number) for each in state.recovering.values()}
    for number, trial_id in message.adopted.items():
        if number not in study.trials:
            changed.append(admit_trial(study, number, trial_id, now))
            # The earlier broker died before its ledger knew of the trial; its process may live.
            changed[-1].recovering = (study.spec.key, number) in recovering
    return changed


def listed(
    study: Study, message: wire.OpenStudy, described: Mapping[int, Params]
) -> dict[int, TrialView]:
    """The trials of a fixed list as policies see them; none unless all parameters are known.

    Those that are about to begin, here or elsewhere, are among them until they have begun.
    """
    left = [number for number in message.waiting if number not in study.trials]
    count = max(0, (study.most_known or 0) - len(study.trials))
    if not (message.fixed and len(left) >= count and all(map(described.get, left[:count]))):
        return {}
    return {
        number: TrialView(number=number, state="pending", params=described[number])
        for number in left[:count]
    }


def _with_new_chances(study: Study) -> list[LiveTrial]:
    """Reset the losses of trials under an earlier driver, which may have caused them."""
    lost = [trial for trial in study.trials.values() if trial.losses and trial.live]
    found = [trial for trial in lost if not study.is_elsewhere(trial)]
    for trial in found:
        trial.losses, trial.lost_at = 0, None
    return found


def known_trials(
    state: BrokerState, event: StudyRead | Refreshed, now: float
) -> Iterator[LiveTrial]:
    """The trials as their ledger left them, stored or to begin again: their processes are gone."""
    # Grouped once: a study may have thousands of trials.
    saved: dict[int, list[Checkpoint]] = {}
    for each in event.checkpoints:
        saved.setdefault(each.number, []).append(each.checkpoint)
    for known in event.trials:
        curve = event.curves.get(known.number, Curve())
        trial = LiveTrial(
            study=known.study,
            number=known.number,
            trial_id=known.trial_id,
            state=known.state,
            submitted=known.submitted - state.wall_offset,
            curve=curve,
            waiting_since=now,
            units=max(known.units, curve.units),
            slices=known.slices,
            suspensions=known.suspensions,
            device_seconds=known.device_seconds,
            energy_joules=known.energy_joules,
            losses=known.losses,
            furthest=curve.units,
            host=known.host if known.slices else None,
            checkpoints=saved.get(known.number, [])[-KEPT_CHECKPOINTS:],
            owner=known.owner,
            row=known,
        )
        if trial.live:
            trial.leave_process()
        yield trial
