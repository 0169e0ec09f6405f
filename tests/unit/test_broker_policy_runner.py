"""The snapshots that a broker gives to policies, and the decisions that it refuses."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest

from optuna_hermes import HermesSampler, _optuna
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core import _admission
from optuna_hermes.broker._core._broker_state import Reservation, Slot
from optuna_hermes.broker._core._events import StudyRead
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import (
    Assignment,
    BatchSizes,
    Budget,
    Curve,
    Decision,
    Device,
    Snapshot,
    Speed,
    TrialView,
    Unstarted,
)
from optuna_hermes.policies import Fifo, Policy
from support.broker import FakeBroker


class Watching(Policy):
    """First in, first out, and remembers what it was shown last."""

    def __init__(self) -> None:
        self.seen = Snapshot()

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen = snapshot
        return Fifo().decide(snapshot)

    def trial(self, number: int) -> TrialView:
        (found,) = [r for r in (*self.seen.trials, *self.seen.finished) if r.number == number]
        return found


@pytest.fixture
def broker() -> FakeBroker:
    """One device and a study whose slices last 1 s."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo", slice_seconds=1.0)
    return broker


@pytest.fixture
def watching(broker: FakeBroker) -> Watching:
    policy = Watching()
    broker.handler.state.studies["s"].policy = policy
    return policy


def begin(broker: FakeBroker, worker: int, number: int, **training: wire.Params) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True, **training))
    return epoch


def test_parameters_come_with_the_first_batch(broker: FakeBroker, watching: Watching) -> None:
    """At the end of its first slice a trial is shown with them."""
    begin(broker, broker.worker(), 0, params={"lr": 0.1, "act": "relu", "n": 3, "bias": True})
    broker.advance(1.0)
    assert watching.trial(0).params == {"lr": 0.1, "act": "relu", "n": 3, "bias": True}


def test_parameters_that_come_later_count_and_none_are_lost(
    broker: FakeBroker, watching: Watching
) -> None:
    """A report may bring them, and one without any takes none away."""
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    report = wire.Report(epoch=epoch, unit=1, step=1, value=0.5, params={"lr": 0.1})
    broker.say(worker, report)
    broker.say(worker, wire.Report(epoch=epoch, unit=2, step=2, value=0.4))
    broker.advance(1.0)
    assert watching.trial(0).params == {"lr": 0.1}


def test_units_left_are_those_of_the_last_report(broker: FakeBroker, watching: Watching) -> None:
    """They fall with every report, and one that does not know them leaves them unknown."""
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    for unit, left in ((1, 9), (2, 8), (3, None)):
        message = wire.Report(epoch=epoch, unit=unit, step=unit, value=0.5, units_left=left)
        broker.say(worker, message)
        broker.advance(1.0)
        assert watching.trial(0).units_left == left


@pytest.mark.parametrize("change", ["held", "away", "waits_for_memory"])
def test_a_trial_that_cannot_begin_could_end_nobody_knows_when(
    broker: FakeBroker, change: str
) -> None:
    """`hermes` would wait for it to end before a budget does, and finish no other."""
    begin(broker, broker.worker(), 0)
    study, runner = broker.handler.state.studies["s"], PolicyRunner(broker.handler.state)
    trial = study.trials[0]
    trial.units_left = 9
    assert runner.snapshot(study, [], 0.0).trials[0].units_left == 9
    if change == "held":
        study.overrides[0] = "held"
    elif change == "away":
        study.retry_at[0] = math.inf
    else:
        trial.waits_for_memory = True
    assert runner.snapshot(study, [], 0.0).trials[0].units_left is None


