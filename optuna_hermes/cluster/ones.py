"""ONES: schedules found by an evolutionary search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optuna_hermes.cluster.candidates import Candidate, candidates
from optuna_hermes.cluster.ones_search import Evolution, Schedules, SearchSpace
from optuna_hermes.cluster.placement import (
    GATE,
    assign_leftovers,
    current_owners,
    hosts_of,
    to_assignments,
)
from optuna_hermes.model import Decision, Device, Snapshot
from optuna_hermes.policies.base import Policy, free_devices

# Schedules that survive a generation, and generations in one decision.
POPULATION = 16
GENERATIONS = 4
# Number of schedules kept in the policy memory, which the next decision begins with.
KEPT = 4
# Least number of trials that compete (at least three for each device); others have more left.
MOST_CANDIDATES = 64
# Value of a trial whose last value is NaN or infinite: it trains where no other can.
DIVERGED = 1e-6


class Ones(Policy):
    """Evolves schedules of devices and batch sizes towards short completion times.

    Bian et al., "Online Evolutionary Batch Size Orchestration for Scheduling Deep Learning
    Workloads in GPU Clusters" (ONES), SC 2021, in style: its text was not at hand. A schedule says
    for each device which trial has it, and with what batch size. Schedules are refreshed (ended
    trials leave, idle devices are given out), crossed over device by device, mutated (a trial
    loses its devices, or changes its batch size), and reordered so that a trial's devices are side
    by side; the best survive. Progress that a trial does not report is sampled from a Beta
    distribution, as in Thompson sampling, and the smallest remaining utilisation goes first.

    This project's own: idle devices go where they win most, with some randomness; all devices of a
    trial share its batch evenly; the score of a schedule is the rate at which it brings down the
    remaining utilisation of all (``SearchSpace.weight``), and a trial that changes devices pays the
    cost of the switch, or a tenth of its time; speeds on other devices are fitted to measurements
    (``candidates``), on up to twice the devices and twice the batch of these. Trials that are not
    elastic keep their batch size and number of devices, and one whose last value is NaN or infinite
    goes last. The best schedules are kept in the policy memory.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Evolve the schedules of the last decision, and assign by the best."""
        devices = free_devices(snapshot)
        if not devices:
            return Decision(memory=snapshot.memory)
        found = candidates(snapshot, max(MOST_CANDIDATES, 3 * len(devices)))
        if not found:
            return Decision(memory=snapshot.memory)
        space = _space(snapshot, found, devices)
        units = sum(trial.curve.units for trial in snapshot.trials)
        # Seeded by the snapshot alone: the same snapshot must give the same decision.
        rng = np.random.default_rng([abs(snapshot.seed), len(found), len(snapshot.finished), units])
        seeds = _seeds(space, found, devices, snapshot.memory)
        # A limit in seconds is not possible, for a policy reads no clock: docs/design/0018 has the
        # time on 64 devices.
        best = Evolution(space, rng).best(seeds, population=POPULATION, generations=GENERATIONS)
        owner, level = best.owner[0].tolist(), best.level[0].tolist()
        batches = {found[i].number: found[i].batch_sizes[level[i]] for i in set(owner) if i >= 0}
        chosen = to_assignments(snapshot, found, devices, owner)
        # Devices that the schedule leaves idle go to other trials that fit.
        chosen += assign_leftovers(snapshot, chosen)
        return Decision(
            assignments=tuple(replace(a, batch_size=batches.get(a.trial)) for a in chosen),
            memory={"plans": [_plan(found, devices, row) for row in best.owner[:KEPT].tolist()]},
        )


def _space(
    snapshot: Snapshot, found: Sequence[Candidate], devices: Sequence[Device]
) -> SearchSpace:
    n_levels = max(len(each.batch_sizes) for each in found)
    seconds = np.full((len(found), n_levels, len(devices) + 1, 2), np.inf)
    for index, each in enumerate(found):
        seconds[index, : len(each.batch_sizes)] = each.seconds
        seconds[index, :, 0] = 0.0
    return SearchSpace(
        seconds=seconds,
        wanted=np.array([each.wanted for each in found]),
        value=np.array([DIVERGED if each.diverged else 1.0 for each in found]),
        switch_seconds=np.array([each.switch_seconds for each in found]),
        gate=GATE,
        owner=current_owners(snapshot, found, devices),
        host=hosts_of(devices),
    )


def _seeds(
    space: SearchSpace, found: Sequence[Candidate], devices: Sequence[Device], memory: Any
) -> Schedules:
    """First schedules: an empty one, the present one, and the best ones of the last decision."""
    empty = np.full(space.n_devices, -1, dtype=np.int64)
    rows = [empty, space.owner]
    place_of = {device.id: index for index, device in enumerate(devices)}
    numbers = {str(each.trial.number): index for index, each in enumerate(found) if each.trial}
    # The memory may be another policy's, from before the user chose this one.
    plans = memory.get("plans") if isinstance(memory, dict) else None
    for plan in plans if isinstance(plans, list) else ():
        if not isinstance(plan, dict):
            continue
        row = empty.copy()
        for id_, number in plan.items():
            if id_ in place_of:
                row[place_of[id_]] = numbers.get(str(number), -1)
        rows.append(row)
    level = np.zeros((len(rows), space.n_trials), dtype=np.int64)
    return Schedules(owner=np.stack(rows), level=level)


def _plan(
    found: Sequence[Candidate], devices: Sequence[Device], owner: Sequence[int]
) -> dict[str, int]:
    # By number, for indices are of this decision only; a new trial has none yet.
    trials = {
        device.id: found[index].trial
        for device, index in zip(devices, owner, strict=True)
        if index >= 0
    }
    return {id_: trial.number for id_, trial in trials.items() if trial is not None}
