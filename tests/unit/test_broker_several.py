"""A lease of several devices: granted, ended, broken, counted and taken over as one."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._broker_state import Lease
from optuna_hermes.broker._core._events import WritesFailed
from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.broker._core._policy_runner import PolicyRunner
from optuna_hermes.ledger._records import LeaseRecord
from optuna_hermes.model import (
    Assignment,
    BatchSizes,
    Checkpoint,
    Decision,
    Device,
    Elastic,
    Snapshot,
    TrialView,
)
from optuna_hermes.policies import Policy
from optuna_hermes.policies.base import free_devices, opened, unopened
from support.broker import FakeBroker


class Wanting(Policy):
    """In the order of numbers, each trial as many devices as it is told; new trials get one."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.seen = Snapshot()

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen = snapshot
        free = [device.id for device in free_devices(snapshot)]
        given: list[Assignment] = []
        for trial in [*opened(snapshot), *unopened(snapshot)]:
            number = None if trial is None else trial.number
            count = 1 if number is None else self.counts.get(number, 1)
            if len(free) >= count > 0:
                given.append(Assignment(trial=number, devices=tuple(free[:count])))
                free = free[count:]
        # As its memory changes it may give none: a broker takes it that it will, later.
        return Decision(assignments=tuple(given), memory=(snapshot.memory or 0) + 1)

    def trial(self, number: int) -> TrialView:
        return next(trial for trial in self.seen.trials if trial.number == number)


class Host:
    """A broker with two devices and a study of one trial, whose trial may have both."""

    def __init__(self, devices: int | list[Device] = 2) -> None:
        self.broker = FakeBroker(devices=devices)
        self.broker.driver(slice_seconds=1.0, unstarted=1)
        self.policy = self.serve(self.broker)
        self.worker = self.broker.worker()
        self.epoch = self.begin(self.broker, self.worker)

    @staticmethod
    def serve(broker: FakeBroker) -> Wanting:
        policy = Wanting()
        broker.handler.state.studies["s"].policy = policy
        return policy

    @staticmethod
    def begin(
        broker: FakeBroker, worker: int, seconds: float = 1.0, *, can_store: bool = True
    ) -> int:
        epoch: int = broker.last(worker, "Grant").epoch
        broker.say(worker, wire.Begin(epoch=epoch, number=0, trial_id=0))
        broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=can_store))
        sizes = BatchSizes(now=8, least=8, most=8, seconds={8: seconds}, most_devices=2)
        broker.say(worker, wire.Beat(epoch=epoch, sizes=sizes))
        return epoch

    def leave(self, tier: str = "disk") -> None:
        """The trial does as it was asked to, and its process ends."""
        saved = Checkpoint(path="/c", units=0, size_bytes=1, sha256="0")
        parked = wire.TierChanged(
            epoch=self.epoch,
            tier=tier,  # type: ignore[arg-type]
            suspend_seconds=0.5,
            checkpoint=saved if tier == "disk" else None,
            can_store=True,
        )
        self.broker.say(self.worker, parked)
        if tier == "disk":
            self.broker.hang_up(self.worker)

    def grow(self) -> None:
        """The trial goes over disk and comes back with both devices, in another process."""
        self.policy.counts[0] = 2
        self.broker.advance(1.0)
        self.leave()
        self.worker = self.broker.worker()
        self.epoch = self.begin(self.broker, self.worker, 0.6)

    @property
    def trial(self) -> LiveTrial:
        return self.broker.handler.state.studies["s"].trials[0]

    @property
    def leases(self) -> list[Lease]:
        return self.broker.handler.state.leases()

    def told(self, kind: str) -> list[dict[str, Any]]:
        events = self.broker.ledger.load_events("s")
        return [event.detail for event in events if event.kind == kind]


@pytest.fixture
def host() -> Host:
    return Host()


def test_another_number_goes_over_disk(host: Host) -> None:
    """A trial that is to have two devices leaves to disk, and another process gets both."""
    host.policy.counts[0] = 2
    host.broker.advance(1.0)
    assert host.broker.last(host.worker, "Yield").tier == "disk"
    host.leave()
    grant = host.broker.last(host.broker.worker(), "Grant")
    assert (grant.number, grant.devices) == (0, ("cpu:0", "cpu:1"))
    assert host.broker.leases()[-1].devices == ("h/cpu:0", "h/cpu:1")
    assert host.trial.devices == ("cpu:0", "cpu:1")
    assert host.told("granted")[-1]["devices"] == ["cpu:0", "cpu:1"]


