"""Devices are powered down only when free, and leased only once they are up again."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import BrokerState, Reservation
from optuna_hermes.broker._core._event_handler import EventHandler
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._core._power import RETRY_SECONDS, Power
from optuna_hermes.model import BatchSizes, Device
from support.broker import FakeBroker


def _begin(broker: FakeBroker, worker: int, number: int) -> int:
    """The worker's grant leads to this trial; its epoch."""
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    return epoch


def _switches(broker: FakeBroker) -> list[tuple[str, bool]]:
    return [(c.device, c.up) for c in broker.log if isinstance(c, SwitchPower)]


def _switched(broker: FakeBroker, device: str, up: bool, problem: str = "") -> None:
    broker.apply(PowerSwitched(device=device, up=up, seconds=1.5, problem=problem))


def _kinds(broker: FakeBroker) -> list[str]:
    return [e.kind for e in broker.ledger.load_events("s") if e.kind.startswith("power")]


def _one_trial(**fields: Any) -> FakeBroker:
    """Three devices and one trial, which needs one of them, and one is in reserve."""
    broker = FakeBroker(devices=3, powers=True)
    broker.driver(unstarted=1, policy="energy:fifo", **fields)
    _begin(broker, broker.worker(), 0)
    return broker


def test_a_device_that_nobody_needs_goes_down_once() -> None:
    """Its command runs while nothing is on it; until that has ended it is on its way."""
    broker = _one_trial()
    broker.poll("cpu:2")
    assert _switches(broker) == [("cpu:2", False)]
    assert broker.handler.state.slots["cpu:2"].power == "going"
    _switched(broker, "cpu:2", up=False)
    broker.poll("cpu:1")
    assert _switches(broker) == [("cpu:2", False)]
    assert _kinds(broker) == ["powered down"]
    assert broker.handler.state.unpowered == ["cpu:2"]
    (shown,) = [d for d in broker.handler.status(0.0).devices if d.id == "cpu:2"]
    assert shown.power == "off"


def test_an_elastic_trial_wants_as_many_devices_as_it_may_have() -> None:
    """One that is held wants none."""
    broker = FakeBroker(devices=4, powers=True)
    broker.driver(unstarted=1, policy="energy:fifo")
    _begin(broker, broker.worker(), 0)
    state = broker.handler.state
    study = state.studies["s"]
    power = Power(state)
    assert power.wanted(study) == 1
    study.trials[0].can_store = True
    study.trials[0].sizes = BatchSizes(now=8, least=8, most=8, most_devices=3)
    assert power.wanted(study) == 3
    study.overrides[0] = "held"
    assert power.wanted(study) == 0


def test_without_commands_nothing_is_switched() -> None:
    """A device that a policy has no use for stays as it is where nobody can power it down."""
    broker = FakeBroker(devices=3)
    broker.driver(unstarted=1, policy="energy:fifo")
    _begin(broker, broker.worker(), 0)
    broker.poll("cpu:2")
    assert _switches(broker) == []


def test_a_policy_that_says_nothing_keeps_all_devices() -> None:
    """Under a policy without `energy` every device has power, and wakes if it has none."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    broker.driver(key="t", unstarted=0, policy="fifo")
    broker.plain(0, key="t", policy="fifo")
    assert _switches(broker)[-1] == ("cpu:2", True)


def test_nobody_gets_a_device_before_it_is_up() -> None:
    """It is woken for trials that come, and granted when its command and a reading are there."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    waiting = [broker.plain(number, policy="energy:fifo") for number in (1, 2)]
    assert broker.last(waiting[0], "Grant").devices == ("cpu:1",)
    assert _switches(broker)[-1] == ("cpu:2", True)
    assert broker.last(waiting[1], "Grant") is None
    broker.poll("cpu:2", free=True)
    assert broker.last(waiting[1], "Grant") is None
    _switched(broker, "cpu:2", up=True)
    assert broker.last(waiting[1], "Grant") is None
    broker.poll("cpu:2", free=True)
    assert broker.last(waiting[1], "Grant").devices == ("cpu:2",)
    assert _kinds(broker) == ["powered down", "powered up"]


