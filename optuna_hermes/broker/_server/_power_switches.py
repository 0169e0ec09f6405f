"""User's commands that power devices down and up, run for a broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from optuna_hermes.broker import _power_commands
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._device_changes import unpowered
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._power_commands import PowerCommands
from optuna_hermes.broker._server._processes import soon

_NO_POWER = "wake them, or start the broker with --power-down-command and --power-up-command"

log = logging.getLogger("optuna_hermes.broker")


def left_unpowered(directory: Path, power: PowerCommands | None) -> tuple[str, ...]:
    """Devices that the broker before this one has powered down, as far as they can be woken."""
    left = _power_commands.recall(directory)
    if power is None and left:
        log.warning("%s may be without power, %s", ", ".join(left), _NO_POWER)
        return ()
    return left


class PowerSwitches:
    """Runs power commands, and reports their ends.

    Args:
        directory: where the devices to wake are saved for the next broker.
        state: which devices are without power.
        power: the commands.
        switched: called when one has ended, before a device is used that it has woken.
    """

    def __init__(
        self,
        directory: Path,
        state: BrokerState,
        power: PowerCommands,
        switched: Callable[[PowerSwitched], None],
    ) -> None:
        self._directory = directory
        self._state = state
        self._power = power
        self._tell = switched

    def switch(self, command: SwitchPower) -> None:
        """Run the user's command, once the device is saved for the next broker."""
        self._remember()
        words = self._power.up if command.up else self._power.down
        loop = asyncio.get_running_loop()

        def ended(problem: str, seconds: float) -> None:
            event = PowerSwitched(
                device=command.device, up=command.up, seconds=seconds, problem=problem
            )
            soon(loop, partial(self._switched, event))

        _power_commands.start(words, command.device, ended)

    def _switched(self, event: PowerSwitched) -> None:
        way = "up" if event.up else "down"
        if event.problem:
            log.error("%s was not powered %s: %s", event.device, way, event.problem)
        else:
            log.info("%s is powered %s after %.1f s", event.device, way, event.seconds)
        self._tell(event)
        self._remember()

    def _remember(self) -> None:
        """Save which devices the next broker has to wake before it grants them."""
        try:
            _power_commands.remember(self._directory, unpowered(self._state))
        except OSError as error:
            log.error(
                "the next broker will not know what is powered down, so make room in %s: %s",
                self._directory,
                error,
            )
