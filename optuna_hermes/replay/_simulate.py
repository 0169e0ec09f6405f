"""Simulations of curve sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import make_policy
from optuna_hermes.simulator import (
    CurveSet,
    FixedList,
    Metrics,
    Recording,
    SwitchCosts,
    Trace,
    TrialSimulator,
    measure,
)
from optuna_hermes.simulator.rivals import RIVALS, arrange, make_rival

REFERENCES = ("fifo", "round-robin", "oracle")
"""Policies that all others are compared with; they are always simulated."""


AnyMetrics = TypeVar("AnyMetrics")


@dataclass(frozen=True, kw_only=True)
class Result(Generic[AnyMetrics]):
    """The result of one simulation."""

    curve_set: str
    family: str
    policy: str
    seed: int
    metrics: AnyMetrics


@dataclass(frozen=True, kw_only=True)
class SimulationRules:
    """Settings that are the same in every simulation.

    Args:
        n_devices: number of devices.
        n_trials: number of trials drawn from each set; all where it has fewer.
        switch_cost: cost of changing a device's trial, as a fraction of the unit trained next.
    """

    n_devices: int = 1
    n_trials: int = 100
    switch_cost: float = 0.005

    @property
    def costs(self) -> SwitchCosts:
        """The costs of switches as a simulation takes them."""
        return SwitchCosts(fraction=self.switch_cost)

    def __post_init__(self) -> None:
        # The simulator itself refuses devices and costs that cannot be.
        if self.n_trials < 1:
            raise InvalidInputError(f"There must be a trial at least but got {self.n_trials}.")


def check_names(sets: Sequence[CurveSet]) -> None:
    """Raise ``InvalidInputError`` if two sets have one name: their results look the same."""
    name, count = Counter(each.name for each in sets).most_common(1)[0]
    if count > 1:
        raise InvalidInputError(
            f"Every curve set must have a name of its own but {count} are called {name!r}: leave "
            "out all but one, or change `name` in their `meta`."
        )


def replay(
    recordings: Sequence[Recording], policy: str, rules: SimulationRules, *, seed: int = 0
) -> Trace:
    """Replay one list of trials under one policy."""
    trials = arrange(policy, recordings)
    return TrialSimulator(
        make_rival(policy, trials) if policy in RIVALS else make_policy(policy),
        FixedList(trials),
        n_devices=rules.n_devices,
        costs=rules.costs,
        seed=seed,
    ).run()


def simulate_one(
    sets: Sequence[CurveSet], rules: SimulationRules, job: tuple[int, str, int]
) -> Result[Metrics]:
    """Replay a draw from a set under a policy, and measure it.

    The ``job`` is the index of the set, the policy's name, and a seed.

    Raises:
        InvalidInputError: there is no such policy, or it decides what a policy may not.
    """
    index, name, seed = job
    chosen = sets[index]
    recordings = arrange(name, chosen.draw(rules.n_trials, seed))
    trace = replay(recordings, name, rules, seed=seed)
    return Result(
        curve_set=chosen.name,
        family=chosen.family,
        policy=name,
        seed=seed,
        metrics=measure(trace, recordings, rules.n_devices, rules.costs),
    )
