"""Simulation of jobs on a cluster under a policy. Deterministic: no clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from optuna_hermes.cluster.job_estimates import Estimator
from optuna_hermes.cluster.job_hosts import Hosts, JobQueue, JobState
from optuna_hermes.cluster.jobs import ClusterJob, JobProgress, JobRecord, JobTrace
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Assignment, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.policies.decisions import check, named, plain
from optuna_hermes.simulator import EventQueue

# Priorities of events at one time: what becomes free first, then who wants it.
_END, _SLICES_END, _SUBMISSION = range(3)


class JobSimulator:
    """Replays jobs on hosts under a policy, which gets the same snapshots as in a broker.

    Each group of hosts is a cluster of its own, and its jobs have no other devices. Without slices
    a job keeps its devices to its end. With slices those of all jobs of a group are up for decision
    at every multiple of their length; a job's progress is kept. A job that wants more
    devices than there are in its group is left out, and has no record.

    Args:
        policy: the policy that assigns devices.
        jobs: the jobs, in any order.
        groups: the number of devices of each host of each group.
        slice_seconds: length of slices; None for jobs that are never interrupted.
        restart_seconds: time that a job loses when it goes on elsewhere, or after a pause.
        estimator: predictor of the jobs' device time, which the policy sees.
        seed: for policies that draw random numbers.

    Raises:
        InvalidInputError: an impossible length, an unknown group, or two jobs with one number.

    Example:
        >>> from optuna_hermes.cluster.jobs import ClusterJob, FixedWork
        >>> from optuna_hermes.policies import make_policy
        >>> work = FixedWork(10.0)
        >>> jobs = [ClusterJob(number=i, submitted=0.0, work=work, devices=2) for i in (0, 1)]
        >>> trace = JobSimulator(make_policy("fifo"), jobs, groups={None: [2]}).run()
        >>> [(record.job.number, record.finished) for record in trace.records]
        [(0, 10.0), (1, 20.0)]
    """

    def __init__(
        self,
        policy: Policy,
        jobs: Sequence[ClusterJob],
        *,
        groups: Mapping[str | None, Sequence[int]],
        slice_seconds: float | None = None,
        restart_seconds: float = 0.0,
        estimator: Estimator | None = None,
        seed: int = 0,
    ) -> None:
        _check(jobs, groups, slice_seconds, restart_seconds)
        self._policy = policy
        self._events = EventQueue[Callable[[], _Group]]()
        self._records: list[JobRecord] = []
        self._groups = {
            name: _Group(
                hosts=Hosts(name, sizes),
                policy=policy,
                events=self._events,
                records=self._records,
                slice_seconds=slice_seconds,
                restart_seconds=restart_seconds,
                estimator=estimator,
                seed=seed,
            )
            for name, sizes in groups.items()
        }
        for job in sorted(jobs, key=lambda job: (job.submitted, job.number)):
            group = self._groups[job.group]
            if job.devices <= len(group.hosts):
                submit = partial(group.submit, job)
                self._events.add(job.submitted, submit, priority=_SUBMISSION)

    def run(self) -> JobTrace:
        """Replay until every job has ended.

        Raises:
            InvalidInputError: the policy raised, broke its contract, or leaves jobs waiting for
                ever.
        """
        while self._events:
            now = self._events.next_time
            # Unlike trials, jobs are decided on after all events of one time: a job that is
            # submitted as another ends competes for its devices.
            touched: dict[_Group, None] = {}
            while self._events and self._events.next_time <= now:
                touched[self._events.pop()()] = None
            for group in touched:
                group.decide()
        waiting = [state.job for group in self._groups.values() for state in group.live.values()]
        if waiting:
            raise InvalidInputError(
                f"A policy must serve every job in the end but {type(self._policy).__name__} "
                f"leaves job {waiting[0].number} waiting."
            )
        return JobTrace(
            records=tuple(self._records),
            n_devices=sum(len(group.hosts) for group in self._groups.values()),
            decisions=sum(group.decisions for group in self._groups.values()),
        )


@dataclass(kw_only=True, eq=False)
class _Group:
    """One group of hosts and its jobs; its events return it, so that it is decided on."""

    hosts: Hosts
    policy: Policy
    events: EventQueue[Callable[[], _Group]]
    records: list[JobRecord]
    slice_seconds: float | None
    restart_seconds: float
    estimator: Estimator | None
    seed: int
    decisions: int = 0
    live: dict[int, JobState] = field(default_factory=dict)
    _running: dict[int, JobState] = field(default_factory=dict)
    _undecided: list[JobState] = field(default_factory=list)
    _over: list[TrialView] = field(default_factory=list)
    _over_shown: tuple[TrialView, ...] = ()
    _memory: Any = None
    _slices_end: float = -math.inf

    def __post_init__(self) -> None:
        self._queue = JobQueue(self.policy)

    def submit(self, job: ClusterJob) -> _Group:
        view = TrialView(
            number=job.number,
            state="pending",
            submitted=job.submitted,
            devices_wanted=job.devices,
            expected_seconds=self.estimator.submitted(job) if self.estimator else None,
            params=job.params,
            **job.work.shown(JobProgress()),
        )
        self.live[job.number] = JobState(job=job, view=view)
        self._queue.add(view)
        return self

    def _end_stretch(self, state: JobState, lease: int) -> _Group:
        # Under another lease the stretch was cut short, and another end is planned.
        if state.lease == lease:
            state.advance(self.events.now)
            # Exactly there, whatever rounding says: a remainder would be a stretch of no length.
            state.done = state.until
            state.stretches.append(state.device_seconds)
            if state.done < state.job.work.total:
                self._plan_stretch(state)
            else:
                self._end(state)
        return self

    def _end(self, state: JobState) -> None:
        self.hosts.release(state.devices)
        del self.live[state.job.number], self._running[state.job.number]
        view = replace(
            state.view,
            state="done",
            device=None,
            devices=(),
            attained_seconds=state.device_seconds,
            **state.job.work.shown(state),
        )
        self._over.append(view)
        assert state.started is not None, "a job that ends has begun"
        used = (state.run_seconds, state.device_seconds, state.restarts)
        record = JobRecord(state.job, state.started, self.events.now, *used)
        self.records.append(record)
        if self.estimator is not None:
            self.estimator.finished(record)

    def _end_slices(self) -> _Group:
        """End all slices: running jobs become parked on their devices, which are free."""
        self._undecided = list(self._running.values())
        self._running.clear()
        for state in self._undecided:
            state.advance(self.events.now)
            state.lease += 1
            self.hosts.release(state.devices)
            state.view = replace(
                state.view,
                state="parked",
                tier="resident",
                attained_seconds=state.device_seconds,
                waiting_since=self.events.now,
                **state.job.work.shown(state),
            )
            self._queue.add(state.view)
        return self

    def decide(self) -> None:
        if len(self._queue) and self.hosts.n_free:
            snapshot = self._snapshot()
            with named(self.policy):
                decision = plain(self.policy.decide(snapshot))
                check(decision, snapshot)
                if decision.pruned:
                    raise ValueError(f"a policy stops no job for good but got {decision.pruned}")
            self.decisions += 1
            self._memory = decision.memory
            for assignment in decision.assignments:
                self._start(assignment)
            self._unbind()
        self._plan_slices()

    def _snapshot(self) -> Snapshot:
        trials, over = self._queue.shown(self.hosts.n_free), tuple[TrialView, ...]()
        if not self._queue.is_ranked:
            trials = (*(state.view for state in self._running.values()), *trials)
            # Rebuilt only when a job has ended, of which there may be 100,000.
            if len(self._over_shown) < len(self._over):
                self._over_shown = tuple(self._over)
            over = self._over_shown
        return Snapshot(
            now=self.events.now,
            seed=self.seed,
            devices=self.hosts.devices,
            trials=trials,
            finished=over,
            memory=self._memory,
        )

    def _plan_slices(self) -> None:
        now = self.events.now
        if self.slice_seconds is None or not self._running or self._slices_end > now:
            return
        # With none of both each job would only get back what it has.
        if len(self._queue) or any(state.view.elastic for state in self._running.values()):
            # Multiples of the length: slices of all jobs end together, and large jobs can start.
            number = now // self.slice_seconds + 1
            self._slices_end = number * self.slice_seconds
            if self._slices_end <= now:  # the quotient of a multiple may be rounded down
                self._slices_end = (number + 1) * self.slice_seconds
            if self._slices_end <= now:
                raise InvalidInputError(
                    f"A slice must be longer than the clock's resolution after {now:.0f} s but is "
                    f"{self.slice_seconds} s: give a longer one."
                )
            self.events.add(self._slices_end, self._end_slices, priority=_SLICES_END)

    def _start(self, assignment: Assignment) -> None:
        if assignment.trial is None:
            raise InvalidInputError("A policy may choose jobs that wait but got a new one.")
        now, state = self.events.now, self.live[assignment.trial]
        self.hosts.take(assignment.devices)
        before = state.hosts
        stayed = self._queue.remove(assignment.trial).waiting_since == now
        state.devices = assignment.devices
        state.hosts = self.hosts.hosts_of(assignment.devices)
        state.batch_size = assignment.batch_size or state.batch_size
        # Another batch size is no restart: the loader is rebuilt where the trial is.
        moved = not stayed or before != state.hosts
        if state.started is None:
            state.started, moved = now, False
        state.restarts += moved
        state.since = now
        state.begins = max(now, state.begins) if not moved else now + self.restart_seconds
        state.view = replace(
            state.view,
            state="running",
            device=assignment.devices[0],
            devices=assignment.devices,
            tier=None,
            waiting_since=None,
            switch_cost_seconds=0.0,
        )
        self._running[assignment.trial] = state
        self._plan_stretch(state)

    def _plan_stretch(self, state: JobState) -> None:
        work = state.job.work
        state.rate, until = work.speed(state.done, state.placement, state.batch_size)
        state.until = min(until, work.total)
        state.lease += 1
        end = max(self.events.now, state.begins) + (state.until - state.done) / state.rate
        self.events.add(end, partial(self._end_stretch, state, state.lease), priority=_END)

    def _unbind(self) -> None:
        # Jobs that got no devices again: resuming them costs a restart from now on.
        for state in self._undecided:
            if state.job.number in self._queue:
                state.view = replace(
                    state.view,
                    tier="host",
                    device=None,
                    devices=(),
                    switch_cost_seconds=self.restart_seconds,
                )
                self._queue.add(state.view)
        self._undecided = []


def _check(
    jobs: Sequence[ClusterJob],
    groups: Mapping[str | None, Sequence[int]],
    slice_seconds: float | None,
    restart_seconds: float,
) -> None:
    if not (slice_seconds is None or 0 < slice_seconds < math.inf):
        raise InvalidInputError(f"slice_seconds must be above 0 but got {slice_seconds}.")
    if not 0 <= restart_seconds < math.inf:
        raise InvalidInputError(f"restart_seconds must be at least 0 but got {restart_seconds}.")
    for job in jobs:
        if job.group not in groups:
            known = ", ".join(map(str, groups))
            raise InvalidInputError(f"A job's group must be one of {known} but got {job.group!r}.")
    if len({job.number for job in jobs}) < len(jobs):
        raise InvalidInputError("Jobs must have different numbers but two have the same.")
