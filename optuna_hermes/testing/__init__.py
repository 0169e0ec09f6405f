"""Test support for packages of your own: a suite for policies, and a session without a broker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from optuna_hermes.testing.session import FakeSession as FakeSession

if TYPE_CHECKING:
    from optuna_hermes.testing.policy import PolicyContract as PolicyContract

# Before the suite is imported: else its failures would show no values.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("optuna_hermes.testing.policy")


def __getattr__(name: str) -> Any:
    # The session needs no Hypothesis.
    if name != "PolicyContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from optuna_hermes.testing.policy import PolicyContract
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            "optuna_hermes.testing.PolicyContract needs hypothesis, which is not installed: run "
            "`pip install hypothesis`.",
            name="hypothesis",
        ) from error
    return PolicyContract
