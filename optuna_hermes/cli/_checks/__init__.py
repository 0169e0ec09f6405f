"""The checks of ``doctor``, a module for each subject; here their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optuna_hermes.view.formats import size

State = Literal["ok", "warn", "fail"]

LITTLE_BYTES = 2 * 1024**3
TOO_LITTLE_BYTES = 200 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check: its state, the finding, and a hint if it is not ok."""

    name: str
    state: State
    found: str
    hint: str = ""


def judged(name: str, found: str, problem: str = "", state: State = "warn") -> Check:
    """A check that is ok if ``problem``, the hint, is empty; else it has ``state``."""
    return Check(name=name, state=state if problem else "ok", found=found, hint=problem)


def enough(name: str, n_bytes: int, hint: str) -> Check:
    """A check that free space suffices for a study."""
    state: State = "ok"
    if n_bytes < LITTLE_BYTES:
        state = "fail" if n_bytes < TOO_LITTLE_BYTES else "warn"
    return Check(name=name, state=state, found=size(n_bytes), hint="" if state == "ok" else hint)
