"""Commands that power devices down and up: how they are read, and what becomes of them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from optuna_hermes.broker._core._broker_state import BrokerState, Slot
from optuna_hermes.broker._core._events import PowerSwitched, SwitchPower
from optuna_hermes.broker._power_commands import PowerCommands, commands_for, power_commands
from optuna_hermes.broker._server import _power_switches as power
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Device

ECHO = "/bin/echo {device}"


def test_commands_are_words_and_their_programs_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker works in another folder, so a program's path becomes an absolute one."""
    (tmp_path / "off.sh").write_text("#!/bin/sh\n")
    (tmp_path / "off.sh").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    commands = power_commands("./off.sh --id={device} 'two words'", ECHO)
    assert commands is not None
    assert commands.down == (f"{tmp_path}/off.sh", "--id={device}", "two words")
    assert power_commands(*commands.texts) == commands
    assert power_commands(None, None) is None


@pytest.mark.parametrize(
    ("down", "up", "message"),
    [
        (ECHO, None, "got --power-down-command alone: add --power-up-command"),
        (None, ECHO, "got --power-up-command alone: add --power-down-command"),
        (ECHO, "/bin/echo", "--power-up-command must be a program and its arguments, {device}"),
        ("", ECHO, "--power-down-command must be a program and its arguments, {device}"),
        ("{device}", ECHO, "--power-down-command must be a program and its arguments, {device}"),
        ("/bin/echo '{device}", ECHO, "must be words as a shell reads them"),
        ("/no/such {device}", ECHO, "must begin with a program but '/no/such' is none"),
    ],
)
def test_bad_commands_are_refused(down: str | None, up: str | None, message: str) -> None:
    """A bad command is refused before anything starts, in one line that says what to do."""
    with pytest.raises(InvalidInputError, match=re.escape(message)) as raised:
        power_commands(down, up)
    assert "\n" not in str(raised.value)


def test_a_policy_that_powers_nothing_down_has_no_commands() -> None:
    """They would never be run, so one is told which policy runs them."""
    with pytest.raises(InvalidInputError, match="use --policy energy:fifo"):
        commands_for("fifo", ECHO, ECHO)
    assert isinstance(commands_for("energy:fifo", ECHO, ECHO), PowerCommands)
    assert commands_for("fifo", None, None) is None


def test_a_command_for_whose_output_there_is_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its device would be on its way for ever, and the broker would never end."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    told: list[PowerSwitched] = []

    async def switch() -> None:
        done = asyncio.Event()

        def note(event: PowerSwitched) -> None:
            told.append(event)
            done.set()

        state = BrokerState(host="h")
        commands = power_commands(ECHO, ECHO)
        assert commands is not None
        switches = power.PowerSwitches(tmp_path, state, commands, note)
        switches.switch(SwitchPower(device="cpu:0", up=True))
        await asyncio.wait_for(done.wait(), 20.0)

    asyncio.run(switch())
    assert told[0].problem == "the command cannot be run: No space left on device"


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, "{device}")


def test_a_command_gets_its_device_and_what_it_says_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The id stands where it was asked for, as it is: no shell reads it."""
    with caplog.at_level(logging.INFO, "optuna_hermes.broker"):
        assert power.run(_python("import sys; print(sys.argv[1], 'is off')"), "$(id);GPU-1") == ""
    assert caplog.messages[-1].endswith(": $(id);GPU-1 is off")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('first'); raise SystemExit(3)", "ended with status 3: first"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print('a\\x1b[31m\\nb'); print(); raise SystemExit(1)", "ended with status 1: b"),
    ],
)
def test_a_command_that_fails_says_so_in_one_line(code: str, message: str) -> None:
    """With its status and the last thing it said, and nothing that a terminal would obey."""
    problem = power.run(_python(code), "cpu:1")
    assert problem.endswith(message)
    assert problem.isprintable()


def test_a_program_that_is_gone_is_a_problem() -> None:
    """It may have been there when the broker started."""
    assert power.run(("/no/such", "{device}"), "cpu:1") == (
        "`/no/such cpu:1` cannot be run: No such file or directory"
    )


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    """It has failed when its time is over; whoever it started goes with it."""
    problem = power.run(("/bin/sh", "-c", "sleep 60 & wait", "{device}"), "cpu:1", seconds=0.2)
    assert problem.endswith("did not end within 0.2 s")


def test_a_child_that_is_left_behind_holds_nobody_up() -> None:
    """A command that has ended is over, though what it started may still have its output open."""
    assert power.run(("/bin/sh", "-c", "sleep 3 & exit 0", "{device}"), "cpu:1", seconds=2.5) == ""


def test_what_is_down_is_remembered(tmp_path: Path) -> None:
    """The next broker reads what this one wrote; a file that means nothing means nothing."""
    commands = PowerCommands(down=("/bin/true",), up=("/bin/true",))
    slots = {id_: Slot(device=Device(id=id_), power="off") for id_ in ("cpu:2", "cpu:1")}
    switches = power.PowerSwitches(
        tmp_path, BrokerState(host="here", slots=slots), commands, lambda event: None
    )
    assert power.left_unpowered(tmp_path, commands) == ()
    switches.save()
    assert power.left_unpowered(tmp_path, commands) == ("cpu:1", "cpu:2")
    slots.clear()
    switches.save()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "unpowered.json").write_text("{]")
    assert power.left_unpowered(tmp_path, commands) == ()
