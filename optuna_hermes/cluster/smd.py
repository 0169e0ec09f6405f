"""SMD: a knapsack of trials over all resources, each with the number of devices that suits it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from optuna_hermes.cluster.candidates import Candidate, candidates
from optuna_hermes.cluster.knapsack import Item, Knapsack
from optuna_hermes.cluster.placement import (
    GATE,
    assign_leftovers,
    current_owners,
    hosts_of,
    side_by_side,
    to_assignments,
)
from optuna_hermes.model import Decision, Device, Resources, Snapshot, TrialView
from optuna_hermes.policies.base import Policy, free_devices

# A trial is tried on every number of devices up to this, and on those it wants and has: so the
# inner problem is solved exactly.
MOST_DEVICES = 16
# Up to so many trials the knapsack is solved exactly, by HiGHS, beyond greedily.
EXACT_TRIALS = 30
# Least number of trials that compete; at least three for each device.
MOST_CANDIDATES = 128
# The target of a trial, in multiples of its time alone.
PATIENCE = 3.0
# Slope of the utility about the target.
STEEPNESS = 4.0


class Smd(Policy):
    """Packs the trials of the largest utility into devices and memory.

    Yu, Wu, Ji and Liu, "A Sum-of-Ratios Multi-Dimensional-Knapsack Decomposition for DNN Resource
    Scheduling" (SMD), INFOCOM 2021, in style: its text was not at hand. The inner problem is solved
    for each trial: on each number of devices the batch size with which it is done soonest, by
    ``T(w) = a M / w + b + d (w - 1)`` fitted to its measured steps (``candidates``). The outer
    problem is a knapsack in several dimensions: devices, device memory, and host memory for
    suspended state; a trial is in it once at most, with one of its numbers of devices.

    This project's own: there are no parameter servers, and the paper's approximation guarantee is
    that of its randomised rounding, which is not reproduced. The utility of a completion time ``T``
    is ``1 / (1 + exp(4 (T / target - 1)))`` with a target of three times the trial's time alone on
    the devices it wants. The value of a trial in the knapsack is the utility it would lose if all
    others went first, divided by the seconds to its end. A trial that changes devices pays the cost
    of the switch, or a tenth of its time. Devices that are left go to trials of no utility as long
    as their resources last.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Pack the free devices."""
        devices = free_devices(snapshot)
        found = candidates(snapshot, max(MOST_CANDIDATES, 3 * len(devices))) if devices else []
        if not found:
            return Decision()
        owner_now = current_owners(snapshot, found, devices)
        has = np.bincount(owner_now + 1, minlength=len(found) + 1)[1:].tolist()
        items = _items(snapshot, found, has)
        knapsack = Knapsack(items, _room(snapshot, devices))
        chosen = knapsack.exact() if len(found) <= EXACT_TRIALS else knapsack.greedy()
        chosen = knapsack.filled(chosen)
        # Without room for any trial one has to break the bounds, unless another's end makes room: a
        # new trial can have a device but no view yet.
        taken = any(not (device.free or device.problem) for device in snapshot.devices)
        if not (chosen or taken or any(trial.state == "running" for trial in snapshot.trials)):
            chosen = items[:1]
        counts = np.zeros((1, len(found)), dtype=np.int64)
        for item in chosen:
            counts[0, item.trial] = item.devices
        owner = side_by_side(counts, owner_now, hosts_of(devices))[0].tolist()
        given = to_assignments(snapshot, found, devices, owner)
        needed = _typical_needs(snapshot)
        given += assign_leftovers(snapshot, given, lambda trial: not _weights(trial, needed)[1])
        batches = {found[item.trial].number: item.batch_size for item in chosen}
        return Decision(
            assignments=tuple(replace(each, batch_size=batches.get(each.trial)) for each in given)
        )


def utility(seconds: float, target_seconds: float) -> float:
    """Utility of a completion time: near 1 at 0, a half at the target, towards 0 beyond."""
    steps = STEEPNESS * (seconds / max(target_seconds, 1e-9) - 1.0)
    return 1.0 / (1.0 + math.exp(min(steps, 700.0)))


def _items(snapshot: Snapshot, found: Sequence[Candidate], has: Sequence[int]) -> list[Item]:
    n_devices = len(free_devices(snapshot))
    behind = sum(each.use for each in found)
    needed = _typical_needs(snapshot)
    largest = max(Counter(device.host for device in snapshot.devices).values())
    items: list[Item] = []
    for index, each in enumerate(found):
        quickest = each.seconds.min(axis=0)
        level = each.seconds[..., 0].argmin(axis=0)
        device_bytes, host_bytes = _weights(each.trial, needed)
        worth = _worth(snapshot.now, each, (behind - each.use) / n_devices)
        for count in _counts(each, int(has[index])):
            seconds = float(quickest[count, int(count > largest)])
            if count != has[index]:
                seconds += max(each.switch_seconds, GATE * seconds)
            items.append(
                Item(
                    trial=index,
                    devices=count,
                    batch_size=each.batch_sizes[int(level[count])],
                    value=0.0 if each.diverged else worth(seconds),
                    weights=(count, count * device_bytes, host_bytes),
                )
            )
    return items


def _worth(now: float, each: Candidate, delay: float) -> Callable[[float], float]:
    """A function from seconds to a trial's end to its value; ``delay`` is the others' time."""
    had = 0.0 if each.trial is None else each.trial.attained_seconds / each.wanted
    waited = 0.0 if each.trial is None else max(now - each.trial.submitted, 0.0)
    alone = float(each.seconds[:, each.wanted, 0].min())
    target = PATIENCE * (had + alone)
    # What it would have if all others went first; the gain is that of a second of a slice.
    later = utility(waited + delay + alone, target)
    return lambda seconds: (utility(waited + seconds, target) - later) / max(seconds, 1e-9)


def _counts(each: Candidate, has: int) -> list[int]:
    # The one that it wants first, since ``Knapsack.filled`` takes the first item that fits.
    named = {each.wanted, has}
    rest = [count for count in each.counts if count <= MOST_DEVICES or count in named]
    return sorted(rest, key=lambda count: (count != each.wanted, count))


def _room(snapshot: Snapshot, devices: Sequence[Device]) -> tuple[float, ...]:
    memory = [device.memory_bytes for device in devices]
    host = snapshot.room.host_bytes
    kept = sum(trial.needs.host_bytes or 0 for trial in snapshot.trials if _has_promise(trial))
    return (
        len(devices),
        math.inf if None in memory else float(sum(each or 0 for each in memory)),
        math.inf if host is None else max(host - kept, 0),
    )


def _has_promise(trial: TrialView) -> bool:
    """True if host memory is reserved for a waiting trial: its state is there, or may go there."""
    return trial.state == "parked" and trial.tier != "disk"


def _typical_needs(snapshot: Snapshot) -> Resources:
    """The assumed needs of an unknown trial: the most that any other takes."""
    needs = [trial.needs for trial in (*snapshot.trials, *snapshot.finished)]
    return Resources(
        device_bytes=max((each.device_bytes or 0 for each in needs), default=0),
        host_bytes=max((each.host_bytes or 0 for each in needs), default=0),
    )


def _weights(trial: TrialView | None, typical: Resources) -> tuple[float, float]:
    """A trial's use of memory on each device, and of host memory."""
    own = Resources() if trial is None else trial.needs
    host = typical.host_bytes if own.host_bytes is None else own.host_bytes
    return (
        float((typical if own.device_bytes is None else own).device_bytes or 0),
        0.0 if trial is not None and _has_promise(trial) else float(host or 0),
    )
