"""User's commands that power a device down and up, as options give them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import ENERGY, POLICIES

DEVICE = "{device}"
"""Placeholder of the device's id in a command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerCommands:
    """Commands, as words: no shell reads them.

    Args:
        down: powers a device down.
        up: powers it up; its device can be used when it has ended with status 0.
    """

    down: tuple[str, ...]
    up: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, str]:
        """Both commands as text, as ``power_commands`` reads them."""
        return shlex.join(self.down), shlex.join(self.up)


def powers_nothing(policy: str, commands: Sequence[str]) -> str:
    """The note that a policy powers no device down, for its broker has no commands; else empty."""
    if commands or not policy.startswith(ENERGY):
        return ""
    return (
        f"Policy {policy} powers no device down: this host's broker was started without "
        "--power-down-command and --power-up-command."
    )


def commands_for(
    policy: str, down: str | None, up: str | None, *, here: bool = True
) -> PowerCommands | None:
    """Return the commands, None if neither is given.

    ``here``: this host runs them, thus one whose program is missing is refused too.

    Raises:
        InvalidInputError: they make no sense, or this policy would never have them run.
    """
    commands = power_commands(down, up, here=here)
    if commands is not None and policy in POLICIES:
        raise InvalidInputError(
            f"--power-down-command needs a policy that powers devices down but got {policy!r}: "
            f"use --policy {ENERGY}{policy}."
        )
    return commands


def power_commands(down: str | None, up: str | None, *, here: bool = True) -> PowerCommands | None:
    """Read ``--power-down-command`` and ``--power-up-command``; None if neither is given.

    Raises:
        InvalidInputError: one of them is missing, cannot be run, or names no device.
    """
    if down is None and up is None:
        return None
    if down is None or up is None:
        given, missing = ("up", "down") if down is None else ("down", "up")
        raise InvalidInputError(
            f"A device that is powered down must be powered up again but got "
            f"--power-{given}-command alone: add --power-{missing}-command."
        )
    return PowerCommands(
        down=_words("--power-down-command", down, here), up=_words("--power-up-command", up, here)
    )


def _words(option: str, text: str, here: bool) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError(
            f"{option} must be words as a shell reads them but got {text!r} ({error}): mend it."
        ) from error
    if not any(DEVICE in word for word in words[1:]):
        raise InvalidInputError(
            f"{option} must be a program and its arguments, {DEVICE} among them where the device's "
            f"id belongs, but got {text!r}."
        )
    if not here:
        return tuple(words)
    program = shutil.which(words[0])
    if program is None:
        raise InvalidInputError(
            f"{option} must begin with a program but {words[0]!r} is none: give its whole path."
        )
    return (os.path.abspath(program), *words[1:])
