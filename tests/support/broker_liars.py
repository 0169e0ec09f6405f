"""Faulty clients: any message, at any time."""

from __future__ import annotations

from random import Random

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import BatchSizes, TierName
from support.broker_clients import Process, Trial
from support.broker_world import World

_TIERS: tuple[TierName, ...] = ("resident", "host", "disk")
_ENDS: tuple[wire.Ending, ...] = ("done", "failed")


def own_epochs(world: World, process: Process) -> set[int]:
    """The epochs for which the broker accepts messages of a process."""
    state = world.handler.state
    own = {lease.epoch for lease in state.leases() if lease.connection == process.connection}
    held = [trial for trial in state.trials() if trial.connection == process.connection]
    parked = {trial.epoch for trial in held if trial.state == "parked"}
    # A trial may end before it knows of its first lease.
    return own | parked | ({0} if held else set())


def lie(world: World, process: Process, random: Random) -> None:
    """Let a process send any message; it does not act afterwards, and its trials are spoilt."""
    process.honest = False
    own = own_epochs(world, process)
    _spoil(world, process)
    key = random.choice([*world.studies, process.study, "unknown"])
    if own and random.random() < 0.6:
        message = about_lease(world, random.choice(sorted(own)), random)
    else:
        message = about_study(world, key, random)
    world.say(process, message)
    _spoil(world, process)
    for run in world.handler.state.trials():
        trial = _trial(world, run.study, run.number)
        if not run.live and trial.end is None:
            trial.end = "failed" if run.state == "failed" else "done"  # in Optuna too


def about_study(world: World, key: str, random: Random) -> wire.FromClient:
    """A random message about a study, or about none."""
    spec = world.specs.get(key, next(iter(world.specs.values())))
    number = random.randrange(len(world.studies[spec.key].trials) + 2)
    opening = world.driver(spec.key)
    kinds: list[wire.FromClient] = [
        wire.Ready(study=key),
        wire.Register(study=spec, number=number, trial_id=number),
        opening,
        wire.Describe(study=key, params={number: {"lr": 0.1}}),
        wire.KeepWorkers(study=key, max_alive=world.max_alive),
        wire.Drain(study=key),
        wire.SetOverrides(study=key, numbers=(number,), override="held"),
        wire.Finish(study=key, numbers=(number,)),
        wire.Finished(study=key, numbers=(number,)),
        wire.ChangePolicy(study=key, policy="fifo"),
        wire.GetStatus(),
        wire.WatchStudy(study=key, now=True),
        wire.Quit(),
        wire.Hello(version=wire.VERSION, role="worker"),
    ]
    return random.choice(kinds)


def about_lease(world: World, epoch: int, random: Random) -> wire.FromClient:
    """A random message about a lease."""
    run = next((run for run in world.handler.state.trials() if run.epoch == epoch), None)
    studies = [world.studies[run.study]] if run else list(world.studies.values())
    number = random.randrange(len(random.choice(studies).trials) + 2)
    checkpoint = None
    if run is not None:
        trial = _trial(world, run.study, run.number)
        trial.spoilt = True
        checkpoint = trial.save()
    tier, taken = random.choice(_TIERS), random.choice([None, 0, 3, 20])
    kinds: list[wire.FromClient] = [
        wire.Begin(epoch=epoch, number=number, trial_id=number),
        wire.FirstBatch(epoch=epoch, can_store=random.random() < 0.5),
        wire.Report(epoch=epoch, unit=random.randint(1, 9), step=0, value=random.random()),
        wire.Beat(epoch=epoch, memory_bytes=taken),
        wire.Beat(
            epoch=epoch,
            sizes=BatchSizes(
                now=random.randint(1, 9), least=2, most=8, most_devices=random.randint(1, 4)
            ),
        ),
        wire.TierChanged(
            epoch=epoch,
            tier=tier,
            suspend_seconds=random.random(),
            checkpoint=random.choice([None, checkpoint]),
            held_bytes=taken,
            host_bytes=random.choice([0, 3, 20]),
            can_store=random.random() < 0.5,
            can_offload=random.random() < 0.5,
        ),
        wire.Ended(epoch=epoch, state=random.choice(_ENDS)),
        wire.Released(epoch=epoch, reason="so", outgrown=random.random() < 0.5),
    ]
    if checkpoint is not None:
        kinds.append(wire.Saved(epoch=epoch, checkpoint=checkpoint))
    return random.choice(kinds)


def _spoil(world: World, process: Process) -> None:
    """Mark the trials that a lying process has had as spoilt."""
    for trial in world.handler.state.trials():
        if trial.connection == process.connection:
            _trial(world, trial.study, trial.number).spoilt = True


def _trial(world: World, key: str, number: int) -> Trial:
    """A trial by its number, created if it does not exist yet."""
    study = world.studies[key]
    while len(study.trials) <= number:
        study.create()
    return study.trials[number]
