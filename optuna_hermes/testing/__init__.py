"""Test support for own implementations: a suite for each contract, and a fake session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna_hermes.testing._ledger import LedgerContract as LedgerContract
from optuna_hermes.testing._session import FakeSession as FakeSession
from optuna_hermes.testing._session import RankedSession as RankedSession
from optuna_hermes.testing.policy import PolicyContract as PolicyContract

if TYPE_CHECKING:
    from optuna_hermes.testing.tier import TierContract as TierContract


def __getattr__(name: str) -> Any:
    if name == "TierContract":  # it needs torch, which the others work without
        from optuna_hermes.testing.tier import TierContract

        return TierContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
