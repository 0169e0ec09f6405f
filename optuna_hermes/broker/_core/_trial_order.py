"""Order of trials: boosted ones first, and the one in which a policy wants others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from optuna_hermes.model import Assignment, Decision, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import place

MOST_ASKED = 16
"""Most trials that a policy is asked about: those that trained last."""


def wanted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, numbers: Collection[int]
) -> list[int]:
    """Order in which a policy would give a device to these trials, if only they wanted one.

    It is asked about one device and them, again and again without those it has chosen. What it
    leaves open goes by when they ran: the latest is wanted first. Its memory is not touched.

    Args:
        decide: the policy.
        snapshot: how things are; every other trial is shown as running.
        numbers: the trials in question.
    """
    trials = [_waiting(trial, snapshot.now) for trial in snapshot.trials if trial.number in numbers]
    recent = sorted(
        trials, key=lambda trial: (trial.waiting_since or 0.0, trial.number), reverse=True
    )
    others = [_busy(trial) for trial in snapshot.trials if trial.number not in numbers]
    asked = {trial.number: trial for trial in recent[:MOST_ASKED]}
    others += [_busy(trial) for trial in recent[MOST_ASKED:]]
    order: list[int] = []
    while len(asked) > 1:
        views = (*others, *asked.values())
        decision = decide(_pretended(snapshot, views))
        chosen = next((a.trial for a in decision.assignments if a.trial in asked), None)
        if chosen is None:
            break
        others.append(_busy(asked.pop(chosen)))
        order.append(chosen)
    return order + [trial.number for trial in recent if trial.number not in order]


def _pretended(snapshot: Snapshot, trials: tuple[TrialView, ...]) -> Snapshot:
    return replace(
        snapshot,
        devices=(Device(id="any", free=True),),
        trials=trials,
        unstarted=Unstarted(count=0, fixed=snapshot.unstarted.fixed),
    )


def _waiting(trial: TrialView, now: float) -> TrialView:
    since = now if trial.waiting_since is None else trial.waiting_since
    elastic = None if trial.elastic is None else replace(trial.elastic, devices=(1, 1))
    return replace(
        trial,
        state="parked",
        waiting_since=since,
        device=None,
        devices=(),
        bound_to=(),
        devices_wanted=1,
        elastic=elastic,
    )


def _busy(trial: TrialView) -> TrialView:
    return replace(trial, state="running", waiting_since=None)


def boosted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, boosted: Collection[int]
) -> Decision:
    """Give boosted trials their devices, and let the policy decide about what is left.

    Args:
        decide: the policy.
        snapshot: how things are.
        boosted: the numbers of these trials. The longest waiting chooses first; one that sits on
            a free device keeps it, and others take first those on which no trial sits.
    """
    waiting = [r for r in snapshot.trials if r.number in boosted and _is_waiting(r)]
    if not waiting:
        return decide(snapshot)
    waiting.sort(key=lambda trial: (trial.waiting_since or 0.0, trial.number))
    others = {
        id_ for r in snapshot.trials if _is_waiting(r) and r not in waiting for id_ in r.seats
    }
    chosen: list[Assignment] = []
    # Devices on which other trials sit are taken only if there are no others.
    for shunned in (others, set[str]()):
        chosen += place(_rest(snapshot, chosen, shunned), _left(waiting, chosen))
    rest = _rest(snapshot, chosen, set())
    if not any(device.free or not device.powered for device in rest.devices):
        return Decision(assignments=tuple(chosen), memory=snapshot.memory)
    decision = decide(rest)
    return replace(decision, assignments=(*chosen, *decision.assignments))


def _is_waiting(trial: TrialView) -> bool:
    return trial.state in ("pending", "parked", "stored")


def _left(trials: Sequence[TrialView], chosen: Sequence[Assignment]) -> list[TrialView]:
    served = {each.trial for each in chosen}
    return [trial for trial in trials if trial.number not in served]


def _rest(snapshot: Snapshot, chosen: Sequence[Assignment], shunned: set[str]) -> Snapshot:
    """Snapshot after these assignments, without the devices that are shunned."""
    taken = {id_ for each in chosen for id_ in each.devices} | shunned
    served = {each.trial for each in chosen}
    devices = tuple(
        replace(device, free=device.free and device.id not in taken) for device in snapshot.devices
    )
    trials = tuple(
        replace(trial, state="running", waiting_since=None) if trial.number in served else trial
        for trial in snapshot.trials
    )
    return replace(snapshot, devices=devices, trials=trials)
