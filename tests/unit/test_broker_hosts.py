"""Hosts that share a study, under attack: they die, sleep, start again and race each other."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from optuna_hermes.broker._core._shared_studies import REFRESH_SECONDS
from optuna_hermes.ledger import DEAD_SECONDS
from support.hosts import KEY, UNITS, Host, Optuna
from support.memory_ledger import MemoryLedger

N_TRIALS = 5

NAMES = ("a", "b", "c")

names = st.sampled_from(NAMES)


class Hosts(RuleBasedStateMachine):
    """Up to three hosts; a host that sleeps does nothing, and hears nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = MemoryLedger(clock=lambda: self.now, shared=True)
        self.optuna = Optuna()
        self.hosts = {
            name: Host(name, self.ledger, self.optuna, n_trials=N_TRIALS, devices=devices)
            for name, devices in zip(NAMES, (1, 2, 1), strict=True)
        }
        self.asleep: set[str] = set()
        self.trained: dict[int, int] = {}
        """By trial the last unit, of those that nobody was disturbed in."""

    @property
    def awake(self) -> list[Host]:
        return [h for name, h in self.hosts.items() if h.lives and name not in self.asleep]

    @rule(name=names)
    def start(self, name: str) -> None:
        """A host that is not there begins, or begins again."""
        if not self.hosts[name].lives:
            self.hosts[name].start(self.now)

    @rule(name=names)
    def die(self, name: str) -> None:
        """A host's power is cut."""
        self.asleep.discard(name)
        self._disturb(name)
        self.hosts[name].die()

    @rule(name=names)
    def sleep(self, name: str) -> None:
        """A host stands still, with all that it has."""
        if self.hosts[name].lives:
            self.asleep.add(name)
            self._disturb(name)

    def _disturb(self, name: str) -> None:
        """Allow the trials that a host has in memory to be trained again."""
        for number in self.hosts[name].holders():
            self.trained.pop(number, None)

    @precondition(lambda self: self.asleep)
    @rule(name=names)
    def wake(self, name: str) -> None:
        """It goes on, and looks at once what the others have done."""
        if name in self.asleep:
            self.asleep.remove(name)
            self.hosts[name].pass_time(self.now)
            self.hosts[name].refresh()

    @rule(name=names)
    def train(self, name: str) -> None:
        """A host's runs train a unit each."""
        if self.hosts[name] in self.awake:
            self._train(self.hosts[name])

    def _train(self, host: Host) -> None:
        for number, unit in host.train():
            last = self.trained.get(number, unit - 1)
            assert unit == last + 1, f"trial {number} trains unit {unit} after {last}"
            self.trained[number] = unit

    @rule(name=names)
    def refresh(self, name: str) -> None:
        """A host looks earlier than it has to."""
        if self.hosts[name] in self.awake:
            self.hosts[name].refresh()

    @rule(seconds=st.sampled_from([0.5, REFRESH_SECONDS, DEAD_SECONDS + 2 * REFRESH_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on; who is awake looks every few seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + REFRESH_SECONDS)
            for host in self.awake:
                host.pass_time(self.now)
                host.refresh()

    @invariant()
    def no_trial_is_held_twice(self) -> None:
        """No two processes have one trial, unless a host was silent until it was dead."""
        held: Counter[int] = Counter()
        for host in self.awake:
            held.update(host.holders())
        assert all(times == 1 for times in held.values()), held

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Whoever loses a race has no problem."""
        for host in self.awake:
            study = host.broker.handler.state.studies[KEY]
            assert study.problem is None

    @invariant()
    def there_are_no_more_trials_than_there_shall_be(self) -> None:
        """The bound holds over all hosts."""
        assert len(self.ledger.load_trials(KEY)) <= N_TRIALS
        assert len(self.optuna.opened) <= N_TRIALS

    def teardown(self) -> None:
        """Let nobody die any more: every trial is trained to its end, and nothing is left."""
        for name in NAMES:
            self.wake(name)
            self.start(name)
        for _ in range(100):
            self.pass_time(REFRESH_SECONDS)
            for host in self.awake:
                self._train(host)
            self.no_trial_is_held_twice()
        trials = self.ledger.load_trials(KEY)
        assert [(trial.number, trial.state) for trial in trials] == [
            (n, "done") for n in range(N_TRIALS)
        ]
        assert all(curve.units == UNITS for curve in self.ledger.load_curves(KEY).values())
        assert self.ledger.load_leases(KEY, live=True) == []
        assert all(trial.owner is None for trial in trials)
        assert len(self.optuna.opened) == N_TRIALS


TestHosts = Hosts.TestCase
TestHosts.settings = settings(
    max_examples=max(1, int(os.environ.get("HERMES_EXAMPLES", "100")) // 2),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
