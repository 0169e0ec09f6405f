"""Hyperband that stops trials."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from zlib import crc32

from optuna_hermes.model import Snapshot, TrialView
from optuna_hermes.policies._asha import checked_eta
from optuna_hermes.simulator.rivals._asha_stop import at_rungs, fallen
from optuna_hermes.simulator.rivals._stop import StopPolicy


class HyperbandStop(StopPolicy):
    """Distributes the trials over brackets, each of which is an ``asha-stop`` of its own.

    The first rung of bracket ``b`` is after ``eta ** b`` units. With ``s + 1`` brackets, where
    ``eta ** s`` units are the most that fit into the longest trial known, bracket ``b`` gets trials
    in proportion to ``ceil((s + 1) * eta ** (s - b) / (s - b + 1))``. While no length is known
    no trial is stopped.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18,
    2018, as Optuna's ``HyperbandPruner`` runs it in a study whose name is empty: all brackets at
    once, with a trial's bracket chosen by a checksum of its number.

    Args:
        eta: reduction factor; one in ``eta`` trials of a rung goes on.

    Raises:
        InvalidInputError: ``eta`` is below 2.
    """

    def __init__(self, eta: int = 3) -> None:
        self.eta = checked_eta(eta)

    def stopped(self, waiting: Sequence[TrialView], snapshot: Snapshot) -> set[int]:
        """The trials that are at a rung of their bracket and not among its best there."""
        judged = at_rungs(waiting, self.eta)
        if not judged:
            return set()
        everyone = (*snapshot.trials, *snapshot.finished)
        shares = bracket_shares(max(map(_length, everyone)), self.eta)
        stopped: set[int] = set()
        for bracket in range(len(shares)):
            here = [trial for trial in judged if bracket_of(trial.number, shares) == bracket]
            trials = at_rungs(here, self.eta, self.eta**bracket)
            if trials:
                peers = [peer for peer in everyone if bracket_of(peer.number, shares) == bracket]
                stopped |= fallen(trials, peers, self.eta)
        return stopped


def _length(trial: TrialView) -> int:
    """Total number of a trial's units, 0 where it is not known."""
    if trial.units_left is not None:
        return trial.curve.units + trial.units_left
    return trial.curve.units if trial.state == "done" else 0


@cache
def bracket_shares(length: int, eta: int) -> tuple[int, ...]:
    """The shares of trials that go to each bracket; none for a length of 0."""
    n_brackets = 0
    while eta**n_brackets <= length:
        n_brackets += 1
    return tuple(
        -(-n_brackets * eta ** (n_brackets - 1 - bracket) // (n_brackets - bracket))
        for bracket in range(n_brackets)
    )


@cache
def bracket_of(number: int, shares: tuple[int, ...]) -> int:
    """The bracket of a trial; there must be one at least."""
    # The hash of HyperbandPruner for a study without a name: trials get the same brackets.
    lot = crc32(f"_{number}".encode()) % sum(shares)
    bracket = 0
    while lot >= shares[bracket]:
        lot -= shares[bracket]
        bracket += 1
    return bracket