def test_the_same_number_stays_in_its_process(host: Host) -> None:
    """At the end of its slice a trial keeps both, and one that waited in memory has both again."""
    host.grow()
    host.broker.advance(1.0)
    assert host.broker.last(host.worker, "Yield") is None
    host.policy.counts[0] = 0
    host.broker.advance(1.0)
    assert host.broker.last(host.worker, "Yield").tier == "resident"
    host.leave("resident")
    assert (host.trial.state, host.trial.devices) == ("parked", ("cpu:0", "cpu:1"))
    host.policy.counts[0] = 2
    host.broker.poll("cpu:0")
    assert host.broker.last(host.worker, "Grant").devices == ("cpu:0", "cpu:1")
    assert host.broker.last(host.worker, "Grant").epoch > host.epoch


def test_a_parked_trial_goes_over_disk_too(host: Host) -> None:
    """Its process has two ranks: one device is for another one."""
    host.grow()
    host.policy.counts[0] = 0
    host.broker.advance(1.0)
    host.leave("resident")
    host.policy.counts[0] = 1
    host.broker.poll("cpu:0")
    assert host.broker.last(host.worker, "Move").tier == "disk"
    host.leave()
    assert host.broker.last(host.broker.worker(), "Grant").devices == ("cpu:0",)


def test_a_trial_that_cannot_be_stored_keeps_its_number(host: Host) -> None:
    """A policy is not offered what would need a disk."""
    host.broker.say(host.worker, wire.FirstBatch(epoch=host.epoch, can_store=False))
    host.broker.advance(1.0)
    assert host.policy.trial(0).device_range == (1, 1)


def test_a_trial_that_does_not_reach_the_disk_is_not_waited_for(host: Host) -> None:
    """The devices that were reserved for it are free again, and it goes on with one."""
    host.policy.counts[0] = 2
    host.broker.advance(1.0)
    host.policy.counts[0] = 1
    host.broker.say(
        host.worker, wire.TierChanged(epoch=host.epoch, tier="resident", suspend_seconds=0)
    )
    grant = host.broker.last(host.worker, "Grant")
    assert (grant.epoch > host.epoch, grant.devices) == (True, ("cpu:0",))


def test_a_policy_sees_devices_and_speeds(host: Host) -> None:
    """The speed measured on one device is remembered when the trial trains on two."""
    host.grow()
    host.broker.advance(1.0)
    seen = host.policy.trial(0)
    assert seen.current_devices == ("cpu:0", "cpu:1")
    assert (seen.device_range, seen.devices_wanted) == ((1, 2), 2)
    assert seen.elastic is not None
    speeds = [(x.devices, x.batch_size, x.step_seconds) for x in seen.elastic.speeds]
    assert speeds == [(1, 8, 1.0), (2, 8, 0.6)]


@pytest.mark.parametrize(("count", "who"), [(3, "3 for trial 0"), (2, "2 for a new trial")])
def test_more_devices_than_allowed_end_the_study(count: int, who: str) -> None:
    """A policy that gives a trial more than it may have, or a new trial several, is named."""
    host = Host(3)

    class Generous(Wanting):
        def decide(self, snapshot: Snapshot) -> Decision:
            number = None if count == 2 else 0
            devices = tuple(device.id for device in free_devices(snapshot))[:count]
            return Decision(assignments=(Assignment(trial=number, devices=devices),))

    host.broker.handler.state.studies["s"].policy = Generous()
    host.broker.advance(1.0)
    assert f"but got {who}" in str(host.broker.handler.state.studies["s"].problem)


