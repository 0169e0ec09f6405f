"""Status of a broker, made of its state. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, get_args

from optuna_hermes.broker._core import _failures as failures
from optuna_hermes.broker._core._broker_state import BrokerState, Lease, Slot, taken_joules
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._protocol import (
    BestTrial,
    BrokerStatus,
    DeviceStatus,
    HolderStatus,
    HostMemory,
    ResidentStatus,
    StudyStatus,
    TrialCounts,
    TrialRow,
    WorkerCounts,
)
from optuna_hermes.ledger._secrets import without_password
from optuna_hermes.model import OverheadKind, Override

if TYPE_CHECKING:
    from optuna_hermes.broker._core._curve_shape import CurveShape
    from optuna_hermes.broker._core._memory_manager import MemoryManager
    from optuna_hermes.curves import CurveCache

JOULES_PER_WATT_HOUR = 3600.0

MAX_LISTED = 5_000
"""Trials up to which all are listed; beyond, of the largest studies those that have a process."""


def broker_status(
    state: BrokerState,
    now: float,
    *,
    memory: MemoryManager,
    trials: bool,
    shapes: CurveCache[CurveShape] | None = None,
) -> BrokerStatus:
    """Return the devices with their holders, and the studies with their trials.

    Args:
        now: seconds of the broker's clock.
        memory: knows why a device cannot be granted, and what processes take of it.
        trials: whether to list every trial of every study.
        shapes: of the curves of the trials that are listed; None leaves them out.
    """
    chosen = _listed(state.studies.values()) if trials else {}
    listed = [chosen.get(key, []) for key in state.studies]
    # The curves of all studies in one call: the cache drops what the last call did not name.
    curves = [trial.curve for each in listed for trial in each]
    found = iter([None] * len(curves) if shapes is None else shapes.each(curves))
    return BrokerStatus(
        host=state.host,
        host_memory=HostMemory(
            used_bytes=state.host_used_bytes, budget_bytes=state.host_budget_bytes
        ),
        recovering=tuple(sorted({each.holder.pid for each in state.recovering.values()})),
        devices=all_devices(
            state, now, memory.problem, lambda slot: _residents(slot, state, memory)
        ),
        studies=tuple(
            study_status(
                study, state, now, tuple(_row(trial, study, next(found)) for trial in each)
            )
            for study, each in zip(state.studies.values(), listed, strict=True)
        ),
    )


def all_devices(
    state: BrokerState,
    now: float,
    problem: Callable[[Slot], str],
    residents: Callable[[Slot], Iterable[ResidentStatus]] = lambda slot: (),
) -> tuple[DeviceStatus, ...]:
    """The devices: why each cannot be granted, if it cannot, and who has memory of it."""
    return tuple(
        DeviceStatus(
            id=slot.device.id,
            kind=slot.device.kind,
            healthy=slot.device.healthy,
            memory_bytes=slot.device.memory_bytes,
            memory_free_bytes=slot.device.memory_free_bytes,
            power=slot.power,
            power_watts=slot.device.power_watts,
            energy_joules=slot.device.energy_joules,
            holder=None if slot.lease is None else _holder(slot.lease, state, now),
            problem=problem(slot),
            residents=tuple(residents(slot)),
            exclusive=slot.device.exclusive,
            part=slot.device.part,
        )
        for slot in state.slots.values()
    )


def _residents(slot: Slot, state: BrokerState, memory: MemoryManager) -> Iterator[ResidentStatus]:
    if slot.device.kind == "cpu":
        return
    holder = state.trial_of(slot.lease)
    parked = sorted(state.parked_on(slot), key=lambda trial: (trial.study, trial.number))
    for trial in (*([holder] if holder else []), *parked):
        # While it trains what it has changes with every batch.
        held = trial.need_bytes if trial is holder else trial.held_bytes
        yield ResidentStatus(
            key=trial.study,
            study=state.studies[trial.study].spec.name,
            trial=trial.number,
            pid=state.pid_of(trial.connection),
            tier=None if trial is holder else trial.tier,
            held_bytes=held,
            process_bytes=memory.process_bytes(slot, trial),
            measured=memory.context_of(slot, trial) is not None,
        )


def _holder(lease: Lease, state: BrokerState, now: float) -> HolderStatus:
    return HolderStatus(
        key=lease.study,
        study=state.studies[lease.study].spec.name,
        trial=lease.number,
        state="yielding" if lease.yielding else "running",
        pid=state.pid_of(lease.connection),
        epoch=lease.epoch,
        since_seconds=now - lease.started,
        left_seconds=max(0.0, lease.deadline - now),
        slice_seconds=lease.deadline - lease.slice_started,
    )


def study_status(
    study: Study, state: BrokerState, now: float, trials: tuple[TrialRow, ...] = ()
) -> StudyStatus:
    held = sum(lease.device_seconds(now) for lease in state.leases_of(study))
    return StudyStatus(
        key=study.spec.key,
        name=study.spec.name,
        policy=study.spec.policy,
        maximize=study.spec.maximize,
        policy_folders=study.spec.folders,
        driver_pid=state.pid_of(study.driver),
        draining=study.draining,
        problem=study.problem,
        problem_may_pass=study.problem_may_pass,
        outage_seconds=None if study.outage_since is None else now - study.outage_since,
        outage_reason="" if study.outage_since is None else study.outage_reason,
        held=_wanted(study, "held"),
        boosted=_wanted(study, "boosted"),
        finishing=_wanted(study, "finishing"),
        all_held=state.all_held(study),
        no_room=tuple(
            sorted(trial.number for trial in study.trials.values() if trial.waits_for_memory)
        ),
        finished=finished(study, state),
        unstarted=state.may_open(study).count,
        workers=WorkerCounts(alive=len(study.workers), idle=len(study.idle_workers)),
        counts=_counts(study),
        lost=tuple(failures.losses_shown(study)),
        failures=failures.shown(study.failures),
        device_seconds=held + sum(trial.device_seconds for trial in study.trials.values()),
        watt_hours=_watt_hours(_joules(study, state, now)),
        held_seconds=held,
        spent_seconds=held + study.spent_seconds,
        overhead_seconds={
            kind: study.overhead_seconds.get(kind, 0.0) for kind in get_args(OverheadKind)
        },
        switches=study.switches,
        best=_best(study),
        trials=trials,
        ledger_url=without_password(study.spec.ledger_url),
    )


def _wanted(study: Study, override: Override) -> tuple[int, ...]:
    trials = (
        study.trials.get(number) for number, each in study.overrides.items() if each == override
    )
    return tuple(sorted(trial.number for trial in trials if trial is not None and trial.live))


def _joules(study: Study, state: BrokerState, now: float) -> float | None:
    """Energy that all trials took, those that train now included; None if none of it is known."""
    known = [trial.energy_joules for trial in study.trials.values()]
    for lease in state.leases_of(study):
        known.append(taken_joules(state.slots_of(lease), lease, now))
    found = [joules for joules in known if joules is not None]
    return sum(found) if found else None


def _watt_hours(joules: float | None) -> float | None:
    return None if joules is None else joules / JOULES_PER_WATT_HOUR


def _listed(studies: Collection[Study]) -> dict[str, list[LiveTrial]]:
    """The trials of each study that are listed, by its key: a frame is bounded."""
    found = {
        study.spec.key: [each for each in study.trials.values() if each.connection is not None]
        for study in studies
    }
    left = MAX_LISTED - sum(map(len, found.values()))
    for study in sorted(studies, key=lambda each: len(each.trials)):
        left -= len(study.trials) - len(found[study.spec.key])
        if left < 0:
            break
        found[study.spec.key] = list(study.trials.values())
    return {key: sorted(each, key=lambda trial: trial.number) for key, each in found.items()}


def finished(study: Study, state: BrokerState) -> bool:
    """True if nothing of the study needs a process any more.

    When it is drained that is when every process could be freed; otherwise when every trial is done
    and no trial may still be created.
    """
    key = study.spec.key
    leases = (slot.lease or slot.reservation for slot in state.slots.values())
    if any(each and each.study == key for each in leases):
        return False
    if study.draining:
        alive = (trial for trial in study.trials.values() if trial.connection is not None)
        return not any(trial.can_store for trial in alive)
    if study.opening_elsewhere or state.count_begun(study):  # a trial begins, which has no row yet
        return False
    return not state.may_open(study).any and not any(trial.live for trial in study.trials.values())


def _counts(study: Study) -> TrialCounts:
    tally = dict.fromkeys(TrialCounts.__struct_fields__, 0)
    for trial in study.trials.values():
        tally[trial.state] += 1
    return TrialCounts(**tally)


def _best(study: Study) -> BestTrial | None:
    """The best value ever reported by a trial that has not failed."""
    lowest = [
        (_lowest(trial.curve.values), trial.number)
        for trial in study.trials.values()
        if trial.state != "failed"
    ]
    value, number = min(lowest, default=(math.inf, 0))
    shown = _shown(value, study)
    return None if shown is None else BestTrial(trial=number, value=shown)


def _lowest(values: tuple[float, ...]) -> float:
    """The lowest finite value, infinite if there is none."""
    low = min(values, default=math.inf)
    # min() returns a NaN that comes first: no value compares as less.
    return low if math.isfinite(low) else min(filter(math.isfinite, values), default=math.inf)


def _shown(value: float, study: Study) -> float | None:
    """Value as its user knows it, None if not finite: JSON has no NaN."""
    if not math.isfinite(value):
        return None
    return -value if study.spec.maximize else value


def _row(trial: LiveTrial, study: Study, shape: CurveShape | None) -> TrialRow:
    values = () if shape is None else shape.values
    slope = None if shape is None else shape.slope
    return TrialRow(
        number=trial.number,
        state=trial.state,
        override=study.override_of(trial),
        tier=trial.tier,
        held_bytes=trial.held_bytes,
        host_bytes=trial.host_bytes,
        device=trial.device if trial.state == "running" else None,
        units=trial.curve.units,
        units_trained=trial.units,
        value=_shown(trial.curve.values[-1], study) if trial.curve.units else None,
        slices=trial.slices,
        suspensions=trial.suspensions,
        device_seconds=trial.device_seconds,
        watt_hours=_watt_hours(trial.energy_joules),
        # None (not finite) has no sign to turn.
        curve=tuple(v and -v for v in values) if study.spec.maximize else tuple(values),
        slope=None if slope is None else _shown(slope, study),
    )
