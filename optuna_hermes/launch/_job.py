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
        arguments: of ``optuna-hermes optimize``, without the storage.
        storage: of the study; it may hold a password, and so is in no script or manifest.
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
    def devices(self) -> tuple[str, ...]:
        """The option that names the devices, empty where the arguments have it or GPUs are used."""
        if self.given("--devices") or self.gpus or not self.cpus:
            return ()
        return ("--devices", f"cpu:{self.cpus}")

    def given(self, option: str) -> str | None:
        """The value of an option among the arguments, None if it is not there."""
        for index, each in enumerate(self.arguments):
            name, separator, value = each.partition("=")
            if name == option:
                return value if separator else "".join(self.arguments[index + 1 : index + 2])
        return None
