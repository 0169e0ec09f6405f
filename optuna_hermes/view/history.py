"""The history of a study, read from its ledger, and the states that its trials can still have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from optuna_hermes._job_environment import host_name
from optuna_hermes.model import LIVE_STATES, add_report

if TYPE_CHECKING:
    from optuna_hermes._optuna_tables import StudyFacts
    from optuna_hermes.broker._protocol import BrokerStatus
    from optuna_hermes.ledger import HostRecord, Ledger, TrialRecord


class Point(NamedTuple):
    """A value of a trial, as the user reported it, NaN and infinite ones too.

    ``unit`` counts from 1, ``device_seconds`` are the trial's until then, ``at`` is Unix time.
    """

    unit: int
    value: float
    device_seconds: float
    at: float


class Bar(NamedTuple):
    """The lease of one device (``host/id``) to a trial, in Unix time.

    ``trial`` is None for a new trial without a number, ``end`` while the lease lasts. A lease may
    have several devices, and so several bars with its ``epoch``.
    """

    device: str
    trial: int | None
    begin: float
    end: float | None
    epoch: int


def end_of(bar: Bar, trials: Mapping[int, TrialHistory], held: Container[int] = ()) -> float | None:
    """The end of a bar, None while its trial, one of those by number, trains.

    A new trial without a number trains if its epoch is among those that are ``held``. After a
    broker that was killed during the lease, the trial's last report is all that is known.
    """
    trial = None if bar.trial is None else trials.get(bar.trial)
    trains = bar.epoch in held if bar.trial is None else trial and trial.state == "running"
    if bar.end is not None or trains:
        return bar.end
    points = () if trial is None else trial.points
    return max([bar.begin, *(point.at for point in points)])


def held_epochs(broker: BrokerStatus | None, key: str) -> frozenset[int]:
    """The epochs of the leases that a study has on a broker's devices now."""
    holders = (device.holder for device in (broker.devices if broker else ()))
    # Studies of two databases may have leases of one epoch.
    return frozenset(each.epoch for each in holders if each and each.key == key)


class Best(NamedTuple):
    """A value that was better than all before it, after ``device_seconds`` of all trials.

    Of equal values that of the trial with the lowest number is the better one.
    """

    device_seconds: float
    value: float
    trial: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialHistory:
    """The history of one trial."""

    number: int
    state: str  # as in ``model.TrialStatus``, as far as it can be known now
    record: TrialRecord  # its row of the ledger, whose own ``state`` may be older
    override: str | None = None  # see ``model.Override``; None once the trial is over
    points: tuple[Point, ...] = ()  # each unit once, as it was last reported, in ascending order


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyHistory:
    """The history of a study."""

    key: str
    maximize: bool = False
    trials: tuple[TrialHistory, ...] = ()  # by number, without those that never had a device
    bars: tuple[Bar, ...] = ()  # in order of epoch
    position: int = 0  # of the last report that was read

    @property
    def device_seconds(self) -> float:
        """Device time of all trials, without leases that have not ended."""
        return math.fsum(trial.record.device_seconds for trial in self.trials)

    @property
    def watt_hours(self) -> float | None:
        """Energy of all trials, as far as known; None if no trial's is known."""
        return total_watt_hours(trial.record for trial in self.trials)


def read_history(
    ledger: Ledger,
    facts: StudyFacts,
    *,
    broker: BrokerStatus | None = None,
    silent: bool = False,
    before: StudyHistory | None = None,
) -> StudyHistory:
    """Read the history of a study; only what is newer than ``before``, an earlier result.

    A trial, or its points, that did not change is the same object as before. ``broker`` and
    ``silent`` are as for ``trial_states``.
    """
    key = str(facts.key)
    if before is None or before.key != key:
        before = StudyHistory(key=key, maximize=facts.sign < 0)
    known = {trial.number: trial for trial in before.trials}
    reports = ledger.load_reports(key, after=before.position)
    new: dict[int, list[Point]] = defaultdict(list)
    for _, report in reports:
        point = Point(report.unit, facts.sign * report.value, report.device_seconds, report.at)
        new[report.number].append(point)
    # After the reports, so that each of them finds its trial.
    records = ledger.load_trials(key)
    states = trial_states(ledger, facts, records, broker, silent=silent)
    overrides = live_overrides(ledger, key, states)
    trials = []
    for record in records:
        number, old = record.number, known.get(record.number)
        trial = TrialHistory(
            number=number,
            state=states[number],
            record=record,
            points=_merged(old.points if old else (), new.get(number, ())),
            override=overrides.get(number),
        )
        trials.append(old if old is not None and old == trial else trial)
    return StudyHistory(
        key=key,
        maximize=before.maximize,
        trials=tuple(trials),
        bars=_bars(ledger, key, before.bars),
        position=reports[-1][0] if reports else before.position,
    )


