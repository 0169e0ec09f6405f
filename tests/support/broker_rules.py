"""Invariants of a broker after every event, for any behaviour of its clients."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import msgspec

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import Lease, Slot
from optuna_hermes.broker._core._events import Send
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import fits
from optuna_hermes.broker._core._study import Study
from support.broker_world import World


def check(world: World) -> None:
    """Raise ``AssertionError`` where a rule is broken."""
    state = world.handler.state
    leases = state.leases()
    _once((id_ for lease in leases for id_ in lease.devices), "a device has one lease")
    for lease in leases:
        there = [state.slots[id_].lease is lease for id_ in lease.devices]
        assert all(there), "a lease that has lost a device"
    _once((lease.epoch for lease in leases), "an epoch has one lease")
    _once((lease.connection for lease in leases), "a process has one lease")
    held = [(lease.study, lease.number) for lease in leases if lease.number is not None]
    _once(held, "a trial has one lease")
    for slot in state.slots.values():
        _check_slot(world, slot)
    for each in state.reservations():
        assert not any(slot.lease and slot.lease.yielding is None for slot in state.slots_of(each))
    for study in state.studies.values():
        _check_study(world, study)
        for trial in study.trials.values():
            _check_trial(world, trial, leases)
    _once((r.connection for r in state.trials() if r.connection), "a process has one trial")
    _check_devices(world)
    _check_promises(world)
    _check_grants(world)
    status = world.handler.status(world.now)
    json.dumps(msgspec.to_builtins(status), allow_nan=False)
    wire.frame(wire.Status(status=status))
    world.handler.changes(world.now)
    assert not world.handler.changes(world.now), "a change is told once"


def check_broken(world: World, device: str) -> None:
    """Raise ``AssertionError`` if a trial stays with a device that was seen to be broken."""
    lease = world.handler.state.slots[device].lease
    trial = None if lease is None else world.handler.state.trial_of(lease)
    if lease is not None and not lease.yielding and not world.is_dying(lease.connection):
        assert trial is not None, "a new trial stays with a broken device"
        assert not trial.can_store, "a trial stays with a broken device"


def _once(values: Iterable[object], what: str) -> None:
    more = [value for value, count in Counter(values).items() if count > 1]
    assert not more, f"{what}: {more}"


def _check_slot(world: World, slot: Slot) -> None:
    state, lease, reservation = world.handler.state, slot.lease, slot.reservation
    if lease is not None:
        assert lease.connection in state.clients, "a lease whose holder is gone"
        assert slot.device.id in lease.devices
        assert not lease.uncommitted or state.studies[lease.study].outage_since is not None, (
            "held for ever"
        )
        trial = state.trial_of(lease)
        if trial is not None:
            assert trial.state == "running", f"a lease of a trial that is {trial.state}"
            assert (trial.connection, trial.epoch) == (lease.connection, lease.epoch)
            assert trial.devices == lease.devices
            study = state.studies[lease.study]
            leaves = lease.yielding or study.outage_since is not None
            assert leaves or not study.is_held(trial), "a device for a trial that is held"
    if reservation is not None and reservation.number is not None:
        study = state.studies[reservation.study]
        assert study.trials[reservation.number].live, "a device for a trial that is over"
        assert not study.is_held(study.trials[reservation.number]), (
            "a device to come for a trial that is held"
        )


def _check_study(world: World, study: Study) -> None:
    clients, key = world.handler.state.clients, study.spec.key
    _once(study.idle_workers, "a process waits once")
    busy = {trial.connection for trial in study.trials.values()}
    busy |= {lease.connection for lease in world.handler.state.leases()}
    for connection in study.idle_workers:
        assert clients[connection].role == "worker", "only workers wait for any trial"
        assert connection in study.workers
        assert connection not in busy, "a process that has a trial does not wait for another"
    assert study.workers <= clients.keys(), "a worker that is gone"
    assert study.driver is None or study.driver in clients, "a driver that is gone"
    assert any(client.study == key for client in clients.values()), "a study that nobody attends"
    assert "Policy" not in (study.problem or ""), study.problem
    if not world.lagging and not world.away:
        known = {trial.number for trial in world.ledgers[key].load_trials(key)}
        assert known <= study.trials.keys(), "a trial was forgotten"


def _check_trial(world: World, trial: LiveTrial, leases: list[Lease]) -> None:
    lease = next((a for a in leases if (a.study, a.number) == (trial.study, trial.number)), None)
    assert (trial.state == "running") == (lease is not None), f"{trial.state} with {lease}"
    assert trial.connection is None or trial.connection in world.handler.state.clients, (
        "its process"
    )
    assert trial.number in world.handler.state.studies[trial.study].trials
    if trial.state in ("running", "parked"):
        assert trial.connection is not None, f"{trial.state} without a process"
    elif trial.state != "pending":
        assert trial.connection is None, f"{trial.state} with a process"
    expected = {"parked": ("resident", "host"), "stored": ("disk",)}.get(trial.state, (None,))
    assert trial.tier in expected, f"{trial.state} in {trial.tier}"
    assert trial.state != "stored" or trial.checkpoints, "stored without a checkpoint"
    assert trial.requested_tier is None or trial.state in ("running", "parked"), (
        "asked, and not there"
    )
    if (trial.study, trial.number) in world.done:
        assert not trial.live, "what is done stays done"


def _check_devices(world: World) -> None:
    """Check that no two honest processes train on one device, or one trial."""
    here = (*world.processes.values(), *world.away_ones)
    there = [p for p in here if p.honest and p.doing == "trains"]
    _once((id_ for p in there for id_ in p.devices), "a device has one holder")
    _once(((p.study, p.trial.number) for p in there if p.trial), "a trial has one process")


def _check_promises(world: World) -> None:
    """Check that no trial is sent to host memory beyond the budget."""
    state = world.handler.state
    sent = [command.message for command in world.answer if isinstance(command, Send)]
    if any(isinstance(m, wire.Move | wire.Yield) and m.tier == "host" for m in sent):
        assert _promised(world) <= state.host_budget_bytes, "more host memory than there is"


def _check_grants(world: World) -> None:
    for command in world.answer:
        if isinstance(command, Send) and isinstance(command.message, wire.Grant):
            for id_ in command.message.devices:
                slot = world.handler.state.slots[id_]
                if slot.lease is not None and slot.lease.epoch == command.message.epoch:
                    assert slot.lease.devices == command.message.devices
                    _check_grant(world, slot, slot.lease)


def _check_grant(world: World, slot: Slot, lease: Lease) -> None:
    """Check that a granted device can hold the trial, unless no other trial could leave it."""
    state = world.handler.state
    assert slot.device.healthy, "a grant of a broken device"
    assert slot.device.free, "a grant of a device that someone else has"
    trial = state.trial_of(lease)
    parked = [other for other in state.parked_on(slot) if other.tier == "resident"]
    need = state.studies[lease.study].need_of(trial)
    held = 0 if trial is None else _uses(world, lease.connection)
    missing = None if need is None else need - held
    if fits(slot.device.memory_free_bytes, missing) is False:
        assert not [o for o in parked if o.requested_tier or _could_go(world, o)], (
            "somebody could go"
        )
    if slot.device.exclusive:
        others = [p for p in world.processes.values() if p.connection != lease.connection]
        kept = [p for p in others if p.honest and p.context and slot.device.id in p.devices]
        assert not kept, "a grant of a device that another process keeps"
    if trial is not None and trial.alone:
        coming = [(each.study, each.number) for each in state.reservations()]
        here = (r for r in state.parked_on(slot) if (r.study, r.number) not in coming)
        near = [other for other in here if _near(slot, trial, other)]
        assert not any(other.can_store for other in near), "alone is alone"


def _near(slot: Slot, trial: LiveTrial, other: LiveTrial) -> bool:
    """True if two trials compete for memory: on a GPU always, on a CPU slot within a study."""
    return slot.device.kind == "gpu" or trial.study == other.study


def _uses(world: World, connection: int) -> int:
    process = world.processes.get(connection)
    return process.uses if process else 0


def _promised(world: World) -> int:
    """Host memory that trials use or have reserved."""
    return sum(trial.host_claim_bytes for trial in world.handler.state.trials())


def _could_go(world: World, trial: LiveTrial) -> bool:
    state = world.handler.state
    room = state.host_budget_bytes - _promised(world)
    takes = trial.takes_bytes
    return trial.can_store or (trial.can_offload and takes is not None and takes <= room)
