"""The user's commands that power devices down and up, beside the policy that asks for them."""

from __future__ import annotations

from optuna_hermes.broker._power_commands import PowerCommands, power_commands
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import ENERGY, POLICIES


def commands_for(policy: str, down: str | None, up: str | None) -> PowerCommands | None:
    """The commands, None if neither is given.

    Raises:
        InvalidInputError: they make no sense, or this policy would never have them run.
    """
    commands = power_commands(down, up)
    if commands is not None and policy in POLICIES:
        raise InvalidInputError(
            f"--power-down-command needs a policy that powers devices down but got {policy!r}: "
            f"use --policy {ENERGY}{policy}."
        )
    return commands
