"""A job: what is to run on how many hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from optuna_hermes.errors import InvalidInputError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command on several hosts.

    Args:
        name: of the job, and of its parts in the engine.
        arguments: of ``optuna-hermes optimize``, without those that are fields here.
        storage: of the study; it may hold a password, and so is in no script or manifest.
        devices: of each host, as ``--devices``; empty for GPUs, or for as many slots as ``cpus``.
        checkpoint_dir: as ``--checkpoint-dir``; empty for the default.
        password: of the hosts' ``$PGPASSWORD``, which is in none either; empty for none.
        hosts: how many.
        gpus: of each host.
        cpus: of each host, 0 for the engine's default.
        grace_seconds: between the signal to suspend and the end.
        time_limit: of a host, as the engine writes it; empty for none.
        extra: lines for the engine that no other field says.
    """

    name: str
    arguments: tuple[str, ...]
    storage: str
    devices: str = ""
    checkpoint_dir: str = ""
    password: str = ""
    hosts: int = 1
    gpus: int = 0
    cpus: int = 0
    grace_seconds: int = 120
    time_limit: str = ""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"A job's name has at most 52 small letters, digits and hyphens but got "
                f"{self.name!r}: give another one by --name."
            )
        if self.hosts > 1 and self.storage.startswith("sqlite"):
            raise InvalidInputError(
                f"{self.hosts} hosts cannot share a file of SQLite but got --storage "
                f"{self.storage}: keep the study in PostgreSQL or MySQL, or start one host."
            )

    @property
    def environment(self) -> dict[str, str]:
        """Variables of each host that no script or manifest may hold."""
        password = {"PGPASSWORD": self.password} if self.password else {}
        return {"OPTUNA_STORAGE": self.storage, **password}

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of each host's ``optimize``, without the storage."""
        slots = f"cpu:{self.cpus}" if self.cpus and not self.gpus else ""
        devices = self.devices or slots
        return (
            *(("--devices", devices) if devices else ()),
            *(("--checkpoint-dir", self.checkpoint_dir) if self.checkpoint_dir else ()),
            *self.arguments,
        )
