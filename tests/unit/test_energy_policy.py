"""`energy:NAME`: which devices a policy lets be powered down, and what it remembers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.broker._imports import absolute_policy_name
from optuna_hermes.cluster.energy import (
    DAY_TICKS,
    KEPT_TICKS,
    TICK_SECONDS,
    Demand,
    EnergyRules,
    restore_demand,
)
from optuna_hermes.errors import UnknownPolicyError
from optuna_hermes.model import Decision, Device, Snapshot, TrialView, Unstarted
from optuna_hermes.policies import Energy, Fifo, Hermes, Policy, make_policy

HOUR = 3600.0


class Played:
    """A study whose devices do at once what `energy:fifo` says of their power."""

    def __init__(self, n_devices: int = 4, rules: EnergyRules | None = None) -> None:
        self.policy = Energy(Fifo(), rules)
        self.ids = [f"cpu:{index}" for index in range(n_devices)]
        self.down: set[str] = set()
        self.now = 0.0
        self.memory: object = None

    def decide(self, n_trials: int, *, unstarted: int | None = 0) -> Decision:
        """With so many trials, each on the first devices that have power."""
        powered = [id_ for id_ in self.ids if id_ not in self.down]
        trials = tuple(
            TrialView(number=n, state="running", device=id_)
            for n, id_ in zip(range(n_trials), powered, strict=False)
        )
        trials += tuple(TrialView(number=n, state="pending") for n in range(len(trials), n_trials))
        held = {trial.device for trial in trials}
        devices = tuple(
            Device(id=id_, powered=id_ in powered, free=id_ in powered and id_ not in held)
            for id_ in self.ids
        )
        decision = self.policy.decide(
            Snapshot(
                now=self.now,
                devices=devices,
                trials=trials,
                unstarted=Unstarted(count=unstarted),
                memory=json.loads(json.dumps(self.memory)),
            )
        )
        self.memory, self.down = decision.memory, set(decision.powered_down)
        return decision


def test_what_a_study_does_not_need_is_powered_down() -> None:
    """As its last trials end devices go down, the last ones first, but for one in reserve."""
    study = Played()
    assert [study.decide(n).powered_down for n in (4, 3, 2, 1)] == [
        (),
        (),
        ("cpu:3",),
        ("cpu:2", "cpu:3"),
    ]


def test_a_study_without_end_needs_every_device() -> None:
    """Trials that may still be created could use every device."""
    assert Played().decide(1, unstarted=None).powered_down == ()
    assert Played().decide(1, unstarted=3).powered_down == ()
    assert Played().decide(1, unstarted=1).powered_down == ("cpu:3",)


def test_what_is_wanted_again_is_woken_and_kept() -> None:
    """Trials that come wake devices, and nothing goes down soon after."""
    study = Played()
    assert study.decide(1).powered_down == ("cpu:2", "cpu:3")
    study.now += TICK_SECONDS
    assert study.decide(4).powered_down == ()
    study.now += study.policy.rules.keep_ticks * TICK_SECONDS - 1
    assert study.decide(1).powered_down == ()


def test_demand_that_has_risen_may_do_so_again() -> None:
    """Devices wanted within hours keep their power where runs come from elsewhere."""
    study = Played()
    for n_trials in (1, 3, 1):
        study.now += 2 * TICK_SECONDS
        decision = study.decide(n_trials)
    assert decision.powered_down == ()
    study.now += study.policy.rules.look_back_ticks * TICK_SECONDS
    assert study.decide(1).powered_down == ()
    study.now += 2 * TICK_SECONDS
    assert study.decide(1).powered_down == ("cpu:2", "cpu:3")


def test_a_study_that_goes_on_with_more_trials_has_told_how_many() -> None:
    """Demand that has risen may not rise again where the broker knows all that is to come."""
    devices = tuple(Device(id=f"cpu:{index}", free=index > 0) for index in range(4))
    policy, memory, down = make_policy("energy:fifo"), None, []
    for hour, wanted in ((0, 4), (1, 1), (24, 4), (25, 1)):
        snapshot = Snapshot(now=hour * HOUR, devices=devices, wanted=wanted, held=("cpu:0",))
        decision = policy.decide(replace(snapshot, wanted_is_all=True, memory=memory))
        memory = decision.memory
        down.append(len(decision.powered_down))
    assert down == [0, 2, 0, 2]
    assert policy.decide(replace(snapshot, memory=memory)).powered_down == ()


def test_devices_are_awake_before_the_load_of_every_day() -> None:
    """After some days what comes at this time is expected, and its devices have power."""
    study = Played(8, EnergyRules(look_back_ticks=6))
    awake = {}
    for tick in range(4 * DAY_TICKS):
        study.now = tick * TICK_SECONDS
        study.decide(7 if 60 <= tick % DAY_TICKS < 72 else 1)
        awake[tick] = 8 - len(study.down)
    days = (DAY_TICKS, 3 * DAY_TICKS)
    assert [awake[day + 58] for day in days] == [2, 8]
    assert [awake[day + 40] for day in days] == [2, 2]


def test_a_device_with_a_suspended_trial_keeps_its_power() -> None:
    """State on a device would be lost with its power."""
    devices = tuple(Device(id=f"cpu:{index}", free=index > 0) for index in range(4))
    trials = (
        TrialView(number=0, state="running", device="cpu:0"),
        TrialView(number=1, state="parked", tier="resident", device="cpu:3", bound_to=("cpu:9",)),
    )
    down = make_policy("energy:fifo").decide(Snapshot(devices=devices, trials=trials)).powered_down
    assert down == ("cpu:2",)
    on_two = replace(trials[1], device="cpu:2", devices=("cpu:2", "cpu:3"), bound_to=("cpu:9",))
    snapshot = Snapshot(devices=devices, trials=(trials[0], on_two))
    assert make_policy("energy:fifo").decide(snapshot).powered_down == ("cpu:1",)


def test_others_devices_do_not_count() -> None:
    """The reserve is there beside what other studies and strangers have."""
    devices = tuple(Device(id=f"cpu:{index}", free=index > 1) for index in range(4))
    trials = (TrialView(number=0, state="running", device="cpu:0"),)
    down = make_policy("energy:fifo").decide(Snapshot(devices=devices, trials=trials)).powered_down
    assert down == ("cpu:3",)


@given(
    levels=st.lists(st.tuples(st.floats(0, 3000), st.integers(0, 4)), max_size=12),
    cut=st.integers(0, 12),
    other=st.lists(st.tuples(st.floats(0, 3000), st.integers(0, 4)), max_size=3),
)
def test_what_comes_later_changes_no_decision(
    levels: list[tuple[float, int]], cut: int, other: list[tuple[float, int]]
) -> None:
    """Decisions up to a moment are the same whatever demand there is after it."""

    def decided(steps: list[tuple[float, int]]) -> list[Decision]:
        study = Played()
        found = []
        for seconds, n_trials in steps:
            study.now += seconds
            found.append(study.decide(n_trials))
        return found

    cut = min(cut, len(levels))
    assert decided(levels[:cut] + other)[:cut] == decided(levels)[:cut]


def test_the_inner_policy_keeps_its_memory() -> None:
    """It is given back what it remembered, and what it had before `energy` was chosen."""

    class Counts(Policy):
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision(memory=(snapshot.memory or 0) + 1)

    policy = Energy(Counts())
    snapshot = Snapshot(devices=(Device(id="cpu:0"),), memory=5)
    for expected in (6, 7):
        memory = policy.decide(snapshot).memory
        assert memory["inner"] == expected
        snapshot = replace(snapshot, memory=memory)


def test_demand_goes_on_where_it_was_remembered() -> None:
    """Ticks without a decision have the demand of the last one, and no history is endless."""
    demand = restore_demand(None, host="h", level=3, now=0.0)
    later = restore_demand(asdict(demand), host="h", level=1, now=2.5 * TICK_SECONDS)
    assert (later.peaks, later.peak, later.level) == ((3, 3), 3, 1)
    much_later = later.seen(2, 1e9)
    assert len(much_later.peaks) < KEPT_TICKS + DAY_TICKS


@pytest.mark.parametrize(
    "known",
    [
        {"host": "other", "tick": 0, "level": 1, "peak": 9, "peaks": []},
        {"host": "h", "tick": 77, "level": 1, "peak": 9, "peaks": []},
        {"host": "h", "tick": 0},
        {"host": "h", "tick": 0, "level": 1, "peak": 9, "peaks": [], "colour": "red"},
        [1, 2],
    ],
)
def test_strange_memory_is_forgotten(known: object) -> None:
    """Memory of another host, of a clock before a restart or of another version means nothing."""
    assert restore_demand(known, host="h", level=2, now=0.0) == Demand(
        host="h", tick=0, level=2, peak=2
    )


def test_energy_wraps_any_policy_by_name() -> None:
    """`energy:` comes before any name that a policy may have."""
    policy = make_policy("energy:hermes")
    assert isinstance(policy, Energy)
    assert isinstance(policy.inner, Hermes)
    with pytest.raises(UnknownPolicyError, match=r"or one of these after energy:, but got 'slow'"):
        make_policy("energy:slow")
    with pytest.raises(UnknownPolicyError, match="but got ''"):
        make_policy("energy:")


def test_a_name_with_energy_is_understood_anywhere() -> None:
    """A file becomes an absolute path behind the word; a name of a policy stays what it is."""
    assert absolute_policy_name("energy:hermes") == "energy:hermes"
    assert absolute_policy_name("energy:/a/b.py:Mine") == "energy:/a/b.py:Mine"
    assert absolute_policy_name("energy:b.py:Mine").startswith("energy:/")


def test_what_a_broker_says_of_a_study_counts() -> None:
    """Devices that are on their way to trials are the study's, and so is what it will need."""
    devices = tuple(Device(id=f"cpu:{index}", free=index > 1) for index in range(4))
    snapshot = Snapshot(devices=devices, wanted=2, held=("cpu:0", "cpu:1"))
    assert make_policy("energy:fifo").decide(snapshot).powered_down == ("cpu:3",)
    assert make_policy("energy:fifo").decide(replace(snapshot, wanted=3)).powered_down == ()
