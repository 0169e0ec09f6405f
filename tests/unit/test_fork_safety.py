"""A fork is tried before a driver is forked."""

from __future__ import annotations

import signal

import pytest

from optuna_hermes.workers import _fork_safety
from optuna_hermes.workers._fork_safety import Unsafe, why_not_fork


def test_a_driver_that_does_not_answer_in_a_fork_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fork is killed and reaped."""
    monkeypatch.setattr(_fork_safety, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(_fork_safety, "_accelerators_work", signal.pause)
    assert why_not_fork() is Unsafe.ACCELERATOR