def test_a_device_that_cannot_be_powered_down_is_used() -> None:
    """A command that fails costs a while without another attempt, and nothing else."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False, problem="`off cpu:2` ended with status 3")
    broker.poll("cpu:2", free=True)
    assert broker.handler.state.slots["cpu:2"].power == "on"
    assert _kinds(broker) == ["power-down failed"]
    assert len(_switches(broker)) == 1
    broker.now += RETRY_SECONDS
    broker.poll("cpu:2")
    assert len(_switches(broker)) == 2
    _switched(broker, "cpu:2", up=False, problem="again")
    broker.poll("cpu:2", free=True)
    trials = [broker.plain(number, policy="energy:fifo") for number in (1, 2)]
    assert {broker.last(trial, "Grant").devices[0] for trial in trials} == {"cpu:1", "cpu:2"}


def test_a_device_that_cannot_be_woken_is_tried_again() -> None:
    """Until its command succeeds nobody gets it, and status says why."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    trial = [broker.plain(number, policy="energy:fifo") for number in (1, 2)][-1]
    _switched(broker, "cpu:2", up=True, problem="it does not answer")
    broker.poll("cpu:2", free=True)
    problems = {d.id: d.problem for d in broker.handler.status(0.0).devices}
    assert problems == {"cpu:0": "", "cpu:1": "", "cpu:2": "it does not answer"}
    assert broker.last(trial, "Grant") is None
    broker.now += RETRY_SECONDS
    broker.poll("cpu:1")
    assert _switches(broker) == [("cpu:2", False), ("cpu:2", True), ("cpu:2", True)]
    _switched(broker, "cpu:2", up=True)
    broker.poll("cpu:2", free=True)
    assert broker.last(trial, "Grant").devices == ("cpu:2",)


def test_a_device_with_a_suspended_trial_keeps_its_power() -> None:
    """A trial that waits in its device's memory would be lost: its device stays on."""
    broker = _one_trial()
    trial = broker.handler.state.studies["s"].trials[0]
    trial.state, trial.devices = "parked", ("cpu:1",)
    broker.handler.state.slots["cpu:1"].unwanted = True
    broker.poll("cpu:1")
    assert broker.handler.state.slots["cpu:1"].power == "on"


def test_a_device_that_a_trial_is_on_its_way_to_keeps_its_power() -> None:
    """A reserved one counts as the study's own, though there is no process for its trial yet."""
    broker = FakeBroker(devices=1, powers=True)
    broker.driver(unstarted=1, policy="energy:fifo")
    study, slot = broker.handler.state.studies["s"], broker.handler.state.slots["cpu:0"]
    assert Power(broker.handler.state).held(study) == ()
    slot.reservation = Reservation(study="s", number=None, slice_seconds=None)
    assert Power(broker.handler.state).held(study) == ("cpu:0",)
    study.powered_down = frozenset({"cpu:0"})
    broker.poll("cpu:0")
    assert (slot.reservation is not None, slot.power) == (True, "on")


def test_a_device_that_is_off_is_not_lost() -> None:
    """A fault that its driver reports then is no news, and no trial's trouble."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    broker.poll("cpu:2", healthy=False, lost=True, problem="gone")
    assert broker.handler.state.slots["cpu:2"].device.healthy
    assert "device lost" not in [event.kind for event in broker.ledger.load_events("s")]


def test_the_next_broker_wakes_what_was_down() -> None:
    """A device that an earlier broker powered down is given to nobody before it was woken."""
    devices = [Device(id=f"cpu:{index}", free=True) for index in range(2)]
    handler = EventHandler(BrokerState(host="h"), devices, powers=True)
    handler.state.expect_off(("cpu:1", "cpu:9"))
    assert handler.state.unpowered == ["cpu:1"]
    broker = FakeBroker(devices=devices, powers=True)
    broker.handler = handler
    broker.poll("cpu:0")
    assert _switches(broker) == []
    broker.driver(unstarted=2, policy="energy:fifo")
    workers = [broker.worker(), broker.worker()]
    assert [broker.last(worker, "Grant") is None for worker in workers] == [False, True]
    assert _switches(broker) == [("cpu:1", True)]


def test_when_a_study_has_ended_devices_stay_as_they_are() -> None:
    """Nobody is served, so nobody says what is needed: nothing is switched."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    for connection in list(broker.handler.state.clients):
        broker.hang_up(connection)
    broker.poll("cpu:2")
    assert not broker.handler.state.studies
    assert _switches(broker) == [("cpu:2", False)]


