"""The supported versions of libraries, and the refusal of others.

This package uses private parts of Optuna and of Lightning, each pinned by a test. The versions
that those tests were run with stand here and in ``pyproject.toml``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from optuna_hermes.errors import VersionError


@dataclass(frozen=True, kw_only=True)
class Range:
    """The versions of a distribution that are supported."""

    name: str
    """Its name in messages."""
    first: str
    last: str
    """The last one that was tested; later ones below ``below`` are accepted."""
    below: str | None = None
    """The first later version that is refused; None for none."""

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


SUPPORTED = {
    "optuna": Range(name="Optuna", first="4.4", last="5.0", below="6"),
    "lightning": Range(name="Lightning", first="2.4", last="2.6", below="3"),
    "pytorch-lightning": Range(name="PyTorch Lightning", first="2.4", last="2.6", below="3"),
    # Below 2.6 `torch.load` would unpickle by default.
    "torch": Range(name="PyTorch", first="2.6", last="2.13"),
}


def require(distribution: str, found: str) -> None:
    """Refuse a version of one of ``SUPPORTED`` that this package cannot work with.

    Raises:
        VersionError: with the command that installs a supported version.
    """
    known = SUPPORTED[distribution]
    new_enough = parsed(found) >= parsed(known.first)
    if new_enough and (known.below is None or parsed(found) < parsed(known.below)):
        return
    wanted = f"{distribution}>={known.first}" + (f",<{known.below}" if known.below else "")
    raise VersionError(
        f"optuna_hermes supports {known.name} {known} but found {found}: run `pip install "
        f"'{wanted}'`."
    )


def is_tested(distribution: str, found: str) -> bool:
    """True if the first two numbers of a version are in the tested range; also without a range."""
    known = SUPPORTED.get(distribution)
    return known is None or parsed(known.first) <= parsed(found) <= parsed(known.last)


def parsed(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
