"""Test support for own implementations: a suite for each contract, and fakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna_hermes.testing._broker import FakeBroker as FakeBroker
from optuna_hermes.testing._devices import FakeDevices as FakeDevices
from optuna_hermes.testing._ledger import LedgerContract as LedgerContract
from optuna_hermes.testing._policy import PolicyContract as PolicyContract
from optuna_hermes.testing._session import FakeSession as FakeSession
from optuna_hermes.testing._session import RankedSession as RankedSession

if TYPE_CHECKING:
    from optuna_hermes.testing._tier import TierContract as TierContract


def __getattr__(name: str) -> Any:
    if name == "TierContract":  # it needs torch, which the others work without
        from optuna_hermes.testing._tier import TierContract

        return TierContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
