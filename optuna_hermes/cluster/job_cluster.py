"""Simulation of jobs on a cluster under a policy. Deterministic: no clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna_hermes.cluster.job_estimates import Estimator
from optuna_hermes.cluster.job_hosts import Hosts, Progress
from optuna_hermes.cluster.job_queue import Line
from optuna_hermes.cluster.jobs import Job, JobRecord, JobTrace, SoFar
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Assignment, Snapshot, TrialView
from optuna_hermes.policies import Policy
from optuna_hermes.simulator.kernel import Agenda


class JobCluster:
    """Replays jobs on hosts under a policy, which gets the same snapshots as in a broker.

    Each group of hosts is a cluster of its own, and its jobs have no other devices. Of events at
    one time, ends of jobs come first, then submissions; then the policy is asked about each group
    in which a job waits and a device is free.

    Without slices a job keeps its devices to its end. With slices those of all jobs of a group are
    up for decision at every multiple of their length, as long as a job waits or a running job is
    elastic; a job's progress is kept.

    Args:
        policy: the policy that assigns devices.
        jobs: the jobs, in any order.
        groups: the number of devices of each host of each group.
        slice_seconds: length of slices; None for jobs that are never interrupted.
        restart_seconds: time that a job loses when it goes on on other devices, or after a pause;
            another batch size on the same devices costs nothing.
        estimator: predictor of the jobs' device time, which the policy sees.
        seed: for policies that draw random numbers.

    Raises:
        InvalidInputError: a length is out of range, a job's group does not exist, or two jobs
            have one number.

    Example:
        >>> from optuna_hermes.policies import make_policy
        >>> from optuna_hermes.simulator import FixedWork, Job, JobCluster
        >>> jobs = [Job(number=i, submitted=0.0, work=FixedWork(10.0), devices=2) for i in (0, 1)]
        >>> trace = JobCluster(make_policy("fifo"), jobs, groups={None: [2]}).run()
        >>> [(record.job.number, record.finished) for record in trace.records]
        [(0, 10.0), (1, 20.0)]
    """

    def __init__(
        self,
        policy: Policy,
        jobs: Sequence[Job],
        *,
        groups: Mapping[str | None, Sequence[int]],
        slice_seconds: float | None = None,
        restart_seconds: float = 0.0,
        estimator: Estimator | None = None,
        seed: int = 0,
    ) -> None:
        _check(jobs, groups, slice_seconds, restart_seconds)
        hosts = {name: Hosts(name, sizes) for name, sizes in groups.items()}
        # Last first, so that the next job is popped off the end.
        self._jobs = sorted(jobs, key=lambda job: (job.submitted, job.number), reverse=True)
        self._refused = tuple(job for job in jobs if job.devices > len(hosts[job.group]))
        self._agenda = Agenda[tuple[_Group, Progress | None, int]]()
        self._records: list[JobRecord] = []
        self._estimator = estimator
        self._groups = {
            name: _Group(
                each,
                policy,
                self._agenda,
                slice_seconds=slice_seconds,
                restart_seconds=restart_seconds,
                seed=seed,
            )
            for name, each in hosts.items()
        }

    def run(self, until: float = math.inf) -> JobTrace:
        """Replay until every job has ended; another call goes on from there.

        Args:
            until: time in seconds at which to stop.

        Raises:
            ValueError: a decision of the policy breaks the contract of policies, or it leaves jobs
                waiting for ever.
        """
        refused = {job.number for job in self._refused}
        while (now := self._next_time()) <= until and now < math.inf:
            touched: dict[int, _Group] = {}
            while self._agenda.next_time <= now:
                group, progress, lease = self._agenda.next()
                touched[id(group)] = group
                self._happens(group, progress, lease)
            while self._jobs and self._jobs[-1].submitted <= now:
                job = self._jobs.pop()
                if job.number not in refused:
                    group = self._groups[job.group]
                    touched[id(group)] = group
                    expected = self._estimator.submitted(job) if self._estimator else None
                    group.submit(job, expected)
            for group in touched.values():
                group.decide(now)
        left = [job for group in self._groups.values() for job in group.unfinished]
        if left and until == math.inf:
            raise ValueError(f"A policy must serve every job in the end but {left[0]} waits.")
        return JobTrace(
            records=tuple(self._records),
            n_devices=sum(len(group.hosts) for group in self._groups.values()),
            decisions=sum(group.decisions for group in self._groups.values()),
            refused=self._refused,
            unfinished=(*left, *reversed(self._jobs)),
        )

    def _next_time(self) -> float:
        coming = self._jobs[-1].submitted if self._jobs else math.inf
        return min(coming, self._agenda.next_time)

    def _happens(self, group: _Group, progress: Progress | None, lease: int) -> None:
        """Handle an event: a group's slices end, or a job's stretch of constant speed does."""
        if progress is None:
            group.end_slices(self._agenda.now)
        elif progress.lease == lease:
            record = group.reach(progress, self._agenda.now)
            if record is not None:
                self._records.append(record)
                if self._estimator is not None:
                    self._estimator.finished(record)


class _Group:
    """One group of hosts and its jobs."""

    def __init__(
        self,
        hosts: Hosts,
        policy: Policy,
        agenda: Agenda[tuple[_Group, Progress | None, int]],
        *,
        slice_seconds: float | None,
        restart_seconds: float,
        seed: int,
    ) -> None:
        self.hosts = hosts
        self.decisions = 0
        self._policy = policy
        self._agenda = agenda
        self._slice_seconds = slice_seconds
        self._restart_seconds = restart_seconds
        self._seed = seed
        self._live: dict[int, Progress] = {}
        self._running: dict[int, Progress] = {}
        self._undecided: list[Progress] = []
        self._line = Line(policy)
        self._over: list[TrialView] = []
        self._over_shown: tuple[TrialView, ...] = ()
        self._memory: Any = None
        self._slices_end = -math.inf

    @property
    def unfinished(self) -> list[Job]:
        """The submitted jobs that have not ended."""
        return [progress.job for progress in self._live.values()]

    # -- events --------------------------------------------------------------------------------

    def submit(self, job: Job, expected_seconds: float | None) -> None:
        """Add a job to the queue."""
        view = TrialView(
            number=job.number,
            state="pending",
            submitted=job.submitted,
            devices_wanted=job.devices,
            expected_seconds=expected_seconds,
            params=job.params,
            **job.work.shown(SoFar()),
        )
        self._live[job.number] = Progress(job=job, view=view)
        self._line.add(view)

    def reach(self, progress: Progress, now: float) -> JobRecord | None:
        """Handle the end of a stretch of constant speed; return a record if the job is over."""
        progress.advance(now)
        progress.done = progress.until  # exactly there, whatever rounding says
        progress.stretches.append(progress.device_seconds)
        if progress.done < progress.job.work.total:
            self._go_on(progress, now)
            return None
        self.hosts.give_back(progress.devices)
        del self._live[progress.job.number], self._running[progress.job.number]
        view = replace(
            progress.view,
            state="done",
            device=None,
            devices=(),
            attained_seconds=progress.device_seconds,
            **progress.job.work.shown(progress.so_far),
        )
        self._over.append(view)
        assert progress.started is not None, "a job that ends has begun"
        return JobRecord(
            progress.job,
            progress.started,
            now,
            progress.run_seconds,
            progress.device_seconds,
            progress.restarts,
        )

    def end_slices(self, now: float) -> None:
        """End all slices: running jobs become parked on their devices, which are free."""
        self._undecided = list(self._running.values())
        self._running.clear()
        for progress in self._undecided:
            progress.advance(now)
            progress.lease += 1
            self.hosts.give_back(progress.devices)
            progress.view = replace(
                progress.view,
                state="parked",
                tier="resident",
                attained_seconds=progress.device_seconds,
                waiting_since=now,
                **progress.job.work.shown(progress.so_far),
            )
            self._line.add(progress.view)

    # -- deciding ------------------------------------------------------------------------------

    def decide(self, now: float) -> None:
        """Ask the policy, if a job waits and a device is free."""
        if len(self._line) and self.hosts.n_free:
            if len(self._over_shown) < len(self._over):
                self._over_shown = tuple(self._over)
            decision = self._policy.decide(self._snapshot(now))
            self.decisions += 1
            self._memory = decision.memory
            for assignment in decision.assignments:
                self._start(assignment, now)
            self._leave()
        self._plan_slices(now)

    def _snapshot(self, now: float) -> Snapshot:
        trials = self._line.shown(self.hosts.n_free)
        if not self._line.is_ranked:
            trials = (*(progress.view for progress in self._running.values()), *trials)
        return Snapshot(
            now=now,
            seed=self._seed,
            devices=self.hosts.devices,
            trials=trials,
            finished=self._over_shown,
            memory=self._memory,
        )

    def _plan_slices(self, now: float) -> None:
        if self._slice_seconds is None or not self._running or self._slices_end > now:
            return
        if len(self._line) or any(p.view.elastic for p in self._running.values()):
            # Multiples of the length: slices of all jobs end together, and large jobs can start.
            self._slices_end = (now // self._slice_seconds + 1) * self._slice_seconds
            self._agenda.plan(self._slices_end, (self, None, 0), priority=1)

    # -- jobs on devices -----------------------------------------------------------------------

    def _start(self, assignment: Assignment, now: float) -> None:
        if assignment.trial is None or assignment.trial not in self._line:
            raise ValueError(f"A policy may choose jobs that wait but got {assignment.trial}.")
        low, high = self._live[assignment.trial].view.device_range
        if not low <= len(set(assignment.devices)) == len(assignment.devices) <= high:
            raise ValueError(
                f"Job {assignment.trial} takes {low} to {high} devices, none twice, but got "
                f"{assignment.devices}."
            )
        self.hosts.take(assignment.devices)
        progress = self._live[assignment.trial]
        was = progress.hosts
        stayed = self._line.remove(assignment.trial).waiting_since == now
        progress.devices = assignment.devices
        progress.hosts = self.hosts.where(assignment.devices)
        progress.batch_size = assignment.batch_size or progress.batch_size
        # Another batch size is no restart: the loader is rebuilt where the trial is.
        moved = not stayed or was != progress.hosts
        if progress.started is None:
            progress.started, moved = now, False
        progress.restarts += moved
        progress.since = now
        progress.begins = max(now, progress.begins) if not moved else now + self._restart_seconds
        progress.view = replace(
            progress.view,
            state="running",
            device=assignment.devices[0],
            devices=assignment.devices,
            tier=None,
            waiting_since=None,
            switch_cost_seconds=0.0,
        )
        self._running[assignment.trial] = progress
        self._go_on(progress, now)

    def _go_on(self, progress: Progress, now: float) -> None:
        """Plan the end of the next stretch of constant speed."""
        work = progress.job.work
        rate, until = work.speed(progress.done, progress.placement, progress.batch_size)
        progress.rate, progress.until = rate, min(until, work.total)
        progress.lease += 1
        end = max(now, progress.begins) + (progress.until - progress.done) / rate
        self._agenda.plan(end, (self, progress, progress.lease))

    def _leave(self) -> None:
        """Unbind jobs that got no devices again: resuming them costs a restart."""
        for progress in self._undecided:
            if progress.job.number in self._line:
                progress.view = replace(
                    progress.view,
                    tier="host",
                    device=None,
                    devices=(),
                    switch_cost_seconds=self._restart_seconds,
                )
                self._line.add(progress.view)
        self._undecided = []


def _check(
    jobs: Sequence[Job],
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
