"""The broker and the simulator call the same policies, and see the same: so they do the same."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Send, Tick
from optuna_hermes.broker._core._study import Study
from optuna_hermes.model import Assignment, Decision, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import POLICIES, Policy, make_policy
from optuna_hermes.simulator import (
    CurveSet,
    EventQueue,
    FixedList,
    Recording,
    SwitchCosts,
    TrialSimulator,
)
from support.broker import FakeBroker

CURVES = "OPTUNA_HERMES_CURVES"
COSTS = SwitchCosts(fraction=0.004)

Start = tuple[float, str, int]
"""Start of a unit: its time, its device and its trial."""


class Watched(Policy):
    """A policy that remembers what it was shown, and whose slices last one unit.

    Args:
        inner: the policy that decides.
        seconds: of an assignment's next unit; None leaves the length of a slice open.
    """

    def __init__(self, inner: Policy, seconds: Callable[[Assignment], float] | None = None) -> None:
        self.inner = inner
        self.seconds = seconds
        self.shown: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        decision = self.inner.decide(snapshot)
        if not decision.assignments:
            return decision
        self.shown.append(snapshot)
        if self.seconds is None:
            return decision
        given = tuple(replace(a, slice_seconds=self.seconds(a)) for a in decision.assignments)
        return replace(decision, assignments=given)


@dataclass
class Worker:
    """A process, the trial that it holds, the lease it has or had, and what it will hear."""

    connection: int
    number: int | None = None
    epoch: int = 0
    inbox: deque[wire.FromBroker] = field(default_factory=deque)


class Player:
    """Workers that train recordings under a broker, each unit for as long as it took then.

    Args:
        policy: a name of ``POLICIES``.
        recordings: one for each trial.
        n_devices: how many devices.
        fixed: whether the driver calls its trials a fixed list.
    """

    def __init__(
        self, policy: str, recordings: Sequence[Recording], n_devices: int, *, fixed: bool
    ) -> None:
        self.recordings = recordings
        self.units = [0] * len(recordings)
        self.left = list(range(len(recordings)))
        self.starts: list[Start] = []
        self.workers: dict[int, Worker] = {}
        self.last: dict[str, int] = {}
        self.device_of: dict[int, str] = {}
        self.due = EventQueue[Callable[[], None]]()
        self.delivered = 0
        self.broker = FakeBroker(devices=[Device(id=f"cpu:{i}") for i in range(n_devices)])
        n_workers = len(recordings) + n_devices
        self.broker.driver(
            unstarted=len(recordings),
            max_alive=n_workers,
            slice_seconds=1e-6,
            fixed=fixed,
            waiting=tuple(self.left) if fixed else (),
            params={number: dict(each.params) for number, each in enumerate(recordings)},
        )
        self.policy = Watched(make_policy(policy), self.seconds)
        self.study.policy = self.policy
        for _ in range(n_workers):
            worker = Worker(self.broker.worker())
            self.workers[worker.connection] = worker
        self.ids = list(self.broker.handler.state.slots)

    @property
    def study(self) -> Study:
        return self.broker.handler.state.studies["s"]

    def play(self) -> list[Start]:
        """Train everything; devices come one after another, as the simulator looks at them."""
        for id_ in self.ids:
            self.broker.poll(id_, free=True)
            self.listen()
        while self.due:
            event = self.due.pop()
            self.broker.now = self.due.now
            event()
            self.listen()
        assert self.study.problem is None
        return self.starts

    # -- what a unit takes

    def cost(self, number: int, device: str) -> float:
        """As the simulator counts: nothing for the trial that the device has trained last."""
        if self.last.get(device) == number and self.device_of.get(number) == device:
            return 0.0
        unit = self.recordings[number].seconds[self.units[number]]
        return COSTS.of(unit, is_new=number not in self.device_of)

    def seconds(self, assignment: Assignment) -> float:
        number = self.left[0] if assignment.trial is None else assignment.trial
        unit = self.recordings[number].seconds[self.units[number]]
        return unit + self.cost(number, assignment.devices[0])

    # -- the workers

    def begin_unit(self, worker: Worker, device: str) -> None:
        number = worker.number
        assert number is not None
        cost = self.cost(number, device)
        end = self.broker.now + (self.recordings[number].seconds[self.units[number]] + cost)
        lease = self.broker.handler.state.slots[device].lease
        assert lease is not None
        assert lease.deadline == end, "a slice ends with its unit"
        self.starts.append((self.broker.now, device, number))
        self.last[device], self.device_of[number] = number, device
        # In the order of the devices, as in the simulator; a device reports before it trains anew.
        priority = 2 * self.ids.index(device)
        training = partial(self.say_training, worker)
        self.due.add(self.broker.now + cost, training, priority=priority + 1)
        self.due.add(end, partial(self.end_unit, worker, device), priority=priority)

    def say_training(self, worker: Worker) -> None:
        assert worker.number is not None
        params = dict(self.recordings[worker.number].params)
        message = wire.FirstBatch(epoch=worker.epoch, can_store=False, params=params)
        self.broker.say(worker.connection, message)

    def end_unit(self, worker: Worker, device: str) -> None:
        number = worker.number
        assert number is not None
        self.units[number] += 1
        unit, values = self.units[number], self.recordings[number].values
        report = wire.Report(
            epoch=worker.epoch,
            unit=unit,
            step=unit,
            value=values[unit - 1],
            units_left=len(values) - unit,
        )
        self.broker.say(worker.connection, report)
        if unit == len(values):
            self.broker.say(worker.connection, wire.Ended(epoch=worker.epoch, state="done"))
            self.broker.hang_up(worker.connection)
            del self.workers[worker.connection]
            return
        self.broker.apply(Tick())
        self.deliver()
        if not worker.inbox:
            self.begin_unit(worker, device)

    def deliver(self) -> None:
        """Give every worker what it was sent."""
        for command in self.broker.log[self.delivered :]:
            if not isinstance(command, Send) or command.connection not in self.workers:
                continue
            if not isinstance(command.message, wire.ReportAck):  # an empty inbox says the same
                self.workers[command.connection].inbox.append(command.message)
        self.delivered = len(self.broker.log)

    def listen(self) -> None:
        """Let every worker answer what it was sent, until nobody has anything to say."""
        self.deliver()
        while asked := [worker for worker in self.workers.values() if worker.inbox]:
            for worker in asked:
                self.answer(worker, worker.inbox.popleft())
            self.deliver()

    def answer(self, worker: Worker, message: wire.FromBroker) -> None:
        if isinstance(message, wire.Yield):
            parked = wire.TierChanged(epoch=worker.epoch, tier="resident", suspend_seconds=0.0)
            self.broker.say(worker.connection, parked)
        elif isinstance(message, wire.Grant):
            worker.epoch = message.epoch
            if worker.number is None:
                worker.number = (
                    self.left[0] if message.listed_number is None else message.listed_number
                )
                self.left.remove(worker.number)
                begin = wire.Begin(epoch=worker.epoch, number=worker.number, trial_id=worker.number)
                self.broker.say(worker.connection, begin)
            self.begin_unit(worker, message.devices[0])


def random_curves(seed: int, n: int) -> list[Recording]:
    """Curves that fall as powers of time, cross each other and are noisy; some diverge."""
    rng = np.random.default_rng(seed)
    recordings = []
    for number in range(n):
        units = np.arange(1, int(rng.integers(6, 14)) + 1)
        floor, start, power = rng.uniform(0.1, 1), rng.uniform(0.5, 3), rng.uniform(0.1, 1.5)
        values = floor + start * units**-power + rng.normal(0, 0.03, len(units))
        if rng.random() < 0.15:
            values[rng.integers(1, len(units)) :] = rng.choice([np.nan, np.inf, 10.0])
        seconds = rng.uniform(0.7, 1.5) * rng.uniform(0.9, 1.1, len(units))
        recordings.append(
            Recording(
                values=tuple(values.tolist()),
                seconds=tuple(seconds.tolist()),
                params={"lr": float(rng.uniform()), "n": number},
            )
        )
    return recordings


def real_curves(path: Path) -> list[Recording]:
    """Some trials of a set that was given, their first units; no two units end together."""
    with np.load(path) as file:
        recordings = CurveSet.from_arrays(path.stem, dict(file)).draw(14, seed=0)
    rng = np.random.default_rng(0)
    return [
        replace(r, values=r.values[:15], seconds=tuple(rng.uniform(0.7, 1.5, 15).tolist()))
        for r in recordings
    ]


def given_sets() -> list[Path]:
    folder = os.environ.get(CURVES)
    files = sorted(Path(folder).glob("*.npz")) if folder else []
    return files[:: max(1, len(files) // 3)][:3]


class Proposed(FixedList):
    """The same trials, as if a sampler that learns had proposed them."""

    @property
    def unstarted(self) -> Unstarted:
        return replace(super().unstarted, fixed=False, listed=())


def check_parity(policy: str, recordings: list[Recording], n_devices: int, *, fixed: bool) -> None:
    source = (FixedList if fixed else Proposed)(recordings)
    watched = Watched(make_policy(policy))
    trace = TrialSimulator(watched, source, n_devices=n_devices, costs=COSTS).run()
    simulated = [(s.start, f"cpu:{s.device}", s.number) for s in trace.slices]
    player = Player(policy, recordings, n_devices, fixed=fixed)
    assert sorted(player.play()) == sorted(simulated)
    assert [s.now for s in player.policy.shown] == [s.now for s in watched.shown]
    for live, replayed in zip(player.policy.shown, watched.shown, strict=True):
        assert comparable(live) == comparable(replayed)


def comparable(snapshot: Snapshot) -> object:
    """Return what a policy may build on, whoever asks it; device time to a billionth of a second.

    A broker knows no more of a trial than it was told with a report, and what a switch will cost
    only from those it has seen.
    """
    trials = {trial.number: told(trial) for trial in (*snapshot.trials, *snapshot.finished)}
    return trials, snapshot.unstarted.listed


def told(trial: TrialView) -> object:
    known = (trial.units_left, dict(trial.params)) if trial.curve.units else None
    since = trial.waiting_since if trial.state == "parked" else None
    seconds = [round(each, 9) for each in (trial.attained_seconds, *trial.curve.device_seconds)]
    values = np.array(trial.curve.values).tobytes()
    return (
        *(
            trial.state,
            trial.tier,
            trial.device,
            trial.bound_to,
            trial.submitted,
            since,
            trial.curve.steps,
        ),
        *(values, seconds, known),
    )


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_broker_does_what_the_simulator_does(
    seed: int, policy: str, n_devices: int, fixed: bool
) -> None:
    """On curves that cross, diverge and end early, every unit is trained when and where it was."""
    check_parity(policy, random_curves(seed, 12 + 4 * seed), n_devices, fixed=fixed)


@pytest.mark.parametrize("n_devices", [1, 3])
def test_that_holds_where_a_list_is_longer_than_its_beginning(n_devices: int) -> None:
    """Ranks foreseen of listed trials decide in both which of them is opened, and when."""
    recordings = random_curves(0, 40)
    for number, each in enumerate(recordings):
        best = min(value for value in each.values if np.isfinite(value))
        recordings[number] = replace(each, params={"seen": best, "kind": str(number % 3)})
    trace = TrialSimulator(make_policy("hermes"), FixedList(recordings), n_devices=n_devices).run()
    first = list(dict.fromkeys(each.number for each in trace.slices))
    assert first != list(range(40))
    check_parity("hermes", recordings, n_devices, fixed=True)


def test_that_holds_for_a_policy_behind_energy() -> None:
    """A policy that is asked by `energy` decides as it does alone."""
    check_parity("energy:hermes", random_curves(0, 10), 3, fixed=False)


@pytest.mark.skipif(not given_sets(), reason=f"{CURVES} names no folder with curve sets")
@pytest.mark.parametrize("path", given_sets(), ids=lambda path: path.stem)
@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_that_holds_on_real_curves(policy: str, n_devices: int, path: Path) -> None:
    """Curves that others recorded are no exception."""
    check_parity(policy, real_curves(path), n_devices, fixed=True)
