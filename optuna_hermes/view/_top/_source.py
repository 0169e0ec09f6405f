"""Where ``top`` gets its pictures from, and to whom it says what people want."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from optuna_hermes.view._history import Bar
from optuna_hermes.view._top._picture import Picture

if TYPE_CHECKING:
    from rich.console import RenderableType


class Source(ABC):
    """What is asked of it may take a while: each call is made in a thread of its own.

    ``look`` and ``past`` are called in one thread, the others in any. What cannot be done raises a
    ``HermesError`` whose words say why.
    """

    @abstractmethod
    def look(self, key: str) -> Picture:
        """How things are.

        Args:
            key: of the study that is shown; empty for any.

        Raises:
            BrokerError: nobody serves anything, and no ledger is known.
        """

    @abstractmethod
    def past(self) -> Sequence[Bar]:
        """Who had which device, as far as it was written down; little after the first time."""

    @abstractmethod
    def want(self, key: str, number: int, wish: Literal["held", "boosted"] | None) -> None:
        """Hold a trial, boost it, or let go of it."""

    @abstractmethod
    def finish(self, key: str, number: int) -> None:
        """Close a trial at its last value."""

    @abstractmethod
    def change_policy(self, key: str, policy: str) -> None:
        """Let another policy decide."""

    @abstractmethod
    def story(self, key: str, number: int) -> RenderableType:
        """What happened to a trial."""

    @abstractmethod
    def close(self) -> None:
        """Hang up; whoever waits in ``look`` wakes up."""