def test_the_driver_tells_a_new_broker_what_it_cannot_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspended trials from before have their parameters before they train again."""
    broker = FakeBroker(devices=1)
    connection = broker.connect("driver")
    spec = wire.StudySpec(key="s", name="s", ledger_url="memory:", policy="fifo")
    known = TrialRecord(
        study="s",
        number=3,
        trial_id=3,
        state="stored",
        tier="disk",
        host="h",
        units=2,
        slices=1,
        suspensions=1,
        device_seconds=2.0,
        submitted=0.0,
        updated=0.0,
    )
    broker.say(connection, wire.Describe(study="s", params={3: {"lr": 0.1}, 9: {"lr": 1.0}}))
    broker.say(connection, wire.Describe(study="other", params={3: {"lr": 0.3}}))
    policy = Watching()
    monkeypatch.setattr(_admission, "make_policy", lambda name: policy)
    message = wire.OpenStudy(study=spec, limit=0, max_alive=2)
    broker.apply(StudyRead(connection=connection, message=message, trials=(known,)))
    assert policy.trial(3).params == {"lr": 0.1}, "when it is asked for the first time"


def test_what_is_left_of_the_budget_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time falls with the clock, device time with what leases have had; unknown is unknown."""
    broker, policy = FakeBroker(devices=2), Watching()
    monkeypatch.setattr(_admission, "make_policy", lambda name: policy)
    broker.driver(slice_seconds=1.0, seconds_left=60.0, device_seconds=9.0)
    workers = [broker.worker(), broker.worker()]
    begin(broker, workers[0], 0)
    begin(broker, workers[1], 1)
    assert policy.seen.left == Budget(seconds=60.0, device_seconds=9.0)
    broker.advance(2.0)
    assert policy.seen.left == Budget(seconds=58.0, device_seconds=5.0)
    broker.advance(70.0)
    assert policy.seen.left == Budget(seconds=0.0, device_seconds=0.0)


def test_without_a_budget_none_is_shown(broker: FakeBroker, watching: Watching) -> None:
    """A driver that names no bound leaves both unknown."""
    begin(broker, broker.worker(), 0)
    broker.advance(1.0)
    assert watching.seen.left == Budget()


def test_what_an_opening_takes_is_shown(broker: FakeBroker, watching: Watching) -> None:
    """From the lease to the first batch; a trial that comes back is not opened once more."""
    worker = broker.worker()
    epoch = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
    broker.advance(0.3)
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    broker.advance(0.7)
    assert watching.seen.opening_seconds == pytest.approx(0.3)
    broker.say(worker, wire.Report(epoch=epoch, unit=1, step=1, value=0.5, units_left=9))
    broker.advance(1.0)
    assert watching.seen.opening_seconds == pytest.approx(0.3)


def test_a_trial_whose_slice_ends_is_shown_with_all_its_device_time(
    broker: FakeBroker, watching: Watching
) -> None:
    """A lease that is renewed is one lease, and each of its slices counts when it is over."""
    begin(broker, broker.worker(), 0)
    for seconds in (1.0, 2.0, 3.0):
        broker.advance(1.0)
        assert watching.trial(0).attained_seconds == pytest.approx(seconds)


def test_a_running_trial_is_shown_as_it_was_when_it_was_decided_about(watching: Watching) -> None:
    """Of others a policy knows no more than at the start of their slices."""
    broker = FakeBroker(devices=2)
    broker.driver(policy="fifo", slice_seconds=1.0)
    broker.handler.state.studies["s"].policy = watching
    begin(broker, broker.worker(), 0)
    broker.advance(0.5)
    begin(broker, broker.worker(), 1)
    broker.advance(1.0)
    assert watching.seen.now == 1.5
    assert watching.trial(1).attained_seconds == pytest.approx(1.0)
    assert watching.trial(0).attained_seconds == pytest.approx(1.0)
    broker.advance(0.5)
    assert watching.seen.now == 2.0
    assert watching.trial(0).attained_seconds == pytest.approx(2.0)
    assert watching.trial(1).attained_seconds == pytest.approx(1.0)


def test_finished_trials_are_shown_as_such(broker: FakeBroker, watching: Watching) -> None:
    """A trial that is done, or failed, is not taken for one that trains."""
    for number, state in enumerate(("done", "failed")):
        worker = broker.worker()
        epoch = begin(broker, worker, number)
        broker.say(worker, wire.Ended(epoch=epoch, state=state))  # type: ignore[arg-type]
        broker.hang_up(worker)
    begin(broker, broker.worker(), 2)
    broker.advance(1.0)
    assert [trial.state for trial in watching.seen.finished] == ["done", "failed"]
    assert [trial.units_left for trial in watching.seen.finished] == [0, None]


