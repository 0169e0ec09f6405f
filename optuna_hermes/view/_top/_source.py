"""The interface from which ``top`` gets its pictures, and which carries out its commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from optuna_hermes.view._history import Bar
from optuna_hermes.view._top._picture import Picture

if TYPE_CHECKING:
    from rich.console import RenderableType


class TopSource(ABC):
    """TopSource of pictures and target of commands; calls may block, so they are made on threads.

    ``look`` and ``past`` are called in one thread, the others in any. A call that fails raises a
    ``HermesError`` whose message is shown.
    """

    @abstractmethod
    def look(self, key: str) -> Picture:
        """Return the present picture.

        Args:
            key: of the study to show; empty for any.

        Raises:
            BrokerError: no broker answers, and no ledger is known.
        """

    @abstractmethod
    def past(self) -> Sequence[Bar]:
        """Return past leases from the ledger, if one is known; quick after the first call."""

    @abstractmethod
    def want(self, key: str, number: int, wish: Literal["held", "boosted"] | None) -> None:
        """Hold, boost or (None) release a trial."""

    @abstractmethod
    def finish(self, key: str, number: int) -> None:
        """Finish a trial at its last value."""

    @abstractmethod
    def change_policy(self, key: str, policy: str) -> None:
        """Change the study's policy."""

    @abstractmethod
    def story(self, key: str, number: int) -> RenderableType:
        """Return the event log of a trial."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; a blocked ``look`` returns."""
