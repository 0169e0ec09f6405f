"""Settings of one call of ``optimize``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from optuna_hermes._job_environment import check_grace
from optuna_hermes.broker._power_commands import PowerCommands
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.ledger import check_shared_url
from optuna_hermes.model import MOST_SEED
from optuna_hermes.suspend._tiers import _remote

MOST_HANG_SECONDS = 1e7


@dataclass(frozen=True, kw_only=True)
class OptimizeSettings:
    """Arguments of one call of ``optimize``, checked: see there."""

    n_trials: int | None = None
    timeout: float | None = None
    device_seconds: float | None = None
    devices: str = "auto"
    policy: str = "hermes"
    slice_seconds: float = 1.0
    seed: int | None = None
    checkpoint_dir: str | Path | None = None
    ledger: str | None = None
    hang_seconds: float | None = None
    grace: float | None = None
    power: PowerCommands | None = None

    def __post_init__(self) -> None:
        """Refuse times that are negative or infinite, and a URL that cannot hold checkpoints.

        Raises:
            InvalidInputError: an argument is out of its range.
        """
        if self.checkpoint_dir == "":  # as of a variable that a shell does not know
            raise InvalidInputError(
                "checkpoint_dir must be a folder or a URL but got '': leave it out for a folder "
                "beside the database."
            )
        if self.checkpoint_dir is not None and _remote.is_url(self.checkpoint_dir):
            _remote.check_url(self.checkpoint_dir)
        if self.ledger is not None:
            check_shared_url(self.ledger)
        for name in ("timeout", "device_seconds", "slice_seconds", "hang_seconds", "grace"):
            if _is_number(value := getattr(self, name)):  # one of NumPy's is not sent to a broker
                object.__setattr__(self, name, float(value))
        for name in ("timeout", "device_seconds", "slice_seconds"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 <= value < math.inf):
                without = "1 s" if name == "slice_seconds" else "no bound"
                raise InvalidInputError(
                    f"{name} must be a finite number of seconds, 0 or more, but got {value!r}: "
                    f"leave it out for {without}."
                )
        n_trials, hang, seed = self.n_trials, self.hang_seconds, self.seed
        if n_trials is not None and not (isinstance(n_trials, Integral) and n_trials >= 0):
            raise InvalidInputError(
                f"n_trials must be a whole number, 0 or more, but got {n_trials!r}."
            )
        if n_trials is not None:
            object.__setattr__(self, "n_trials", int(n_trials))
        if hang is not None and not (_is_number(hang) and 1 <= hang <= MOST_HANG_SECONDS):
            raise InvalidInputError(
                f"hang_seconds must be from 1 to {MOST_HANG_SECONDS:.0f} but got {hang!r}: give "
                "seconds, 300 if in doubt."
            )
        if seed is not None and not (isinstance(seed, Integral) and 0 <= seed <= MOST_SEED):
            raise InvalidInputError(
                f"seed must be a whole number from 0 to {MOST_SEED} but got {seed!r}: leave it "
                "out for one that is drawn."
            )
        if self.grace is not None:
            check_grace(self.grace)


def _is_number(value: object) -> bool:
    return isinstance(value, Real)
