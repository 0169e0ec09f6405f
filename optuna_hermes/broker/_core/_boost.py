"""Boosted runs, which get devices before the policy decides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from optuna_hermes.model import Assignment, Decision, RunView, Snapshot
from optuna_hermes.policies import place


def boosted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, boosted: Collection[int]
) -> Decision:
    """Give boosted runs their devices, and let the policy decide about what is left.

    Args:
        decide: the policy.
        snapshot: how things are.
        boosted: the numbers of these runs. The longest waiting chooses first; one that sits on
            a free device keeps it, and others take first those on which no run sits.
    """
    waiting = [r for r in snapshot.runs if r.number in boosted and _waits(r)]
    if not waiting:
        return decide(snapshot)
    waiting.sort(key=lambda run: (run.waiting_since or 0.0, run.number))
    others = {id_ for r in snapshot.runs if _waits(r) and r not in waiting for id_ in r.seats}
    chosen: list[Assignment] = []
    # Devices on which other runs sit are taken only if there are no others.
    for shunned in (others, set[str]()):
        chosen += place(_rest(snapshot, chosen, shunned), _left(waiting, chosen))
    rest = _rest(snapshot, chosen, set())
    if not any(device.free or not device.powered for device in rest.devices):
        return Decision(assignments=tuple(chosen), memory=snapshot.memory)
    decision = decide(rest)
    return replace(decision, assignments=(*chosen, *decision.assignments))


def _waits(run: RunView) -> bool:
    return run.state in ("pending", "parked", "stored")


def _left(runs: Sequence[RunView], chosen: Sequence[Assignment]) -> list[RunView]:
    served = {each.run for each in chosen}
    return [run for run in runs if run.number not in served]


def _rest(snapshot: Snapshot, chosen: Sequence[Assignment], shunned: set[str]) -> Snapshot:
    """Snapshot after these assignments, without the devices that are shunned."""
    taken = {id_ for each in chosen for id_ in each.devices} | shunned
    served = {each.run for each in chosen}
    devices = tuple(
        replace(device, free=device.free and device.id not in taken) for device in snapshot.devices
    )
    runs = tuple(
        replace(run, state="running", waiting_since=None) if run.number in served else run
        for run in snapshot.runs
    )
    return replace(snapshot, devices=devices, runs=runs)
