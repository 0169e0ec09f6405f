"""The broker's state under attack: no rule breaks, and in the end every trial is trained."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _event_handler
from optuna_hermes.broker._core._broker_state import BrokerState, Lease
from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import Command, Event, Send, StudyRead
from optuna_hermes.broker._core._lease_ends import LeaseEnds
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._memory_manager import MemoryManager
from optuna_hermes.broker._core._overrides import Overrides
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.policies import POLICIES
from support.broker_clients import Mixed, Process
from support.broker_liars import about_lease, lie, own_epochs
from support.broker_rules import check, check_broken
from support.broker_world import World

STEPS = 50
EXAMPLES = int(os.environ.get("HERMES_EXAMPLES", "40"))
"""Number of lives of a broker that are played; some thousands by hand, see CONTRIBUTING.md."""

WANTED = 4
OVERRIDES: tuple[Literal["held", "boosted"] | None, ...] = ("held", "held", "boosted", None)
PATIENCE = 600
"""Rounds in which processes that behave finish what was begun."""

STRETCHING = "support.broker_world:Stretching"

numbers = st.integers(0, 2**16)


class BrokerMachine(RuleBasedStateMachine):
    """A host of its own, whose processes behave or do not."""

    @initialize(
        gpus=st.booleans(),
        devices=st.integers(1, 3),
        told=st.sampled_from(["all", "all", "total", "nothing"]),
        lists=st.booleans(),
        exclusive=st.sampled_from([False, False, True]),
        budget=st.sampled_from([0, 4, 8, 12]),
        ledgers=st.integers(1, 2),
        policies=st.lists(st.sampled_from(sorted(POLICIES)), min_size=2, max_size=2),
        seed=numbers,
        opened=st.integers(0, 2),
    )
    def begin(self, seed: int, opened: int, **world: Any) -> None:
        self.world = World(**world, wanted=WANTED, random=Random(seed))
        for key in list(self.world.studies)[:opened]:
            self.world.open_study(key)

    # -- those who behave

    @rule(which=numbers)
    def open_study(self, which: int) -> None:
        """A driver comes; if there is one already it is refused, and leaves."""
        self.world.open_study(self.key(which))

    @rule(which=numbers)
    def start_plain(self, which: int) -> None:
        key = self.key(which)
        if len(self.world.studies[key].trials) < WANTED:
            self.world.start_plain(key)

    @rule(which=numbers)
    def act(self, which: int) -> None:
        if process := self.process(which):
            self.world.act(process)

    @rule(seed=numbers, rounds=st.integers(1, 4))
    def bustle(self, seed: int, rounds: int) -> None:
        """Most processes do something, in some order, a few times."""
        random = Random(seed)
        for _ in range(rounds):
            some = [p for p in self.world.processes.values() if random.random() < 0.7]
            random.shuffle(some)
            for process in some:
                self.world.act(process)
                check(self.world)
            self.world.staff()
            self.world.advance(random.choice([0.1, 0.4, 1.1]))
            check(self.world)

    @rule(seed=numbers, rounds=st.integers(2, 6))
    def work(self, seed: int, rounds: int) -> None:
        """The same for longer, and whoever has lost its driver gets another."""
        driven = {p.study for p in self.world.processes.values() if p.role == "driver"}
        for key, study in self.world.studies.items():
            if key not in driven and not study.finished and seed % 3:
                self.world.open_study(key)
        self.bustle(seed, rounds)

    @rule(which=numbers)
    def drain(self, which: int) -> None:
        drivers = [p for p in self.world.processes.values() if p.role == "driver"]
        if drivers:
            driver = drivers[which % len(drivers)]
            self.world.say(driver, wire.Drain(study=driver.study))

    # -- those who watch

    @rule(seed=numbers)
    def want(self, seed: int) -> None:
        """Somebody wants something of some trials, and mostly of those that train."""
        random = Random(seed)
        for trial in list(self.world.handler.state.trials()):
            if random.random() < (0.6 if trial.state == "running" else 0.2):
                override = random.choice(OVERRIDES)
                self.world.want(
                    wire.SetOverrides(study=trial.study, numbers=(trial.number,), override=override)
                )
                check(self.world)

    @rule(seed=numbers, times=st.integers(1, 3))
    def close_one(self, seed: int, times: int) -> None:
        """Somebody wants a trial to be finished, and may go away before it is."""
        live = [trial for trial in self.world.handler.state.trials() if trial.live]
        for trial in live and Random(seed).choices(live):
            self.world.close_trial(trial.study, trial.number, times)

    @rule(which=numbers, policy=st.sampled_from(sorted(POLICIES)))
    def change_policy(self, which: int, policy: str) -> None:
        self.world.want(wire.ChangePolicy(study=self.key(which), policy=policy))

    # -- time, devices, the ledger, ends

    @rule(tenths=st.integers(1, 30))
    def wait(self, tenths: int) -> None:
        self.world.advance(tenths / 10)

    @rule(seconds=st.sampled_from([3.0, 100.0, 1e6]))
    def sleep(self, seconds: float) -> None:
        """The machine was suspended, or the broker stopped for a while."""
        self.world.jump(seconds)

    @rule(which=numbers)
    def hang_up(self, which: int) -> None:
        if process := self.process(which):
            self.world.hang_up(process)

    @rule()
    def bury(self) -> None:
        self.world.bury()

    @rule(which=numbers, healthy=st.booleans(), free=st.booleans())
    def change_device(self, which: int, healthy: bool, free: bool) -> None:
        devices = list(self.world.devices)
        device = devices[which % len(devices)]
        self.world.change(device, healthy=healthy, free=free)
        self.world.poll()
        if not healthy:
            check_broken(self.world, device)

    @rule(which=numbers, taken=st.integers(0, 10))
    def meet_stranger(self, which: int, taken: int) -> None:
        """Somebody else's process takes, or gives back, memory of a device."""
        devices = list(self.world.devices)
        self.world.strangers[devices[which % len(devices)]] = taken
        self.world.poll()

    @rule(count=st.integers(1, 3))
    def refuse_leases(self, count: int) -> None:
        self.world.refusals = count

    @rule(lagging=st.booleans())
    def lag(self, lagging: bool) -> None:
        """The ledger answers late from now on, or again at once."""
        self.world.lagging = lagging
        if not lagging:
            self.world.catch_up()

    @rule(which=numbers)
    def lose_ledger(self, which: int) -> None:
        self.world.lose_ledger(self.key(which))

    @rule()
    def find_ledgers(self) -> None:
        self.world.find_ledgers()

    @rule()
    def catch_up(self) -> None:
        self.world.catch_up()

    @rule(wall_step=st.sampled_from([0.0, -7200.0, 1e7]), share=st.sampled_from([0.0, 0.7, 1.0]))
    def drop_broker(self, wall_step: float, share: float) -> None:
        self.world.drop_broker(wall_step, share)

    @rule(count=st.integers(1, 4))
    def come_back(self, count: int) -> None:
        for _ in range(count):
            self.world.come_back()

    @rule(which=numbers, how=st.sampled_from(["twice", "late"]))
    def mix_up(self, which: int, how: Mixed) -> None:
        """Have a process's next message on its lease arrive twice, or after the following one."""
        if process := self.process(which):
            process.mixed = how

    # -- those who do not behave

    @rule(which=numbers, seed=numbers)
    def lie(self, which: int, seed: int) -> None:
        """A process says what it may not, or not now."""
        if process := self.process(which):
            lie(self.world, process, Random(seed))

    @rule(seed=numbers)
    def say_late(self, seed: int) -> None:
        """Check that a message about a lease that is over, or another's, changes nothing at all.

        Whoever says that it is over is told that this is known.
        """
        random = Random(seed)
        epoch = random.choice([*self.world.epochs, self.world.epochs[-1] + 1])
        message = about_lease(self.world, epoch, random)
        self.world.poll()
        before, commands = fingerprint(self.world), []
        for process in list(self.world.processes.values()):
            if epoch not in own_epochs(self.world, process):
                said = self.world.say(process, message)
                commands += [c for c in said if not _is_noted(c)]
        assert (commands, fingerprint(self.world)) == ([], before), "a late message was heard"

    @rule(role=st.sampled_from(["driver", "plain"]), which=numbers)
    def read_for_the_dead(self, role: str, which: int) -> None:
        """A client is gone by the time that the study it asked for is read."""
        key = self.key(which)
        process = self.world.connect(role, key)
        opening = self.world.driver(key)
        register = wire.Register(study=self.world.specs[key], number=0, trial_id=0)
        event = self.world.read(process, opening if role == "driver" else register)
        self.world.hang_up(process)
        assert self.world.feed(event) == []

    # -- what holds

    @invariant()
    def rules_hold(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        """Once everybody behaves, every trial is trained to its end."""
        if hasattr(self, "world") and sys.exc_info()[0] is None:
            finish(self.world)

    # -- inside

    def key(self, which: int) -> str:
        return list(self.world.studies)[which % len(self.world.studies)]

    def process(self, which: int) -> Process | None:
        there = list(self.world.processes.values())
        return there[which % len(there)] if there else None


def fingerprint(world: World) -> str:
    """All that a broker knows, as text."""
    state = world.handler.state
    studies = [(s.idle_workers, s.workers, s.trials, s.memory) for s in state.studies.values()]
    return repr((state.epoch, state.slots, state.clients, studies))


def finish(world: World) -> None:
    """Processes and devices behave from now on.

    Whoever lied leaves, and drivers that are there begin again, for a study may have ended.
    """
    world.refusals, world.lagging = 0, False
    while world.away_ones:
        world.come_back()
    world.find_ledgers()
    for device in world.devices:
        world.strangers[device] = 0
        world.change(device, healthy=True, free=True)
    for process in list(world.processes.values()):
        world.straighten(process)
        if process.role == "driver" or not process.honest:
            world.hang_up(process)
    for key in world.studies:
        world.open_study(key)
    for _ in range(PATIENCE):
        if all(study.finished for study in world.studies.values()):
            break
        world.staff()
        world.poll()
        world.advance(0.4)
        world.bury()
        for process in list(world.processes.values()):
            world.act(process)
        world.look_again()
        world.want_nothing()
        check(world)
        problems = [study.problem for study in world.handler.state.studies.values()]
        assert not any(problems), problems
    for study in world.studies.values():
        assert study.finished, [t for t in study.trials if not t.end]


TestBroker = pytest.mark.timeout(300 + EXAMPLES)(BrokerMachine.TestCase)
TestBroker.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, suppress_health_check=list(HealthCheck)
)