def test_a_policy_that_prunes_ends_its_study_only(broker: FakeBroker) -> None:
    """A broker kills nothing: the study stops, its trials are suspended, and it says why."""

    class Pruning(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision(pruned=tuple(r.number for r in snapshot.trials if r.state == "parked"))

    other = broker.driver(key="other", unstarted=0, policy="fifo")
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    broker.handler.state.studies["s"].policy = Pruning()
    broker.advance(1.0)
    problems = {s.key: s.problem for s in broker.handler.status(broker.now).studies}
    assert "kills nothing" in problems["s"]
    assert "trial 0" in problems["s"]
    assert problems["other"] is None
    assert broker.handler.state.studies["s"].trials[0].live
    assert broker.last(worker, "Yield") is not None
    broker.say(
        worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True)
    )
    assert broker.last(worker, "Move").tier == "disk"
    assert broker.last(other, "Refused") is None


class Stopping(Policy):
    """First in, first out, until a trial has had so many units."""

    def __init__(self, most: int) -> None:
        self.most = most

    def decide(self, snapshot: Snapshot) -> Decision:
        over = any(trial.curve.units >= self.most for trial in snapshot.trials)
        return Decision() if self.most == 0 or over else Fifo().decide(snapshot)


def test_a_policy_that_lets_all_wait_for_ever_ends_its_study(broker: FakeBroker) -> None:
    """Once no device is leased, nothing would happen that could change its mind."""
    study = broker.handler.state.studies["s"]
    study.policy = Stopping(1)
    worker = broker.worker()
    epoch = begin(broker, worker, 0)
    broker.say(worker, wire.Report(epoch=epoch, unit=1, step=1, value=0.5))
    broker.advance(1.0)
    assert study.problem is None, "its trial is on its way"
    broker.say(
        worker, wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.0, can_store=True)
    )
    assert study.problem is not None
    assert "Policy 'fifo' must serve every trial" in study.problem


@pytest.mark.parametrize("waits_for", ["nothing", "a process", "a timeout", "a device", "no trial"])
def test_a_policy_may_wait_for_what_is_to_come(waits_for: str) -> None:
    """It may want several processes at once, and a device that another study has."""
    broker = FakeBroker(devices=2)
    broker.driver(policy="fifo", unstarted=0 if waits_for == "no trial" else 4, max_alive=2)
    state = broker.handler.state
    study, runner = state.studies["s"], PolicyRunner(state)
    study.policy = Stopping(0)
    study.idle_workers = [90] if waits_for == "a process" else [90, 91]
    if waits_for == "a timeout":
        study.ends_at = 100.0
    slots = list(state.slots.values())[waits_for == "a device" :]
    assert runner.decide(study, slots, 0.0) == Decision()
    assert (study.problem is not None) == (waits_for == "nothing")


GPUS = tuple(Device(id=f"GPU-{index}", kind="gpu", free=True) for index in range(2))
BOUND = TrialView(number=0, state="parked", bound_to=("GPU-1",))
LISTED = TrialView(number=7, state="pending")