def test_a_broker_does_not_end_while_a_command_runs() -> None:
    """Nobody would hear of its end."""
    broker = _one_trial()
    for connection in list(broker.handler.state.clients):
        broker.hang_up(connection)
    assert not broker.handler.idle
    _switched(broker, "cpu:2", up=False)
    assert broker.handler.idle


class PowerMachine(RuleBasedStateMachine):
    """Trials come and go, commands succeed and fail, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = FakeBroker(devices=4, powers=True)
        self.running: dict[int, int] = {}
        self.numbers = 0
        self.pending: list[SwitchPower] = []
        self.seen = 0

    @rule()
    @precondition(lambda self: len(self.running) < 7)
    def come(self) -> None:
        connection = self.broker.plain(self.numbers, policy="energy:fifo", slice_seconds=500.0)
        self.running[connection] = self.numbers
        self.numbers += 1

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def go(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[connection]
        self.broker.hang_up(connection)

    @rule(data=st.data(), works=st.booleans())
    @precondition(lambda self: self.pending)
    def switched(self, data: st.DataObject, works: bool) -> None:
        command = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        _switched(self.broker, command.device, command.up, "" if works else "no")

    @rule(seconds=st.sampled_from([1.0, 61.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.broker.advance(seconds)
        for id_, slot in self.broker.handler.state.slots.items():
            if slot.power == "on":
                self.broker.poll(id_, free=True)

    @invariant()
    def each_device_is_switched_in_turn_with_nothing_on_it(self) -> None:
        new, self.seen = self.broker.log[self.seen :], len(self.broker.log)
        held = {c.device for c in self.pending}
        for command in new:
            if isinstance(command, SwitchPower):
                assert command.device not in held
                held.add(command.device)
                self.pending.append(command)
        for slot in self.broker.handler.state.slots.values():
            if slot.power != "on":
                assert slot.lease is None
                assert slot.reservation is None
                assert not self.broker.handler.state.parked_on(slot)
        for study in self.broker.handler.state.studies.values():
            assert study.problem is None
        self.broker.check()

    def teardown(self) -> None:
        """Commands that work from now on bring a device to everyone who waits."""
        for _ in range(30):
            while self.pending:
                command = self.pending.pop()
                _switched(self.broker, command.device, command.up)
                self.each_device_is_switched_in_turn_with_nothing_on_it()
            self.wait(61.0)
            self.each_device_is_switched_in_turn_with_nothing_on_it()
        leases = [s.lease for s in self.broker.handler.state.slots.values() if s.lease]
        assert len(leases) == min(4, len(self.running))


TestPowerMachine = PowerMachine.TestCase
TestPowerMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_devices_stay_as_they_are_while_trials_begin() -> None:
    """Between a grant and the trial's first word a study needs neither more nor less."""
    broker = FakeBroker(devices=4, powers=True)
    broker.driver(unstarted=2, policy="energy:fifo")
    assert _switches(broker) == [("cpu:3", False)]
    _switched(broker, "cpu:3", up=False)
    for number in (0, 1):
        worker = broker.worker()
        broker.poll("cpu:2")
        _begin(broker, worker, number)
        broker.poll("cpu:2")
    assert _switches(broker) == [("cpu:3", False)]


def test_nothing_is_woken_for_a_study_that_leaves() -> None:
    """While its trials are suspended nobody asks its policy: what was down stays down."""
    broker = _one_trial()
    _switched(broker, "cpu:2", up=False)
    driver = broker.handler.state.studies["s"].driver
    assert driver is not None
    broker.say(driver, wire.Drain(study="s"))
    broker.poll("cpu:1")
    assert _switches(broker) == [("cpu:2", False)]
