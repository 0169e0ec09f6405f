"""Rivals that policies are compared with: stopping rules, and clairvoyants. Simulation only.

They are policies like the others, but a broker cannot run them: the first kind prunes, and the
second knows how a training ends before it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from optuna_hermes.errors import UnknownPolicyError
from optuna_hermes.policies import Policy
from optuna_hermes.simulator._metrics import by_final
from optuna_hermes.simulator._workload import Recording
from optuna_hermes.simulator.rivals._oracle import Oracle as Oracle
from optuna_hermes.simulator.rivals._oracle import OracleBreadth as OracleBreadth
from optuna_hermes.simulator.rivals._stop import AshaStop as AshaStop
from optuna_hermes.simulator.rivals._stop import HyperbandStop as HyperbandStop
from optuna_hermes.simulator.rivals._stop import MedianStop as MedianStop
from optuna_hermes.simulator.rivals._stop import StopPolicy as StopPolicy

_MAKERS: Mapping[str, Callable[[Sequence[Recording]], Policy]] = {
    "asha-stop": lambda _: AshaStop(),
    "median-stop": lambda _: MedianStop(),
    "hyperband-stop": lambda _: HyperbandStop(),
    "oracle": Oracle,
    "oracle-breadth": OracleBreadth,
}

RIVALS: tuple[str, ...] = tuple(_MAKERS)
"""The names of all rivals, as users give them."""


def arrange(name: str, recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """Put the trials of a fixed list into the order in which a policy would open them.

    Simulate and ``measure`` with the returned list, and make the rival with it.

    Example:
        >>> from optuna_hermes.simulator import FixedList, Recording, TrialSimulator
        >>> trials = [Recording(values=(value,), seconds=(1.0,)) for value in (0.3, 0.1, 0.2)]
        >>> trials = arrange("oracle", trials)
        >>> trace = TrialSimulator(make_rival("oracle", trials), FixedList(trials)).run()
        >>> [each.value for each in trace.slices]
        [0.1, 0.2, 0.3]
    """
    # A policy can only open the next trial of a list, and this one would open the best.
    if name == "oracle":
        return tuple(recordings[index] for index in by_final(recordings))
    return tuple(recordings)


def make_rival(name: str, recordings: Sequence[Recording]) -> Policy:
    """Make one of ``RIVALS`` with its default settings, for trials as ``arrange`` returned them.

    Raises:
        UnknownPolicyError: there is no such rival.
    """
    if name not in _MAKERS:
        raise UnknownPolicyError(f"A rival must be one of {', '.join(RIVALS)} but got {name!r}.")
    # The oracles read those of opened trials only, so a list may grow with these.
    return _MAKERS[name](recordings)
