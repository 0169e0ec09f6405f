"""Boosted trials: they choose their devices before the policy is asked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from optuna_hermes.model import WAITING_STATES, Assignment, Decision, Snapshot, TrialView
from optuna_hermes.policies import place


def boosted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, boosted: Collection[int]
) -> Decision:
    """Give boosted trials their devices, and let the policy decide about what is left.

    The longest waiting chooses first; one that is on a free device keeps it, and others take first
    those on which no trial is parked.
    """
    waiting = [r for r in snapshot.trials if r.number in boosted and _is_waiting(r)]
    if not waiting:
        return decide(snapshot)
    waiting.sort(key=lambda trial: (trial.waiting_since or 0.0, trial.number))
    others = {
        id_
        for r in snapshot.trials
        if _is_waiting(r) and r not in waiting
        for id_ in r.current_devices
    }
    chosen: list[Assignment] = []
    # Devices on which other trials are parked are taken only if there are no others.
    for shunned in (others, set[str]()):
        chosen += place(_rest(snapshot, chosen, shunned), _left(waiting, chosen))
    rest = _rest(snapshot, chosen, set())
    if not any(device.free or not device.powered for device in rest.devices):
        return Decision(assignments=tuple(chosen), memory=snapshot.memory)
    decision = decide(rest)
    return replace(decision, assignments=(*chosen, *decision.assignments))


def _is_waiting(trial: TrialView) -> bool:
    return trial.state in WAITING_STATES


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