def best_so_far(history: StudyHistory) -> tuple[Best, ...]:
    """The values that were better than all before them, in the order of their time."""
    # The device time of a trial counts up to its last report: leases say nothing about values.
    reports = ((point, trial) for trial in history.trials for point in trial.points)
    spent, had, found = 0.0, dict[int, float](), list[Best]()
    sign = -1.0 if history.maximize else 1.0
    best = math.inf, 0
    for point, trial in sorted(reports, key=lambda each: each[0].at):
        number = trial.number
        # After a crash units are trained again: a report may state less device time than before.
        spent += max(0.0, point.device_seconds - had.get(number, 0.0))
        had[number] = max(point.device_seconds, had.get(number, 0.0))
        # A trial that has failed is never the best one.
        if not math.isfinite(point.value) or trial.state == "failed":
            continue
        # Of equal ones the same as a broker's status has.
        if (sign * point.value, number) < best:
            best = sign * point.value, number
            found.append(Best(spent, point.value, number))
    return tuple(found)


def trial_states(
    ledger: Ledger,
    facts: StudyFacts,
    records: Collection[TrialRecord],
    broker: BrokerStatus | None,
    *,
    silent: bool = False,
    hosts: Collection[HostRecord] | None = None,
) -> dict[int, str]:
    """The state of each trial: its end in Optuna, else the ledger's if that can still be true.

    ``broker`` is the status of this host's broker, None if there is none; with ``silent`` it does
    not answer, and its trials are as the ledger says. The live ``hosts`` are read unless given.
    """
    from optuna_hermes.ledger import live_hosts

    alive = {host.instance for host in (live_hosts(ledger) if hosts is None else hosts)}
    key, here = str(facts.key), (None, host_name())
    served = silent or (broker is not None and broker.study(key) is not None)
    # A broker of another runtime directory may have them.
    served = served or ledger.is_locked(key)
    # A broker that was killed could not write down what became of its trials. One that a process
    # may have is as the ledger says: checkpoints decide for the others. Without an owner there is
    # one broker, and the host may have had another name.
    lost = {
        record.number
        for record in records
        if record.state in ("running", "parked")
        and not (served if record.host in here or record.owner is None else record.owner in alive)
    }
    stored = {each.number for each in ledger.load_checkpoints(key)} if lost else set()
    states: dict[int, str] = {record.number: record.state for record in records}
    states |= {number: "stored" if number in stored else "pending" for number in lost}
    return states | {number: end for number, end in facts.ends.items() if number in states}


def live_overrides(ledger: Ledger, key: str, states: Mapping[int, str]) -> dict[int, str]:
    """The overrides of trials that have not ended."""
    # The ledger keeps those of others, too.
    overrides = ledger.load_overrides(key).items()
    return {number: each for number, each in overrides if states.get(number) in LIVE_STATES}


def total_watt_hours(records: Iterable[TrialRecord]) -> float | None:
    """Energy of trials, as far as known; None if no trial's is known."""
    known = [record.watt_hours for record in records if record.watt_hours is not None]
    return math.fsum(known) if known else None


def _merged(before: tuple[Point, ...], new: Sequence[Point]) -> tuple[Point, ...]:
    if not new:
        # The same object: the web page sees by that that the curve has not changed.
        return before
    units = {point.unit: point for point in before}
    for point in new:
        add_report(units, point.unit, point)
    return tuple(units.values())


def _bars(ledger: Ledger, key: str, before: tuple[Bar, ...]) -> tuple[Bar, ...]:
    # Ended leases do not change: those from the first one that had not ended are read again.
    live = (bar.epoch for bar in before if bar.end is None)
    since = min(live, default=before[-1].epoch + 1 if before else 0)
    kept = tuple(bar for bar in before if bar.epoch < since)
    new = (
        Bar(device, lease.number, lease.started, lease.ended, lease.epoch)
        for lease in ledger.load_leases(key, since=since)
        for device in lease.devices
    )
    return (*kept, *new)