@pytest.mark.parametrize(
    ("numbers", "snapshot", "words"),
    [
        ((None, None), Snapshot(unstarted=Unstarted(count=1)), "than are left, 1, but got 2"),
        (
            (None, 7),
            Snapshot(unstarted=Unstarted(count=1, fixed=True, listed=(LISTED,))),
            "than are left, 1, but got 2",
        ),
        ((0,), Snapshot(trials=(BOUND,)), "leaves trial 0 on GPU-1, to .* but got GPU-0"),
    ],
    ids=["new", "listed", "bound"],
)
def test_what_a_policy_may_not_give_ends_its_study(
    broker: FakeBroker, numbers: tuple[int | None, ...], snapshot: Snapshot, words: str
) -> None:
    """More new trials than there are, or a device where the trial's process cannot go on."""

    class InOrder(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            pairs = zip(numbers, snapshot.devices, strict=False)
            given = (Assignment(trial=n, devices=(each.id,)) for n, each in pairs)
            return Decision(assignments=tuple(given))

    begin(broker, broker.worker(), 0)
    study = broker.handler.state.studies["s"]
    study.policy, study.limit, study.trials[0].can_store = InOrder(), 2, False
    runner = PolicyRunner(broker.handler.state)
    assert runner.ask(study, replace(snapshot, devices=GPUS)).assignments == ()
    assert re.match(f"Policy 'fifo' raised ValueError.*{words}.*: mend it", study.problem or "")


class UnreadableError(Exception):
    """An error of a user's own that cannot be shown."""

    def __repr__(self) -> str:
        return str(self.code)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "words"),
    [(AssertionError("x" * 5_000_000), r"AssertionError\('xxx"), (UnreadableError(), "Unreadable")],
)
def test_an_error_of_a_policy_is_sent_whatever_it_holds(
    broker: FakeBroker, error: Exception, words: str
) -> None:
    """No message may be as long as all of a snapshot: the driver's connection would end."""

    class Asserting(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            raise error

    (driver,) = (c for c, client in broker.handler.state.clients.items() if client.role == "driver")
    study = broker.handler.state.studies["s"]
    study.policy = Asserting()
    broker.worker()
    assert re.match(f"Policy 'fifo' raised {words}.* at {__file__}.*: mend it", study.problem or "")
    broker.say(driver, wire.WatchStudy(study="s", now=True))
    wire.frame(broker.last(driver, "StudyChanged"))


class Counting(Policy):
    """Trial 0 first, in numbers of NumPy, and by a generator."""

    def decide(self, snapshot: Snapshot) -> Decision:
        given = (
            Assignment(trial=np.int64(0), devices=(device.id,), slice_seconds=np.float64(1.0))
            for device in snapshot.devices
            if device.free
        )
        return Decision(assignments=given)  # type: ignore[arg-type]


def test_a_decision_may_be_of_numpys_numbers_and_of_a_generator() -> None:
    """All that follows from it can be sent, to the trial and to drivers."""
    broker = FakeBroker(devices=1)
    driver = broker.driver(params={0: {"x": 0.5}}, waiting=(0,), fixed=True, unstarted=1)
    broker.handler.state.studies["s"].policy = Counting()
    worker = broker.worker()
    assert broker.last(worker, "Grant").listed_number == 0
    begin(broker, worker, 0)
    broker.advance(1.5)
    broker.say(driver, wire.WatchStudy(study="s", now=True))
    told = broker.last(driver, "StudyChanged")
    assert told.study.problem is None
    for message in (*broker.sent(worker), told):
        wire.frame(message)


# -- a fixed list, or proposals of a sampler that learns -------------------------------------------


@pytest.mark.parametrize("fixed", [True, False])
def test_a_policy_is_told_what_is_to_come(fixed: bool, watching: Watching) -> None:
    """The driver's word for the trials that may be created reaches the policy."""
    broker = FakeBroker(devices=1)
    broker.driver(policy="fifo", unstarted=2, fixed=fixed)
    broker.handler.state.studies["s"].policy = watching
    broker.worker()
    assert watching.seen.unstarted == Unstarted(count=1, fixed=fixed)


def waiting(study: optuna.Study, number: int) -> optuna.Study:
    for index in range(number):
        study.enqueue_trial({"x": index / 10})
    return study


@pytest.mark.parametrize(
    ("sampler", "fixed"),
    [
        (optuna.samplers.RandomSampler, True),
        (lambda: optuna.samplers.GridSampler({"x": [1, 2]}), True),
        (optuna.samplers.BruteForceSampler, True),
        (optuna.samplers.QMCSampler, True),
        (optuna.samplers.TPESampler, False),
        (optuna.samplers.GPSampler, False),
        (optuna.samplers.CmaEsSampler, False),
        (type("Learning", (optuna.samplers.RandomSampler,), {}), False),
    ],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_does_not_learn_has_a_fixed_list(
    sampler: Callable[[], optuna.samplers.BaseSampler], fixed: bool
) -> None:
    """Alone and within this package's own; without a bound there is no list."""
    wrapped = HermesSampler(optuna.samplers.PartialFixedSampler({}, sampler()))
    for each in (sampler(), HermesSampler(sampler()), wrapped):
        study = optuna.create_study(sampler=each)
        assert _optuna.fixed_list(study, 5) is fixed
        assert _optuna.fixed_list(study, None) is False


def test_enqueued_trials_are_a_fixed_list_if_they_are_all() -> None:
    """One more than were enqueued, and the sampler proposes it."""
    study = waiting(optuna.create_study(sampler=HermesSampler()), 3)
    assert _optuna.fixed_list(study, 3)
    assert not _optuna.fixed_list(study, 4)


def test_parameters_are_plain_json() -> None:
    """Whatever a choice is, it can be sent: what JSON does not know goes as its text."""
    params = {"lr": 0.1, "n": 3, "bias": True, "none": None, "act": "relu"}
    more = {
        "huge": 2**70,
        "vast": 10**400,
        "single": np.float32(0.5),
        "shape": (1, 2),
        "\udce9": "\udce9.csv",
    }
    plain = _optuna.params_of(optuna.trial.FixedTrial(params | more))
    assert plain == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's own, of choices that it cannot store
        trial = optuna.trial.FixedTrial(params | more)
        for name, value in (params | more).items():
            trial.suggest_categorical(name, [value])
    plain = _optuna.params_of(trial)
    texts = {"single": "0.5", "shape": "(1, 2)", r"\udce9": r"\udce9.csv"}
    assert plain == params | texts | {"huge": float(2**70), "vast": str(10**400)}
    wire.frame(wire.FirstBatch(epoch=1, can_store=True, params=plain))


def test_host_memory_is_kept_for_trials_on_devices_and_for_those_promised_one() -> None:
    """Not for those whose devices are up for decision; a promise counts in place of the lease."""
    broker = FakeBroker(devices=2)
    broker.driver(unstarted=2)
    state = broker.handler.state
    for number, need in enumerate((3, 5)):
        begin(broker, broker.worker(), number)
        state.studies["s"].trials[number].need_bytes = need
    state.host_budget_bytes = 100

    def room(*slots: Slot) -> int | None:
        return PolicyRunner(state).snapshot(state.studies["s"], slots, 0.0).room.host_bytes

    first = state.slots["cpu:0"]
    assert (room(), room(first)) == (92, 95)
    first.reservation = Reservation(study="s", number=1, slice_seconds=None)
    assert (room(), room(first)) == (90, 95)


def test_a_trial_that_has_not_changed_is_not_looked_at_again(broker: FakeBroker) -> None:
    """A policy is shown the same view until something in it changes, and then a new one."""
    begin(broker, broker.worker(), 0)
    broker.worker()
    study, policy_runner = broker.handler.state.studies["s"], PolicyRunner(broker.handler.state)
    trial, sizes = study.trials[0], BatchSizes(now=2, least=1, most=4, most_devices=3)
    changes: dict[str, Any] = {"units_left": 7, "need_bytes": 5}
    changes |= {"params": {"lr": 0.5}, "device_seconds": 99.0, "tier": "host"}
    changes |= {"curve": Curve(steps=(1,), values=(0.5,), device_seconds=(1.0,))}
    changes |= {"sizes": sizes, "speeds": (Speed(devices=1, batch_size=2, step_seconds=1.0),)}
    changes |= {"can_store": False, "connection": None, "devices": ("cpu:2", "cpu:1")}
    changes |= {"state": "stored", "waiting_since": 3.0}
    for name, value in changes.items():
        (kept,) = policy_runner.snapshot(study, [], 9.0).trials
        assert policy_runner.snapshot(study, [], 10.0).trials[0] is kept
        setattr(trial, name, value)
        (shown,) = policy_runner.snapshot(study, [], 11.0).trials
        trial.cached_view = None
        assert kept != shown == policy_runner.snapshot(study, [], 11.0).trials[0], name
