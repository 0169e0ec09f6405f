"""The rule for the number of powered nodes, shared by replay and live policy. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optuna_hermes.errors import InvalidInputError

TICK_SECONDS = 600.0
"""Length of a tick: demand is recorded and forecast, and nodes powered down, once a tick."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyRules:
    """Buffer and delays of powering nodes down.

    Args:
        buffer_share: of all nodes, kept powered beyond demand; one node at least.
        look_back_ticks: no node that was wanted within so many ticks is powered down.
        keep_ticks: for so many ticks after a wake-up nothing is powered down.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    buffer_share: float = 0.05
    look_back_ticks: int = 36
    keep_ticks: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.buffer_share <= 1:
            raise InvalidInputError(
                f"buffer_share must be between 0 and 1 but got {self.buffer_share}."
            )
        for name in ("look_back_ticks", "keep_ticks"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be 1 or more but got {getattr(self, name)}.")

    def buffer(self, n_nodes: int) -> int:
        """Nodes kept powered beyond demand."""
        return max(1, math.ceil(self.buffer_share * n_nodes))

    def wanted(
        self,
        *,
        n_nodes: int,
        powered: int,
        demand: int,
        recent: int,
        expected: float,
        may_fall: bool,
    ) -> int:
        """The number of nodes that shall have power from now on.

        Nodes are woken when demand, now or expected, leaves less than half of the buffer, and then
        for the whole buffer; they are powered down to recent or expected demand plus the buffer.

        Hu et al. (Helios, SC '21) call this cluster energy saving (CES): demand ahead is forecast,
        a buffer is kept, and nothing is powered down soon after a wake-up. The paper uses two
        thresholds, on the fall from the mean of the past and to the mean of the forecast; this
        project's own rule uses the highest demand of the last hours and a quantile of the highest
        one to come, and lets half of the buffer be used up before anything is woken.

        Args:
            n_nodes: number of nodes.
            powered: number of nodes that have power, or are being woken.
            demand: number of nodes wanted now.
            recent: the highest demand of ``look_back_ticks``.
            expected: the highest demand that is expected.
            may_fall: whether nodes may be powered down now.
        """
        buffer = self.buffer(n_nodes)
        ahead = max(demand, math.ceil(expected))
        least = max(demand + (buffer + 1) // 2, ahead + buffer // 2)
        if powered < min(n_nodes, least):
            return min(n_nodes, ahead + buffer)
        return min(n_nodes, powered, max(recent, ahead) + buffer if may_fall else powered)
