"""Policy runner: snapshots for the policies, and checks of their decisions. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.model import (
    Budget,
    Decision,
    Override,
    Resources,
    Snapshot,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies.base import opened, place, unopened
from optuna_hermes.policies.decisions import check, plain, raised

if TYPE_CHECKING:
    from optuna_hermes.broker._core._power import Power

_WAY_OUT = "mend it, or choose another with --policy, and run the same command again."

_PREFERENCE: dict[Override | None, int] = {"boosted": 0, None: 1, "held": 2, "finishing": 2}


class PolicyRunner:
    """Asks the policies of studies; a policy's memory is left to the caller.

    Args:
        power: of the devices, None where nothing powers them down.
    """

    def __init__(self, state: BrokerState, power: Power | None = None) -> None:
        self._state = state
        self._power = power

    def decide(
        self, study: Study, slots: Sequence[Slot], now: float, fixed: Collection[int] = ()
    ) -> Decision:
        """Decision of the policy of ``study`` on ``slots``, as if their slices were over.

        Boosted trials come first, and those of the numbers ``fixed`` keep the devices they have, if
        they go on. A policy that breaks its contract decides nothing, and ends its study only.
        """
        snapshot = self.snapshot(study, slots, now)
        if fixed:
            trials = (
                _fixed(trial) if trial.number in fixed else trial for trial in snapshot.trials
            )
            snapshot = replace(snapshot, trials=tuple(trials))
        boosted = frozenset(n for n, override in study.overrides.items() if override == "boosted")
        if study.draining or study.problem or not boosted:
            decision = self.ask(study, snapshot)
        else:
            from optuna_hermes.broker._core._boosts import boosted_first  # few are boosted

            decision = boosted_first(partial(self.ask, study), snapshot, boosted)
        if not decision.assignments and self._waits_in_vain(study, snapshot, decision):
            study.problem = (
                f"Policy {study.spec.policy!r} must serve every trial in the end but, with all "
                f"devices free, assigns none: {_WAY_OUT}"
            )
        return decision

    def ask(self, study: Study, snapshot: Snapshot) -> Decision:
        """Decision of the policy; none if it breaks its contract, which ends its study only."""
        if study.draining or study.problem:
            return Decision(memory=study.memory)
        try:
            # A copy: a policy may change its memory in place, which would look as if it had not.
            asked = replace(snapshot, memory=json.loads(json.dumps(snapshot.memory)))
            decision = plain(study.policy.decide(asked))
            check(decision, snapshot)
            _check_possible(decision, snapshot, study, self._state.may_open(study).count)
            decision = _without_parts(decision, snapshot)
        # A policy is the user's code: it may not end the broker.
        except (Exception, SystemExit) as error:
            study.problem = f"Policy {study.spec.policy!r} raised {raised(error)}: {_WAY_OUT}"
            return Decision(memory=study.memory)
        return decision

    def _waits_in_vain(self, study: Study, snapshot: Snapshot, decision: Decision) -> bool:
        """True if trials would wait for ever: the policy would see the same the next time."""
        to_open = _at_most(self._state.may_open(study), len(snapshot.devices))
        may_change = (
            study.draining
            or study.problem
            or decision.memory != snapshot.memory
            or snapshot.left.seconds is not None  # the study ends all the same
            or self._state.leases()
            or not all(device.free and device.healthy for device in snapshot.devices)
            or any(trial.state == "running" for trial in snapshot.trials)
            # Processes are starting, or a trial is opened later.
            or (snapshot.unstarted.count or 0) < (to_open.count or 0)
        )
        return not may_change and bool(place(snapshot, [*opened(snapshot), *unopened(snapshot)]))

    def wanted_last(self, trials: Iterable[LiveTrial], now: float) -> list[LiveTrial]:
        """The trials, of any studies, from the one that will be wanted last to the first.

        Where studies meet, those that are equally far from their study's next slice are equal.
        """
        by_study: dict[str, dict[int, LiveTrial]] = {}
        for trial in trials:
            by_study.setdefault(trial.study, {})[trial.number] = trial
        placed: list[tuple[int, LiveTrial]] = []
        for key, own in by_study.items():
            study = self._state.studies[key]
            numbers = list(own)
            if len(own) > 1:
                # Only where several trials could make room.
                from optuna_hermes.broker._core._trial_order import wanted_first

                numbers = wanted_first(partial(self.ask, study), self.snapshot(study, [], now), own)
                numbers.sort(key=lambda n: _PREFERENCE[study.override_of(own[n])])
            placed += [(place, own[number]) for place, number in enumerate(numbers)]
        return [trial for _, trial in sorted(placed, key=lambda each: -each[0])]

    def snapshot(self, study: Study, slots: Sequence[Slot], now: float) -> Snapshot:
        """Snapshot for the policy of ``study``, with ``slots`` as the devices that are free."""
        open_ids = {slot.device.id for slot in slots}
        up = {
            slot.lease.number for slot in slots if slot.lease and slot.lease.study == study.spec.key
        }
        reserved = {reservation.number for reservation in self._state.reserved(study.spec.key)}
        leased_seconds = self._leased_seconds(study, up, now)
        processes = self._processes(study)
        # All of them for a device that is free: there are processes for more than one at a time.
        opens = now >= study.opens_again_at and study.has_time_to_open(now, up)
        unstarted = _at_most(self._state.may_open(study), processes if opens else 0)
        if unstarted.any:
            listed = tuple(self._state.listed(study).values())
            unstarted = replace(unstarted, listed=listed)
        views: list[TrialView] = []
        finished: list[TrialView] = []
        for trial in study.trials.values():
            # Shown as running, so that it is not chosen: it has a device or gets no process.
            busy = (
                trial.number in reserved
                or not study.can_begin(trial)
                or not study.has_time_for(trial, now)
                or (trial.connection is None and processes == 0)
            )
            view = self._view(study, trial, leased_seconds.get(trial.number, 0.0), busy=busy)
            if trial.number in up:
                view = _as_parked(view, now)
            (views if trial.live else finished).append(view)
        parts = [slot.device.part for slot in self._state.slots.values()]
        if any(parts):
            whole = max(1, parts.count(False))
            views = [_at_most_devices(view, whole) for view in views]
        return Snapshot(
            now=now,
            seed=study.spec.seed,
            devices=tuple(
                replace(slot.device, free=slot.device.id in open_ids, powered=slot.power == "on")
                for slot in self._state.slots.values()
            ),
            trials=tuple(views),
            finished=tuple(finished),
            unstarted=unstarted,
            wanted=None if self._power is None else self._power.wanted(study),
            wanted_is_all=study.driver is not None,  # it has told how many are left
            held=() if self._power is None else self._power.held(study),
            left=self._left(study, now),
            opening_seconds=study.opening_seconds,
            room=Resources(host_bytes=self._host_room(open_ids)),
            memory=study.memory,
        )

    def _view(self, study: Study, trial: LiveTrial, held: float, *, busy: bool) -> TrialView:
        """View of a trial for a policy, kept until something that it is made of changes.

        ``held`` is device time of its lease that its own count does not have yet.
        """
        state = "running" if busy and trial.live else trial.state
        attained, cost = trial.device_seconds + held, study.cost(trial.tier)
        bound_to = trial.devices if self._bound(trial) else ()
        # Nobody knows when a trial could end that gets no device.
        waits = study.is_barred(trial) or trial.number in study.retry_at or trial.waits_for_memory
        units_left = None if waits else trial.units_left
        made_of = (
            state,
            attained,
            cost,
            bound_to,
            units_left,
            trial.curve,
            trial.waiting_since,
            trial.tier,
            trial.devices,
            trial.params,
            trial.need_bytes,
            (trial.connection is None, trial.can_store, trial.sizes, trial.speeds),  # ``elastic``
        )
        # Few of many trials have changed since the last decision: comparing is cheaper than making.
        if trial.cached_view is None or trial.cached_view[0] != made_of:
            least, most = trial.device_range
            view = TrialView(
                number=trial.number,
                state=state,
                curve=trial.curve,
                attained_seconds=attained,
                submitted=trial.submitted,
                waiting_since=None if state == "running" else trial.waiting_since,
                tier=trial.tier,
                device=trial.device,
                devices=trial.devices if len(trial.devices) > 1 else (),
                bound_to=bound_to,
                switch_cost_seconds=cost,
                units_left=0 if state == "done" else units_left,
                params=trial.params,
                devices_wanted=min(max(len(trial.devices), least), most),
                elastic=trial.elastic,
                # What it needs on a device is what it takes of the host's memory when it leaves.
                needs=Resources(device_bytes=trial.need_bytes, host_bytes=trial.need_bytes),
            )
            trial.cached_view = made_of, view
        return trial.cached_view[1]

    def _left(self, study: Study, now: float) -> Budget:
        spent = study.device_seconds
        if spent is not None:
            held = sum(lease.device_seconds(now) for lease in self._state.leases_of(study))
            spent = max(0.0, spent - study.spent_seconds - held)
        seconds = None if study.ends_at is None else max(0.0, study.ends_at - now)
        return Budget(seconds=seconds, device_seconds=spent)

    def _host_room(self, open_ids: Container[str]) -> int:
        """Host memory that trials leave whose devices are not up for decision."""
        taken = 0
        for slot in self._state.slots.values():
            each = slot.reservation or slot.lease
            if each is not None and slot.device.id not in open_ids:
                study = self._state.studies[each.study]
                trial = None if each.number is None else study.trials.get(each.number)
                taken += study.need_of(trial) or 0
        return self._state.host_budget_bytes - taken

    def _leased_seconds(
        self, study: Study, up: Container[int | None], now: float
    ) -> dict[int, float]:
        """Device time of the leases that are out, up to the last decision about each."""
        held: dict[int, float] = {}
        for lease in self._state.leases_of(study):
            if lease.number is not None:
                end = now if lease.number in up else lease.slice_started
                held[lease.number] = lease.device_seconds(end)
        return held

    def _processes(self, study: Study) -> int:
        """Number of processes for stored trials and new trials, others going to disk for them.

        Only what is there counts: a device is not kept for a worker that may never come.
        """
        may_leave = sum(
            1 for r in study.trials.values() if r.can_store and r.connection is not None
        )
        taken = sum(map(self._state.needs_process, self._state.reserved(study.spec.key)))
        return max(0, len(study.idle_workers) + may_leave - taken)

    def _bound(self, trial: LiveTrial) -> bool:
        """True if a trial can go on only on the GPUs of its process, whose number is fixed."""
        slot = None if trial.connection is None else self._state.slots.get(trial.device or "")
        if slot is None or slot.device.kind != "gpu":
            return False
        least, most = trial.device_range
        return least == most


def _at_most_devices(view: TrialView, most: int) -> TrialView:
    """View of a trial that may be given fewer devices: a process uses one slice of a GPU only."""
    if view.device_range[1] <= most:
        return view
    elastic = view.elastic
    if elastic is not None:
        least, _ = elastic.devices
        elastic = replace(elastic, devices=(min(least, most), most))
    return replace(view, devices_wanted=min(view.devices_wanted, most), elastic=elastic)


def _without_parts(decision: Decision, snapshot: Snapshot) -> Decision:
    """The decision without further devices for trials that would have a slice of a GPU."""
    parts = {device.id for device in snapshot.devices if device.part}
    if not any(parts.intersection(a.devices) for a in decision.assignments if len(a.devices) > 1):
        return decision
    given = []
    for each in decision.assignments:
        whole = tuple(id_ for id_ in each.devices if id_ not in parts)
        given.append(replace(each, devices=whole or each.devices[:1]))
    return replace(decision, assignments=tuple(given))


def _fixed(view: TrialView) -> TrialView:
    """View of a trial that keeps its devices, or waits."""
    count = len(view.current_devices)
    elastic = None if view.elastic is None else replace(view.elastic, devices=(count, count))
    return replace(view, devices_wanted=count, elastic=elastic, bound_to=view.current_devices)


def _as_parked(view: TrialView, now: float) -> TrialView:
    """View of a trial whose slice has just ended: it is up for decision like a parked one."""
    return replace(
        view, state="parked", waiting_since=now, tier="resident", switch_cost_seconds=0.0
    )


def _check_possible(decision: Decision, snapshot: Snapshot, study: Study, most: int | None) -> None:
    """Refuse what a broker could never carry out; it may open ``most`` trials."""
    if decision.pruned:
        raise ValueError(
            f"a broker kills nothing but the policy prunes trial {decision.pruned[0]}: such a "
            "policy is for the simulator"
        )
    # The snapshot's own count is less while workers start, which is not the policy's fault: what is
    # opened beyond it waits for a process.
    new = {None, *(trial.number for trial in snapshot.unstarted.listed)}
    opened = sum(each.trial in new for each in decision.assignments)
    if most is not None and opened > most:
        raise ValueError(f"a policy opens no more trials than are left, {most}, but got {opened}")
    bound = {trial.number: trial.bound_to for trial in snapshot.trials if trial.bound_to}
    for each in decision.assignments:
        trial = None if each.trial is None else study.trials.get(each.trial)
        if trial is None or trial.can_store:  # then it may go elsewhere over disk
            continue
        ids = bound.get(trial.number, each.devices)
        if not set(ids).issuperset(each.devices):
            raise ValueError(
                f"a policy leaves trial {each.trial} on {', '.join(ids)}, to which it is bound, "
                f"but got {', '.join(each.devices)}"
            )


def _at_most(unstarted: Unstarted, processes: int) -> Unstarted:
    count = processes if unstarted.count is None else min(processes, unstarted.count)
    return Unstarted(count=count, fixed=unstarted.fixed)