def test_device_time_is_that_of_both(host: Host) -> None:
    """Runs, reports, studies and energy count each device."""
    host.grow()
    before = host.trial.device_seconds
    host.broker.now += 3.0
    host.broker.say(host.worker, wire.Report(epoch=host.epoch, unit=1, step=1, value=0.5))
    assert host.trial.curve.device_seconds == (pytest.approx(before + 6.0),)
    (entry,) = host.broker.handler.status(host.broker.now).studies
    assert entry.held_seconds == pytest.approx(6.0)
    host.policy.counts[0] = 2
    host.broker.poll("cpu:0")
    assert host.policy.trial(0).attained_seconds == pytest.approx(before + 6.0)
    host.broker.now += 1.0
    host.broker.say(host.worker, wire.Ended(epoch=host.epoch, state="done"))
    assert host.trial.device_seconds == pytest.approx(before + 8.0)


def test_energy_is_that_of_both() -> None:
    """Counters are added up; where one counts nothing, so are the rated powers."""

    def gpu(name: str, joules: float | None) -> Device:
        return Device(id=name, kind="gpu", free=True, energy_joules=joules, power_watts=100.0)

    for counted, expected in ((50.0, 70.0 + 30.0), (None, 2 * 100.0 * 2)):
        host = Host([gpu("GPU-a", 10.0), gpu("GPU-b", counted)])
        host.grow()
        before = host.trial.energy_joules or 0.0
        host.broker.now += 2.0
        host.broker.poll("GPU-a", energy_joules=80.0)
        host.broker.poll("GPU-b", energy_joules=None if counted is None else counted + 30.0)
        host.broker.say(host.worker, wire.Ended(epoch=host.epoch, state="done"))
        assert host.trial.energy_joules == pytest.approx(before + expected)


@pytest.mark.parametrize("how", ["ended", "died", "refused"])
def test_all_devices_are_free_together(host: Host, how: str) -> None:
    """However a lease ends."""
    host.grow()
    assert len(host.leases) == 1
    if how == "ended":
        host.broker.say(host.worker, wire.Ended(epoch=host.epoch, state="done"))
    elif how == "died":
        host.broker.hang_up(host.worker)
    else:
        host.broker.say(host.worker, wire.Released(epoch=host.epoch, reason="so"))
    assert host.leases == []
    assert [lease.ended for lease in host.broker.ledger.load_leases("s")].count(None) == 0


def test_a_broken_device_ends_the_lease_of_all(host: Host) -> None:
    """The trial leaves both, and goes on with the one that works."""
    host.grow()
    host.policy.counts[0] = 1
    host.broker.poll("cpu:1", healthy=False, problem="lost")
    assert host.broker.last(host.worker, "Yield").tier == "disk"
    host.leave()
    assert host.broker.last(host.broker.worker(), "Grant").devices == ("cpu:0",)


def test_a_device_that_breaks_is_not_waited_for(host: Host) -> None:
    """A reservation that needed it is given up on the others too."""
    host.policy.counts[0] = 2
    host.broker.advance(1.0)
    host.policy.counts[0] = 1
    host.broker.poll("cpu:1", healthy=False, problem="lost")
    assert host.broker.handler.state.reservations() == []
    host.leave()
    assert host.broker.last(host.broker.worker(), "Grant").devices == ("cpu:0",)


def test_the_next_broker_takes_both_over(host: Host) -> None:
    """A process that comes back has its two devices, which nobody else could get meanwhile."""
    host.grow()
    pid = host.broker.handler.state.clients[host.worker].pid
    after = host.broker.successor()
    after.driver(slice_seconds=1.0, unstarted=1)
    policy = host.serve(after)
    other = after.worker()
    assert after.last(other, "Grant") is None
    sizes = BatchSizes(now=8, least=8, most=8, seconds={8: 0.6}, most_devices=2)
    resume = wire.Reattach(
        study=wire.StudySpec(key="s", name="s", ledger_url="memory:"),
        epoch=host.epoch,
        devices=("cpu:0", "cpu:1"),
        number=0,
        trial_id=0,
        held_seconds=3.0,
        training=True,
        can_store=True,
        reports=(wire.Report(epoch=host.epoch, unit=1, step=1, value=1.0, age_seconds=1.0),),
        sizes=sizes,
    )
    after.resume(pid, resume)
    (lease,) = after.handler.state.leases()
    assert (lease.epoch, lease.devices) == (host.epoch, ("cpu:0", "cpu:1"))
    assert after.last(other, "Grant") is None
    trial = after.handler.state.studies["s"].trials[0]
    assert trial.curve.device_seconds[-1] - trial.device_seconds == pytest.approx(4.0)
    policy.counts[0] = 2
    after.advance(1.0)
    assert policy.trial(0).device_range == (1, 2)