class StretchedMachine(BrokerMachine):
    """Most trials can be trained on several devices, and are: now on more, now on fewer."""

    @initialize(
        gpus=st.booleans(),
        devices=st.integers(2, 3),
        told=st.sampled_from(["all", "total", "nothing"]),
        budget=st.sampled_from([0, 8]),
        ledgers=st.integers(1, 2),
        policies=st.sampled_from([[STRETCHING], [STRETCHING] * 2, [STRETCHING, "ones"], ["smd"]]),
        seed=numbers,
        opened=st.integers(1, 2),
    )
    def begin(self, seed: int, opened: int, **world: Any) -> None:
        super().begin(seed, opened, stretches=True, **world)


TestStretchedBroker = pytest.mark.timeout(300 + EXAMPLES)(StretchedMachine.TestCase)
TestStretchedBroker.settings = settings(TestBroker.settings, max_examples=max(1, EXAMPLES // 2))


class ReadyMachine(BrokerMachine):
    """There are processes enough to set up trials before there are devices for them."""

    @initialize(
        devices=st.integers(1, 2),
        ledgers=st.integers(1, 2),
        policies=st.lists(
            st.sampled_from(["hermes", "fifo", "round-robin"]), min_size=1, max_size=2
        ),
        seed=numbers,
        opened=st.integers(1, 2),
    )
    def begin(self, seed: int, opened: int, **world: Any) -> None:
        super().begin(seed, opened, gpus=False, told="nothing", budget=8, sets_up=True, **world)
        self.world.max_alive += 4


TestReadyBroker = pytest.mark.timeout(300 + EXAMPLES)(ReadyMachine.TestCase)
TestReadyBroker.settings = settings(TestBroker.settings, max_examples=max(1, EXAMPLES // 2))


# -- what it can see ---------------------------------------------------------------------------


class CrampedMachine(BrokerMachine):
    """Two studies take turns on one GPU that holds two of their runs at most."""

    @initialize(seed=numbers)
    def begin(self, seed: int) -> None:
        super().begin(
            gpus=True,
            devices=1,
            told="all",
            budget=8,
            ledgers=1,
            policies=["round-robin", "round-robin"],
            seed=seed,
            opened=2,
        )


class ExclusiveMachine(CrampedMachine):
    """The same GPU, which one process at most may use."""

    @initialize(seed=numbers)
    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.world.change("GPU:0", exclusive=True)
        self.world.poll()


def grant_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = EventHandler.handle

    late: list[Command] = []

    def hasty(self: EventHandler, event: Event, now: float) -> list[Command]:
        commands = [*late, *handle(self, event, now)]
        late[:] = [command for command in commands if isinstance(command, LeaseRecord)]
        return [command for command in commands if command not in late]

    monkeypatch.setattr(EventHandler, "handle", hasty)


def any_epoch_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def lease(self: BrokerState, epoch: int) -> Lease | None:
        return next((slot.lease for slot in self.slots.values() if slot.lease), None)

    monkeypatch.setattr(BrokerState, "lease", lease)


def _is_noted(command: Command) -> bool:
    return isinstance(command, Send) and isinstance(command.message, wire.LeaseEndAck)


def leases_outlive_their_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseEnds, "holder_gone", lambda *_: None)


def host_memory_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokerState, "host_used_bytes", 0)


def a_lease_ends_on_its_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    end = LeaseEnds.end

    def half(self: LeaseEnds, turn: Turn, lease: Lease) -> None:
        further = turn.state.slots_of(lease)[1:]
        end(self, turn, lease)
        for slot in further:
            slot.lease = lease

    monkeypatch.setattr(LeaseEnds, "end", half)


def ranks_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTrial, "suits", lambda self, slots: True)


def epochs_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = _event_handler.admit_study

    def forgetful(turn: Turn, event: StudyRead) -> Study:
        return admit(turn, replace(event, last_epoch=0))

    monkeypatch.setattr(_event_handler, "admit_study", forgetful)


def nobody_is_asked_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overrides, "enforce", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (grant_before_commit, "a grant before its lease"),
        # Or a trial is left over; that takes long to find.
        pytest.param(
            any_epoch_will_do, "a late message was heard|end=None", marks=pytest.mark.slow
        ),
        (leases_outlive_their_holders, "a lease whose holder is gone"),
        (host_memory_has_no_end, "more host memory than there is"),
        (epochs_begin_again, "epoch must be above"),
        (nobody_is_asked_to_let_go, "a device for a trial that is held"),
    ],
)
def test_the_machine_sees_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack finds what it is there to find."""
    plant(monkeypatch)
    assert_seen(seen, CrampedMachine)


def test_the_machine_sees_a_device_that_two_processes_would_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grant to a trial whose process could not make a context, since another one has one."""
    monkeypatch.setattr(MemoryManager, "_is_alone", lambda *_: True)
    assert_seen("a grant of a device that another process keeps", ExclusiveMachine)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (a_lease_ends_on_its_first_device, "a device has one lease"),
        (ranks_come_and_go, "ranks do not come and go"),
    ],
)
def test_the_machine_sees_a_bug_of_several_devices(
    plant: Callable[[pytest.MonkeyPatch], None], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases that come apart, and processes that are given what they cannot use."""
    plant(monkeypatch)
    assert_seen(seen, StretchedMachine)


def assert_seen(seen: str, machine: type[BrokerMachine]) -> None:
    """An attack finds a planted bug."""
    budget = settings(
        TestBroker.settings,
        max_examples=300,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises(Exception, match=seen):
        run_state_machine_as_test(machine, settings=budget)