def test_a_process_that_claims_other_devices_is_refused(host: Host) -> None:
    """A lease is for the devices that the ledger says, all of them."""
    host.grow()
    pid = host.broker.handler.state.clients[host.worker].pid
    after = host.broker.successor()
    resume = wire.Reattach(
        study=wire.StudySpec(key="s", name="s", ledger_url="memory:"),
        epoch=host.epoch,
        devices=("cpu:0",),
        number=0,
        trial_id=0,
    )
    worker = after.resume(pid, resume)
    assert "is not for device cpu:0" in after.last(worker, "Refused").reason


def test_what_the_ledger_refuses_never_was(host: Host) -> None:
    """A lease that was never written is undone on both devices."""
    host.policy.counts[0] = 2
    host.broker.advance(1.0)
    host.leave()
    host.broker.worker()
    (epoch,) = (c.epoch for c in host.broker.log[-9:] if isinstance(c, LeaseRecord))
    host.broker.apply(WritesFailed(study="s", epochs=(epoch,), reason="full"))
    assert host.leases == []
    assert host.trial.state == "stored"


# -- slices of GPUs


class Greedy(Wanting):
    """Gives each trial as many devices as it may have, and notes how many that is."""

    def decide(self, snapshot: Snapshot) -> Decision:
        self.counts = {trial.number: trial.device_range[1] for trial in snapshot.trials}
        return super().decide(snapshot)


def cut(*parts: bool) -> tuple[Host, Greedy]:
    """A host whose GPUs are slices or whole, and a policy that gives all it can."""
    devices = [
        Device(id=f"{'MIG' if part else 'GPU'}-{place}", kind="gpu", free=True, part=part)
        for place, part in enumerate(parts)
    ]
    host = Host(devices)
    policy = Greedy()
    host.broker.handler.state.studies["s"].policy = policy
    return host, policy


def again(host: Host) -> tuple[str, ...]:
    """The devices of the trial after it was on disk."""
    host.broker.advance(1.0)
    if host.broker.last(host.worker, "Yield") is None:
        return host.trial.devices
    host.leave()
    grant: wire.Grant = host.broker.last(host.broker.worker(), "Grant")
    return grant.devices


def test_a_trial_gets_one_slice_at_most() -> None:
    """A process sees the first slice only: ranks on others would find no device."""
    host, policy = cut(True, True)
    assert len(again(host)) == 1
    assert policy.trial(0).device_range == (1, 1)


def test_whole_gpus_beside_slices_are_given_together() -> None:
    """No slice is added to them."""
    for parts in ((False, False, True), (True, False, False)):
        host, policy = cut(*parts)
        devices = again(host)
        assert devices
        assert "MIG" not in "".join(devices) or len(devices) == 1
        assert policy.trial(0).device_range == (1, 2)


@pytest.mark.parametrize(
    ("assigned", "given"),
    [
        (("MIG-0", "GPU-1", "GPU-2"), ("GPU-1", "GPU-2")),
        (("MIG-0", "MIG-3"), ("MIG-0",)),
        (("GPU-1", "GPU-2"), ("GPU-1", "GPU-2")),
        (("MIG-3",), ("MIG-3",)),
    ],
)
def test_a_policy_that_mixes_them_gets_the_whole_ones(
    assigned: tuple[str, ...], given: tuple[str, ...]
) -> None:
    """The slices of such an assignment stay free; of slices only, one is left."""
    host, _ = cut(True, False, False, True)
    study = host.broker.handler.state.studies["s"]
    devices = tuple(slot.device for slot in host.broker.handler.state.slots.values())
    elastic = Elastic(batch_size=8, batch_sizes=(8, 8), devices=(1, 3))
    trial = TrialView(number=0, state="parked", elastic=elastic)

    class Mixing(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision(assignments=(Assignment(trial=0, devices=assigned),))

    study.policy = Mixing()
    snapshot = Snapshot(devices=devices, trials=(trial,))
    (assignment,) = PolicyRunner(host.broker.handler.state).ask(study, snapshot).assignments
    assert assignment.devices == given
